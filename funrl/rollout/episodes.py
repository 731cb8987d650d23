"""Episodes: what an environment and a policy said to each other, token by token.

    trajectory = Trajectory("policy", Node(None, [5, 7], sampled=False))
    trajectory.token_ids()  # [5, 7]: what the model saw

A node is what one side added. A trajectory is a path of nodes from the root of one agent's conversation. Both are
immutable values, so a retry, a branch or a shorter context is an earlier trajectory used again, and nothing that the
policy wrote is tokenised a second time.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from funrl.compiled_kernels.truncated_scores import KeptTokens
from funrl.kinds import OwnedLines, joined_lines
from funrl.rollout.sampling_parameters import Sampling

Message = Mapping[str, Any]  # of a chat: "role", "content", and perhaps "tool_calls" and others
Tools = Sequence[Mapping[str, Any]]  # JSON schemas of functions, as chat templates take them
Status = Literal["done", "turns", "tokens", "time", "failed", "cancelled"]


class Endpoint(NamedTuple):
    """Address at which programs reach one agent of an episode over HTTP.

    Attributes:
      base_url: of the OpenAI dialects; others are beside it, as clients of these expect.
      api_key: ends with the episode.
      model: name of the model.
    """

    base_url: str
    api_key: str
    model: str


class SampledNumbers(NamedTuple):
    """Values per token that the policy sampled, as in `Node`."""

    raw_logp: Tensor
    sampling_logp: Tensor
    versions: Tensor
    digests: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Node:
    """Tokens that one side added to a trajectory, on the host. Compared and hashed by identity.

    Attributes:
      parent: what they follow; None: the root.
      tokens: [N] token ids, at least one.
      sampled: whether the policy sampled them; otherwise they are context: a prompt, a tool's output, or the tokens
        that a template puts between turns.
      raw_logp: [N] nats, under the model's own distribution; None unless sampled.
      sampling_logp: [N] nats, under the distribution that was sampled from; None unless sampled.
      versions: [N] int64, version of the weights that sampled each token; None unless sampled.
      digests: [N] int64, digest of these weights, as in `requests.Completion`; None: they are not recorded.
      routes: [P + N - 1, choices] int16, experts of all tokens of the path but the last, as in
        `requests.Completion`; None: they are not recorded.
      kept: ids that could be sampled at each token, as in `requests.Completion`; None: they are not recorded.
      messages: what the tokens say, as messages of a chat; empty for raw tokens.
      finish: how sampling ended, as in `requests.Completion`; None unless sampled.
      sampling, seed: of the request that sampled it, whose prompt are the tokens before; None unless sampled.
      problems: why parts of a reply could not be read.
      turns_before: of a root that a fork begins with, turns of the policy before the fork, which it renders again.
      owned: values that the tokens own, such as pictures; None: none.
      summary: whether it is the policy's summary of its history, from which another trajectory continues.
    """

    parent: Node | None
    tokens: Sequence[int]
    sampled: bool
    raw_logp: Tensor | None = None
    sampling_logp: Tensor | None = None
    versions: Tensor | None = None
    routes: Tensor | None = None
    kept: KeptTokens | None = None
    messages: Sequence[Message] = ()
    finish: str | None = None
    sampling: Sampling | None = None
    seed: int | None = None
    problems: Sequence[str] = ()
    turns_before: int = 0
    owned: OwnedLines | None = None
    digests: Tensor | None = None
    summary: bool = False

    @property
    def numbers(self) -> SampledNumbers:
        """Values of its tokens from the policy. Raises: ValueError, they were not sampled."""
        if self.raw_logp is None or self.sampling_logp is None or self.versions is None:
            raise ValueError("the node is context: no policy sampled its tokens")
        return SampledNumbers(self.raw_logp, self.sampling_logp, self.versions, self.digests)

    def path(self) -> list[Node]:
        """Nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Trajectory:
    """A path of nodes of one agent; what other agents say is context in it.

    Attributes:
      agent: its name; a run maps agents to roles.
      leaf: the last node.
      tools: descriptions of the tools (JSON schemas of functions) that the template showed the model.
    """

    agent: str
    leaf: Node
    tools: Sequence[Mapping[str, Any]] = ()

    def nodes(self) -> Iterator[Node]:
        """Nodes from the root to the leaf."""
        return iter(self.leaf.path())

    def token_ids(self) -> list[int]:
        """All token ids: what the model saw and wrote."""
        return [token for node in self.leaf.path() for token in node.tokens]

    def messages(self) -> list[Message]:
        """The messages of all nodes, in order."""
        return [message for node in self.leaf.path() for message in node.messages]


@dataclass(frozen=True)
class Reply:
    """The turn that the policy sampled.

    Attributes:
      message: as a message of a chat, without the token that ended it.
      tool_calls: (name, arguments) of the calls that were read from it.
      problems: why calls or parts of the message could not be read; the environment may show them to the policy.
      tokens: [N] token ids, the end of the turn included.
      finish: as in `requests.Completion`: "stop", "string" or "length".
    """

    message: Message
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]]
    problems: Sequence[str]
    tokens: Sequence[int]
    finish: str


