"""Checks of a whole algorithm before the first update, by running it on an example with the run's fields."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.across import ALONE, Across
from funrl.algos.applying import apply_advantage, first_signal
from funrl.algos.core import CARRIED, Advantage, Algorithm, Loss, Signal, run_piece
from funrl.algos.guarding import defined_at, described, line_of, name_of
from funrl.algos.metrics import PieceError
from funrl.algos.reading import on_example, reads, run_advantage
from funrl.algos.terms import Filter
from funrl.batch import (
    Batch,
    MissingField,
    as_dict,
    example,
    map_kinds,
    schema_of,
    select,
    with_across,
    with_rows_spread,
)
from funrl.fields import FIELDS


class Available(NamedTuple):
    """The fields of `Batch` that a run writes, by where they can be read, without the chain's own.

    Attributes:
      filter, chain: fields of all rows of the step.
      losses: fields in an update, where fields per row are spread over tokens; includes fields that only the step
        writes.
    """

    filter: frozenset[str]
    chain: frozenset[str]
    losses: frozenset[str]


SOME = 2  # rows of the example: its first group


def check(algorithm: Algorithm, available: Iterable[str] | Available) -> None:
    """Check that an algorithm can be trained on what a run provides.

    Args:
      algorithm: to be trained.
      available: names of the fields of `Batch` that the run writes before the advantage chain and in the step, without
        the chain's own; an `Available` where filter, chain and losses see different fields. Fields that are
        read optionally may be absent.

    Raises:
      PieceError: a field is read that nothing writes (the message names it, its writer and its reader), or that is not
        available where it is read; the chain's result is not per token, or its pieces are in the wrong order; a filter
        does not give one bool per row; a loss does not give scalars, has unequal numbers of numerators and
        denominators, or does not depend on a trained parameter; a filter or the chain gives a different result on a
        rank that has the tokens of some rows only; a piece changes its inputs in place.
    """
    given = available if isinstance(available, Available) else Available(*[frozenset(available)] * 3)
    given = Available(*(names | {"tokens", "mask"} for names in given))
    schema = algorithm.schema
    in_step = set(schema.by("step"))
    before = example(given.chain - in_step, schema)
    if algorithm.filter is not None:
        _check_filter(algorithm.filter, example(given.filter - in_step, schema))
    rows = before
    if algorithm.advantage is not None:
        check_order(algorithm.advantage)
        rows = _advantage_on(algorithm.advantage, before)
        _check_across("the advantage chain", functools.partial(_signal_on, algorithm.advantage), before)
    rows = with_rows_spread(_in_update(rows, before, given))
    some = select(example(given.losses & in_step, schema), slice(len(rows.mask)))  # the chain may choose fewer rows
    moving = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in as_dict(some).items()}
    for role, loss in algorithm.losses.items():
        _check_loss(role, loss, rows, in_step=rows._replace(**moving), given=given)
    reading = any("divergence" in reads(loss).required for loss in algorithm.losses.values())
    if reading != (algorithm.divergence is not None):
        raise PieceError(
            "a loss reads batch.divergence, but Algorithm.divergence is not set: give Divergence(beta)"
            if reading
            else "Algorithm.divergence is set, but no loss reads batch.divergence: divergence_to_teacher() does"
        )


def _in_update(rows: Batch, before: Batch, given: Available) -> Batch:
    """Rows after the chain with the fields that an update sees: the chain's own, and `given.losses`."""
    written = {name for name, x in as_dict(rows).items() if as_dict(before).get(name) is not x}
    left_out = set(rows.names()) - written - given.losses
    schema = schema_of(rows)
    further = given.losses - set(rows.names()) - set(schema.by("step"))
    added = select(example(further, schema), slice(len(rows.mask)))
    return rows._replace(**dict.fromkeys(left_out), **as_dict(added))


