"""One algorithm for each source of prompts, in one run.

    by_source({"math": grpo(), "chat": reinforce_plus_plus()})

Each row belongs to the objective of its prompt's source. Its chain sees the rows of its source alone, and its losses
have denominators of their own, so each objective's loss is what it would be without the others, on any mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.across import Across
from funrl.algos.core import Advantage, Algorithm, Loss, Signal, check_rank, run_piece
from funrl.algos.metrics import Metric, PieceError
from funrl.algos.reading import reads, run_advantage
from funrl.algos.terms import Filter
from funrl.batch import Batch, kind_of, map_fields, schema_of, seen_of, with_across
from funrl.fields import Field

OBJECTIVE = "objective"
OBJECTIVE_FIELD = Field("row", "source", "number of the objective of the prompt's source", dtype="int")


def by_source(objectives: Mapping[str, Algorithm], weights: Mapping[str, float] | None = None) -> Algorithm:
    """An algorithm that learns from each source of prompts by another one.

    The loss of a role is the weighted sum of the objectives' losses for it. Metrics of an objective are named
    SOURCE/METRIC.

    Args:
      objectives: source -> its algorithm; a source is the `data_source` of the records, or the stem of their file.
      weights: source -> factor of its losses; None, or for a source that is not there: 1.

    Raises:
      PieceError: there is no objective; a weight is of none; an algorithm learns from pairs or demonstrations;
        objectives differ in what the step computes over the whole vocabulary, or declare a field or a role differently.

    Example:
      >>> from funrl.algos import dapo, grpo
      >>> by_source({"chat": dapo(), "math": grpo()}).objectives
      ('chat', 'math')
    """
    names = tuple(objectives)
    factors = _factors(names, weights or {})
    if not names:
        raise PieceError("by_source({}): give an algorithm for each source of prompts")
    for name, algorithm in objectives.items():
        if algorithm.example != "row" or algorithm.objectives or "demonstration" in reads(algorithm).required:
            raise PieceError(f"by_source: the algorithm of {name!r} does not learn from single rows that are sampled")
    divergences = {algorithm.divergence for algorithm in objectives.values()} - {None}
    if len(divergences) > 1:
        raise PieceError(f"by_source: the step computes one divergence, and the objectives have {len(divergences)}")
    every = list(objectives.values())
    filters = {algorithm.filter for algorithm in every}
    roles = dict.fromkeys(role for algorithm in every for role in algorithm.losses)
    views = _views([algorithm.advantage for algorithm in every])
    return Algorithm(
        advantage=_advantage(names, [algorithm.advantage for algorithm in every]),
        losses={
            role: _loss(
                [
                    _Part(name, algorithm.losses[role], factor, view)
                    for name, algorithm, factor, view in zip(names, every, factors, views, strict=True)
                    if role in algorithm.losses
                ]
            )
            for role in roles
        },
        filter=None if filters == {None} else _Filters(tuple(algorithm.filter for algorithm in every)),
        divergence=next(iter(divergences), None),
        fields=_joined([algorithm.fields for algorithm in every], "field") | {OBJECTIVE: OBJECTIVE_FIELD},
        roles=_joined([algorithm.roles for algorithm in every], "role"),
        objectives=names,
        parts=tuple(every),
    )


def _factors(names: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    strange = [name for name in weights if name not in names]
    if strange:
        raise PieceError(f"by_source: a weight for {strange[0]!r}, which has no algorithm; {', '.join(names)} have")
    return [float(weights.get(name, 1.0)) for name in names]


def _joined(parts: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name, declared in (pair for part in parts for pair in part.items()):
        if joined.setdefault(name, declared) != declared:
            raise PieceError(f"by_source: two objectives declare the {what} {name!r} differently")
    return joined


def _advantage(names: Sequence[str], chains: Sequence[Advantage | None]) -> Advantage:
    """The chains of all objectives, each on the rows of its own."""

    def init() -> trees.Tree:
        return tuple(() if chain is None else chain.init() for chain in chains)

    def update(signal: Signal, state: trees.Tree, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "row")
        merged = _Merged(signal, batch)
        states = []
        for number, (name, chain, before) in enumerate(zip(names, chains, state, strict=True)):
            rows = rows_of_objective(batch, number)
            after = before
            if chain is not None and not len(rows.batch.group):
                merged.add_nothing(run_advantage(chain).signal)
            elif chain is not None:
                own = Signal(signal.x[rows.keep_B], signal.mask[rows.keep_b])
                done, after = run_piece(chain, own, before, batch=rows.batch)
                if done.rows is not None:
                    raise PieceError(f"by_source: the objective of {name!r} draws rows anew, as pf_ppo does")
                merged.add(name, done, rows)
            states.append(after)
        return merged.signal(), tuple(states)

    return Advantage(init, update, whole_groups=any(chain is not None and chain.whole_groups for chain in chains))


class ObjectiveRows(NamedTuple):
    """The rows of one objective.

    Attributes:
      batch: of these rows alone.
      keep_B: [B] bool, which of all rows they are.
      keep_b: [b] bool, which of this rank's rows.
    """

    batch: Batch
    keep_B: Tensor
    keep_b: Tensor


def rows_of_objective(batch: Batch, number: int) -> ObjectiveRows:
    """The rows of the objective of a number; of a batch that records what is read, all rows."""
    objective_B = batch.objective
    keep_B = objective_B == number if seen_of(batch) is None else torch.ones_like(objective_B, dtype=torch.bool)
    keep_b = batch.across.own(keep_B)

    def some(name: str, x: Any) -> Any:
        kind = kind_of(batch, name)
        return kind.select(x, (keep_B if kind.everywhere else keep_b).nonzero()[:, 0])

    across = some_across(batch.across, keep_B, keep_b)
    return ObjectiveRows(with_across(map_fields(some, batch), across), keep_B, keep_b)


def some_across(across: Across, keep_B: Tensor, keep_b: Tensor) -> Across:
    """The exchange of some rows alone.

    Args:
      keep_B, keep_b: bool, which of all rows, and which of one's own.
    """

    def sums(x_kT: Tensor) -> Tensor:
        x_bT = x_kT.new_zeros(len(keep_b), *x_kT.shape[1:])
        x_bT[keep_b] = x_kT
        return across.sums(x_bT)[keep_B]

    def own(x_K: Tensor) -> Tensor:
        x_B = x_K.new_zeros(len(keep_B), *x_K.shape[1:])
        x_B[keep_B] = x_K
        return across.own(x_B)[keep_b]

    by_row = None
    if across.by_row is not None:
        keep_R = across.by_row.sums(keep_b[:, None]) > 0
        by_row = some_across(across.by_row, keep_R, keep_b)
    return Across(sums, own, across.kth_largest, by_row=by_row)


class _Merged:
    """Results of several chains, each of its own rows, put together for all rows."""

    def __init__(self, signal: Signal, batch: Batch) -> None:
        self.first = signal
        self.batch = batch
        self.fields: dict[str, Tensor] = {}
        self.metrics: dict[str, Metric] = {}
        self.x = signal.x.new_zeros(signal.mask.shape)
        self.mask = signal.mask.clone()

    def add(self, name: str, done: Signal, rows: ObjectiveRows) -> None:
        """Add the result of one chain."""
        check_rank(done, "token")
        self.x = self.x + _scattered(done.x, rows.keep_b)
        self.mask = torch.where(rows.keep_b[:, None], _scattered(done.mask, rows.keep_b), self.mask)
        self.metrics |= {f"{name}/{key}": metric for key, metric in done.metrics.items()}
        for field, own in done.fields.items():
            everywhere = schema_of(self.batch)[field].kind.everywhere
            whole = _scattered(own, rows.keep_B if everywhere else rows.keep_b)
            before = self.fields.get(field, torch.zeros_like(whole))
            self.fields[field] = before | whole if whole.dtype == torch.bool else before + whole

    def add_nothing(self, example: Signal) -> None:
        """Add the fields of a chain that has no rows in this step, of its result on an example."""
        for field, x in example.fields.items():
            everywhere = schema_of(self.batch)[field].kind.everywhere
            shape = (len(self.first.x), *x.shape[1:]) if everywhere else (*self.mask.shape, *x.shape[2:])
            dtype = self.first.x.dtype if x.is_floating_point() else x.dtype
            self.fields.setdefault(field, self.x.new_zeros(shape, dtype=dtype))

    def signal(self) -> Signal:
        """The signal of all rows."""
        carried = {name: self.fields.pop(name, None) for name in ("returns", "weight")}
        return Signal(self.x, self.mask, **carried, extra=self.fields, metrics=self.metrics)


def _scattered(x: Tensor, keep: Tensor) -> Tensor:
    """Values of the kept rows among zeros for the others."""
    whole = x.new_zeros(len(keep), *x.shape[1:])
    whole[keep] = x
    return whole


class _View(NamedTuple):
    """The part of a batch that the losses of one objective see.

    Attributes:
      number: of the objective.
      hidden: fields that chains of other objectives make and its own does not, which are as if they were not there.
    """

    number: int
    hidden: frozenset[str]

    def of(self, batch: Batch) -> Batch:
        """The batch whose mask has the tokens of this objective's rows alone; of a recording batch, all."""
        objective = batch.objective  # of rows [B], or of tokens [B, T] in an update
        here = objective == self.number
        mask = batch.mask if seen_of(batch) is not None else batch.mask & (here if here.dim() == 2 else here[:, None])
        return batch._replace(mask=mask, **dict.fromkeys(self.hidden))


