"""Programs that talk to an endpoint, by the arguments that other frameworks give them: --env=program:FILE.py:run.

async def run(base_url, api_key, ...): ... return reward

| argument | value |
|---|---|
| `base_url`, `api_key`, `model` | of the endpoint of the episode, see `funrl.serve` |
| `messages` | of the example |
| `prompt` | as in the record: a text or messages |
| `data`, `metadata` | the whole record |
| any other | the field of the record |

AReaL's `run(data, base_url, api_key, **extra)` and miles' `run_agent(base_url, prompt, ...)` have this form.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from numbers import Real

from funrl.data.prompts import Example
from funrl.environments.adapters import example_messages
from funrl.environments.builtin.load import FLAG
from funrl.environments.calls import call
from funrl.environments.environment import Environment
from funrl.foreign.shapes import AdaptedEnvironment, check_arguments, parameter_names, taken_values
from funrl.loading import load_object
from funrl.rollout.episodes import Episode, Message
from funrl.rollout.policy import Policy
from funrl.serve.endpoint import check_installed
from funrl.serve.programs import endpoint_environment

ENDPOINT_ARGUMENTS = ("base_url", "api_key")  # at least one of them is an argument


def load_program(name: str, **arguments: object) -> Environment:
    """The environment of the program that "FILE.py:NAME" names; the arguments are the same at every call."""
    return agent_program(load_object(FLAG, name), **arguments)


def agent_program(program: object, **arguments: object) -> Environment:
    """An environment of a program that asks an endpoint.

    Args:
      program: a function, plain or `async`, or an object or a class with `run`. It returns the reward of the episode,
        None (unscored), or a dict with "reward" and further numbers, which become metrics.
      arguments: the same at every call. Those that the class takes are of the class, and of `run` only if that
        names them too.

    Raises:
      TypeError: it is no such program.
      ImportError: the packages of the extra `serve` are missing.
    """
    run = getattr(program, "run", None) if isinstance(program, type) or not callable(program) else program
    if not callable(run):
        raise TypeError(f"{program!r:.100} is neither a function nor has it run(base_url, api_key, ...)")
    check_installed()
    of_class: dict[str, object] = {}
    if isinstance(program, type):
        of_class = taken_values(program, arguments)
        run = program(**of_class).run
    names, takes_any = parameter_names(run)
    own = {name: value for name, value in arguments.items() if name in names or name not in of_class}
    if not takes_any and not set(ENDPOINT_ARGUMENTS) & set(names):
        raise TypeError(
            f"{program!r:.100} takes neither {' nor '.join(ENDPOINT_ARGUMENTS)}, so that it cannot ask the endpoint"
        )
    check_arguments(run, own)

    async def run_episode(policy: Policy, example: Example, seed: int) -> Episode:
        parts: dict[str, float] = {}
        prompt = example.messages if example.conversational else example.text
        record = {"prompt": prompt, **example.fields}

        async def asked(messages: list[Message], **place: object) -> float | None:
            values = {"messages": messages, "data": record, "metadata": example.fields, **record, **place, **own}
            result = await call(run, **taken_values(run, values))
            if isinstance(result, Mapping):
                if "reward" not in result:
                    raise TypeError(f"the program returned {dict(result)!r:.200}, without 'reward'")
                numbers = {name: value for name, value in result.items() if isinstance(value, Real)}
                parts.update({name: float(value) for name, value in numbers.items() if name != "reward"})
                result = result["reward"]
            return None if isinstance(result, float) and math.isnan(result) else result

        bare = example._replace(fields={}, messages=example_messages(example))
        episode = await endpoint_environment(asked).run(policy, bare, seed)
        return dataclasses.replace(episode, parts={**episode.parts, **parts})

    return AdaptedEnvironment(run_episode)
