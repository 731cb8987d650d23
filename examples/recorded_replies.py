"""Replies in token ids, for environments of frameworks that render conversations themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from funrl.rollout.episodes import Node, Trajectory
from funrl.rollout.policy import Policy, Tools


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