def _views(chains: Sequence[Advantage | None]) -> list[_View]:
    makes = [frozenset() if chain is None else run_advantage(chain).makes for chain in chains]
    return [_View(number, frozenset().union(*makes) - own) for number, own in enumerate(makes)]


class _Part(NamedTuple):
    """The loss of one objective for a role."""

    name: str
    loss: Loss
    factor: float
    view: _View


def _loss(parts: Sequence[_Part]) -> Loss:
    """The weighted sum of the losses of several objectives, each over the tokens of its own rows."""

    def denominators(batch: Batch) -> tuple[Tensor, ...]:
        return tuple(den for part in parts for den in part.loss.denominators(part.view.of(batch)))

    def numerators(x_BT: Tensor, batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Metric]]:
        sums: list[Tensor] = []
        metrics: dict[str, Metric] = {}
        for part in parts:
            nums, seen = part.loss.numerators(x_BT, part.view.of(batch))
            sums += [part.factor * num for num in nums]
            metrics |= {f"{part.name}/{key}": metric for key, metric in seen.items()}
        return tuple(sums), metrics

    return Loss(denominators, numerators)


class _Filters(NamedTuple):
    """The filters of all objectives, each over its own rows; rows of one without a filter are kept."""

    filters: tuple[Filter | None, ...]

    def __call__(self, batch: Batch) -> Tensor:
        kept_B = torch.ones_like(batch.objective, dtype=torch.bool)
        for number, filter in enumerate(self.filters):
            if filter is not None:
                rows = rows_of_objective(batch, number)
                kept_B[rows.keep_B] &= filter(rows.batch)
        return kept_B
