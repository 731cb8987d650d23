"""What named algorithms have in common: a policy term with its regularisers, and changes to a finished algorithm."""

from __future__ import annotations

from dataclasses import replace

from funrl.algos.core import Advantage, Algorithm, Filter, Term, add, chain, scale, weighted
from funrl.algos.filters import every
from funrl.algos.kl import kl_to_reference
from funrl.algos.terms import entropy_bonus


def policy(term: Term, kl: float = 0.0, entropy: float = 0.0, kind: str = "k3") -> Term:
    """A policy term under the importance weights, if there are any, beside a KL and an entropy bonus without them.

    Args:
      term: what the policy learns from.
      kl: factor of the KL to the reference, in units of advantage per nat; 0: none, and no reference is needed.
      entropy: factor of the entropy bonus, in units of advantage per nat; 0: none.
      kind: how the KL is estimated, as in `funrl.algos.kl`.
    """
    terms = [weighted(term)]
    if kl:
        terms.append(scale(kl, kl_to_reference(kind)))
    if entropy:
        terms.append(entropy_bonus(entropy))
    return add(*terms)


def corrected(algorithm: Algorithm, *pieces: Advantage) -> Algorithm:
    """The algorithm with pieces before its advantage chain: corrections, penalties, masks, combined scores.

    corrected(grpo(), importance_weights("token", high=2.0)) is GRPO with truncated importance sampling.
    """
    return replace(algorithm, advantage=chain(*pieces, algorithm.advantage))


def filtered(algorithm: Algorithm, *filters: Filter) -> Algorithm:
    """The algorithm with filters beside its own: filtered(grpo(), unequal_scores()) samples dynamically."""
    own = () if algorithm.keep is None else (algorithm.keep,)
    return replace(algorithm, keep=every(*own, *filters))
