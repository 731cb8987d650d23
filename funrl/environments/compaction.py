"""Compaction: a summary that the policy writes takes the place of its history, where that has become long."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from funrl.data.json_lines import JsonObject
from funrl.data.prompts import Example
from funrl.environments.environment import Environment
from funrl.kinds import OwnedLines
from funrl.rollout.episodes import Episode, Message, Reply, Tools, Trajectory
from funrl.rollout.policy import Policy, RunEndingError

REQUEST = (
    "Your context is nearly full. Write a summary of the work so far for yourself: what was asked, what you have found "
    "out, what is left to do. You will continue from this summary alone."
)
FRAMING = "\n\nSummary of your work so far:\n"
COMPACT_TOOL = "compact"


def compacting(
    environment: Environment, at: int = 0, request: str = REQUEST, framing: str = FRAMING, tool: bool = False
) -> Environment:
    """An environment whose histories are shortened by summaries that the policy writes.

    Where a history has `at` tokens before a reply, the policy is asked for a summary of it, and replies after the
    first messages and that summary. The environment does not notice. What was said before is a row of the episode of
    its own, which ends with the summary: all rows of an episode share its reward, and each sampled token is trained
    once. Summaries are turns: `EpisodeLimits` count them, as turns and tokens of all rows together, while `length`
    bounds each row.

    Args:
      environment: whose conversations are messages.
      at: tokens; 0: no limit. A summary and a reply must have room beyond it.
      request: the message that asks for the summary.
      framing: text between the first messages and the summary.
      tool: also let the policy call `compact` with a summary, instead of another reply. The calls beside it are left
        out.

    Raises:
      ValueError: `at` is below 0, or nothing would ever be compacted.
      RunEndingError: in a run, the conversations are token ids, or no history may become as long as `at`.

    Example: compacting(message_environment(Pages), at=24_000)
    References: Li et al., 2026, https://arxiv.org/abs/2607.05378, which keeps the last turns beside the summary.
    """
    if at < 0 or (at == 0 and not tool):
        raise ValueError(f"compacting(at={at}, tool={tool}): give a limit above 0 in tokens, or the tool")
    return cast(Environment, _Compacting(environment, at, request, framing, tool))


class _Compacting:
    """See `compacting`."""

    def __init__(self, environment: Environment, at: int, request: str, framing: str, tool: bool):
        self.environment = environment
        self.at = at
        self.request = request
        self.framing = framing
        self.tool = tool

    def __getattr__(self, name: str) -> Any:
        """Whatever else the environment has, such as `agents`, `prompts` and `score`."""
        if name == "environment":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.environment, name)

    @property
    def tools(self) -> Tools:
        """Schemas of the environment's tools, and that of the summary."""
        own = getattr(self.environment, "tools", ())
        return [*own, TOOL_SCHEMA] if self.tool else own

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Run an episode of the environment with a policy that compacts.

        A summary after which a limit allowed no further turn is a row too: the environment has not seen it.

        Raises:
          RunEndingError: histories reach the limit of tokens before they are compacted.
        """
        length = policy.limits.length
        if 0 < length <= self.at and not self.tool:
            raise RunEndingError(
                f"compacting(at={self.at}): a history has at most {length} tokens in this run; give a smaller number"
            )
        episode = await self.environment.run(cast(Policy, _CompactingPolicy(policy, self)), example, seed)
        if not isinstance(episode, Episode):
            return episode
        last = _last_summaries(policy, episode)
        return dataclasses.replace(episode, ends=[*episode.ends, *last]) if last else episode


def _last_summaries(policy: Policy, episode: Episode) -> list[Trajectory]:
    """Summaries of trajectories that the environment gives, after which the policy had no turn."""
    ends = policy.ends()
    continued = {end.leaf for end in policy.before_forks(ends)}
    given = {end.leaf for end in [*policy.before_forks(episode.ends), *episode.ends]}

    def is_last(end: Trajectory) -> bool:
        history = [node for part in [*policy.before_forks([end]), end] for node in part.leaf.path()]
        return end.leaf.summary and end.leaf not in continued | given and not given.isdisjoint(history)

    return [end for end in ends if is_last(end)]


class _CompactingPolicy:
    """A policy that summarises what it goes on from; all else is that of the policy within."""

    def __init__(self, policy: Policy, compaction: _Compacting):
        self._policy = policy
        self._compaction = compaction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def start(
        self,
        content: Sequence[Message] | Sequence[int],
        tools: Tools = (),
        agent: str = "policy",
        owned: OwnedLines | None = None,
    ) -> Trajectory:
        """Begin a trajectory, with the tool that compacts."""
        if not isinstance(content[0], Mapping):
            raise RunEndingError("compaction needs conversations of messages; this environment begins with token ids")
        return self._policy.start(content, [*tools, TOOL_SCHEMA] if self._compaction.tool else tools, agent, owned)

    async def sample(self, trajectory: Trajectory, *args: Any, **how: Any) -> tuple[Reply, Trajectory]:
        """Sample the next turn that is not a summary."""
        if self._is_long(trajectory):
            reply, ended = await self._policy.sample(self._with_request(trajectory))
            summaries = _called_summaries(reply)  # it may use the tool instead
            trajectory = self._compacted(ended, (summaries or [str(reply.message.get("content") or "")])[0])
        while True:
            reply, ended = await self._policy.sample(trajectory, *args, **how)
            summaries = _called_summaries(reply)
            if not (self._compaction.tool and summaries):
                return reply, ended
            trajectory = self._compacted(ended, summaries[0])

    def _is_long(self, trajectory: Trajectory) -> bool:
        nodes = list(trajectory.nodes())
        before = self._policy.before_forks([trajectory])  # where the template forks, turns are on those
        has_turn = any(node.sampled for node in nodes) or (before and not before[-1].leaf.summary)
        return 0 < self._compaction.at <= sum(len(node.tokens) for node in nodes) and bool(has_turn)

    def _with_request(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the request, in the user's last message where roles must alternate."""
        leaf = trajectory.leaf
        request = self._compaction.request
        try:
            return self._policy.extend(trajectory, [{"role": "user", "content": request}])
        except ValueError:
            if leaf.parent is None or not leaf.messages or leaf.messages[-1]["role"] != "user":
                raise
        longer = [*leaf.messages[:-1], with_text(leaf.messages[-1], f"\n\n{request}")]
        return self._policy.extend(dataclasses.replace(trajectory, leaf=leaf.parent), longer)

    def _compacted(self, ended: Trajectory, summary: str) -> Trajectory:
        """The trajectory of what follows a summary, with which another one has ended."""
        opening = list([*self._policy.before_forks([ended]), ended][0].leaf.path()[0].messages)
        asks = [n for n, message in enumerate(opening) if message["role"] == "user"]
        place = asks[-1] if asks else len(opening) - 1
        opening[place] = with_text(opening[place], self._compaction.framing + summary)
        return self._policy.compact(ended, opening)


def _called_summaries(reply: Reply) -> list[str]:
    """Summaries in a reply's calls of the tool that compacts."""
    return [str(call["summary"]) for name, call in reply.tool_calls if name == COMPACT_TOOL and "summary" in call]


def with_text(message: Message, text: str) -> Message:
    """A message with a text after its content."""
    content = message["content"]
    longer = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return {**message, "content": longer}


TOOL_SCHEMA: JsonObject = {
    "type": "function",
    "function": {
        "name": COMPACT_TOOL,
        "description": "Replace the conversation so far by a summary, from which you continue.",
        "parameters": {
            "type": "object",
            "properties": {"summary": {"type": "string", "description": "All that is still needed."}},
            "required": ["summary"],
        },
    },
}
