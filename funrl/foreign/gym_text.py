"""Text environments of gymnasium, which a reply steps: --env=gymnasium:ID, gymnasium:FILE.py:NAME.

A class has `reset` and `step`, and gymnasium need not be installed for one that imports nothing of it. Written for
gymnasium 1.4; reference: https://gymnasium.farama.org
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from funrl.data.prompts import Example
from funrl.environments.adapters import example_messages
from funrl.environments.builtin.load import ARGUMENTS, FLAG
from funrl.environments.calls import call
from funrl.environments.environment import Environment
from funrl.foreign.shapes import LARGEST_SEED, AdaptedEnvironment, seeded_prompts, text_turns, with_observation
from funrl.loading import LoadError, load_object
from funrl.rollout.episodes import Episode, Message
from funrl.rollout.policy import Policy

GYM_PROMPT = "Act in the environment."
GYM_EPISODES = 256
GYM_METHODS = ("reset", "step")


def load_gymnasium(
    name: str,
    action: str | Callable[[str], object] | None = None,
    show: str | Callable[[object], str] = str,
    instruction: str = GYM_PROMPT,
    episodes: int = GYM_EPISODES,
    **arguments: object,
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
    make = functools.partial(_maker(name), **arguments)

    async def run(policy: Policy, example: Example, seed: int) -> Episode:
        environment = await call(make)
        try:
            begin = int(example.fields.get("seed", seed % LARGEST_SEED))
            observation, _ = await call(environment.reset, seed=begin, options=example.fields.get("options"))
            action_of = parse or _parser_of(getattr(environment, "action_space", None))

            async def act(text: str) -> tuple[Sequence[Message], float | None, bool]:
                try:
                    chosen = action_of(text)
                except ValueError as error:
                    return [{"role": "user", "content": f"error: {error}"}], None, False
                observed, reward, terminated, truncated, _ = await call(environment.step, chosen)
                answer = {"role": "user", "content": text_of(observed)}
                return [answer], float(reward), bool(terminated or truncated)

            messages = with_observation(example_messages(example), f"\n\n{text_of(observation)}")
            return await text_turns(policy, messages, act)
        finally:
            if hasattr(environment, "close"):
                await call(environment.close)

    return AdaptedEnvironment(run, seeded_prompts(instruction, episodes))


def _maker(name: str) -> Callable[..., object]:
    """The class of a file, or what makes a registered environment. Raises: LoadError."""
    if ":" in name and ".py" in name:
        kind = load_object(FLAG, name)
        missing = [method for method in GYM_METHODS if isinstance(kind, type) and not hasattr(kind, method)]
        if missing or not callable(kind):
            raise LoadError(f"{kind!r:.100} is no environment of gymnasium: it lacks {', '.join(missing) or 'a call'}")
        return kind
    try:
        import gymnasium  # type: ignore[import-not-found]
    except ImportError as error:
        raise LoadError(f"it needs gymnasium ({error}): pip install gymnasium") from error
    try:
        gymnasium.spec(name)
    except Exception as error:  # of gymnasium's registry
        raise LoadError(f"gymnasium has no environment {name!r}: {error}") from error
    return functools.partial(gymnasium.make, name)


def _parser_of(space: Any) -> Callable[[str], object]:
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
