"""Parts of adapters of frameworks: the environment, turns of text, replies in token ids, checked calls, scores."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from funrl.data.prompts import Example
from funrl.environments.adapters import ToolOutput, error_text, to_last_turn
from funrl.environments.agents import POLICY
from funrl.environments.answer_rewards import AnswerReward
from funrl.environments.calls import call
from funrl.environments.chat import TemplateChat
from funrl.environments.forms.tool_calls import argument_problem
from funrl.rollout.episodes import Episode, Message, Node, Reply, Status, Trajectory
from funrl.rollout.policy import LimitReached, Policy, Tools

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


class RecordedReplies:
    """The replies of one episode, each to a prompt of token ids.

    A prompt that begins with all tokens of an earlier reply continues that reply's trajectory.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        self._begun: list[tuple[list[int], Trajectory]] = []
        self._ends: list[tuple[list[int], Trajectory]] = []

    def begin(self, messages: Sequence[Mapping[str, object]], tools: Tools = ()) -> list[int]:
        """Token ids of a conversation up to the policy's turn, whose messages the record then has."""
        trajectory = self._policy.start(messages, tools)
        tokens = trajectory.token_ids()
        self._begun.append((tokens, trajectory))
        return tokens

    async def reply(self, prompt: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()) -> Node:
        """Sample a reply to a prompt.

        Raises:
          LimitReached: a limit of the episode leaves no room for a turn.
        """
        prompt = list(prompt)
        _, end = await self._policy.sample(self._opened(prompt), max_tokens, stop)
        self._ends.append(([*prompt, *end.leaf.tokens], end))
        return end.leaf

    def end_of(self, tokens: Sequence[int], mask: Sequence[int]) -> Trajectory:
        """The recorded trajectory of a framework's own record of a conversation, up to its last reply.

        Args:
          tokens: [N] ids of the conversation, which may be cut off.
          mask: [N] whether the policy sampled each token.

        Raises:
          ValueError: the policy did not sample these tokens where the mask says so.
        """
        tokens = list(tokens)
        if len(mask) != len(tokens):
            raise ValueError(f"its mask has {len(mask)} entries for {len(tokens)} tokens")
        common = [_common(ids, tokens) for ids, _ in self._ends]
        whole = [n for n, (ids, _) in enumerate(self._ends) if common[n] == min(len(ids), len(tokens))]
        if not whole:
            raise ValueError(
                f"its token {max(common, default=0)} of {len(tokens)} is not that of the {len(common)} replies that "
                "were sampled; give the ids of replies as they are"
            )
        chosen = max(whole, key=lambda n: (common[n], -len(self._ends[n][0])))
        end = self._ends[chosen][1]
        sampled = [node.sampled for node in end.nodes() for _ in node.tokens][: len(tokens)]
        sampled += [False] * (len(tokens) - len(sampled))
        for place, (own, given) in enumerate(zip(sampled, mask, strict=True)):
            if own != bool(given):
                fact = "sampled" if own else "not sampled"
                raise ValueError(f"its mask is {given} at token {place} of {len(tokens)}, which was {fact}")
        return end

    def _opened(self, prompt: list[int]) -> Trajectory:
        """The trajectory of a prompt: the longest known one that it begins with, and the rest."""
        known = [(ids, end) for ids, end in (*self._begun, *self._ends) if ids == prompt[: len(ids)]]
        if not known:
            return self._policy.start(prompt)
        ids, end = max(known, key=lambda pair: len(pair[0]))
        rest = prompt[len(ids) :]
        return self._policy.extend(end, rest) if rest else end


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common begin of two lists."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def seeded_prompts(instruction: str, episodes: int) -> Callable[[int], Sequence[Mapping[str, Any]]]:
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