def learns_alone(algorithm: Algorithm) -> bool:
    """True if a completion that is alone in its group can have an advantage other than 0, or no chain makes advantages.

    Args:
      algorithm: one that `check` has passed.
    """
    if algorithm.advantage is None:
        return True
    names = (reads(algorithm).required | {"tokens", "mask", "score", "group"}) - set(algorithm.schema.by("step"))
    alone = example(names, algorithm.schema)._replace(group=torch.arange(4))
    return bool(_advantage_on(algorithm.advantage, alone).advantage.any())


def check_order(advantage: Advantage) -> None:
    """Check that every piece of a chain comes after the pieces whose results it reads.

    Raises:
      PieceError: one comes too early.
    """
    pieces, states = _flat(advantage, advantage.init())
    batch = example(schema=FIELDS.extended(advantage.fields))
    seeking = []

    def run(batch: Batch) -> None:
        signal = first_signal(batch)
        for piece, state in zip(pieces, states, strict=True):
            for early, field in seeking:
                if _makes(piece, field):
                    raise PieceError(
                        f"{early}() reads signal.{field}, which {name_of(piece)}() sets after it: put that piece first"
                    )
            absent = [field for field in CARRIED if getattr(signal, field) is None]
            seeking.extend(
                (name_of(piece), field) for field in absent if _goes_by(piece, state, signal, batch=batch, field=field)
            )
            given = {field: as_dict(example((field,)))[field] for field in absent}
            try:
                signal = run_piece(piece, signal, state, batch=batch)[0]
            except MissingField:
                signal = run_piece(piece, signal._replace(**given), state, batch=batch)[0]

    on_example("the advantage chain", run, batch)


def _check_across(what: str, run: Callable[[Batch], object], batch: Batch) -> None:
    """Check that a piece gives the same result on a rank with the tokens of some rows as on one with those of all rows.

    Args:
      run: batch -> the piece's result, a tree.
      batch: all rows of the example; `batch.across` must already work on it.

    Raises:
      PieceError: the result differs, or the piece fails.
    """
    if batch.get("score") is not None:
        batch = batch._replace(score=torch.tensor([0.0, 1.0, 1.0, 0.25], dtype=torch.float64))  # groups that differ
    asked: list[Tensor] = []

    def heard(ask: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: (asked.append(ask(*args)), asked[-1])[1]

    def on_both(rows: Batch) -> None:
        whole = run(with_across(rows, Across(heard(ALONE.sums), ALONE.own, heard(ALONE.kth_largest))))
        answers = iter(asked)
        some = _first_rows(rows)
        others = Across(lambda x: next(answers), lambda x: x[:SOME], lambda x, k: next(answers))
        try:
            why = "" if _same_rows(whole, run(with_across(some, others))) else "other numbers"
        except Exception as error:
            why = f"{type(error).__name__}: {error}{line_of(error)}"
        if why:
            raise PieceError(
                f"{what} gives a rank that has the tokens of {SOME} of 4 rows a different result than one that has "
                f"all ({why}). Fields per row [B] hold all rows, fields per token [b, T] hold the rank's own rows: "
                "batch.across.sums(x_bT) is the sum of every row [B], batch.across.own(x_B) picks the rank's own "
                "rows [b]"
            )

    on_example(what, on_both, batch)


def _same_rows(whole: object, part: object) -> bool:
    """True if values per row are the same for all rows, and values per token for the rows that both have."""
    pairs = zip(trees.leaves(_first_rows(whole)), trees.leaves(part), strict=True)
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    return all(a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True) for a, b in tensors)


def _first_rows(whole: object) -> Any:
    """The part of a result that belongs to a rank with the tokens of the first rows only."""
    if isinstance(whole, Batch):
        return map_kinds(lambda kind, x: x if kind.everywhere else kind.select(x, slice(SOME)), whole)
    if isinstance(whole, tuple):
        return tuple(_first_rows(part) for part in whole)
    return whole[:SOME] if isinstance(whole, Tensor) and whole.dim() >= 2 else whole


def _signal_on(advantage: Advantage, batch: Batch) -> Any:
    """Signal, state and metrics of a chain."""
    signal, state = run_piece(advantage, first_signal(batch), advantage.init(), batch=batch)
    fields = Batch(schema_of(batch), **signal.extra)
    rest = tuple(signal._replace(metrics={}, extra={}))
    return fields, rest, state, {name: tuple(metric) for name, metric in signal.metrics.items()}


