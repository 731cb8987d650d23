"""Text environments of gymnasium: --env=gymnasium:ID, or gymnasium:FILE.py:NAME, a class with `reset` and `step`.

Gymnasium need not be installed for a class that imports nothing of it. Written for gymnasium 1.4; reference:
https://gymnasium.farama.org/api/env
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funrl.data.prompts import Example
from funrl.environments.adapters import example_messages
from funrl.environments.agents import POLICY
from funrl.environments.builtin.load import ARGUMENTS, FLAG
from funrl.environments.calls import call
from funrl.environments.environment import Environment
from funrl.foreign.turns import text_turns
from funrl.loading import LoadError, load_object
from funrl.rollout.episodes import Episode, Message
from funrl.rollout.policy import Policy

GYM_PROMPT = "Act in the environment."
GYM_EPISODES = 256
GYM_SEEDS = 1 << 31
GYM_METHODS = ("reset", "step")


def load_gymnasium(
    name: str,
    action: str | Callable[[str], Any] | None = None,
    show: str | Callable[[Any], str] = str,
    instruction: str = GYM_PROMPT,
    episodes: int = GYM_EPISODES,
    **arguments: Any,
) -> Environment:
    """A text environment of gymnasium.

    Args:
      name: id of a registered environment, or "FILE.py:NAME" of a class.
      action: text of a reply -> action, a function or "FILE.py:NAME"; None: the last whole number in it for a discrete
        action space, else the text. The policy gets the message of a ValueError, and no step is made.
      show: observation -> text, likewise.
      instruction: prompt of a run without --prompts; the first observation follows it.
      episodes: prompts of such a run, which differ by their seed.
      arguments: of the environment.

    Raises:
      LoadError: it cannot be loaded, or gymnasium is not installed.
    """
    parse = load_object(ARGUMENTS, action) if isinstance(action, str) else action
    text_of = load_object(ARGUMENTS, show) if isinstance(show, str) else show
    if ":" in name and ".py" in name:
        kind = load_object(FLAG, name)
        if not callable(kind):
            raise LoadError(f"{kind!r:.100} is no class of an environment")
        missing = [method for method in GYM_METHODS if isinstance(kind, type) and not hasattr(kind, method)]
        if missing:
            raise LoadError(f"{kind!r:.100} is no environment of gymnasium: it lacks {', '.join(missing)}")
        return _Gymnasium(lambda: kind(**arguments), parse, text_of, instruction=instruction, episodes=episodes)
    try:
        import gymnasium  # type: ignore[import-not-found]
    except ImportError as error:
        raise LoadError(f"it needs gymnasium ({error}): pip install gymnasium") from error
    try:
        gymnasium.spec(name)
    except Exception as error:  # of gymnasium's registry
        raise LoadError(f"gymnasium has no environment {name!r}: {error}") from error
    make = functools.partial(gymnasium.make, name, **arguments)
    return _Gymnasium(make, parse, text_of, instruction=instruction, episodes=episodes)


class _Gymnasium:
    """See `load_gymnasium`."""

    agents = (POLICY,)

    def __init__(
        self,
        make: Callable[[], Any],
        action: Callable[[str], Any] | None,
        show: Callable[[Any], str],
        *,
        instruction: str,
        episodes: int,
    ):
        self._make = make
        self._action = action
        self._show = show
        self._instruction = instruction
        self._episodes = episodes

    def prompts(self, seed: int) -> Sequence[Mapping[str, Any]]:
        """Episodes with different seeds."""
        prompt = [{"role": "user", "content": self._instruction}]
        return [{"prompt": prompt, "seed": (seed * self._episodes + n) % GYM_SEEDS} for n in range(self._episodes)]

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Alternate turns of the policy and of a new environment."""
        environment = await call(self._make)
        try:
            begin = int(example.fields.get("seed", seed % GYM_SEEDS))
            observation, _ = await call(environment.reset, seed=begin, options=example.fields.get("options"))
            parse = self._action or _parser_of(getattr(environment, "action_space", None))
            *before, last = example_messages(example)
            content = f"{last['content']}\n\n{self._show(observation)}"

            async def act(text: str) -> tuple[Sequence[Message], float | None, bool]:
                try:
                    action = parse(text)
                except ValueError as error:
                    return [{"role": "user", "content": f"error: {error}"}], None, False
                observed, reward, terminated, truncated, _ = await call(environment.step, action)
                answer = {"role": "user", "content": self._show(observed)}
                return [answer], float(reward), bool(terminated or truncated)

            return await text_turns(policy, [*before, {**last, "content": content}], act)
        finally:
            if hasattr(environment, "close"):
                await call(environment.close)


def _parser_of(space: Any) -> Callable[[str], Any]:
    """The parser of texts into actions of a space."""
    if not hasattr(space, "n"):
        return str
    first = int(getattr(space, "start", 0))
    after = first + int(space.n)

    def parse(text: str) -> int:
        numbers = re.findall(r"-?\d+", text)
        if not numbers or not first <= int(numbers[-1]) < after:
            raise ValueError(f"an action is a whole number from {first} to {after - 1}")
        return int(numbers[-1])

    return parse
