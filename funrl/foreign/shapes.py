"""Parts of adapters of frameworks: the environment, checked calls, scores and records."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from funrl.data.prompts import Example
from funrl.environments.adapters import ToolOutput, error_text
from funrl.environments.agents import POLICY
from funrl.environments.answer_rewards import AnswerReward
from funrl.environments.calls import call
from funrl.environments.forms.tool_calls import argument_problem
from funrl.rollout.episodes import Episode, Message
from funrl.rollout.policy import Policy

LARGEST_SEED = 1 << 31


class AdaptedEnvironment:
    """An environment of one agent, whose `run`, and perhaps `prompts`, are functions."""

    agents: tuple[str, ...] = (POLICY,)

    def __init__(
        self,
        run: Callable[[Policy, Example, int], Awaitable[Episode]],
        prompts: Callable[[int], Sequence[Mapping[str, Any]]] | None = None,
    ):
        self._run = run
        if prompts is not None:
            self.prompts = prompts

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Run one episode."""
        return await self._run(policy, example, seed)


def seeded_prompts(instruction: str, episodes: int) -> Callable[[int], Sequence[Mapping[str, Any]]]:
    """Prompts of one text, for episodes with different seeds."""
    prompt = [{"role": "user", "content": instruction}]
    return lambda seed: [{"prompt": prompt, "seed": (seed * episodes + n) % LARGEST_SEED} for n in range(episodes)]


def with_observation(messages: Sequence[Message], observation: str) -> list[Message]:
    """Messages of a prompt, the last of which ends with an observation."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}{observation}"}]


def failed_output(problem: str) -> ToolOutput:
    """Output of a call that failed."""
    return ToolOutput(f"error: {problem}", succeeded=False)


def checked_call(
    act: Callable[[str, Mapping[str, Any]], Awaitable[ToolOutput]],
    schemas: Sequence[Mapping[str, Any]],
    failed: Callable[[str], ToolOutput] = failed_output,
    errors: tuple[type[BaseException], ...] = (Exception, SystemExit),
) -> Callable[[str, Mapping[str, Any]], Awaitable[ToolOutput]]:
    """A function of tool calls that refuses arguments against the schemas, and answers errors.

    Args:
      act: runs a call.
      failed: problem -> what the policy hears of it.
      errors: kinds that are answered; others fail the episode.
    """

    async def run_call(name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        if problem := argument_problem(name, arguments, schemas):
            return failed(problem)
        try:
            return await act(name, arguments)
        except errors as error:
            return failed(str(error) or error_text(error))

    return run_call


async def answer_score(score: AnswerReward, example: Example, answer: str) -> float | None:
    """Reward of an answer; None: unscored."""
    messages = example.messages if example.conversational else None
    reward = await call(score, example.text, answer, example.fields, messages)
    return None if math.isnan(reward) else reward


def parameter_names(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names of the parameters of a function or a class, and whether it takes any other argument."""
    parameters = inspect.signature(function).parameters
    return list(parameters), any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def taken_values(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a function takes, by name."""
    names, takes_any = parameter_names(function)
    return {name: value for name, value in values.items() if takes_any or name in names}


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a function does not take. Raises: TypeError."""
    names, _ = parameter_names(function)
    if unknown := set(arguments) - set(taken_values(function, arguments)):
        raise TypeError(f"{function!r:.100} takes no argument {min(unknown)!r}, only {', '.join(names)}")


def mean_parts(numbers: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Mean of the numbers of each name."""
    values: dict[str, list[float]] = {}
    for name, number in numbers:
        values.setdefault(name, []).append(float(number))
    return {name: math.fsum(several) / len(several) for name, several in values.items()}


def joined_text(content: Any) -> str:
    """Text of a message's content: a text, or parts with a `text`."""
    if isinstance(content, str) or content is None:
        return content or ""
    texts = (part.get("text", "") if isinstance(part, Mapping) else getattr(part, "text", "") for part in content)
    return "".join(map(str, texts))


def record_kind(module: str, name: str) -> Callable[..., Any]:
    """A framework's record if its module is imported, else one with the same names."""
    return getattr(sys.modules.get(module), name, SimpleNamespace)
