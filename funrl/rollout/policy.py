"""The policy of one episode: it starts trajectories, samples replies and adds what the environment says.

    trajectory = policy.start([{"role": "user", "content": "17 * 23?"}])
    reply, trajectory = await policy.sample(trajectory)
    trajectory = policy.extend(trajectory, [{"role": "user", "content": "Are you sure?"}])

Messages are rendered by a `Chat`; what the policy wrote stays the tokens that it wrote.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import NamedTuple

from funrl.kinds import OwnedLines
from funrl.processes import spans
from funrl.rollout.episodes import (
    Chat,
    Endpoint,
    Message,
    Node,
    PathPrefix,
    ReadReply,
    Reply,
    Status,
    Tools,
    Trajectory,
    call_seed,
    exchange_of,
    tokens_or_messages,
)
from funrl.rollout.requests import Completion, Request
from funrl.rollout.sampling_parameters import Sampling

Complete = Callable[[Request], Awaitable[Completion]]  # of a request whose number means nothing
Serve = Callable[["Policy", str], AbstractAsyncContextManager[Endpoint]]


class LimitReached(Exception):
    """A trajectory may not be continued.

    Attributes:
      status: the limit, as the status of its episode.
    """

    def __init__(self, status: Status, message: str):
        super().__init__(message)
        self.status: Status = status


class RunEndingError(ValueError):
    """An environment cannot work in this run at all: it ends the run, as every episode would fail."""


class UnknownAgentError(RunEndingError):
    """An environment starts an agent that the run does not know."""


class PolicySetup(NamedTuple):
    """Sampling and rendering of the policy of an episode.

    Attributes:
      sampling: of a reply; `max_new_tokens` bounds each reply, `samples` is ignored.
      chat: renders messages and reads replies; None: everything is token ids, and messages are empty.
      models: agent -> the model that answers for it, as `Request.model`; None: any agent is the policy.
      serve: (policy, agent) -> a context with the endpoint of an agent, such as `funrl.serve.endpoint.serve_agent`.
    """

    sampling: Sampling
    chat: Chat | None = None
    models: Mapping[str, str] | None = None
    serve: Serve | None = None


class EpisodeLimits(NamedTuple):
    """Limits of an episode, and of a replica.

    Attributes:
      turns: sampled turns of a trajectory.
      tokens: sampled tokens of a trajectory; 0: no limit.
      length: tokens of a trajectory, such as the model's number of positions; 0: no limit.
      episode_s: seconds after whose end a trajectory gets no further turn; 0: no limit. What it ends depends on time.
      environment_s: seconds that an environment may take between two calls of the policy.
      retries: further attempts at an episode whose environment failed.
      waiting: bound on the unfinished episodes of a replica, which bounds their memory on the host.
      fixed: let each replica have an equal range of the examples, instead of taking them as it has room.
    """

    turns: int = 16
    tokens: int = 0
    length: int = 0
    episode_s: float = 0.0
    environment_s: float = 60.0
    retries: int = 1
    waiting: int = 1024
    fixed: bool = False


EPISODE_LIMITS = EpisodeLimits()


class Policy:
    """The policy of one episode. Calls of `sample` may run concurrently.

    Attributes:
      complete, setup, limits: as in `__init__`.
      chat, sampling: of the setup.
      served: the endpoints, which end with the episode.
    """

    def __init__(
        self,
        complete: Complete,
        setup: PolicySetup,
        seed: int,
        limits: EpisodeLimits = EPISODE_LIMITS,
    ):
        """Make it.

        Args:
          complete: completes a request by the model that it names.
          setup: how it samples and renders.
          seed: of the episode, as of a request; see `call_seed`.
          limits: of its trajectories.
        """
        self.complete = complete
        self.setup = setup
        self._seed = seed
        self.limits = limits
        self.chat = setup.chat
        self.sampling = setup.sampling
        self._first: tuple[list[int], OwnedLines | None] | None = None
        self._calls: Counter[bytes] = Counter()
        self._sampled: list[Trajectory] = []
        self._begin = time.monotonic()
        self._read: Counter[str] = Counter()  # calls of tools, and unreadable calls
        self._causes: dict[Node, tuple[str, bool]] = {}  # by the reply that a template would render otherwise
        self._forked: dict[Node, Trajectory] = {}  # by the root of the trajectory that continues
        self._prefixes: dict[Node, PathPrefix] = {}
        self.served = AsyncExitStack()

    def start(
        self,
        content: Sequence[Message] | Sequence[int],
        tools: Tools = (),
        agent: str = "policy",
        owned: OwnedLines | None = None,
    ) -> Trajectory:
        """Begin a trajectory.

        Args:
          content: messages or token ids, at least one.
          tools: descriptions that the chat template shows.
          agent: whose trajectory it is.
          owned: values that token ids own, such as the pictures of `Example.tokens`; messages have their own.

        Raises:
          ValueError: there is no content, or messages cannot be rendered.
          UnknownAgentError: the run does not know the agent.
        """
        self._check_agent(agent)
        tokens, messages = tokens_or_messages(content)
        if messages:
            tokens = self._chat().opening(messages, tools)
        if messages or owned is None or owned.empty:
            tokens, owned = self._expanded(tokens, messages)
        if self._first is None:
            self._first = tokens, owned
        node = Node(None, tokens, sampled=False, messages=messages, owned=owned)
        return Trajectory(agent, node, tools)

    def extend(self, trajectory: Trajectory, content: Sequence[Message] | Sequence[int]) -> Trajectory:
        """Add what others say. Only that is rendered; the tokens of the policy's turns stay as they are.

        Messages that follow other messages, without a turn of the policy in between, are rendered together with them.

        Args:
          content: messages or token ids, at least one.

        Raises:
          ValueError: there is no content, or messages cannot be rendered there.
        """
        leaf = trajectory.leaf
        tokens, messages = tokens_or_messages(content)
        if tokens:
            tokens, owned = self._expanded(tokens, messages)
            return dataclasses.replace(trajectory, leaf=Node(leaf, tokens, sampled=False, owned=owned))
        if not leaf.sampled:
            if not leaf.messages:
                raise ValueError("messages cannot follow token ids of the environment: extend by token ids")
            messages = [*leaf.messages, *messages]
            if leaf.parent is None:
                longer = self.start(messages, trajectory.tools, trajectory.agent)
                return self._fork(longer, self._forked[leaf]) if leaf in self._forked else longer
            leaf = leaf.parent
        chat = self._chat()
        last = leaf.tokens[-1] if leaf.finish == "stop" else None
        reply = leaf.messages[0] if leaf.messages else None
        tokens = chat.continuation(messages, trajectory.tools, last, reply)
        tokens, owned = self._expanded(tokens, messages)
        node = Node(leaf, tokens, sampled=False, messages=messages, owned=owned)
        cause, forks = chat.fork_cause(exchange_of(node), trajectory.tools)
        forks = forks and all(earlier.messages for earlier in leaf.path())  # raw tokens cannot be rendered again
        self._causes[leaf] = cause, forks
        if not forks:
            return dataclasses.replace(trajectory, leaf=node)
        before = dataclasses.replace(trajectory, leaf=leaf)
        return self._fork(self.start([*before.messages(), *messages], trajectory.tools, trajectory.agent), before)

    async def sample(
        self,
        trajectory: Trajectory,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        opening: int = 0,
    ) -> tuple[Reply, Trajectory]:
        """Sample the policy's next turn.

        Args:
          max_tokens: bound on its tokens; None: that of the setup, which holds in any case.
          stop: texts that end it, besides those of the setup.
          seed: makes equal calls with the same seed give the same tokens; None: they differ.
          opening: last tokens before it that are read as its begin, such as that of a call which is demanded.

        Raises:
          LimitReached: a limit leaves no room for a turn.
          ValueError: the engine cannot take the request.
        """
        asked = self._asked(max_tokens, stop)
        prefix = self._prefix(trajectory.leaf)
        room = self._room(prefix)
        request_seed = self._call_seed(prefix, asked, model=self._model(trajectory.agent), seed=seed)
        sampling = dataclasses.replace(asked, max_new_tokens=min(asked.max_new_tokens, room))
        return await self.request(trajectory, sampling, request_seed, opening)

    async def request(
        self, trajectory: Trajectory, sampling: Sampling, seed: int, opening: int = 0
    ) -> tuple[Reply, Trajectory]:
        """Sample the next turn by the parameters and the seed of a request, such as those of a node of a log.

        Raises:
          ValueError: the engine cannot take the request.
        """
        tokens = self._prefix(trajectory.leaf).tokens
        with spans.span("turn", agent=trajectory.agent):
            completion = await self._completion(trajectory, tokens, sampling, seed)
        chat = self.setup.chat
        written = completion.written
        reading = ReadReply({"role": "assistant", "content": ""})
        if chat is not None:
            begin = len(tokens) - opening
            reading = chat.read(tokens[:begin], [*tokens[begin:], *written], trajectory.tools)
            self._read["tool_calls"] += len(reading.tool_calls) + len(reading.problems)
            self._read["call_errors"] += len(reading.problems)
        longer = with_turn(trajectory, completion, sampling, seed, None if chat is None else reading)
        self._sampled.append(longer)
        return Reply(*reading, tokens=longer.leaf.tokens, finish=completion.finish), longer

    async def endpoint(self, agent: str = "policy") -> Endpoint:
        """Serve an agent over HTTP until the episode ends; `ends` gives the trajectories of its replies.

        Raises:
          ImportError: the packages of the extra `serve` are missing.
          ValueError: the setup has no server or no chat.
          UnknownAgentError: the run does not know the agent.
        """
        self._check_agent(agent)
        if self.setup.serve is None:
            raise ValueError("the policy has no server: give PolicySetup serve=funrl.serve.endpoint.serve_agent")
        return await self.served.enter_async_context(self.setup.serve(self, agent))

    def answered(self, answer: object) -> None:
        """Take note of what the environment itself answered, such as the messages and the reward of a turn.

        The environments of `adapters` call it. An episode resumed from a checkpoint compares it with the saved one;
        see `ResumablePolicy`.
        """

    def _expanded(self, tokens: list[int], messages: Sequence[Message]) -> tuple[list[int], OwnedLines | None]:
        """Tokens with those of the pictures of messages; see `Chat.expanded`."""
        return (tokens, None) if self.setup.chat is None else self.setup.chat.expanded(tokens, messages)

    def compact(self, trajectory: Trajectory, messages: Sequence[Message]) -> Trajectory:
        """Continue with other messages instead of a history, which ends with the policy's summary of it.

        The history is a row of the episode of its own. Limits go on counting turns and sampled tokens.

        Args:
          trajectory: ends with the summary, the last turn that the policy sampled.
          messages: that the policy sees from here on.

        Raises:
          ValueError: the trajectory does not end with a turn, or the messages cannot be rendered.
        """
        if not trajectory.leaf.sampled:
            raise ValueError("compact: the trajectory has to end with a turn of the policy, the summary")
        ended = dataclasses.replace(trajectory, leaf=dataclasses.replace(trajectory.leaf, summary=True))
        self._sampled = [ended if turn.leaf is trajectory.leaf else turn for turn in self._sampled]
        self._read["compactions"] += 1
        return self._fork(self.start(messages, trajectory.tools, trajectory.agent), ended)

    def _fork(self, started: Trajectory, before: Trajectory) -> Trajectory:
        """A trajectory that has just been started, as a fork of another one."""
        root = dataclasses.replace(started.leaf, turns_before=self._prefix(before.leaf).turns)
        self._forked[root] = before
        return dataclasses.replace(started, leaf=root)

    async def _completion(self, trajectory: Trajectory, tokens: list[int], sampling: Sampling, seed: int) -> Completion:
        """Complete a trajectory, whose token ids are `tokens`."""
        prefix = self._prefix(trajectory.leaf)
        model = self._model(trajectory.agent)
        request = Request(0, tokens, sampling, seed, computed=prefix.computed, model=model, owned=prefix.owned)
        return await self.complete(request)

    def _model(self, agent: str) -> str:
        """Name of the model that answers for an agent; "": the policy."""
        return (self.setup.models or {}).get(agent, "")

    def ends(self) -> list[Trajectory]:
        """Trajectories of this episode that end with a sampled turn which no other continues."""
        continued = {id(node) for end in self._sampled for node in end.leaf.path()[:-1]}
        return [end for end in self._sampled if id(end.leaf) not in continued]

    def _check_agent(self, agent: str) -> None:
        models = self.setup.models
        if models is not None and agent not in models:
            known = ", ".join(f"{name}:{'another model' if model else 'policy'}" for name, model in models.items())
            raise UnknownAgentError(
                f"the environment starts agent {agent!r}, and the run knows {known}; name it in --agents and, if the "
                "environment has one, in its attribute `agents`"
            )

    def before_forks(self, ends: Sequence[Trajectory]) -> list[Trajectory]:
        """Trajectories from which some others forked because the template renders their history otherwise, in order."""
        before: list[Trajectory] = []
        for end in ends:
            while (root := end.leaf.path()[0]) in self._forked:
                end = self._forked[root]
                before.append(end)
        return list({end.leaf: end for end in before[::-1]}.values())

    def counts(self) -> dict[str, float]:
        """Counts of the episode: calls of tools, unreadable calls, and forks or drifts by cause."""
        counts = {name: float(number) for name, number in self._read.items()}
        for cause, forks in self._causes.values():
            if cause:
                name = f"{'forks' if forks else 'drift'}/{cause}"
                counts[name] = counts.get(name, 0.0) + 1.0
        return counts

    def _chat(self) -> Chat:
        if self.setup.chat is None:
            raise ValueError("messages need a chat template: give the policy a chat, or token ids")
        return self.setup.chat

    def _asked(self, max_tokens: int | None, stop: Sequence[str]) -> Sampling:
        """Sampling parameters of a call, before limits."""
        sampling = dataclasses.replace(self.setup.sampling, samples=1)
        if stop:
            sampling = dataclasses.replace(sampling, stop_strings=(*sampling.stop_strings, *stop))
        if max_tokens is not None:
            most = min(max_tokens, sampling.max_new_tokens)
            sampling = dataclasses.replace(sampling, max_new_tokens=most)
        return sampling

    def _prefix(self, node: Node) -> PathPrefix:
        """Everything up to a node, from the longest known part: no turn costs what all before it have cost."""
        new: list[Node] = []
        current: Node | None = node
        while current is not None and current not in self._prefixes:
            new.append(current)
            current = current.parent
        if current is None:
            root = new[-1]
            before = self._forked.get(root)
            forked = None if before is None else self._prefix(before.leaf)
            prefix = PathPrefix([], hashlib.blake2b(digest_size=16), 0, *((0, 0) if forked is None else forked[3:5]))
        else:
            prefix = self._prefixes[current]
            if new and current.sampled:
                del self._prefixes[current]  # its successor is longer; a branch from there is computed again
        self._prefixes[node] = prefix.extended(new[::-1])
        return self._prefixes[node]

    def _room(self, prefix: PathPrefix) -> int:
        """Tokens that the limits leave for the next turn, at least 1."""
        limits = self.limits
        length = len(prefix.tokens)
        if prefix.turns >= limits.turns:
            raise LimitReached("turns", f"the trajectory has {prefix.turns} turns, the limit of them")
        if limits.episode_s and time.monotonic() - self._begin > limits.episode_s:
            raise LimitReached("time", f"the episode has taken more than {limits.episode_s:g} s")
        room = limits.length - length if limits.length else self.setup.sampling.max_new_tokens
        if limits.tokens:
            room = min(room, limits.tokens - prefix.sampled)
        if room < 1:
            raise LimitReached(
                "tokens",
                f"the trajectory has {length} tokens, {prefix.sampled} of them sampled; the limits are {limits.length} "
                f"and {limits.tokens}",
            )
        return room

    def _call_seed(self, prefix: PathPrefix, asked: Sampling, *, model: str, seed: int | None) -> int:
        """Seed of a call's noise; counts the call."""
        key = prefix.key(asked, model)
        if seed is not None:
            return call_seed(self._seed, key, "seed", seed)
        ordinal = self._calls[key]
        self._calls[key] += 1
        default = dataclasses.replace(self.setup.sampling, samples=1)
        if ordinal == 0 and not model and asked == default and prefix.begins_as(self._first):
            return self._seed
        return call_seed(self._seed, key, "ordinal", ordinal)


def with_turn(
    trajectory: Trajectory, completion: Completion, sampling: Sampling, seed: int, reading: ReadReply | None = None
) -> Trajectory:
    """A trajectory with the turn that a request has sampled.

    Args:
      trajectory: before the turn.
      completion: the turn.
      sampling, seed: of the request.
      reading: the message of the turn; None: it is not known.
    """
    node = Node(
        trajectory.leaf,
        completion.tokens.tolist(),
        sampled=True,
        raw_logp=completion.raw_logp,
        sampling_logp=completion.sampling_logp,
        versions=completion.versions,
        digests=completion.digests,
        routes=completion.routes,
        kept=completion.kept,
        messages=() if reading is None else (reading.message,),
        finish=completion.finish,
        sampling=sampling,
        seed=seed,
        problems=() if reading is None else reading.problems,
    )
    return dataclasses.replace(trajectory, leaf=node)
