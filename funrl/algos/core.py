"""What an algorithm is made of: three small closed families and one record.

| piece | type | closed under | runs |
|---|---|---|---|
| advantage | `init() -> state`, `update(signal, state, batch) -> (signal, state)` | `chain` | once a rollout, no gradient |
| term | `(logp, batch) -> (per-token loss, metrics)` | `add`, `scale`, `weighted` | in every training step |
| reduction | `(per-token loss, mask) -> Fraction` | `+` | in every training step |

A `Fraction` keeps numerator and denominator apart until micro-batches and data ranks are summed, so gradient
accumulation and data parallelism are exact by construction. A denominator depends on the mask alone, never on a
log-probability. Every piece names the fields of `Batch` that it reads; `needs_of` collects them before a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl.batch import Batch


class Fraction(NamedTuple):
    """A mean that is not yet divided. `a + b` is the fraction of the union of what a and b were taken over."""

    num: Tensor
    den: Tensor

    def __add__(self, other: Fraction) -> Fraction:  # type: ignore[override]
        return Fraction(self.num + other.num, self.den + other.den)

    @property
    def value(self) -> Tensor:
        """num / den; 0 where there is nothing to take a mean of."""
        return torch.where(self.den == 0, torch.zeros_like(self.num), self.num / self.den.clamp_min(1e-38))


Metrics = dict[str, Tensor]
Term = Callable[[Tensor, Batch], tuple[Tensor, Metrics]]
Reduction = Callable[[Tensor, Tensor], Fraction]
Loss = Callable[[Tensor, Batch], tuple[tuple[Fraction, ...], dict[str, Fraction]]]
Filter = Callable[[Batch], Tensor]


class Signal(NamedTuple):
    """What an advantage chain transforms: it begins as rewards and ends as advantages.

    Attributes:
      x: [B] outcome scores, later [B, T] token rewards, finally [B, T] advantages.
      mask: [B, T] bool, tokens that count; begins as `batch.mask`, corrections may take tokens out.
      returns: [B, T] the critic's target, where a piece sets it.
      weight: [B, T] importance weights, where a piece sets them.
      rows: [N] int64, the rows to train on, where a piece resamples them; None is all.
      metrics: what the pieces report, as fractions.
    """

    x: Tensor
    mask: Tensor
    returns: Tensor | None = None
    weight: Tensor | None = None
    rows: Tensor | None = None
    metrics: dict[str, Fraction] = {}  # noqa: RUF012  (never mutated: pieces make a new dict)


class Advantage(NamedTuple):
    """One piece of an advantage chain, in the protocol of a gradient transformation.

    Attributes:
      init: () -> state, a tree of tensors; it is part of the checkpoint.
      update: (signal, state, batch) -> (signal, state), pure.
      needs: the fields of `Batch` that it reads.
    """

    init: Callable[[], Any]
    update: Callable[[Signal, Any, Batch], tuple[Signal, Any]]
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: how rewards become advantages, what is minimised, and which rows are kept.

    Attributes:
      advantage: from `Signal(x=batch.score)` to advantages.
      policy_loss: (logp, batch) -> (fractions, metrics); the loss is the sum of the fractions' values.
      value_loss: the same for the critic, with values in the place of log-probabilities; None: no critic.
      keep: batch -> [B] bool, rows worth training on; the loop samples more prompts for those that are not.
    """

    advantage: Advantage
    policy_loss: Loss
    value_loss: Loss | None = None
    keep: Filter | None = None


def needs(*fields: str) -> Callable[[Callable], Callable]:
    """Marks a function as a reader of these fields of `Batch`."""
    unknown = set(fields) - set(Batch._fields)
    if unknown:
        raise ValueError(f"{sorted(unknown)} are no fields of Batch; there are {list(Batch._fields)}")

    def mark(fn: Callable) -> Callable:
        fn.needs = frozenset(fields) | getattr(fn, "needs", frozenset())  # type: ignore[attr-defined]
        return fn

    return mark


def needs_of(*pieces: Any) -> frozenset[str]:
    """All fields that the pieces read. An `Algorithm` reads what its parts read, less what its advantage makes."""
    fields: frozenset[str] = frozenset()
    for piece in pieces:
        if isinstance(piece, Algorithm):
            made = {"advantage", "returns", "weight"}
            fields |= needs_of(piece.advantage, piece.policy_loss, piece.value_loss, piece.keep) - made
        elif piece is not None:
            fields |= getattr(piece, "needs", frozenset())
    return fields


def stateless(fn: Callable[[Tensor, Batch], Tensor], *fields: str) -> Advantage:
    """An advantage piece without state that changes only `signal.x`; `batch.mask` is the mask of the signal."""

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        return signal._replace(x=fn(signal.x, batch._replace(mask=signal.mask))), state

    return Advantage(lambda: (), update, needs_of(needs(*fields)(lambda: None)))


def chain(*pieces: Advantage) -> Advantage:
    """The pieces one after the other; the state is the tuple of their states."""

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        after = []
        for piece, before in zip(pieces, state, strict=True):
            signal, now = piece.update(signal, before, batch)
            after.append(now)
        return signal, tuple(after)

    return Advantage(lambda: tuple(p.init() for p in pieces), update, needs_of(*pieces))


def add(*terms: Term) -> Term:
    """The sum of the terms' losses; their metrics together."""

    @needs(*needs_of(*terms))
    def term(logp_BT: Tensor, batch: Batch):
        total, metrics = terms[0](logp_BT, batch)
        for other in terms[1:]:
            loss_BT, more = other(logp_BT, batch)
            total, metrics = total + loss_BT, metrics | more
        return total, metrics

    return term


def scale(factor: float, term: Term) -> Term:
    """`factor` times the term's loss."""

    @needs(*needs_of(term))
    def scaled(logp_BT: Tensor, batch: Batch):
        loss_BT, metrics = term(logp_BT, batch)
        return factor * loss_BT, metrics

    return scaled


def weighted(term: Term) -> Term:
    """The term's loss times `batch.weight`, the importance weights that an advantage piece has set.

    Where no piece has set weights, the term is unchanged.
    """

    @needs("weight", *needs_of(term))
    def with_weight(logp_BT: Tensor, batch: Batch):
        loss_BT, metrics = term(logp_BT, batch)
        return (loss_BT if batch.weight is None else batch.weight.detach() * loss_BT), metrics

    return with_weight


def reduce(term: Term, reduction: Reduction) -> Loss:
    """A loss: the term's per-token loss under a reduction, its metrics as means over tokens."""

    @needs(*needs_of(term))
    def loss(logp_BT: Tensor, batch: Batch):
        loss_BT, metrics = term(logp_BT, batch)
        means = {k: token_fraction(v.detach(), batch.mask) for k, v in metrics.items()}
        return (reduction(loss_BT, batch.mask),), means

    return loss


def together(*losses: Loss) -> Loss:
    """The sum of losses that have denominators of their own."""

    @needs(*needs_of(*losses))
    def loss(logp_BT: Tensor, batch: Batch):
        fractions, metrics = (), {}
        for one in losses:
            more, means = one(logp_BT, batch)
            fractions, metrics = fractions + more, metrics | means
        return fractions, metrics

    return loss


def token_fraction(x_BT: Tensor, mask_BT: Tensor) -> Fraction:
    """The mean of x over the tokens of the mask, as a fraction; what lies outside the mask may be NaN."""
    kept = torch.where(mask_BT, x_BT, torch.zeros_like(x_BT))
    return Fraction(kept.sum(), mask_BT.sum().to(x_BT.dtype))
