"""Losses of reward models: for whole completions from pairs, and for steps from labels.

These are terms on a reward head's outputs x [B, T] instead of log-probabilities. A completion's reward is the output at
its last masked token. A value head's output describes the state before a token: put one more token at the end of each
sequence into the mask, so that the output there has seen the whole sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from funrl.algos.losses.pairs import pair_metrics, pair_sums, to_pair_tokens
from funrl.algos.masks import rounding, where_masked
from funrl.algos.terms import Term
from funrl.batch import Batch


def last_tokens(mask_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
    """[B, T] bool, the last masked token of each sequence."""
    place_BT = torch.arange(mask_BT.shape[1], device=mask_BT.device).expand(mask_BT.shape)
    masked_BT = torch.where(mask_BT, place_BT, torch.full_like(place_BT, -1))
    if segments_BT is None:
        return mask_BT & (place_BT == masked_BT.amax(1, keepdim=True))
    nowhere = torch.full((mask_BT.shape[0], mask_BT.shape[1] + 1), -1, device=mask_BT.device)
    last = nowhere.scatter_reduce(1, segments_BT.long(), masked_BT, "amax")
    return mask_BT & (place_BT == last.gather(1, segments_BT.long()))


def pairwise_reward(center: float = 0.0, margin: bool = False) -> Term:
    """-log s(x_chosen - x_rejected - margin) + center (x_chosen + x_rejected)^2, Bradley and Terry's likelihood.

    Args:
      center: pulls the mean of a pair's rewards to 0; in 1 / reward^2.
      margin: use the batch's target difference of each pair.
    Needs: margin [B, T] if margin, the same on all tokens of a pair. For the layout of the batch see
      `funrl.algos.losses.pairs`.
    Returns: a term; loss [B, T], the same on all tokens of a pair: reduce by `sequence_mean`; metrics as those of
      `preference`, in units of reward.
    References: Ouyang et al., 2022, https://arxiv.org/abs/2203.02155; margin, Touvron et al., 2023,
      https://arxiv.org/abs/2307.09288; center, Eisenstein et al., 2023, https://arxiv.org/abs/2312.09244
    """

    def term(x_BT: Tensor, batch: Batch):
        at_end_BT = last_tokens(batch.mask, batch.get("segments"))
        chosen_P, rejected_P = pair_sums(where_masked(x_BT, at_end_BT), batch)
        gap_P = chosen_P - rejected_P
        if margin:
            gap_P = gap_P - pair_sums(where_masked(batch.margin, at_end_BT), batch)[0]
        loss_P = -logsigmoid(gap_P) + center * (chosen_P + rejected_P).square()
        rounding_P = sum(pair_sums(where_masked(rounding(x_BT), at_end_BT), batch))
        return to_pair_tokens(loss_P, batch), pair_metrics(chosen_P, rejected_P, batch, rounding_P=rounding_P)

    return term


def step_reward() -> Term:
    """-y log s(x) - (1 - y) log s(-x) at the last token of every step: a process reward model.

    `mask` is true at the last tokens of steps only, and `label` holds y there, 0 to 1; reduce by `token_mean`.

    Needs: label [B, T].
    Returns: a term; loss [B, T] in nats; metric "preference/step_accuracy".
    References: Uesato et al., 2022, https://arxiv.org/abs/2211.14275; Lightman et al., 2023,
      https://arxiv.org/abs/2305.20050

    Warning: TRL trains two outputs by cross-entropy; their difference is x.
    """

    def term(x_BT: Tensor, batch: Batch):
        y_BT = batch.label
        loss_BT = binary_cross_entropy_with_logits(x_BT, y_BT.to(x_BT.dtype), reduction="none")
        right_BT = (x_BT > 0) == (y_BT > 0.5)
        return loss_BT, {"preference/step_accuracy": right_BT.to(x_BT.dtype)}

    return term
