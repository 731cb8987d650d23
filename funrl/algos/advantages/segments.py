"""Advantages of episodes whose history was compacted: segments that share a reward, and the summaries between them.

A segment is a row of the episode, up to the policy's summary of it; rows of an agent's episode are in this order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.advantages.returns import Lambda
from funrl.algos.advantages.teacher_rewards import sum_of_earlier_rows
from funrl.algos.advantages.turns import check_factors
from funrl.algos.core import Advantage, Signal, check_rank, stateless
from funrl.algos.masks import row_or_episode_sums, where_masked
from funrl.batch import Batch

SUMMARY_AUTHOR = 4  # of `author`


def discount_segments(gamma: float = 1.0, gae_lambda: float | Lambda = 1.0) -> Advantage:
    """Discount advantages by the tokens that were sampled in later segments, on [B, T]: (gamma lambda)^n A[t].

    n are the sampled tokens of the later rows of the agent's episode. Each segment has the reward at its end; the
    factor makes it as far from the first segments as it was in the episode. A single row stays as it is.

    Args:
      gamma, gae_lambda: those of the `gae` before it; a function gets lengths [B, 1] as there.

    Raises:
      ValueError: gamma or lambda is outside 0 to 1.
    References: cross-trajectory GAE of CompactionRL, Li et al., 2026, https://arxiv.org/abs/2607.05378

    Warning: rows of branches that were sampled side by side count as later too.
    """
    check_factors("discount_segments", gamma=gamma)
    if not callable(gae_lambda):
        check_factors("discount_segments", gae_lambda=gae_lambda)

    def discount(x_BT: Tensor, batch: Batch) -> Tensor:
        own_lambda = gae_lambda
        if callable(own_lambda):
            own_lambda = own_lambda(row_or_episode_sums(torch.ones_like(x_BT), batch.mask, batch))
        factor_b1 = torch.as_tensor(gamma * own_lambda, dtype=x_BT.dtype) ** _later_tokens(batch).to(x_BT.dtype)
        return where_masked(x_BT * factor_b1, batch.mask)

    return stateless(discount, per="token")


def _later_tokens(batch: Batch) -> Tensor:
    """Sampled tokens in later rows of the agent's episode, [b, 1] float64 for each of a rank's rows."""
    across = batch.across
    earlier_b = sum_of_earlier_rows(batch.mask.double(), batch)
    return (across.own(across.sums(batch.mask)) - earlier_b - batch.mask.sum(1))[:, None]


def mask_summaries() -> Advantage:
    """Take the policy's summaries of its history out of the loss, numerator and denominator, on [B, T].

    Put it last in the chain: they still count as sampled tokens before it.

    Uses author [B, T]; without it there are no summaries.
    """

    def update(signal: Signal, state: trees.Tree, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "token")
        author_BT = batch.get("author")
        kept_BT = signal.mask if author_BT is None else signal.mask & (author_BT != SUMMARY_AUTHOR)
        return signal._replace(x=where_masked(signal.x, kept_BT), mask=kept_BT), state

    return Advantage(lambda: (), update)
