"""Sampling by sorting the whole vocabulary: what `funrl.rollout.sampling` is compared with."""

import torch
from torch import Tensor

from funrl.rollout.sampling_parameters import Sampling


def plain_logp(logits_RV: Tensor, how: Sampling, seen_RV: Tensor | None = None) -> Tensor:
    """Log-probabilities of the distribution that is drawn from, -inf for tokens that cannot be drawn."""
    x_RV = logits_RV
    if how.repetition_penalty != 1:
        assert seen_RV is not None
        penalized_RV = torch.where(x_RV < 0, x_RV * how.repetition_penalty, x_RV / how.repetition_penalty)
        x_RV = torch.where(seen_RV, penalized_RV, x_RV)
    value_RV, ids_RV = (x_RV / how.temperature).sort(descending=True, stable=True)
    if how.top_k:
        value_RV[:, how.top_k :] = -torch.inf
    prob_RV = value_RV.softmax(-1)
    before_RV = prob_RV.cumsum(-1) - prob_RV
    if how.top_p < 1:  # sums of all but the last token can be rounded to 1
        value_RV[:, 1:][before_RV[:, 1:] >= how.top_p] = -torch.inf
    prob_RV = value_RV.softmax(-1)
    value_RV[prob_RV < how.min_p * prob_RV[:, :1]] = -torch.inf
    return torch.empty_like(value_RV).scatter_(1, ids_RV, value_RV.log_softmax(-1))
