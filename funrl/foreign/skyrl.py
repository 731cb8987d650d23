"""Environments of SkyRL-gym: --env=skyrl:ID, or skyrl:FILE.py:NAME, a subclass of `BaseTextEnv`.

A class in a file needs `init`, `step` and `close` alone; SkyRL-gym need not be installed for one that imports nothing
of it. Written for skyrl-gym 0.4; reference: https://docs.skyrl.ai
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funrl.data.prompts import Example
from funrl.environments.adapters import example_messages
from funrl.environments.agents import POLICY
from funrl.environments.builtin.load import FLAG
from funrl.environments.calls import call
from funrl.environments.environment import Environment
from funrl.foreign.turns import text_turns
from funrl.loading import LoadError, load_object
from funrl.rollout.episodes import Episode, Message
from funrl.rollout.policy import Policy

TEXT_ENV_METHODS = ("init", "step", "close")


def load_skyrl(name: str, config: Mapping[str, Any] | None = None) -> Environment:
    """An environment of SkyRL-gym.

    Args:
      name: of a registered environment, such as "gsm8k", or "FILE.py:NAME" of a class.
      config: of all its objects, `env_config`.

    Raises:
      LoadError: it cannot be loaded, or skyrl-gym is not installed.
    """
    if ":" in name:
        return skyrl_environment(load_object(FLAG, name), config)
    try:
        import skyrl_gym  # type: ignore[import-not-found]
    except ImportError as error:
        raise LoadError(f"it needs skyrl-gym ({error}): pip install skyrl-gym") from error
    if name not in skyrl_gym.registry:
        raise LoadError(f"skyrl-gym has no environment {name!r}; it has {', '.join(sorted(skyrl_gym.registry))}")
    return _SkyRL(lambda **arguments: skyrl_gym.make(name, **arguments), config)


def skyrl_environment(kind: Any, config: Mapping[str, Any] | None = None) -> Environment:
    """An environment of a class with `init`, `step` and `close`. Raises TypeError if it lacks one."""
    missing = [name for name in TEXT_ENV_METHODS if not hasattr(kind, name)]
    if missing or not callable(kind):
        raise TypeError(f"{kind!r:.100} is no environment of SkyRL-gym: it lacks {', '.join(missing) or 'a call'}")
    return _SkyRL(kind, config)


class _SkyRL:
    """See `load_skyrl`. `make` takes `env_config` and `extras`, the fields of the record."""

    agents = (POLICY,)

    def __init__(self, make: Callable[..., Any], config: Mapping[str, Any] | None):
        self._make = make
        self._config = dict(config or {})

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Alternate turns of the policy and of a new environment."""
        extras = {"seed": seed, **copy.deepcopy(example.fields)}
        environment = await call(self._make, env_config=dict(self._config), extras=extras)
        try:
            prompt = list(map(dict, example_messages(example)))
            messages, _ = await call(environment.init, prompt)

            async def act(text: str) -> tuple[Sequence[Message], float | None, bool]:
                output = await call(environment.step, text)
                reward = output["reward"]
                return output["observations"], None if reward is None else float(reward), bool(output["done"])

            return await text_turns(policy, messages, act)
        finally:
            await call(environment.close)
