"""Parts that recipes share: a policy term with its regularisers, and changes to a finished algorithm."""

from __future__ import annotations

from dataclasses import replace

from funrl.algos.advantages.shaping import Controller, adaptive_kl, fixed_kl
from funrl.algos.core import Advantage, Algorithm, add, chain, scale, weighted
from funrl.algos.filters.by_row import every
from funrl.algos.losses.clipped import entropy_bonus
from funrl.algos.losses.kl import kl_to_reference
from funrl.algos.metrics import PieceError
from funrl.algos.terms import Filter, Term


def with_regularizers(
    term: Term,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    kl_kind: str = "k3",
    kl_bias_corrected: bool = False,
) -> Term:
    """A policy term with importance weights, if there are any, plus an unweighted KL and entropy bonus.

    Args:
      term: the policy's term.
      kl_coef: factor of the KL to the reference, in units of advantage per nat; 0: none, and no reference is needed.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat; 0: none.
      kl_kind: how the KL is estimated, as in `funrl.algos.losses.kl`.
      kl_bias_corrected: weigh that estimate by the importance ratio, as in `kl_to_reference`.
    """
    terms = [weighted(term)]
    if kl_coef:
        terms.append(scale(kl_coef, kl_to_reference(kl_kind, kl_bias_corrected)))
    if entropy_coef:
        terms.append(entropy_bonus(entropy_coef))
    return add(*terms)


def kl_controller(kl_coef: float, kl_target: float | None) -> Controller | None:
    """`fixed_kl`, or `adaptive_kl` if there is a target; None if the coefficient is 0.

    Raises:
      ValueError: there is a target, but the coefficient is 0.
    """
    if not kl_coef:
        if kl_target is not None:
            raise ValueError(f"kl_target={kl_target} with kl_coef=0: the adaptive coefficient must start above 0")
        return None
    return fixed_kl(kl_coef) if kl_target is None else adaptive_kl(kl_coef, kl_target)


def corrected(algorithm: Algorithm, *pieces: Advantage) -> Algorithm:
    """The algorithm with pieces before its advantage chain: corrections, penalties, masks, combined scores.

    corrected(grpo(), importance_weights("token", high=2.0)) is GRPO with truncated importance sampling.
    """
    if algorithm.advantage is None:
        raise PieceError("this algorithm has no advantage chain to put pieces before")
    return replace(algorithm, advantage=chain(*pieces, algorithm.advantage))


def filtered(algorithm: Algorithm, *filters: Filter) -> Algorithm:
    """Add filters to an algorithm: `grpo` with `unequal_scores()` samples dynamically."""
    own = () if algorithm.filter is None else (algorithm.filter,)
    return replace(algorithm, filter=every(*own, *filters))
