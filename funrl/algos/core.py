"""What an algorithm is made of: three small closed families and one record.

| piece | type | closed under | runs |
|---|---|---|---|
| advantage | `init() -> state`, `update(signal, state, batch) -> (signal, state)` | `chain` | once a rollout |
| term | `(logp, batch) -> (per-token loss, metrics)` | `add`, `scale`, `weighted` | in every training step |
| reduction | `(per-token loss, mask, segments) -> Fraction` | `+` | in every training step |

A `Fraction` keeps numerator and denominator apart until micro-batches and data ranks are summed, so gradient
accumulation and data parallelism are exact by construction. A denominator depends on the mask alone, never on a
log-probability. Every piece names the fields of `Batch` that it reads; `needs_of` collects them before a run.
A loss made by `reduce` never looks outside the mask: what stands there, NaN included, is 0 before a term sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl.batch import Batch


class Fraction(NamedTuple):
    """A mean that is not yet divided. `a + b` is the fraction of the union of what a and b were taken over.

    A denominator of 0 stands for 1: then the fraction is a sum, or there was nothing to take a mean of.
    """

    num: Tensor
    den: Tensor

    def __add__(self, other: Fraction) -> Fraction:  # type: ignore[override]
        return Fraction(self.num + other.num, self.den + other.den)

    def over(self, den: Tensor) -> Tensor:
        """num / den, for the denominator of a whole of which this is a part."""
        return self.num / torch.where(den == 0, torch.ones_like(den), den)

    @property
    def value(self) -> Tensor:
        """num / den."""
        return self.over(self.den)


Metrics = dict[str, Any]  # [B, T] tensors, or fractions where the mean is not over tokens
Term = Callable[[Tensor, Batch], tuple[Tensor, Metrics]]
Reduction = Callable[..., Fraction]  # (loss_BT, mask_BT, segments_BT=None)
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
      extra: further [B, T] fields of `Batch` that pieces set for the terms, by name.
      metrics: what the pieces report, as fractions.
    """

    x: Tensor
    mask: Tensor
    returns: Tensor | None = None
    weight: Tensor | None = None
    rows: Tensor | None = None
    extra: dict[str, Tensor] = {}  # noqa: RUF012  (never mutated: pieces make a new dict)
    metrics: dict[str, Fraction] = {}  # noqa: RUF012  (never mutated: pieces make a new dict)


