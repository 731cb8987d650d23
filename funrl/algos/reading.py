"""The fields that pieces read and make, recorded by running them on an example batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import CARRIED, NO_FIELDS, Advantage, Algorithm, Loss, RankError, Signal, run_piece
from funrl.algos.guarding import WatchedInputs, described, guarded, line_of, name_of
from funrl.algos.masks import clean
from funrl.algos.metrics import PieceError
from funrl.batch import Batch, FieldReads, MissingField, ReadRecord, as_dict, example, recording, with_rows_spread
from funrl.fields import FIELDS, Field, Schema


class CountError(ValueError):
    """A piece expects a different number of reward functions than `batch.scores` has.

    Attributes:
      wanted: the number that it expects.
    """

    def __init__(self, message: str, wanted: int):
        super().__init__(message)
        self.wanted = wanted


class PieceRun(NamedTuple):
    """Result of an advantage chain on the example.

    Attributes:
      reads: the fields that it read, including `score` if its result depends on the outcomes.
      makes: the fields that it made, which losses may read.
      signal: its result.
    """

    reads: FieldReads
    makes: frozenset[str]
    signal: Signal


def reads(*pieces: object, fields: Mapping[str, Field] = NO_FIELDS) -> FieldReads:
    """The fields that pieces read: losses, advantages, terms, filters, or algorithms, minus what their chains make.

    Pieces run on an example batch that records reads, so that lambdas and users' own functions are covered too.

    Args:
      pieces: losses, advantages, terms, filters or algorithms.
      fields: declarations of further fields that terms and filters may read; other pieces bring their own.

    Raises:
      PieceError: one of them cannot be run on the example, or returns a wrong result.
    """
    all_reads = FieldReads()
    for piece in pieces:
        all_reads = all_reads | _reads_of(piece, Schema(fields))
    return all_reads


def _reads_of(piece: object, fields: Schema) -> FieldReads:
    """The fields that one piece reads."""
    if piece is None:
        return FieldReads()
    if isinstance(piece, Algorithm):
        makes = frozenset() if piece.advantage is None else run_advantage(piece.advantage).makes
        all_reads = _reads_of(piece.advantage, fields) | _reads_of(piece.filter, Schema(piece.fields))
        for loss in piece.losses.values():
            all_reads = all_reads | (_reads_of(loss, fields) - makes)
        return all_reads
    if isinstance(piece, Advantage):
        return run_advantage(piece).reads
    return _reads_of_function(piece, piece.fields if isinstance(piece, Loss) else fields)


@functools.lru_cache(maxsize=1024)
def _reads_of_function(piece: object, fields: Schema) -> FieldReads:
    batch = example(schema=FIELDS.extended(fields))
    return on_example(name_of(piece), lambda batch: run_function(piece, batch), batch)[1].reads


def run_function(piece: object, batch: Batch) -> Any:
    """Run a loss, a term, a ratio or a filter on a batch, with any log-probabilities."""
    shape = as_dict(batch)["mask"].shape
    x_BT = -0.5 - 0.1 * torch.arange(shape.numel(), dtype=torch.float64).reshape(shape) % 0.7
    if isinstance(piece, Loss):
        spread = with_rows_spread(batch)
        return piece.denominators(spread), piece.numerators(x_BT, spread)
    if not callable(piece):
        raise PieceError(f"{described(piece)} is not a piece of an algorithm")
    places = inspect.signature(piece).parameters.values()
    needed = [p for p in places if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return piece(batch) if len(needed) == 1 else piece(x_BT, clean(batch))


def run_advantage(advantage: Advantage) -> PieceRun:
    """Run an advantage piece on the example, repeatedly until all fields that it depends on are known."""
    return _run_advantage(advantage.hashable())


@functools.lru_cache(maxsize=1024)
def _run_advantage(advantage: Advantage) -> PieceRun:
    given: dict[str, Any] = {}
    while True:
        try:
            signal, seen = _run_once(advantage, given, 0.0)
            break
        except MissingField as error:  # it reads a field of the signal that an earlier piece should have made
            if error.field not in CARRIED or error.field in given:
                raise
            given[error.field] = as_dict(example((error.field,)))[error.field]
    seen.required |= set(given)
    moved, _ = _run_once(advantage, given, 1.0)
    if any(not torch.equal(a, b) for a, b in zip(_leaves(signal), _leaves(moved), strict=True)):
        seen.required.add("score")
    makes = frozenset(signal.fields) - set(given)
    return PieceRun(seen.reads, makes | {"advantage", "sampled"}, signal)


def _run_once(advantage: Advantage, given: dict[str, Any], change: float) -> tuple[Signal, ReadRecord]:
    """Run once on outcomes or, if the piece needs them, token rewards, plus a change that differs by row."""

    def update(batch: Batch) -> Signal:
        outcomes = as_dict(batch)["score"]
        mask = as_dict(batch)["mask"]
        moved_B = outcomes + change * torch.arange(1.0, 1 + len(outcomes), dtype=outcomes.dtype).square()
        try:
            return run_piece(advantage, Signal(moved_B, mask, **given), advantage.init(), batch=batch)[0]
        except RankError:
            rewards_BT = torch.where(mask, moved_B[:, None].cumsum(0).expand(mask.shape), 0.0)
            return run_piece(advantage, Signal(rewards_BT, mask, **given), advantage.init(), batch=batch)[0]

    return on_example(name_of(advantage), update, example(schema=FIELDS.extended(advantage.fields)))


def _leaves(signal: Signal) -> list[Tensor]:
    fields = (signal.x, signal.mask, signal.returns, signal.weight, signal.rows, signal.extra)
    return [x for x in trees.leaves(fields) if isinstance(x, Tensor)]


def on_example(what: str, run: Callable[[Batch], object], batch: Batch | None = None) -> tuple[Any, ReadRecord]:
    """Result of `run` on the recording example, and its reads; with as many reward functions as it expects.

    Raises:
      PieceError: it failed on the example (the message names the user's line), or changed the example.
    """
    batch = example() if batch is None else batch
    for _ in range(2):
        try:
            return _recorded(what, run, batch)
        except CountError as error:
            batch = batch._replace(scores=as_dict(batch)["scores"][:, :1].repeat(1, error.wanted))
        except (PieceError, MissingField):
            raise
        except Exception as error:
            raise PieceError(
                f"{what} cannot be run on the example batch that records its reads (4 rows of 8 tokens)"
                f"{line_of(error)}: {type(error).__name__}: {error}"
            ) from error
    raise PieceError(f"{what} expects different numbers of reward functions")


def _recorded(what: str, run: Callable[[Batch], object], batch: Batch) -> tuple[Any, ReadRecord]:
    """Result of `run` on the batch, and its reads. Where the batch has changed, a second run finds the piece."""
    watched, seen = recording(batch, by_piece=False)
    inputs = WatchedInputs(batch)
    try:
        return run(watched), seen
    finally:  # what the change has led to may have failed
        if inputs.changed() is not None:
            inputs.put_back()
            watched, _ = recording(batch)
            guarded(what, functools.partial(run, watched), batch)
