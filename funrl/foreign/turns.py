"""Episodes in which each reply is a text that an environment steps by, whatever calls it may look like."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from funrl.environments.adapters import to_last_turn
from funrl.environments.agents import POLICY
from funrl.environments.chat import TemplateChat
from funrl.rollout.episodes import Episode, Message, Node, Reply, Status
from funrl.rollout.policy import LimitReached, Policy

# text of a reply -> messages that answer it, its reward or None, whether the episode ends
Act = Callable[[str], Awaitable[tuple[Sequence[Message], float | None, bool]]]


async def text_turns(
    policy: Policy, messages: Sequence[Message], act: Act, written: Callable[[Reply], str] | None = None
) -> Episode:
    """Let the policy and an environment take turns.

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