@dataclass(frozen=True)
class Episode:
    """All trajectories of one run of an environment, and their rewards.

    Attributes:
      ends: trajectories to train on, each of an agent, in canonical order: as the environment lists them. Several
        may share nodes.
      rewards: outcome reward of each agent; None: unscored, left out of baselines and losses and counted, never 0.
      turn_rewards: parts of these rewards that single sampled nodes earned; an outcome is not increased by them.
      states: name of the state in which a sampled node was sampled, for algorithms that compare replies in one state;
        where there is none, the state is what was said since the reply before.
      parts: named parts of the reward or further numbers, averaged into metrics.
      status: "done"; "turns", "tokens" or "time": a limit ended it; "failed": the environment failed; "cancelled".
      problem: why it failed; "" otherwise.
      counts: numbers that the policy has counted, as in `Policy.counts`; metrics have their means over episodes.
      forked: number of trajectories at the start of `ends` from which others forked; the environment lists the rest.
    """

    ends: Sequence[Trajectory]
    rewards: Mapping[str, float | None]
    turn_rewards: Mapping[Node, float] = field(default_factory=dict)
    states: Mapping[Node, str] = field(default_factory=dict, kw_only=True)
    parts: Mapping[str, float] = field(default_factory=dict)
    status: Status = "done"
    problem: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)
    forked: int = 0

    def agents(self) -> list[str]:
        """Names of its agents, in the order of their first trajectory."""
        return list(dict.fromkeys(end.agent for end in self.ends))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the episode as its record: a chain of nodes is as deep as the episode has turns."""
        return from_record, (to_record(self),)


ROOT_PARENT = -1


class EpisodeRecord(NamedTuple):
    """An episode without references from node to node.

    Attributes:
      nodes: fields of each node, parents before children.
      parents: index of each node's parent; `ROOT_PARENT`: it has none.
      ends: (agent, index of the leaf, tools) of each trajectory.
      turn_rewards, states: by index of a node.
      rest: the other fields of the episode.
    """

    nodes: Sequence[Mapping[str, Any]]
    parents: Sequence[int]
    ends: Sequence[tuple[str, int, Sequence[Mapping[str, Any]]]]
    turn_rewards: Mapping[int, float]
    states: Mapping[int, str]
    rest: Mapping[str, Any]


def to_record(episode: Episode) -> EpisodeRecord:
    """Flatten an episode. Nodes that trajectories share are recorded once."""
    numbers: dict[Node, int] = {}
    for end in episode.ends:
        for node in end.leaf.path():
            numbers.setdefault(node, len(numbers))
    for node in (*episode.turn_rewards, *episode.states):
        for before in node.path():
            numbers.setdefault(before, len(numbers))
    return EpisodeRecord(
        nodes=[_fields_of(node, "parent") for node in numbers],
        parents=[ROOT_PARENT if node.parent is None else numbers[node.parent] for node in numbers],
        ends=[(end.agent, numbers[end.leaf], end.tools) for end in episode.ends],
        turn_rewards={numbers[node]: reward for node, reward in episode.turn_rewards.items()},
        states={numbers[node]: state for node, state in episode.states.items()},
        rest=_fields_of(episode, "ends", "turn_rewards", "states"),
    )


def from_record(record: EpisodeRecord) -> Episode:
    """The episode of a record, with nodes of its own."""
    nodes: list[Node] = []
    for values, parent in zip(record.nodes, record.parents, strict=True):
        nodes.append(Node(None if parent == ROOT_PARENT else nodes[parent], **values))
    return Episode(
        ends=[Trajectory(agent, nodes[leaf], tools) for agent, leaf, tools in record.ends],
        turn_rewards={nodes[number]: reward for number, reward in record.turn_rewards.items()},
        states={nodes[number]: state for number, state in record.states.items()},
        **record.rest,
    )


def _fields_of(value: Any, *but: str) -> dict[str, Any]:
    """Fields of a dataclass by name, without some."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.name not in but}


class ReadReply(NamedTuple):
    """Message that tokens of the policy say; see `Reply`."""

    message: Message
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    problems: Sequence[str] = ()


