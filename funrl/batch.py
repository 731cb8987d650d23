"""The one record that travels through a step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Rows of tokens and what is known of each. B rows of T tokens; a field that is not known is None.

    Every [B, T] field is aligned with `tokens`: position t speaks of token t, given what came before it.
    """

    tokens: Tensor  # [B, T] int64, prompt then completion then padding
    mask: Tensor  # [B, T] bool, true exactly on tokens that the policy sampled, less what a correction has rejected
    positions: Tensor | None = None  # [B, T] int64, position of each token in its sequence; None: 0, 1, 2, ...
    segments: Tensor | None = None  # [B, T] int64, which sequence of a packed row; 0 is padding; None: one a row
    length: Tensor | None = None  # [B] int64, tokens of the row that are not padding
    group: Tensor | None = None  # [B] int64, rows of one prompt share a number
    score: Tensor | None = None  # [B] outcome reward of the row
    scores: Tensor | None = None  # [B, K] the parts of it, where there are several reward functions
    token_reward: Tensor | None = None  # [B, T] rewards given to single tokens, added to the outcome
    truncated: Tensor | None = None  # [B] bool, the completion hit the length limit
    rollout_logp: Tensor | None = None  # [B, T] nats, by the engine that sampled
    old_logp: Tensor | None = None  # [B, T] nats, by the trainer before the first update on this batch
    ref_logp: Tensor | None = None  # [B, T] nats, by the frozen reference
    teacher_logp: Tensor | None = None  # [B, T] nats, by a teacher to distil from
    reward_logp: Tensor | None = None  # [B, T] nats, by an implicit process reward model
    value: Tensor | None = None  # [B, T] the critic's estimate before token t, before the first update
    sum_pi_squared: Tensor | None = None  # [B, T] sum over the vocabulary of the squared probabilities
    greedy_score: Tensor | None = None  # [B] outcome reward of a greedy completion of the row's prompt
    advantage: Tensor | None = None  # [B, T] in units of reward
    returns: Tensor | None = None  # [B, T] the critic's target
    weight: Tensor | None = None  # [B, T] importance weight of each token, a constant
    entropy: Tensor | None = None  # [B, T] nats, of the policy that is being trained; differentiable
    old_entropy: Tensor | None = None  # [B, T] nats, of the trainer's policy before the first update on this batch
    entropy_coefficient: Tensor | None = None  # [B, T] factor of an adaptive entropy bonus, one number
    selected: Tensor | None = None  # [B, T] bool, tokens that a piece picked out of the whole batch
    sampled: Tensor | None = None  # [B, T] bool, the mask before corrections
    label: Tensor | None = None  # [B, T] judgement, 0 to 1: of a step at its end, of a sequence on all tokens
    margin: Tensor | None = None  # [B, T] by how much a chosen sequence should win, on all of its tokens
    kl_baseline: Tensor | None = None  # [B, T] nats, KTO's reference point, the same everywhere
    teacher_top: Tensor | None = None  # [B, T, K] int64, the teacher's K likeliest tokens in the place of token t
    teacher_top_logp: Tensor | None = None  # [B, T, K] nats, the teacher's, of these tokens
    student_top_logp: Tensor | None = None  # [B, T, K] nats, the trained policy's, of these tokens; differentiable


def select(batch: Batch, rows) -> Batch:
    """The given rows (a slice or an index tensor) of every field."""
    return Batch(**{name: x[rows] for name, x in batch._asdict().items() if x is not None})
