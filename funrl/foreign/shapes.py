"""Parts of adapters of frameworks: the environment, turns of text, checked calls, scores."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from funrl.data.prompts import Example
from funrl.environments.adapters import ToolOutput, error_text, to_last_turn
from funrl.environments.agents import POLICY
from funrl.environments.answer_rewards import AnswerReward
from funrl.environments.calls import call
from funrl.environments.chat import TemplateChat
from funrl.environments.forms.tool_calls import argument_problem
from funrl.rollout.episodes import Episode, Message, Node, Reply, Status
from funrl.rollout.policy import LimitReached, Policy

LARGEST_SEED = 1 << 31


class AdaptedEnvironment:
    """An environment of one agent, whose `run`, and perhaps `prompts`, are functions."""

    agents: tuple[str, ...] = (POLICY,)

    def __init__(
        self,
        run: Callable[[Policy, Example, int], Awaitable[Episode]],
        prompts: Callable[[int], Sequence[Mapping[str, object]]] | None = None,
    ):
        self._run = run
        if prompts is not None:
            self.prompts = prompts

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Run one episode. Raises: ValueError if its prompt has pictures."""
        check_text(example)
        return await self._run(policy, example, seed)


def check_text(example: Example) -> None:
    """Refuse a prompt with pictures. Raises: ValueError."""
    if example.opening is not None:
        raise ValueError(f"{example.source or 'the prompt'} has pictures; environments of other frameworks get text")


# text of a reply -> messages that answer it, its reward or None, whether the episode ends
Act = Callable[[str], Awaitable[tuple[Sequence[Message], float | None, bool]]]


async def text_turns(
    policy: Policy, messages: Sequence[Message], act: Act, written: Callable[[Reply], str] | None = None
) -> Episode:
    """Alternate turns of the policy and of an environment.

    Args:
      act: answers the text of a reply.
      written: the text of a reply; None: `written_text`.

    The reward of the episode is the sum of its turns' rewards; it is unscored if all of them are None. A limit ends it
    with the rewards so far.
    """
    trajectory = policy.start(messages)
    rewards: dict[Node, float] = {}
    status: Status = "done"
    ended = False
    while not ended:
        try:
            reply, trajectory = await policy.sample(trajectory)
        except LimitReached as limit:
            status = limit.status
            break
        answer, reward, ended = await act(written(reply) if written else written_text(policy, reply))
        policy.answered((answer, reward, ended))
        if reward is not None:
            rewards[trajectory.leaf] = float(reward)
        if not ended:
            trajectory = policy.extend(trajectory, answer)
    total = math.fsum(rewards.values()) if rewards else None
    return Episode([to_last_turn(trajectory)], {POLICY: total}, rewards, status=status)


def written_text(policy: Policy, reply: Reply) -> str:
    """The whole text of a reply, calls and thoughts included, without the token that ended it."""
    chat = policy.chat
    if not isinstance(chat, TemplateChat):
        return str(reply.message["content"])
    ids = reply.tokens[:-1] if reply.finish == "stop" else reply.tokens
    return str(chat.tokenizer.decode(list(ids), skip_special_tokens=True))


def seeded_prompts(instruction: str, episodes: int) -> Callable[[int], Sequence[Mapping[str, object]]]:
    """Prompts of one text, for episodes with different seeds."""
    prompt = [{"role": "user", "content": instruction}]
    return lambda seed: [{"prompt": prompt, "seed": (seed * episodes + n) % LARGEST_SEED} for n in range(episodes)]


def with_observation(messages: Sequence[Message], observation: str) -> list[Message]:
    """Messages of a prompt; the last ends with an observation."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}{observation}"}]


def failed_output(problem: str) -> ToolOutput:
    """Output of a call that failed."""
    return ToolOutput(f"error: {problem}", succeeded=False)


def checked_call(
    act: Callable[[str, Mapping[str, object]], Awaitable[ToolOutput]],
    schemas: Sequence[Mapping[str, object]],
    failed: Callable[[str], ToolOutput] = failed_output,
    errors: tuple[type[BaseException], ...] = (Exception, SystemExit),
) -> Callable[[str, Mapping[str, object]], Awaitable[ToolOutput]]:
    """A function of tool calls that refuses arguments against the schemas, and answers errors.

    Args:
      act: runs a call.
      failed: problem -> what the policy hears of it.
      errors: kinds that are answered; others fail the episode.
    """

    async def run_call(name: str, arguments: Mapping[str, object]) -> ToolOutput:
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


def parameter_names(function: Callable[..., object]) -> tuple[list[str], bool]:
    """Names of the parameters of a function or a class, and whether it takes any other argument."""
    parameters = inspect.signature(function).parameters
    return list(parameters), any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def taken_values(function: Callable[..., object], values: Mapping[str, object]) -> dict[str, object]:
    """The values that a function takes, by name."""
    names, takes_any = parameter_names(function)
    return {name: value for name, value in values.items() if takes_any or name in names}


def check_arguments(function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Refuse arguments that a function does not take. Raises: TypeError."""
    names, _ = parameter_names(function)
    if unknown := set(arguments) - set(taken_values(function, arguments)):
        raise TypeError(f"{function!r:.100} takes no argument {min(unknown)!r}, only {', '.join(names)}")


def mean_parts(numbers: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean of the numbers of each name."""
    values: dict[str, list[float]] = {}
    for name, number in numbers:
        values.setdefault(name, []).append(float(number))
    return {name: math.fsum(several) / len(several) for name, several in values.items()}


def joined_text(content: str | Iterable[object] | None) -> str:
    """Text of a message's content: a text, or parts with a `text`."""
    if isinstance(content, str) or content is None:
        return content or ""
    texts = (part.get("text", "") if isinstance(part, Mapping) else getattr(part, "text", "") for part in content)
    return "".join(map(str, texts))
