"""Environments of NeMo-Gym, on an agent server: --env=nemo_gym:URL.

Someone else has started NeMo-Gym's servers, with `policy_base_url=http://127.0.0.1:PORT/v1`. Each episode is a request
`/run` to the agent server, whose calls of the model come back to this run.

NeMo-Gym need not be installed here. Written for nemo-gym 0.7; reference: https://github.com/NVIDIA-NeMo/Gym
"""

from __future__ import annotations

import http.client
import itertools
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from funrl.data.json_lines import DataError, JsonLines
from funrl.data.prompts import Example
from funrl.environments.adapters import example_messages
from funrl.environments.agents import POLICY
from funrl.environments.calls import call
from funrl.environments.environment import Environment
from funrl.foreign.key_relay import open_relay, user_of
from funrl.loading import LoadError
from funrl.rollout.episodes import Episode, Message
from funrl.rollout.policy import Policy
from funrl.serve.endpoint import check_installed, serve_policy

RELAY_PORT = 8017
GYM_ROWS = 1000
CHECK_S = 10.0
LONGEST_ANSWER = 500  # characters of an answer in an error's message
PARAMETERS = "responses_create_params"  # of a row: the request that begins the episode
NOT_PARTS = ("reward", "mask_sample")


def load_nemo_gym(url: str, data: str | None = None, tasks: int = GYM_ROWS, port: int = RELAY_PORT) -> Environment:
    """An environment of a NeMo-Gym agent server.

    Args:
      url: of the agent server, such as http://127.0.0.1:8001.
      data: JSON lines as NeMo-Gym has them, the prompts of a run without --prompts.
      tasks: bound on these.
      port: of this machine, to which `policy_base_url` of NeMo-Gym's model server leads.

    Raises:
      LoadError: the server does not answer, the file cannot be read, or the port is not free.
    """
    check_installed()
    root = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        urllib.request.urlopen(root, timeout=CHECK_S).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LoadError(f"no agent server of NeMo-Gym answers at {root} ({error!r}); start it first") from error
    if data is None:
        return _NemoGym(root, port)
    try:
        lines = list(itertools.islice(JsonLines(Path(data)).scan(), tasks))
    except DataError as error:
        raise LoadError(str(error)) from error
    without = [place for place, row in lines if not isinstance(row, dict) or PARAMETERS not in row]
    if without or not lines:
        problem = f"line {without[0] + 1} has no {PARAMETERS}" if lines else "it has no row"
        raise LoadError(f"{data}: {problem}")
    return _NemoGymTasks(root, port, [row for _, row in lines])


class _NemoGym:
    """See `load_nemo_gym`."""

    agents = (POLICY,)

    def __init__(self, root: str, port: int):
        self._root = root
        self._port = port

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Let the agent server run an episode, and read its reward."""
        await call(open_relay, self._port)
        parameters = example.fields.get(PARAMETERS) or {"input": list(map(dict, example_messages(example)))}
        async with serve_policy(policy) as (endpoint, session):
            body = {**example.fields, PARAMETERS: {**parameters, "user": user_of(endpoint)}}
            result: Mapping[str, Any] = {}
            try:
                result = await call(_post, f"{self._root}/run", body)
            except RuntimeError:
                if session.limit is None:
                    raise
            ends = session.trajectories()
            status = session.limit or "done"
        if not ends:
            raise RuntimeError(f"the agent of {self._root} has not asked for a reply with the `user` of the request")
        reward = None if result.get("mask_sample") else result.get("reward")
        return Episode(ends, {POLICY: None if reward is None else float(reward)}, parts=_parts(result), status=status)


class _NemoGymTasks(_NemoGym):
    """An environment whose prompts are the rows of a file of NeMo-Gym."""

    def __init__(self, root: str, port: int, rows: Sequence[Mapping[str, Any]]):
        super().__init__(root, port)
        self._rows = rows

    def prompts(self, seed: int) -> Sequence[Mapping[str, Any]]:
        """The rows in their order."""
        return [{"prompt": _messages(row[PARAMETERS], number), **row} for number, row in enumerate(self._rows)]


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
            messages.append({"role": role, "content": _text(item.get("content"))})
    return messages or [{"role": "user", "content": f"task {number}"}]


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(str(part.get("text", "")) for part in content)


def _parts(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that an agent server returns beside the reward, and the components of this."""
    numbers = {**result, **(result.get("reward_components") or {})}
    return {
        name: float(value)
        for name, value in numbers.items()
        if isinstance(value, Real) and name not in NOT_PARTS and not name.startswith("_") and math.isfinite(value)
    }
