"""Environments of simpler things: a message environment, tools, a function of messages, one completion.

| given | environment |
|---|---|
| an object with `reset`, `step` and `close` | `message_environment` |
| typed functions with docstrings, and a score | `tool_environment` |
| a function that answers messages | `function_environment` |
| a reward function of prompt and completion | `single_turn` |

Every function may be plain or `async`; a plain one runs in a thread.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from funrl.data.json_lines import JsonObject
from funrl.data.pictures import inner_pictures
from funrl.data.prompts import Example
from funrl.environments.agents import POLICY
from funrl.environments.calls import call
from funrl.environments.chat import picture_content
from funrl.environments.environment import Environment, MessageEnvironment, PlainEnvironment, ReturnError
from funrl.environments.forms.tool_calls import argument_problem
from funrl.rewards.call import CompletedRow, Failure, Reward, RewardError, awaited_outcomes, outcomes, reward_functions
from funrl.rewards.call import Score as RewardScore
from funrl.rollout.episodes import Episode, Message, Node, Status, Trajectory
from funrl.rollout.policy import LimitReached, Policy, Tools

LONGEST_ERROR = 2000  # characters of an error's text
GYM = "; an environment of gymnasium is --env=gymnasium:FILE.py:NAME"


def message_environment(make: Callable[[], MessageEnvironment | PlainEnvironment]) -> Environment:
    """An environment of conversations with one agent.

    Args:
      make: makes the other side, anew for each attempt at an episode.

    The episode's reward is the sum of its turns' rewards; it is unscored if all of them are None. A limit ends the
    conversation before its next turn, with the rewards so far: an environment that counts an unfinished episode as a
    failure returns 0.0 instead of None.
    """
    return _Conversations(make)


def tool_environment(
    tools: Sequence[Callable[..., object]], score: Callable[..., object], system: str | None = None
) -> Environment:
    """An environment in which the policy calls tools until it replies without a call.

    A tool's output, or the error that it raised, follows as a message of role "tool", and so does what could not be
    read of a call.

    Args:
      tools: functions with types and a docstring that describes their arguments (Google style), which become the JSON
        schemas that the chat template shows.
      score: (messages, **fields of the example's record) -> reward of the episode; None: unscored. Its `images` are
        those of all messages.
      system: a system message, before the messages of the example.

    Raises:
      ValueError: a tool has no docstring or types.
    """
    return _Tools(tools, score, system)


def function_environment(answer: Callable[..., object]) -> Environment:
    """An environment of a function: (messages, **fields of the example's record) -> the next ones, or the reward.

    Args:
      answer: a text continues as the user's message, a list of messages as these; a number or None is the reward, and
        ends the episode.
    """
    return _Answers(answer)


def single_turn(reward: Reward | None = None) -> Environment:
    """An environment of one completion of each prompt.

    Args:
      reward: a reward function of any form that rewards a completion on its own; None: the episodes are unscored.
    """
    return _SingleTurn(reward)


def tool_schema(tool: Callable[..., object]) -> JsonObject:
    """JSON schema of a function, from its types and its docstring. Raises ValueError if it lacks them."""
    from transformers.utils import get_json_schema

    if not callable(tool):
        raise ValueError(f"{tool!r:.100} is no tool: a list of functions with types and docstrings is needed")
    try:
        return get_json_schema(tool)
    except Exception as error:
        name = getattr(tool, "__name__", repr(tool))
        raise ValueError(f"tool {name} needs types, and a docstring with a line for each argument: {error}") from error


def example_messages(example: Example) -> list[Message]:
    """Messages of an example, with its pictures; a text is the user's."""
    if example.opening is not None:
        return list(example.opening)
    return [{"role": "user", "content": example.text}] if example.messages is None else list(example.messages)


class ToolOutput(NamedTuple):
    """Result of a call of a tool.

    Attributes:
      text: that the policy reads.
      content: parts of text and pictures that it reads instead; None: the text.
      succeeded: whether the tool gave it, and not an error.
      reward: that the call earned; None: nothing is known of it.
      ends: whether it ends the episode.
    """

    text: str
    succeeded: bool = True
    reward: float | None = None
    ends: bool = False
    content: Sequence[Mapping[str, object]] | None = None


class ToolConversation(NamedTuple):
    """A conversation in which the policy called tools.

    Attributes:
      end: trajectory up to the policy's last reply.
      status: of the episode.
      outputs: of all calls, unreadable ones included.
      rewards: of replies whose calls earned one: the sums.
    """

    end: Trajectory
    status: Status
    outputs: Sequence[ToolOutput]
    rewards: Mapping[Node, float]

    def parts(self) -> dict[str, float]:
        """Counts of calls and of failed calls, as parts of an episode."""
        failed = sum(not output.succeeded for output in self.outputs)
        return {"tool_calls": float(len(self.outputs)), "failed_tool_calls": float(failed)}


async def tool_conversation(
    policy: Policy,
    trajectory: Trajectory,
    run_call: Callable[[str, Mapping[str, Any]], Awaitable[ToolOutput]],
    run_problem: Callable[[str], ToolOutput] = lambda problem: ToolOutput(f"error: {problem}", succeeded=False),
) -> ToolConversation:
    """Run tool calls of the policy until it replies without a call, or a call or a limit ends the episode.

    Args:
      trajectory: its begin, with the tools.
      run_call: (name, arguments) -> output of a call; the calls of a reply run one after another.
      run_problem: what could not be read of a reply -> what the policy hears of it.
    """
    status: Status = "done"
    all_outputs: list[ToolOutput] = []
    rewards: dict[Node, float] = {}
    while True:
        try:
            reply, trajectory = await policy.sample(trajectory)
        except LimitReached as limit:
            status = limit.status
            break
        if not reply.tool_calls and not reply.problems:
            break
        outputs = [await run_call(name, arguments) for name, arguments in reply.tool_calls]
        outputs += [run_problem(problem) for problem in reply.problems]
        policy.answered([tuple(output) for output in outputs])
        all_outputs += outputs
        earned = [output.reward for output in outputs if output.reward is not None]
        if earned:
            rewards[trajectory.leaf] = math.fsum(earned)
        if any(output.ends for output in outputs):
            break
        trajectory = policy.extend(trajectory, _tool_messages(reply.message, outputs))
    return ToolConversation(to_last_turn(trajectory), status, all_outputs, rewards)


class _Conversations:
    """See `message_environment`. `make` makes the other side."""

    agents = (POLICY,)

    def __init__(self, make: Callable[[], MessageEnvironment | PlainEnvironment]):
        self.make = make

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Alternate turns of the policy and of a new environment."""
        environment = self.make()
        name = type(environment).__name__
        try:
            messages, tools = checked_reset(name, await call(environment.reset, example, seed))
            policy.answered((messages, tools))
            trajectory = policy.start(messages, tools)
            rewards: dict[Node, float] = {}
            states: dict[Node, str] = {}
            status: Status = "done"
            ended = False
            while not ended:
                state = getattr(environment, "state", None)
                try:
                    reply, trajectory = await policy.sample(trajectory)
                except LimitReached as limit:
                    status = limit.status
                    break
                if state is not None:
                    states[trajectory.leaf] = state
                message = {**reply.message, "problems": list(reply.problems)} if reply.problems else reply.message
                messages, reward, ended = checked_step(name, await call(environment.step, message))
                policy.answered((messages, reward, ended))
                if reward is not None:
                    rewards[trajectory.leaf] = reward
                if not ended:
                    trajectory = policy.extend(trajectory, messages)
            total = math.fsum(rewards.values()) if rewards else None
            end = to_last_turn(trajectory)
            return Episode([end], {trajectory.agent: total}, rewards, status=status, states=states)
        finally:
            await call(environment.close)


class _Tools:
    """See `tool_environment`. `tools` are the schemas."""

    agents = (POLICY,)

    def __init__(self, tools: Sequence[Callable[..., object]], score: Callable[..., object], system: str | None):
        self.tools = [tool_schema(tool) for tool in tools]
        self._tools = {tool["function"]["name"]: function for tool, function in zip(self.tools, tools, strict=True)}
        self._score = score
        self._system = system

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Run tool calls of the policy until it replies without a call."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        opened = policy.start([*system, *example_messages(example)], self.tools)
        talk = await tool_conversation(policy, opened, self._output)
        messages = talk.end.messages()
        reward = await call(self._score, messages, **seen_fields(self._score, example, messages))
        return Episode([talk.end], {talk.end.agent: reward}, parts=talk.parts(), status=talk.status)

    async def _output(self, name: str, arguments: Mapping[str, object]) -> ToolOutput:
        """Run a call."""
        if problem := argument_problem(name, arguments, self.tools):
            return ToolOutput(f"error: {problem}", succeeded=False)
        try:
            value = await call(self._tools[name], **arguments)
            content = picture_content(value)
            return ToolOutput(output_text(value)) if content is None else ToolOutput("", content=content)
        except (Exception, SystemExit) as error:
            return ToolOutput(f"error: {error_text(error)}", succeeded=False)


class _Answers:
    agents = (POLICY,)

    def __init__(self, answer: Callable[..., object]):
        self._answer = answer

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Alternate turns of the policy and of the function until the function gives a reward."""
        trajectory = policy.start(example_messages(example))
        while True:
            try:
                _, trajectory = await policy.sample(trajectory)
            except LimitReached as limit:
                last = to_last_turn(trajectory)
                return Episode([last], {last.agent: None}, status=limit.status)
            messages = trajectory.messages()
            answer = await call(self._answer, messages, **seen_fields(self._answer, example, messages))
            policy.answered(answer)
            if isinstance(answer, str):
                answer = [{"role": "user", "content": answer}]
            if not isinstance(answer, Sequence):
                return Episode([trajectory], {trajectory.agent: answer})
            trajectory = policy.extend(trajectory, answer)


class _SingleTurn:
    agents = (POLICY,)

    def __init__(self, reward: Reward | None):
        self._reward = None if reward is None else reward_functions([reward])[0]

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Complete the prompt once, and reward the completion."""
        reply, trajectory = await policy.sample(policy.start(example.tokens, owned=example.owned))
        if self._reward is None:
            return Episode([trajectory], {trajectory.agent: None})
        messages = example.messages if example.conversational else None
        text = str(reply.message["content"])
        row = CompletedRow(example.text, text, example.fields, completion_ids=reply.tokens, messages=messages)
        if self._reward.awaited:
            (outcome,) = await awaited_outcomes(self._reward, [row])
        else:
            (outcome,) = await call(outcomes, self._reward, [row])
        if isinstance(outcome, Failure):
            raise RewardError(*outcome)
        parts = outcome.entries if isinstance(outcome, RewardScore) else {}
        return Episode([trajectory], {trajectory.agent: float(outcome)}, parts=parts)


def seen_fields(function: Callable[..., object], example: Example, messages: Sequence[Message]) -> JsonObject:
    """The fields of an example; where the function takes `images`, all pictures of the messages, if they have any."""
    pictures = inner_pictures([*messages])
    parameters = inspect.signature(function).parameters.values() if pictures else ()
    takes = any(x.name == "images" or x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters)
    return {**example.fields, **({"images": pictures} if takes else {})}


def checked_reset(name: str, value: object) -> tuple[Sequence[Message], Tools]:
    """The messages and tools that `reset` of a class returned. Raises ReturnError if it returned anything else."""
    wanted = 'return a tuple: messages, tools, such as ([{"role": "user", "content": "..."}], ())'
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ReturnError(f"{name}.reset returned {value!r:.200}; {wanted}")
    messages, tools = value
    if not _are_messages(messages):
        gym = GYM if isinstance(tools, Mapping) else ""
        raise ReturnError(f"{name}.reset returned {value!r:.200}; {wanted}{gym}")
    if tools and not isinstance(tools, list | tuple):
        raise ReturnError(f"{name}.reset returned the tools {tools!r:.200}; {wanted}: tools are a list of schemas")
    return messages, tools or ()


def checked_step(name: str, value: object) -> tuple[Sequence[Message], Any, Any]:
    """Messages, reward and end that `step` of a class returned. Raises ReturnError if it returned anything else."""
    wanted = "return a tuple: messages, reward, whether the episode ends"
    if not isinstance(value, tuple | list) or len(value) != 3:
        gym = GYM if isinstance(value, tuple) and len(value) == 5 and isinstance(value[4], Mapping) else ""
        raise ReturnError(f"{name}.step returned {value!r:.200}; {wanted}{gym}")
    messages, reward, ended = value
    if reward is not None and not isinstance(reward, Real):
        raise ReturnError(f"{name}.step returned the reward {reward!r:.200}; a number or None is needed")
    if reward is not None and not math.isfinite(reward):
        raise ReturnError(f"{name}.step returned the reward {reward!r:.200}; a finite number is needed, or None")
    if not ended and not _are_messages(messages):
        raise ReturnError(
            f"{name}.step returned the messages {messages!r:.200} and continues; at least one message such as "
            '{"role": "user", "content": "..."} is needed'
        )
    return messages, reward, ended


def _are_messages(value: Any) -> bool:
    """True of at least one message, or token id."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__") or not len(value):
        return False
    parts = list(value)
    if isinstance(parts[0], Mapping):
        return all(isinstance(part, Mapping) and isinstance(part.get("role"), str) for part in parts)
    return all(hasattr(part, "__index__") and not isinstance(part, bool) for part in parts)


def output_text(value: object) -> str:
    """Text of what a tool returned: itself, or JSON."""
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def error_text(error: BaseException) -> str:
    """Name and text of an error, cut off."""
    try:
        return f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
    except Exception:  # its own text fails
        return type(error).__name__


def _tool_messages(reply: Message, outputs: Sequence[ToolOutput]) -> list[Message]:
    """Outputs of a reply's calls, with their ids, else with some of nine characters, as Mistral's templates demand."""
    ids = [call.get("id") for call in reply.get("tool_calls") or ()]
    ids += [None] * (len(outputs) - len(ids))
    return [
        {
            "role": "tool",
            "tool_call_id": number or f"call{n:05}",
            "content": output.text if output.content is None else list(output.content),
        }
        for n, (number, output) in enumerate(zip(ids, outputs, strict=True))
    ]


def to_last_turn(trajectory: Trajectory) -> Trajectory:
    """The trajectory up to its last sampled turn: what follows is never read."""
    node: Node | None = trajectory.leaf
    while node is not None and not node.sampled:
        node = node.parent
    return trajectory if node is None else Trajectory(trajectory.agent, node, trajectory.tools)
