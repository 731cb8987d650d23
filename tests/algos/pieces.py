"""What the table of pieces is made of: a row per piece. The batch and the properties are those of `funrl.testing`.

A row's reference is written from the formula, with Python floats and loops: it gets the batch as nested lists
(`plain(batch)`), with the same field names, and knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from piece_properties import equals_reference, ranks, reference_gradient
from piece_properties import plain_batch as plain

from funrl import trees
from funrl.batch import Batch
from funrl.testing.awkward_rows import awkward_batch as example
from funrl.testing.awkward_rows import nearby_logp as policy_logp
from funrl.testing.awkward_rows import token_rewards_like as token_signal
from funrl.testing.check_pieces import PROPERTIES
from funrl.testing.subjects import Subject
from funrl.testing.subjects import loss_parts as fractions
from funrl.testing.subjects import term_output as on_term

__all__ = ["Batch", "Row", "example", "fractions", "on_term", "plain", "policy_logp", "token_signal"]


@dataclass(frozen=True)
class Row:
    """One public piece, with one choice of its arguments.

    Attributes:
      name: "module.function", of funrl.algos, plus anything after a space to tell rows of one piece apart.
      kind: what `make()` is, and what `reference` takes and gives:
        advantage: (x, b) -> dict of any of x, mask, returns, weight, rows and extra fields; nested lists
        term: (logp, b) -> loss [B][T]; what stands outside the mask is not compared
        loss: (logp, b) -> list of (numerator, denominator)
        reduction: (loss, b) -> (numerator, denominator)
        filter: (b) -> [B] bool
      make: () -> the piece.
      reference: see kind.
      tokens: an advantage piece that is given token rewards [B, T] instead of scores [B].
      prepare: (batch) -> batch, what the piece needs beyond the example.
      smooth: the derivative of the reference is the gradient (no stopped gradients inside): it is checked by
        differences.
      packed: the piece gives the same on packed rows. False where it reads a field of whole rows.
      additive: the piece of a whole is the sum over its parts. False where it takes statistics over the batch.
      permutes: the piece does not care for the order of rows.
      compiles: torch.compile takes it whole. False where a loop depends on the numbers.
      also: further public names that this row covers.
    """

    name: str
    kind: str
    make: Callable[[], Any]
    reference: Callable[..., Any]
    tokens: bool = False
    prepare: Callable[[Batch], Batch] = lambda batch: batch
    smooth: bool = False
    packed: bool = True
    additive: bool = True
    permutes: bool = True
    compiles: bool = True
    also: tuple[str, ...] = ()

    @property
    def subject(self) -> Subject:
        """The piece as `funrl.testing` checks it."""
        return Subject(self.kind, self.make(), self.tokens, "weighted" in self.name, self.prepare)

    @property
    def properties(self) -> dict[str, Callable[[Subject], None]]:
        """The properties that the piece is to have."""
        without = {"packing": self.packed, "micro_batches": self.additive, "row_order": self.permutes}
        without |= {"reference_gradient": self.smooth, "compilation": self.compiles}
        own = {"reference": lambda subject: equals_reference(subject, self.reference)}
        if self.kind in ("term", "loss"):
            own["reference_gradient"] = lambda subject: reference_gradient(subject, self.reference)
        if self.kind in ("advantage", "filter"):
            own["ranks"] = ranks
        return {name: holds for name, holds in {**PROPERTIES[self.kind], **own}.items() if without.get(name, True)}


def sampled(b: SimpleNamespace, i: int) -> list[int]:
    """The positions of row i's sampled tokens."""
    return [t for t, on in enumerate(b.mask[i]) if on]


def members(b: SimpleNamespace, i: int) -> list[int]:
    """The rows of row i's group, itself included."""
    return [j for j, number in enumerate(b.group) if number == b.group[i]]


def sequences(b: SimpleNamespace) -> list[int]:
    """The rows that have a sampled token."""
    return [i for i in range(len(b.mask)) if any(b.mask[i])]


def grid(b: SimpleNamespace, fill: float = 0.0) -> list[list[float]]:
    """[B][T] of one number."""
    return [[fill] * len(row) for row in b.mask]


def sum_leaves(state) -> float:
    """The sum of all numbers in a state."""
    return float(sum(x.sum() for x in trees.leaves(state)))
