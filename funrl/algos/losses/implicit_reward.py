"""The loss of an implicit process reward model, PRIME's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from funrl.algos.core import Loss
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.masks import clean, rounding, sums_by_sequence, where_masked
from funrl.algos.metrics import Mean, Metric
from funrl.algos.terms import episodes_of
from funrl.batch import Batch


def implicit_reward_loss(beta: float = 0.05) -> Loss:
    """Train an implicit process model on outcomes: the cross-entropy of sigmoid(sum_t q[t]) with the label.

    The sum is over the tokens of the mask. The trainer passes the mask before corrections, since the outcome belongs to
    all tokens of a completion.

    L_i = - s log sigmoid(Q) - (1 - s) log sigmoid(-Q),  Q = beta sum_t (log pi_implicit - log pi_ref), the mean over
    sequences; s is the mean label of the sequence's tokens. All rows of an agent's episode, which have one outcome, are
    one sequence.

    Args:
      beta: reward per nat.
    Needs: label [B, T] in 0 to 1, ref_logp [B, T] (nats). The loss's first argument is the model's logp [B, T].
    Returns: a loss in nats; metric "implicit_reward/accuracy", the share of sequences where Q and the label agree; a
      Q within rounding of 0, as at the first step, counts one half.
    References: PRIME, Cui et al., 2025, https://arxiv.org/abs/2502.01456
    """

    def numerators(logp_BT: Tensor, batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Metric]]:
        mask_BT = batch.mask
        batch = clean(batch)

        def sums(x_BT: Tensor) -> Tensor:
            return sums_by_sequence(x_BT, mask_BT, batch)

        q_BT = beta * (where_masked(logp_BT, mask_BT) - batch.ref_logp)
        q_BS, label_BS, length_BS = map(sums, (q_BT, batch.label.to(q_BT.dtype), torch.ones_like(q_BT)))
        label_BS = label_BS / length_BS.clamp_min(1)
        there_BS = length_BS > 0
        entropy_BS = binary_cross_entropy_with_logits(q_BS, label_BS, reduction="none")
        rounding_BS = beta * sums(rounding(logp_BT))
        side_BS = torch.where(q_BS.abs() <= rounding_BS, 0, q_BS.sign())
        agree_BS = (1 + torch.where(label_BS > 0.5, side_BS, -side_BS)) / 2
        accuracy = Mean(where_masked(agree_BS, there_BS).sum(), there_BS.sum().to(q_BT.dtype))
        return (where_masked(entropy_BS, there_BS).sum(),), {"implicit_reward/accuracy": accuracy}

    sequences = sequence_mean()

    def denominators(batch: Batch) -> tuple[Tensor, ...]:
        return sequences.at(episodes_of(sequences, batch)).denominators(batch.mask, batch.get("segments"))

    return Loss(denominators, numerators)