class Advantage(NamedTuple):
    """One piece of an advantage chain, in the protocol of a gradient transformation.

    Attributes:
      init: () -> state, a tree of tensors that is carried from step to step.
      update: (signal, state, batch) -> (signal, state), pure.
      needs: the fields of `Batch` that it reads, or of the signal where an earlier piece must make them.
      makes: the fields beside the advantage that the losses may read after it, such as "returns" and "weight".
      heeds: the fields of the signal that it goes by if an earlier piece has made them.
    """

    init: Callable[[], Any]
    update: Callable[[Signal, Any, Batch], tuple[Signal, Any]]
    needs: frozenset[str] = frozenset()
    makes: frozenset[str] = frozenset()
    heeds: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: how rewards become advantages, what is minimised, and which rows are kept.

    Attributes:
      advantage: from `Signal(x=batch.score)` to advantages.
      policy_loss: (logp, batch) -> (fractions, metrics); the loss is the sum of the fractions' values.
      value_loss: the same for the critic, with values in the place of log-probabilities; None: no critic.
      reward_loss: the same for an implicit process reward model, with its log-probabilities; None: no such model.
      keep: batch -> [B] bool, rows worth training on; the loop samples more prompts for those that are not.
    """

    advantage: Advantage
    policy_loss: Loss
    value_loss: Loss | None = None
    reward_loss: Loss | None = None
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
            made = piece.advantage.makes | {"advantage"}
            parts = (piece.advantage, piece.policy_loss, piece.value_loss, piece.reward_loss, piece.keep)
            fields |= needs_of(*parts) - made
        elif piece is not None:
            fields |= getattr(piece, "needs", frozenset())
    return fields


def stateless(fn: Callable[[Tensor, Batch], Tensor], *fields: str, per: str | None = None) -> Advantage:
    """An advantage piece without state that changes only `signal.x`; `batch.mask` is the mask of the signal.

    Args:
      fn: (x, batch) -> x.
      fields: of `Batch`, that it reads.
      per: "row" for a piece on outcomes [B], "token" for one on token rewards [B, T]; None: either.
    """

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        if per is not None:
            check_rank(signal, per)
        return signal._replace(x=fn(signal.x, batch._replace(mask=signal.mask))), state

    return Advantage(lambda: (), update, needs_of(needs(*fields)(lambda: None)))


def check_rank(signal: Signal, per: str) -> None:
    """Whether the signal is what a piece works on, "row" outcomes [B] or "token" rewards [B, T].

    Raises:
      ValueError: it is not; told by its rank, since B and T may be equal.
    """
    shape = list(signal.x.shape)
    if per == "token" and signal.x.dim() != 2:
        raise ValueError(
            f"a piece on token rewards [B, T] was given outcomes {shape}: put to_tokens() or to_last_token() before it"
        )
    if per == "row" and signal.x.dim() != 1:
        raise ValueError(f"a piece on outcomes [B] was given token rewards {shape}: put it before to_tokens()")


def chain(*pieces: Advantage) -> Advantage:
    """The pieces one after the other; the state is the tuple of their states.

    Raises:
      ValueError: a piece goes by a field that only a later one makes.
    """
    made, needed, heeded = frozenset[str](), frozenset[str](), frozenset[str]()
    for place, piece in enumerate(pieces, 1):
        missing = (piece.needs | piece.heeds) - piece.makes - made
        for later, other in enumerate(pieces[place:], place + 1):
            for field in sorted(other.makes & missing):
                raise ValueError(
                    f"piece {place} of the chain goes by signal.{field}, which piece {later} makes: put that one first"
                )
        needed, heeded, made = needed | (piece.needs - made), heeded | (piece.heeds - made), made | piece.makes

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        after = []
        for piece, before in zip(pieces, state, strict=True):
            signal, now = piece.update(signal, before, batch)
            after.append(now)
        return signal, tuple(after)

    return Advantage(lambda: tuple(p.init() for p in pieces), update, needed, made, heeded)


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
    """The term's loss times `batch.weight`, the importance weights that a piece of the advantage chain may make.

    On a batch without weights the term is unchanged.
    """

    @needs(*needs_of(term))
    def with_weight(logp_BT: Tensor, batch: Batch):
        loss_BT, metrics = term(logp_BT, batch)
        return (loss_BT if batch.weight is None else batch.weight.detach() * loss_BT), metrics

    return with_weight


def reduce(term: Term, reduction: Reduction) -> Loss:
    """A loss: the term's per-token loss under a reduction, its metrics as means over tokens.

    Per-token fields and log-probabilities are set to zero outside the mask before the term sees them, so that
    nothing there (NaN, a prompt's log-probability) reaches a loss or, through 0 times NaN, a gradient.
    """

    @needs(*needs_of(term))
    def loss(logp_BT: Tensor, batch: Batch):
        loss_BT, metrics = term(where_masked(logp_BT, batch.mask), clean(batch))
        means = {k: _metric(v, batch.mask) for k, v in metrics.items()}
        return (reduction(loss_BT, batch.mask, batch.segments),), means

    return loss


def _metric(x: Any, mask_BT: Tensor) -> Fraction:
    return x if isinstance(x, Fraction) else token_fraction(x.detach(), mask_BT)


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
    return Fraction(where_masked(x_BT, mask_BT).sum(), mask_BT.count_nonzero().to(x_BT.dtype))


TOKEN_FIELDS = ("token_reward", "rollout_logp", "old_logp", "ref_logp", "teacher_logp", "value", "sum_pi_squared")
TOKEN_FIELDS += ("advantage", "returns", "weight", "entropy", "old_entropy", "entropy_coefficient", "selected")
TOKEN_FIELDS += ("label", "margin", "kl_baseline", "reward_logp")


def where_masked(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """x on the mask and exactly 0 elsewhere; no gradient flows elsewhere either."""
    return torch.where(mask_BT, x_BT, x_BT.new_zeros(()))


def clean(batch: Batch) -> Batch:
    """The batch with every per-token field exactly 0 outside the mask.

    Raises:
      ValueError: a field is not per token, such as advantages of a chain that never came to tokens.
    """
    kept = {name: x for name in TOKEN_FIELDS if (x := getattr(batch, name)) is not None}
    for name, x in kept.items():
        if x.dim() != 2:
            raise ValueError(f"batch.{name} is {list(x.shape)} and not [B, T]; to_tokens() in the chain makes it so")
    return batch._replace(**{name: where_masked(x, batch.mask) for name, x in kept.items()})


def sequence_sums(x_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
    """The sum of x over the masked tokens of each sequence.

    Args:
      segments_BT: which sequence of a packed row a token belongs to, 1 to T; None: a row is one sequence.
    Returns: [B, 1] where a row is one sequence, [B, T + 1] where rows are packed, indexed by segment.
    """
    kept_BT = where_masked(x_BT, mask_BT)
    if segments_BT is None:
        return kept_BT.sum(1, keepdim=True)
    return kept_BT.new_zeros(kept_BT.shape[0], kept_BT.shape[1] + 1).scatter_add(1, segments_BT, kept_BT)


def to_own_tokens(x_BS: Tensor, mask_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
    """Gives every masked token the number of its own sequence: from the shape of `sequence_sums` to [B, T]."""
    x_BT = x_BS.expand(mask_BT.shape) if segments_BT is None else x_BS.gather(1, segments_BT)
    return where_masked(x_BT, mask_BT)
