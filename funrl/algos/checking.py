"""Checks of a whole algorithm before the first update, by running it on an example that has what the run provides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.across import ALONE, Across
from funrl.algos.core import (
    Advantage,
    Algorithm,
    Loss,
    PieceError,
    Signal,
    apply_advantage,
    described,
    first_signal,
    name_of,
    reads,
    run_piece,
)
from funrl.algos.reading import on_example, run_advantage
from funrl.batch import FIELDS, Batch, MissingField, as_dict, example, fields_by, map_fields, with_across

MADE_ON_THE_WAY = ("weight", "returns")  # fields of the signal that pieces may go by
SOME = 2  # rows of the example: its first group


def check(algorithm: Algorithm, available: Iterable[str]) -> None:
    """Check that an algorithm can be trained on what a run provides.

    Args:
      algorithm: to be trained.
      available: names of the fields of `Batch` that the run writes before the advantage chain and in the step, without
        what the chain itself makes. Optional reads need not be among them.
    Raises:
      PieceError: a field is read that nothing writes (named, with who would write it and who reads it); the chain never
        comes to tokens, or its pieces are in the wrong order; a filter does not give a truth value per row; a loss
        gives no scalars, not as many numerators as denominators, or does not depend on what is trained; a filter or the
        chain gives something else where a rank has the tokens of some rows only.
    """
    names = frozenset(available) | {"tokens", "mask"}
    before = example(names - set(fields_by("step")))
    if algorithm.filter is not None:
        _check_filter(algorithm, before)
    rows = before
    if algorithm.advantage is not None:
        check_order(algorithm.advantage)
        rows = _advantage_on(algorithm.advantage, before)
        _check_across("the advantage chain", functools.partial(_signal_on, algorithm.advantage), before)
    step = {name: x for name, x in as_dict(example(names)).items() if FIELDS[name].writer == "step"}
    some = {name: x[: len(rows.mask)] for name, x in step.items()}  # the chain may have chosen fewer rows
    moving = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in some.items()}
    for role, loss in algorithm.losses.items():
        _check_loss(role, loss, rows, rows._replace(**moving))
    reading = any("divergence" in loss.reads.required for loss in algorithm.losses.values())
    if reading != (algorithm.divergence is not None):
        raise PieceError(
            "a loss reads batch.divergence, and Algorithm.divergence does not say which: give Divergence(beta)"
            if reading
            else "Algorithm.divergence is given, and no loss reads batch.divergence: divergence_to_teacher() does"
        )


def learns_alone(algorithm: Algorithm) -> bool:
    """True if a completion that is alone in its group can have an advantage other than 0, or no chain makes advantages.

    Args:
      algorithm: that `check` has passed.
    """
    if algorithm.advantage is None:
        return True
    names = (reads(algorithm).required | {"tokens", "mask", "score", "group"}) - set(fields_by("step"))
    alone = example(names)._replace(group=torch.arange(4))
    return bool(_advantage_on(algorithm.advantage, alone).advantage.any())


def check_order(advantage: Advantage) -> None:
    """Check that every piece of a chain comes after those whose products it goes by.

    Raises:
      PieceError: one comes too early.
    """
    pieces, states = _flat(advantage, advantage.init())
    batch, seeking = example(), []

    def run(batch: Batch) -> None:
        signal = first_signal(batch)
        for piece, state in zip(pieces, states, strict=True):
            for early, field in seeking:
                if _makes(piece, field):
                    raise PieceError(
                        f"{early}() goes by signal.{field}, which {name_of(piece)}() after it makes: put that one first"
                    )
            absent = [field for field in MADE_ON_THE_WAY if getattr(signal, field) is None]
            seeking.extend((name_of(piece), field) for field in absent if _goes_by(piece, state, signal, batch, field))
            given = {field: as_dict(example((field,)))[field] for field in absent}
            try:
                signal = run_piece(piece, signal, state, batch)[0]
            except MissingField:
                signal = run_piece(piece, signal._replace(**given), state, batch)[0]

    on_example("the advantage chain", run, batch)


def _check_across(what: str, run: Callable[[Batch], Any], batch: Batch) -> None:
    """Check that a rank that has the tokens of some rows gets of a piece what one that has those of all gets.

    Args:
      run: a batch -> what the piece makes of it, a tree.
      batch: all rows of the example; others have answered what is asked of `batch.across`.

    Raises:
      PieceError: it gets something else, or nothing.
    """
    if batch.get("score") is not None:
        batch = batch._replace(score=torch.tensor([0.0, 1.0, 1.0, 0.25], dtype=torch.float64))  # groups that differ
    asked: list[Tensor] = []

    def heard(ask: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: (asked.append(ask(*args)), asked[-1])[1]

    def on_both(rows: Batch) -> None:
        whole = run(with_across(rows, Across(heard(ALONE.sums), ALONE.own, heard(ALONE.kth_largest))))
        answers = iter(asked)
        some = map_fields(lambda name, x: x if FIELDS[name].kind == "row" else x[:SOME], rows)
        others = Across(lambda x: next(answers), lambda x: x[:SOME], lambda x, k: next(answers))
        try:
            why = "" if _same_rows(whole, run(with_across(some, others))) else "other numbers"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            raise PieceError(
                f"{what} gives a rank that has the tokens of {SOME} of 4 rows something else than one that has all "
                f"({why}). Fields per row [B] are of all rows, fields per token [b, T] of the rank's own: "
                "batch.across.sums(x_bT) is the sum of every row [B], batch.across.own(x_B) picks one's own [b]"
            )

    on_example(what, on_both, batch)


def _same_rows(whole: Any, part: Any) -> bool:
    """True where the numbers per row are the same, and those per token are for the rows that both have."""
    pairs = list(zip(trees.leaves(whole), trees.leaves(part), strict=True))
    tensors = [(a if a.dim() < 2 else a[:SOME], b) for a, b in pairs if isinstance(a, Tensor)]
    return all(a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True) for a, b in tensors)


def _signal_on(advantage: Advantage, batch: Batch) -> Any:
    """Signal, state and metrics of a chain."""
    signal, state = run_piece(advantage, first_signal(batch), advantage.init(), batch)
    return tuple(signal._replace(metrics={})), state, {name: tuple(metric) for name, metric in signal.metrics.items()}


def _flat(piece: Advantage, state: Any) -> tuple[list[Advantage], list[Any]]:
    """The pieces of nested chains one after the other, with their states."""
    if not piece.pieces:
        return [piece], [state]
    parts = [_flat(inner, own) for inner, own in zip(piece.pieces, state, strict=True)]
    return [p for pieces, _ in parts for p in pieces], [s for _, states in parts for s in states]


def _makes(piece: Advantage, field: str) -> bool:
    return field in run_advantage(piece).makes


def _goes_by(piece: Advantage, state: Any, signal: Signal, batch: Batch, field: str) -> bool:
    """True where a piece's result, the field itself aside, depends on a field of the signal."""
    given = signal._replace(**{field: as_dict(example((field,)))[field]})
    try:
        outs = [run_piece(piece, s, state, batch)[0]._replace(**{field: None}, metrics={}) for s in (signal, given)]
    except MissingField as error:
        return error.field == field
    one, other = (trees.leaves(tuple(out)) for out in outs)
    return len(one) != len(other) or any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _advantage_on(advantage: Advantage, batch: Batch) -> Batch:
    try:
        return on_example(
            "the advantage chain", lambda rows: apply_advantage(advantage, advantage.init(), rows)[0], batch
        )[0]
    except MissingField as error:
        raise PieceError(f"the advantage chain cannot run: {error}") from error


