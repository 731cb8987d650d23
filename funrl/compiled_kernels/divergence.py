"""Divergences between distributions that are given by their log-probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def divergence(logp: Tensor, teacher_logp: Tensor, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence of a student q from a teacher p.

        m = beta p + (1 - beta) q,   D = beta KL(p || m) + (1 - beta) KL(q || m);
        at beta = 0 KL(p || q), the forward KL;   at beta = 1 KL(q || p), the reverse KL

    Args:
      logp, teacher_logp: log q and log p [..., V] in nats, of whole distributions.
      beta: from 0, which covers what the teacher does, to 1, which keeps to what it is sure of.

    Returns: [...] in nats, differentiable in both.

    Raises:
      ValueError: beta is not in [0, 1].

    References: Agarwal et al., 2023 (GKD), https://arxiv.org/abs/2306.13649
    Warning: the sum above goes to 0 at both ends, like beta KL(p || q) and (1 - beta) KL(q || p). There it is the KL
      itself, as in TRL: the value jumps, so 0.01 is no small change from 0.
    """
    check_divergence_beta(beta)
    if beta == 0:
        return _kl(teacher_logp, logp)
    if beta == 1:
        return _kl(logp, teacher_logp)
    m_logp = log_mixture(logp, teacher_logp, beta)
    return beta * _kl(teacher_logp, m_logp) + (1 - beta) * _kl(logp, m_logp)


def topk_divergence(topk_logp: Tensor, teacher_topk_logp: Tensor, beta: float = 0.5) -> Tensor:
    """`divergence` over K tokens and one more outcome, which is any other token.

    It is at most the divergence over the whole vocabulary, and equal where the two agree on the other tokens up to a
    factor. Without the further outcome a sum over K tokens is no divergence: the reverse KL's is least at q = p / e.

    Args:
      topk_logp, teacher_topk_logp: [..., K] log-probabilities of the same K tokens, the teacher's most probable, of the
        distributions over the whole vocabulary.
      beta: as in `divergence`.

    Returns: [...] in nats.
    """
    return divergence(_with_remainder(topk_logp), _with_remainder(teacher_topk_logp), beta)


def log_mixture(logp: Tensor, teacher_logp: Tensor, beta: float) -> Tensor:
    """log (beta p + (1 - beta) q), for beta in between 0 and 1."""
    return torch.logaddexp(teacher_logp + math.log(beta), logp + math.log1p(-beta))


def check_divergence_beta(beta: float) -> None:
    """Raise ValueError where `beta` is not in [0, 1]."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}; it goes from 0, the forward KL, to 1, the reverse KL")


def _kl(p_logp: Tensor, q_logp: Tensor) -> Tensor:
    return (p_logp.exp() * (p_logp - q_logp)).sum(-1)


def _with_remainder(logp: Tensor) -> Tensor:
    """[..., K + 1]; the mass that remains is at least what rounding may take from 1."""
    rest = (1 - logp.exp().sum(-1, keepdim=True)).clamp_min(torch.finfo(logp.dtype).eps)
    return torch.cat([logp, rest.log()], -1)
