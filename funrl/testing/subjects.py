"""A piece that is checked, what it gives, and comparisons of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from funrl.algos.core import NO_FIELDS, Loss, Reduction, Signal, reduce, run_piece
from funrl.algos.guarding import line_of
from funrl.algos.losses.reductions import sequence_mean, token_mean
from funrl.algos.masks import clean, where_masked
from funrl.algos.metrics import Mean
from funrl.batch import Batch
from funrl.testing.awkward_rows import awkward_batch, token_rewards_like, with_own_fields

EXACT = 1e-11  # tolerance, relative and absolute, in float64


@dataclasses.dataclass(frozen=True)
class Subject:
    """A piece that is checked.

    Attributes:
      kind: "term", "loss", "reduction", "advantage" or "filter".
      piece: the piece.
      tokens: an advantage piece that is given token rewards [B, T] instead of scores [B].
      weighted: an advantage piece that is given importance weights.
      prepare: (batch) -> batch, what the piece needs beyond the awkward batch.
    """

    kind: str
    piece: Any
    tokens: bool = False
    weighted: bool = False
    prepare: Callable[[Batch], Batch] = lambda batch: batch

    def batch(self, dtype: torch.dtype = torch.float64) -> Batch:
        """The awkward batch with what the piece needs."""
        return self.prepare(with_own_fields(awkward_batch(dtype), getattr(self.piece, "fields", NO_FIELDS)))

    def signal(self, batch: Batch) -> Signal:
        """The signal that an advantage piece is given."""
        x = token_rewards_like(batch) if self.tokens else batch.score
        return Signal(x, batch.mask, weight=batch.weight if self.weighted else None)

    def losses(self) -> list[Loss]:
        """The losses that the piece makes: itself, or a term under each kind of reduction."""
        if self.kind == "loss":
            return [self.piece]
        return [reduce(self.piece, form) for form in (token_mean(), sequence_mean())]


# ---- what a piece gives


def loss_parts(loss: Loss, x: Tensor, batch: Batch) -> tuple[tuple[Mean, ...], dict[str, Any]]:
    """The parts of a loss as numerators over denominators, and its metrics."""
    nums, metrics = loss.numerators(x, batch)
    return tuple(Mean(num, den) for num, den in zip(nums, loss.denominators(batch), strict=True)), metrics


def reduction_parts(reduction: Reduction, loss: Tensor, mask: Tensor, segments: Tensor | None = None) -> list[Mean]:
    """The parts of a reduction."""
    nums = reduction.numerators(loss, mask, segments)
    dens = reduction.denominators(mask, segments)
    return [Mean(num, den) for num, den in zip(nums, dens, strict=True)]


def term_output(term: Any, x: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """A term as `reduce` runs it: what is outside the mask is 0, and the batch is constant."""
    return term(where_masked(x, batch.mask), clean(batch))


def advantage_output(subject: Subject, batch: Batch) -> Signal:
    """The signal of an advantage piece from its first state."""
    return run_piece(subject.piece, subject.signal(batch), subject.piece.init(), batch)[0]


def signal_fields(signal: Signal) -> dict[str, Tensor]:
    """The tensors of a signal by name; fields that are no tensors, such as ragged ones, are left out."""
    fields = {"x": signal.x, "mask": signal.mask, "rows": signal.rows, **signal.fields}
    return {k: v for k, v in fields.items() if isinstance(v, Tensor)}


def numbers(out: tuple[tuple[Mean, ...], dict[str, Any]]) -> list[Tensor]:
    """The numbers of a loss's parts and metrics."""
    parts, metrics = out
    return [*(x for part in parts for x in part), *(x for name in sorted(metrics) for x in metrics[name])]


