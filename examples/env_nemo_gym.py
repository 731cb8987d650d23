"""Environments of NeMo-Gym, on an agent server.

funrl grpo --model=DIR --env=examples/env_nemo_gym.py:nemo_gym --env_args=url:URL,data:rows.jsonl

Someone else has started NeMo-Gym's servers, with `policy_base_url=http://127.0.0.1:PORT/v1`, and at that port
examples/nemo_gym_relay.py, which finds the endpoint of an episode by the field `user` of a request. Each episode is a
request `/run` to the agent server, whose calls of the model come back to this run.

NeMo-Gym need not be installed here. Written for nemo-gym 0.7; reference: https://github.com/NVIDIA-NeMo/Gym
"""

from __future__ import annotations

import http.client
import itertools
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from funrl.data.json_lines import DataError, JsonLines
from funrl.data.prompts import Example
from funrl.environments.adapters import example_messages
from funrl.environments.agents import POLICY
from funrl.environments.calls import call
from funrl.environments.environment import Environment
from funrl.foreign.shapes import AdaptedEnvironment, joined_text
from funrl.loading import LoadError
from funrl.rollout.episodes import Episode, Message
from funrl.rollout.policy import Policy
from funrl.serve.endpoint import check_installed, serve_policy

GYM_ROWS = 1000
CHECK_S = 10.0
LONGEST_ANSWER = 500  # characters of an answer in an error's message
PARAMETERS = "responses_create_params"  # of a row: the request that begins the episode
NOT_PARTS = ("reward", "mask_sample")


def nemo_gym(url: str, data: str | None = None, tasks: int = GYM_ROWS) -> Environment:
    """An environment of a NeMo-Gym agent server.

    Args:
      url: of the agent server, such as http://127.0.0.1:8001.
      data: JSON lines as NeMo-Gym has them, the prompts of a run without --prompts.
      tasks: bound on these.

    Raises:
      LoadError: the server does not answer, or the file cannot be read.
    """
    check_installed()
    root = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        urllib.request.urlopen(root, timeout=CHECK_S).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LoadError(f"no agent server of NeMo-Gym answers at {root} ({error!r}); start it first") from error
    rows = None if data is None else _rows(data, tasks)

    async def run(policy: Policy, example: Example, seed: int) -> Episode:
        parameters = example.fields.get(PARAMETERS) or {"input": list(map(dict, example_messages(example)))}
        async with serve_policy(policy) as (endpoint, session):
            user = f"{urlsplit(endpoint.base_url).port}.{endpoint.api_key}"
            body = {**example.fields, PARAMETERS: {**parameters, "user": user}}
            result: Mapping[str, Any] = {}
            try:
                result = await call(_post, f"{root}/run", body)
            except RuntimeError:
                if session.limit is None:
                    raise
            ends = session.trajectories()
            status = session.limit or "done"
        if not ends:
            raise RuntimeError(f"the agent of {root} has not asked for a reply with the `user` of the request")
        reward = None if result.get("mask_sample") else result.get("reward")
        return Episode(ends, {POLICY: None if reward is None else float(reward)}, parts=_parts(result), status=status)

    if rows is None:
        return AdaptedEnvironment(run)
    prompts = [{"prompt": _messages(row[PARAMETERS], number), **row} for number, row in enumerate(rows)]
    return AdaptedEnvironment(run, lambda seed: prompts)


def _rows(data: str, tasks: int) -> list[Mapping[str, Any]]:
    """Rows of a file. Raises: LoadError."""
    try:
        lines = list(itertools.islice(JsonLines(Path(data)).scan(), tasks))
    except DataError as error:
        raise LoadError(str(error)) from error
    without = [place for place, row in lines if not isinstance(row, dict) or PARAMETERS not in row]
    if without or not lines:
        problem = f"line {without[0] + 1} has no {PARAMETERS}" if lines else "it has no row"
        raise LoadError(f"{data}: {problem}")
    return [row for _, row in lines]


def _post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object that answers a request. Raises RuntimeError with the answer if it is anything else."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            result = json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        raise RuntimeError(f"{url} answers with status {error.code}: {text[:LONGEST_ANSWER]}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RuntimeError(f"{url} does not answer: {error!r}") from error
    if not isinstance(result, dict) or "reward" not in result:
        raise RuntimeError(f"{url} answers without a reward: {json.dumps(result)[:LONGEST_ANSWER]}")
    return result


def _messages(parameters: Mapping[str, Any], number: int) -> list[Message]:
    """The messages of a request, as those of a chat: they show what a prompt is."""
    given = parameters.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())
    messages = []
    if parameters.get("instructions"):
        messages.append({"role": "system", "content": str(parameters["instructions"])})
    for item in items:
        if item.get("type", "message") == "message" and item.get("role") in ("system", "developer", "user"):
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": joined_text(item.get("content"))})
    return messages or [{"role": "user", "content": f"task {number}"}]


def _parts(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that an agent server returns beside the reward, and the components of this."""
    numbers = {**result, **(result.get("reward_components") or {})}
    return {
        name: float(value)
        for name, value in numbers.items()
        if isinstance(value, Real) and name not in NOT_PARTS and not name.startswith("_") and math.isfinite(value)
    }