def _flat(piece: Advantage, state: trees.Tree) -> tuple[list[Advantage], list[Any]]:
    """The pieces of nested chains one after the other, with their states."""
    if not piece.pieces:
        return [piece], [state]
    parts = [_flat(inner, own) for inner, own in zip(piece.pieces, state, strict=True)]
    return [p for pieces, _ in parts for p in pieces], [s for _, states in parts for s in states]


def _makes(piece: Advantage, field: str) -> bool:
    return field in run_advantage(piece).makes


def _goes_by(piece: Advantage, state: object, signal: Signal, batch: Batch, field: str) -> bool:
    """True if a piece's result, apart from the field itself, depends on a field of the signal."""
    given = signal._replace(**{field: as_dict(example((field,)))[field]})
    try:
        outs = [
            run_piece(piece, s, state, batch=batch)[0]._replace(**{field: None}, metrics={}) for s in (signal, given)
        ]
    except MissingField as error:
        return error.field == field
    without, with_field = (trees.leaves(tuple(out)) for out in outs)
    return len(without) != len(with_field) or any(
        not torch.equal(a, b) for a, b in zip(without, with_field, strict=True)
    )


def _advantage_on(advantage: Advantage, batch: Batch) -> Batch:
    try:
        return on_example(
            "the advantage chain", lambda rows: apply_advantage(advantage, advantage.init(), rows)[0], batch
        )[0]
    except MissingField as error:
        raise PieceError(f"the advantage chain cannot run: {error}") from error


def _check_filter(filter: Filter, batch: Batch) -> None:
    schema = schema_of(batch)
    known = Batch(schema, **{name: x for name, x in as_dict(batch).items() if schema[name].writer == "source"})
    name = name_of(filter)
    try:
        kept, _ = on_example(f"the filter {name}", filter, known)
    except MissingField as error:
        raise PieceError(f"the filter {name} cannot run on what the source gives: {error}") from error
    if callable(kept):
        raise PieceError(f"the filter {name}(batch) gave {described(kept)}: {name} makes filters; call it, {name}(...)")
    if not isinstance(kept, Tensor) or kept.dtype != torch.bool or kept.shape != batch.mask.shape[:1]:
        origin = defined_at(filter)
        raise PieceError(f"the filter {name} gave {described(kept)}: one bool per row [B] is needed{origin}")
    _check_across(f"the filter {name}", filter, known)


def _check_loss(role: str, loss: Loss, rows: Batch, in_step: Batch, given: Available) -> None:
    try:
        dens, _ = on_example(f"the loss of {role!r}", loss.denominators, rows)
    except MissingField as error:
        written_late = error.field in loss.fields.by("step") + FIELDS.by("step")
        at_fault = "a denominator reads what only the step writes" if written_late else "it lacks"
        raise PieceError(f"the loss of {role!r} has no denominators: {at_fault}; {error}") from error
    x_BT = torch.full(rows.mask.shape, -0.5, dtype=torch.float64, requires_grad=True)
    try:
        (nums, _), _ = on_example(f"the loss of {role!r}", lambda batch: loss.numerators(x_BT, batch), in_step)
    except MissingField as error:
        elsewhere = error.field in (given.filter | given.chain) - given.losses
        why = f"; the {'chain' if error.field in given.chain else 'filter'} can read it, an update cannot" * elsewhere
        raise PieceError(f"the loss of {role!r} cannot be computed: {error}{why}") from error
    if len(nums) != len(dens) or any(x.dim() for x in (*nums, *dens)):
        tops, bottoms = ([list(x.shape) for x in xs] for xs in (nums, dens))
        raise PieceError(
            f"the loss of {role!r} gave numerators {tops} and denominators {bottoms}: equally many scalars are needed"
        )
    if not any(num.requires_grad for num in nums):
        raise PieceError(f"the loss of {role!r} does not depend on any trained parameter: it has no gradient")
