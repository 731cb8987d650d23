"""Text environments of SkyRL-gym, which a reply steps whatever calls it may look like.

funrl grpo --model=DIR --prompts=FILE --env=examples/env_skyrl.py:skyrl_environment --env_args=name:gsm8k

SkyRL-gym need not be installed for a class that imports nothing of it. Written for skyrl-gym 0.4; reference:
https://docs.skyrl.ai
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from funrl.data.prompts import Example
from funrl.environments.adapters import example_messages
from funrl.environments.builtin.load import FLAG
from funrl.environments.calls import call
from funrl.environments.environment import Environment
from funrl.foreign.shapes import AdaptedEnvironment, text_turns
from funrl.loading import LoadError, load_object
from funrl.rollout.episodes import Episode, Message
from funrl.rollout.policy import Policy

METHODS = ("init", "step", "close")


def skyrl_environment(name: Any, config: Mapping[str, Any] | None = None) -> Environment:
    """An environment of SkyRL-gym.

    Args:
      name: of a registered environment, such as "gsm8k", or "FILE.py:NAME" of a class with `init`, `step` and `close`,
        or such a class, or what makes its objects. It takes `env_config`, and `extras`, the fields of the record.
      config: of all its objects, `env_config`.

    Raises:
      LoadError: it cannot be loaded, or skyrl-gym is not installed.
      TypeError: a class lacks a method.
    """
    make = _load(name) if isinstance(name, str) else name
    missing = [method for method in METHODS if isinstance(make, type) and not hasattr(make, method)]
    if missing or not callable(make):
        raise TypeError(f"{make!r:.100} is no environment of SkyRL-gym: it lacks {', '.join(missing) or 'a call'}")

    async def run(policy: Policy, example: Example, seed: int) -> Episode:
        extras = {"seed": seed, **copy.deepcopy(example.fields)}
        environment = await call(make, env_config=dict(config or {}), extras=extras)
        try:
            messages, _ = await call(environment.init, list(map(dict, example_messages(example))))

            async def act(text: str) -> tuple[Sequence[Message], float | None, bool]:
                output = await call(environment.step, text)
                reward = output["reward"]
                return output["observations"], None if reward is None else float(reward), bool(output["done"])

            return await text_turns(policy, messages, act)
        finally:
            await call(environment.close)

    return AdaptedEnvironment(run)


def _load(name: str) -> Any:
    """The class of a file, or what makes a registered environment. Raises: LoadError."""
    if ":" in name:
        return load_object(FLAG, name)
    try:
        import skyrl_gym  # type: ignore[import-not-found]
    except ImportError as error:
        raise LoadError(f"it needs skyrl-gym ({error}): pip install skyrl-gym") from error
    if name not in skyrl_gym.registry:
        raise LoadError(f"skyrl-gym has no environment {name!r}; it has {', '.join(sorted(skyrl_gym.registry))}")
    return functools.partial(skyrl_gym.make, name)
