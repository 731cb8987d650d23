"""Checks of terms, losses, reductions, advantages, filters and whole algorithms of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, TypedDict, Unpack

from funrl.algos.core import Advantage, Algorithm, Loss, Reduction
from funrl.algos.guarding import defined_at, name_of
from funrl.algos.terms import Filter, Term
from funrl.batch import Batch
from funrl.testing.loss_properties import (
    constants,
    denominators_before_step,
    finite_gradient,
    outside_the_mask,
    packing,
    parts_add_up,
    per_token,
    typed_metrics,
)
from funrl.testing.row_properties import advantage_outside_the_mask, row_order, truth_per_row
from funrl.testing.shared_properties import (
    compilation,
    determinism,
    fields,
    float32,
    in_place,
    padding,
)
from funrl.testing.subjects import Subject, assert_all
from funrl.trainer.jobs.compatibility import check_algorithm as check_in_run
from funrl.trainer.settings.settings import settings_of

OF_LOSSES = {
    "outside_the_mask": outside_the_mask,
    "padding": padding,
    "packing": packing,
    "micro_batches": parts_add_up,
    "denominators": denominators_before_step,
    "constants": constants,
    "gradient": finite_gradient,
    "float32": float32,
    "compilation": compilation,
}
OF_ALL = {"in_place": in_place, "determinism": determinism}
PROPERTIES: dict[str, dict[str, Callable[[Subject], None]]] = {
    "term": {"per_token": per_token, **OF_ALL, "fields": fields, **OF_LOSSES},
    "loss": {**OF_ALL, "typed_metrics": typed_metrics, "fields": fields, **OF_LOSSES},
    "reduction": {**OF_ALL, "padding": padding, "packing": packing, "micro_batches": parts_add_up},
    "advantage": {
        **OF_ALL,
        "fields": fields,
        "outside_the_mask": advantage_outside_the_mask,
        "padding": padding,
        "row_order": row_order,
        "float32": float32,
        "compilation": compilation,
    },
    "filter": {
        "truth_per_row": truth_per_row,
        **OF_ALL,
        "fields": fields,
        "padding": padding,
        "row_order": row_order,
    },
}


def subject_text(subject: Subject) -> str:
    """A piece with its file and line."""
    return f"{subject.kind} {name_of(subject.piece)}{defined_at(subject.piece)}"


class CheckOptions(TypedDict, total=False):
    """Options of a check.

    Attributes:
      prepare: batch -> batch, for what the piece needs beyond the batch of `awkward_batch`.
      without: properties that it is not to have, such as {"micro_batches"} where it takes statistics over a batch.
    """

    prepare: Callable[[Batch], Batch]
    without: Collection[str]


def check_term(term: Term, **options: Unpack[CheckOptions]) -> None:
    """Check a term: its shapes, its gradient, and that nothing changes it that must not.

    Args:
      term: (logp [B, T], batch) -> (loss [B, T], metrics), not the factory that makes it.
      options: see `CheckOptions`.

    Raises:
      AssertionError: the first property that it lacks, with the piece, its file and line, and the number.
    """
    _check(Subject("term", term), **options)


def check_loss(loss: Loss, **options: Unpack[CheckOptions]) -> None:
    """Check a loss with numerators and denominators of its own, as `check_term` does a term."""
    _check(Subject("loss", loss), **options)


def check_reduction(reduction: Reduction, **options: Unpack[CheckOptions]) -> None:
    """Check a reduction, as `check_term` does a term."""
    _check(Subject("reduction", reduction), **options)


def check_advantage(advantage: Advantage, tokens: bool = False, **options: Unpack[CheckOptions]) -> None:
    """Check a piece of an advantage chain, or a whole chain, as `check_term` does a term.

    Args:
      tokens: it works on token rewards [B, T] instead of scores [B].
    """
    _check(Subject("advantage", advantage, tokens), **options)


def check_filter(filter_: Filter, **options: Unpack[CheckOptions]) -> None:
    """Check a filter, batch -> [B] bool, as `check_term` does a term."""
    _check(Subject("filter", filter_), **options)


def _check(
    subject: Subject, prepare: Callable[[Batch], Batch] = lambda batch: batch, without: Collection[str] = ()
) -> None:
    """Check all properties of a piece but for some. Raises: AssertionError; ValueError, there is no such property."""
    subject = dataclasses.replace(subject, prepare=prepare)
    assert_all(PROPERTIES[subject.kind], subject, subject_text(subject), without)


def check_algorithm(
    algorithm: Algorithm,
    prepare: Callable[[Batch], Batch] = lambda batch: batch,
    without: Collection[str] = (),
    **flags: Any,
) -> None:
    """Check that a run can train an algorithm, and the properties of its losses, its advantage chain and its filter.

    Args:
      prepare: as in `check_term`.
      without: properties that its parts are not to have; those of one kind of part are passed over in the others.
      flags: of the run, as `funrl.train` takes them, such as teacher="DIR".

    Raises:
      AssertionError: the run would refuse it, or a part lacks a property.
    """
    try:
        check_in_run(algorithm, settings_of(**flags))
    except ValueError as error:
        raise AssertionError(f"a run refuses it: {error}") from error
    parts = [*(("loss", loss) for loss in algorithm.losses.values())]
    parts += [(kind, piece) for kind in ("advantage", "filter") if (piece := getattr(algorithm, kind)) is not None]
    for kind, piece in parts:
        _check(Subject(kind, piece), prepare, set(without) & set(PROPERTIES[kind]))