def _check_filter(algorithm: Algorithm, batch: Batch) -> None:
    assert algorithm.filter is not None
    known = {name: x for name, x in as_dict(batch).items() if FIELDS[name].writer == "source"}
    name = name_of(algorithm.filter)
    try:
        kept, _ = on_example(f"the filter {name}", algorithm.filter, Batch(**known))
    except MissingField as error:
        raise PieceError(f"the filter {name} cannot run on what the source gives: {error}") from error
    if callable(kept):
        raise PieceError(f"the filter {name}(batch) gave {described(kept)}: {name} makes filters; call it, {name}(...)")
    if not isinstance(kept, Tensor) or kept.dtype != torch.bool or kept.shape != batch.mask.shape[:1]:
        raise PieceError(f"the filter {name} gave {described(kept)}: a truth value per row [B] is needed")
    _check_across(f"the filter {name}", algorithm.filter, Batch(**known))


def _check_loss(role: str, loss: Loss, rows: Batch, in_step: Batch) -> None:
    try:
        dens, _ = on_example(f"the loss of {role!r}", loss.denominators, rows)
    except MissingField as error:
        at_fault = "a denominator reads what only the step writes" if error.field in fields_by("step") else "it lacks"
        raise PieceError(f"the loss of {role!r} has no denominators: {at_fault}; {error}") from error
    x_BT = torch.full(rows.mask.shape, -0.5, dtype=torch.float64, requires_grad=True)
    try:
        (nums, _), _ = on_example(f"the loss of {role!r}", lambda batch: loss.numerators(x_BT, batch), in_step)
    except MissingField as error:
        raise PieceError(f"the loss of {role!r} cannot be computed: {error}") from error
    if len(nums) != len(dens) or any(x.dim() for x in (*nums, *dens)):
        tops, bottoms = ([list(x.shape) for x in xs] for xs in (nums, dens))
        raise PieceError(
            f"the loss of {role!r} gave numerators {tops} and denominators {bottoms}: as many scalars are needed"
        )
    if not any(num.requires_grad for num in nums):
        raise PieceError(f"the loss of {role!r} depends on nothing that is trained: it has no gradient")
