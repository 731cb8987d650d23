"""Scores of a distribution without some tokens, from those of the distribution with them.

With s the probability of the tokens that are never sampled, the others' probabilities become p / (1 - s).
"""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.compiled_kernels.linear_logprob import TokenScores


def with_unsampled(topk_NK: Tensor | None, unsampled: tuple[int, ...], tokens_N: Tensor) -> Tensor:
    """Ids whose log-probabilities `without_unsampled` needs, behind those that are wanted anyhow."""
    ids_NU = torch.tensor(unsampled, device=tokens_N.device).expand(len(tokens_N), -1)
    return ids_NU if topk_NK is None else torch.cat([topk_NK, ids_NU], 1)


def without_unsampled(scores: TokenScores, count: int) -> TokenScores:
    """Scores of the distribution in which the last `count` of the top-k tokens have the probability 0.

    Args:
      scores: per token [N]; `topk_logp` [N, K + count].
    """
    assert scores.topk_logp is not None
    wanted_NK = scores.topk_logp[:, : scores.topk_logp.shape[1] - count]
    logp_NU = scores.topk_logp[:, wanted_NK.shape[1] :]
    prob_NU = logp_NU.exp()
    rest_N = 1 - prob_NU.sum(1)
    log_rest_N = torch.log1p(-prob_NU.sum(1))
    entropy_N = scores.entropy
    if entropy_N is not None:
        entropy_N = (entropy_N + (prob_NU * logp_NU).sum(1)) / rest_N + log_rest_N
    squares_N = scores.sum_pi_squared
    if squares_N is not None:
        squares_N = (squares_N - prob_NU.square().sum(1)) / rest_N.square()
    return scores._replace(
        logp=None if scores.logp is None else scores.logp - log_rest_N,
        entropy=entropy_N,
        sum_pi_squared=squares_N,
        topk_logp=wanted_NK - log_rest_N.unsqueeze(1) if wanted_NK.shape[1] else None,
    )