class Chat(Protocol):
    """The rendering of messages as tokens, and the reading of replies."""

    def opening(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens of a conversation, up to the start of the policy's turn."""
        ...

    def continuation(
        self, messages: Sequence[Message], tools: Tools, last: int | None, reply: Message | None
    ) -> list[int]:
        """Tokens from the end of a reply to the start of the policy's next turn, with messages in between.

        Args:
          last: the stop token that ended the reply, which is not rendered again; None: the reply was cut off.
          reply: content and calls of the reply, as the tools have answered them.
        """
        ...

    def expanded(self, tokens: list[int], messages: Sequence[Message]) -> tuple[list[int], OwnedLines | None]:
        """Rendered tokens of messages with those of their pictures, and the values of these; None: there are none.

        Raises:
          ValueError: a picture cannot be used, or the tokens have other places for pictures.
        """
        ...

    def fork_cause(self, nodes: Sequence[Node], tools: Tools) -> tuple[str, bool]:
        """Cause why the template would render a history otherwise than it was sampled, and whether it forks there.

        Args:
          nodes: the policy's turns since someone else than a tool spoke, what followed each, and the new messages; the
            root is before them if nobody has. If tools answer, the last turn and the new messages.

        Returns: the cause, "" if there is no difference; and whether the conversation continues as the template has it.
        """
        ...

    def read(self, before: Sequence[int], tokens: Sequence[int], tools: Tools) -> ReadReply:
        """Read a reply, given without the token that ended it. Raises nothing.

        Args:
          before: all tokens before the reply.
        """
        ...


class PathPrefix(NamedTuple):
    """Tokens of a path, and what a call needs to know of them.

    Attributes:
      tokens: all token ids; never changed.
      digest: of them, and of what they own.
      computed: tokens up to the last one of the last sampled turn, which was never fed back.
      turns, sampled: turns of the policy, and tokens of these; those before a fork included.
      owned: values that the tokens own, such as pictures; None: none.
    """

    tokens: list[int]
    digest: Any
    computed: int
    turns: int
    sampled: int
    owned: OwnedLines | None = None

    def extended(self, nodes: Sequence[Node]) -> PathPrefix:
        """The prefix with the tokens of further nodes."""
        if not nodes:
            return self
        new = [token for node in nodes for token in node.tokens]
        digest = self.digest.copy()
        digest.update(np.asarray(new, dtype="<i8").tobytes())
        for node in nodes:
            if node.owned is not None:
                digest.update(node.owned.digest.to_bytes(16, "little"))
        sampled = [len(node.tokens) for node in nodes if node.sampled]
        behind = sum(len(node.tokens) for node in itertools.takewhile(lambda node: not node.sampled, nodes[::-1]))
        length = len(self.tokens) + len(new)
        return PathPrefix(
            [*self.tokens, *new],
            digest,
            computed=length - behind - 1 if sampled else self.computed,
            turns=self.turns + len(sampled),
            sampled=self.sampled + sum(sampled),
            owned=joined_lines([self.owned, *(node.owned for node in nodes)]),
        )

    def begins_as(self, first: tuple[Sequence[int], OwnedLines | None] | None) -> bool:
        """True if it is a begin, given by its tokens and what they own."""
        if first is None or self.tokens != first[0]:
            return False
        own, given = ((None if owned is None else owned.digest) for owned in (self.owned, first[1]))
        return own == given

    def key(self, asked: Sampling, model: str) -> bytes:
        """Digest of what a call asks for: all tokens of the path, its sampling parameters, and which model it is of."""
        digest = self.digest.copy()
        digest.update(repr(asked).encode())
        digest.update(model.encode())
        return digest.digest()


def exchange_of(node: Node) -> list[Node]:
    """A node and those before it, back to what a user said last or to the root; that is the first one if it is.

    In a cycle of tools only the node and the reply that it follows, as those before have been compared; and tokens that
    the reply had to begin with.
    """
    if node.parent is None:
        raise ValueError("a root follows nothing")
    if not any(message.get("role") == "user" for message in node.messages):
        opening = node.parent.parent
        if opening is None or opening.parent is None or opening.sampled or opening.messages:
            return [node.parent, node]
        return [opening, node.parent, node]
    nodes = [node]
    while (before := nodes[-1].parent) is not None and (before.parent is None or not _asks(before)):
        nodes.append(before)
    return nodes[::-1]


def _asks(node: Node) -> bool:
    """True if a user speaks, and does not answer a call: gpt-oss drops what was thought before one only later."""
    if node.sampled or not any(message.get("role") == "user" for message in node.messages):
        return False
    reply = node.parent
    return reply is None or not any(message.get("tool_calls") for message in reply.messages)


def tokens_or_messages(content: Sequence[Message] | Sequence[int]) -> tuple[list[int], list[Message]]:
    """Split content into token ids and messages; one of the two is empty. Raises ValueError if both are."""
    tokens = [token for token in content if not isinstance(token, Mapping)]
    messages = [message for message in content if isinstance(message, Mapping)]
    if bool(tokens) == bool(messages):
        raise ValueError(f"give messages or token ids, at least one, instead of {list(content)[:10]!r}")
    return tokens, messages


def call_seed(seed: int, key: bytes, kind: str, number: int) -> int:
    """Seed of the noise of a call, a signed 64-bit number.

    It depends on nothing else: neither on the order in which concurrent calls arrive (up to an exchange of equal ones),
    nor on the mesh. The first call of the trajectory that an episode starts first, with the sampling parameters of the
    setup, has the seed of the episode instead.

    Args:
      seed: of the episode.
      key: digest of all tokens before the call, and of its sampling parameters.
      kind, number: "ordinal" among equal calls, or "seed" given by the caller.
    """
    digest = hashlib.blake2b(f"{seed} {kind} {number} ".encode() + key, digest_size=8)
    return int.from_bytes(digest.digest(), "little", signed=True)
