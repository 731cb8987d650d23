"""Estimates of KL(pi || other) from one sample, per token, and the term that keeps a policy near its reference.

With d = log other - log pi at the sampled token:

| kind | value | as a loss, in expectation over fresh samples |
|---|---|---|
| k1 | -d | gradient is zero: useful in a reward or with the straight-through form |
| k2 | d^2 / 2 | gradient of KL(pi, other), the right one |
| k3 | exp(d) - 1 - d | gradient of KL(other, pi), the forward divergence |
| abs | the absolute value of d | a distance, not an estimate of the KL |

A kind with "+", such as "k3+", has that kind's value and the gradient of k2.

References: Schulman, 2020, http://joschu.net/blog/kl-approx.html; Tang and Munos, 2025,
  https://arxiv.org/abs/2506.09477
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from funrl.algos.losses.ratios import LOG_RATIO_BOUND, times_ratio
from funrl.algos.terms import Term
from funrl.batch import Batch

KL_KINDS = ("k1", "k2", "k3", "abs")


def kl_estimate(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A one-sample estimate of KL(pi || other), elementwise.

    With d = log other - log pi, k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d, and abs is |d|. A "+" gives the gradient
    of k2.

    Args:
      kind: "k1", "k2", "k3" or "abs", or one of these with "+".
    Returns: (logp, other_logp) -> KL; all in nats and of one shape.

    Raises:
      ValueError: the kind is unknown.

    Warning: k3 clamps d to +-20 so that exp stays finite. verl also clamps its value to +-10; TRL clamps nothing.
    """
    if kind.removesuffix("+") not in KL_KINDS:
        raise ValueError(
            f"KL kind {kind!r} is unknown; there are {list(KL_KINDS)}, each also with '+' (gradient of k2)"
        )

    def estimate(logp_BT: Tensor, other_BT: Tensor) -> Tensor:
        d_BT = other_BT - logp_BT
        value_BT = _value(kind.removesuffix("+"), d_BT)
        if not kind.endswith("+"):
            return value_BT
        moves_BT = _value("k2", d_BT)
        return moves_BT - moves_BT.detach() + value_BT.detach()

    return estimate


def _value(kind: str, d_BT: Tensor) -> Tensor:
    if kind == "k1":
        return -d_BT
    if kind == "k2":
        return 0.5 * d_BT.square()
    if kind == "abs":
        return d_BT.abs()
    d_BT = d_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return d_BT.expm1() - d_BT


def kl_to(field: str, kind: str, metric: str) -> Term:
    """Estimate per token of KL(pi || the policy whose log-probabilities `field` holds), reported as `metric`."""
    estimate = kl_estimate(kind)

    def term(logp_BT: Tensor, batch: Batch):
        loss_BT = estimate(logp_BT, getattr(batch, field))
        return loss_BT, {metric: loss_BT}

    return term


def kl_to_reference(kind: str = "k3", bias_corrected: bool = False) -> Term:
    """Estimate of KL(pi || pi_ref) per token. Multiply it with `scale`.

    With `bias_corrected` it is r k with r = pi / pi_old unclipped, and the gradient goes through both factors. For
    tokens of an older policy this is unbiased in value and gradient with k1 and k3 only: the means of k2 and abs are
    not the KL.

    Args:
      kind: "k1", "k2", "k3" or "abs", or, without `bias_corrected`, one of these with "+" for the gradient of k2.
      bias_corrected: weigh by the importance ratio, as DeepSeek-V3.2 does (with k3).
    Needs: ref_logp [B, T]; old_logp [B, T] if bias_corrected.
    Returns: a term; loss [B, T] in nats; metric "actor/kl_loss" (nats).

    Raises:
      ValueError: the kind is unknown, or has a "+" together with `bias_corrected`: the gradient through the ratio is
        already part of the right one, and that of k2 would be added to it.
    References: Shao et al., 2024, https://arxiv.org/abs/2402.03300; DeepSeek-AI, 2025, https://arxiv.org/abs/2512.02556
    """
    plain = kl_to("ref_logp", kind, "actor/kl_loss")
    if not bias_corrected:
        return plain
    if kind.endswith("+"):
        raise ValueError(
            f"kl_to_reference({kind!r}, bias_corrected=True): the ratio and the '+' would both add the gradient that "
            f"{kind[:-1]} lacks; use {kind[:-1]!r}"
        )
    corrected = times_ratio(plain)

    def term(logp_BT: Tensor, batch: Batch):
        loss_BT, _ = corrected(logp_BT, batch)
        return loss_BT, {"actor/kl_loss": loss_BT}

    return term


def kl_to_old(kind: str = "abs") -> Term:
    """Estimate of KL(pi || pi_old) per token.

    Args:
      kind: "k1", "k2", "k3" or "abs", or one of these with "+" for the gradient of k2.
    Needs: old_logp [B, T].
    Returns: a term; loss [B, T] in nats; metric "actor/kl_to_old" (nats).
    """
    return kl_to("old_logp", kind, "actor/kl_to_old")