def output(subject: Subject, batch: Batch, logp: Tensor) -> dict[str, Tensor]:
    """All that a piece gives on a batch, by name."""
    piece = subject.piece
    if subject.kind == "advantage":
        return signal_fields(advantage_output(subject, batch))
    if subject.kind == "filter":
        return {"kept rows": piece(batch)}
    if subject.kind == "reduction":
        parts = reduction_parts(piece, logp, batch.mask, batch.get("segments"))
        return {f"part {i}": torch.stack([part.num, part.den.to(part.num)]) for i, part in enumerate(parts, 1)}
    if subject.kind == "loss":
        return {f"number {i}": x for i, x in enumerate(numbers(loss_parts(piece, logp, batch)), 1)}
    loss_BT, metrics = term_output(piece, logp, batch)
    per_token = {f"metric {name!r}": x for name, x in metrics.items() if isinstance(x, Tensor)}
    return {name: where_masked(x, batch.mask) for name, x in ({"loss": loss_BT} | per_token).items()}


def gradient_by(leaf: Tensor, total: Tensor) -> Tensor:
    """The gradient of the total, zeros where it does not depend on the leaf (an entropy bonus by log-probabilities)."""
    if not total.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient


# ---- properties


def assert_all(
    properties: Mapping[str, Callable[[Any], None]], subject: Any, what: str, without: Collection[str]
) -> None:
    """Check properties of a subject but for some, in their order.

    Args:
      what: names the subject in messages; its first word is its kind.

    Raises:
      AssertionError: it lacks one; says the subject, the property and the number.
      ValueError: `without` names what is no property.
    """
    if unknown := sorted(set(without) - set(properties)):
        kind = what.partition(" ")[0]
        raise ValueError(f"without={unknown[0]!r}: the properties of {kind}s are {', '.join(properties)}")
    for name, holds in properties.items():
        if name not in without:
            assert_one(name, holds, subject, what)


def assert_one(name: str, holds: Callable[[Any], None], subject: Any, what: str) -> None:
    """Check one property, as `assert_all` does."""
    try:
        holds(subject)
        return
    except AssertionError as error:
        text = str(error)
    except Exception as error:
        text = f"{type(error).__name__}: {error}{line_of(error)}"
    raise AssertionError(f"{what}: {name} ({(holds.__doc__ or '').strip()}): {text}")


# ---- comparisons


def demand(condition: Any, text: str) -> None:
    """Raise AssertionError with the text where the condition is false."""
    if not condition:
        raise AssertionError(text)


def demand_close(got: Tensor, want: Tensor, what: str, tolerance: float = EXACT) -> None:
    """Raise AssertionError where two tensors differ in shape, dtype or by more than the tolerance."""
    demand(got.shape == want.shape, f"{what} is {list(got.shape)} instead of {list(want.shape)}")
    demand(got.dtype == want.dtype, f"{what} is {got.dtype} instead of {want.dtype}")
    if not torch.allclose(got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
        gap = (got.double() - want.double()).abs().nan_to_num(nan=math.inf)
        index = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)) if gap.dim() else ()
        where = f" at {list(index)}" if index else ""
        raise AssertionError(f"{what}{where} is {got[index].item():.6g} instead of {want[index].item():.6g}")


def demand_equal(got: dict[str, Tensor], want: dict[str, Tensor], when: str) -> None:
    """Raise AssertionError where two outputs differ in a bit."""
    demand(set(got) == set(want), f"{when} it gives {sorted(got)} instead of {sorted(want)}")
    for name, value in want.items():
        same = got[name].shape == value.shape and torch.equal(got[name].nan_to_num(), value.nan_to_num())
        if not same:
            demand_close(got[name], value, f"{name} {when}", 0.0)


def demand_same_numbers(loss: Loss, one: tuple[Batch, Tensor], other: tuple[Batch, Tensor], when: str) -> None:
    """Raise AssertionError where a loss gives other numbers of two forms of a batch."""
    whole, changed = (numbers(loss_parts(loss, logp, batch)) for batch, logp in (one, other))
    for number, (a, b) in enumerate(zip(whole, changed, strict=True), 1):
        demand_close(b, a, f"number {number} of the loss {when}")
