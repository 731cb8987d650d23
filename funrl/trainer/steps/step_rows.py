"""Rows on their ranks: what every rank knows of all rows, and the tokens of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.across import ALONE
from funrl.algos.advantages.units import episode_fields, units_of
from funrl.batch import Batch, as_dict, declare, kind_of, map_fields, map_kinds, narrowed, schema_of, with_across
from funrl.data.packing import Packing, RowCost
from funrl.fields import Field
from funrl.kinds import OwnedLines, Ragged, Value
from funrl.mesh.mesh import Mesh, single
from funrl.mesh.rows import Owners, across, hand_over, move_rows


class UpdatePlan(NamedTuple):
    """Division of a step's rows into updates and forward passes.

    Attributes:
      step, seed: the number of the step and the seed of the run; they choose the mini-batches.
      epochs: passes over the rows.
      minibatches: optimizer steps a pass.
      token_budget: tokens of one rank in a forward pass; a longer row raises it.
      cost: growth of a row's work with its length; None: as in the model that learns last.
    """

    step: int = 1
    seed: int = 0
    epochs: int = 1
    minibatches: int = 1
    token_budget: int = 16384
    cost: RowCost | None = None


class Epoch(NamedTuple):
    """Assignment of the rows in one pass over them.

    Attributes:
      number: of the pass, from 0.
      parts: numbers of the rows of each mini-batch.
      packings: of each mini-batch, by places in its numbers.
      to: [B] the rank that trains each row.
      plan: the division that this is a pass of.
    """

    number: int
    parts: list[np.ndarray]
    packings: list[Packing]
    to: np.ndarray
    plan: UpdatePlan


class RowUnits(NamedTuple):
    """Units of rows, by number.

    Attributes:
      example: [B] such as the episode: its rows are in one mini-batch, on any ranks; None: each row is one.
      together: [B] such as the agent's episode: its rows are in one micro-batch; None: any rows may be apart.
    """

    example: np.ndarray | None = None
    together: np.ndarray | None = None


SINGLE_ROWS = RowUnits()  # each row is alone


class Rows(NamedTuple):
    """Rows of a step, numbered 0 to B - 1.

    Attributes:
      batch: fields whose kind is `everywhere` have all rows [B], the same on all ranks; the others have this rank's own
        rows, in the order of their numbers, whole numbers per token in `TOKEN_INT`. Ranks that differ in other axes
        than those of rows hold the same.
      owner: [B] the rank that has each row, by its index over the row axes of `mesh`.
      mesh: whose ranks hold the rows.
      epoch: the pass by whose assignment the rows were placed, so that it need not be planned again; None: by none.
    """

    batch: Batch
    owner: np.ndarray
    mesh: Mesh
    epoch: Epoch | None = None

    @property
    def lengths(self) -> np.ndarray:
        """[B] tokens of each row."""
        return self.batch.length.cpu().numpy()

    @property
    def examples(self) -> np.ndarray | None:
        """[B] number of each row's example, its episode; None: each row is one."""
        episode_B = self.batch.get("episode")
        return None if episode_B is None else episode_B.cpu().numpy()

    def units(self, whole_episodes: bool) -> RowUnits:
        """Units of the rows, by number.

        Args:
          whole_episodes: whether a loss has sums over whole episodes.
        """
        unit_B = self.batch.get("unit") if whole_episodes else None
        return RowUnits(self.examples, None if unit_B is None else unit_B.cpu().numpy())

    @property
    def index(self) -> int:
        """This rank's index over the row axes; -1 where it is not in the mesh."""
        return int(self.mesh.index(self.mesh.row_axes)) if self.mesh.here else -1

    @property
    def own(self) -> np.ndarray:
        """Row numbers of this rank, ascending."""
        return np.flatnonzero(self.owner == self.index)

    def local(self, numbers: np.ndarray) -> np.ndarray:
        """Places among this rank's rows of some of them, by their numbers."""
        return np.searchsorted(self.own, numbers)

    def with_fields(self, **fields: Value | None) -> Rows:
        return self._replace(batch=narrowed(self.batch._replace(**fields)))

    def declaring(self, fields: Mapping[str, Field]) -> Rows:
        """The rows with declarations of further fields."""
        return self._replace(batch=declare(self.batch, fields))


def rows_of(batch: Batch, owner: np.ndarray | None = None, mesh: Mesh | None = None) -> Rows:
    """Rows of a batch, by default all of them this rank's own; its sums go over all ranks' rows."""
    mesh = mesh or single()
    owner = np.zeros(len(batch.tokens), dtype=np.int64) if owner is None else owner
    return Rows(with_across(narrowed(batch), across(owner, mesh, mesh.row_axes)), owner, mesh)


def split_rows(batch: Batch, owner: np.ndarray, mesh: Mesh) -> Rows:
    """The rows of a batch that every rank has whole, each rank keeping its own."""
    own = torch.from_numpy(np.flatnonzero(owner == int(mesh.index(mesh.row_axes)))).to(batch.tokens.device)
    return rows_of(map_kinds(lambda kind, x: x if kind.everywhere else kind.select(x, own), batch), owner, mesh)


def take(rows: Rows, numbers: np.ndarray) -> Rows:
    """Some rows, in the given order; one may come several times. They stay on their ranks."""
    owner = rows.owner[numbers]
    return rows_of(_chosen(rows, numbers, numbers[owner == rows.index]), owner, rows.mesh)


def agent_numbers(rows: Rows, agents: Collection[int]) -> np.ndarray:
    """Row numbers of some agents."""
    return np.flatnonzero(np.isin(rows.batch.agent.cpu().numpy(), list(agents)))


def rows_of_agents(rows: Rows, agents: Collection[int] | None) -> Rows:
    """The rows of some agents; None: all rows."""
    return rows if agents is None else take(rows, agent_numbers(rows, agents))


def on_all_rows(fields: Mapping[str, Tensor], numbers: np.ndarray, rows: Rows) -> dict[str, Tensor]:
    """Scatter fields that a role wrote for some rows into fields of all rows of this rank.

    Args:
      fields: of the rows, on the ranks of these.
      numbers: of the rows.
      rows: all rows; those that are not among the numbers keep what they have, or get 0.
    """
    chosen_b = torch.from_numpy(np.isin(rows.own, numbers)).to(rows.mesh.device)
    whole = {}
    for name, some in fields.items():
        before = rows.batch.get(name)
        width = rows.batch.tokens.shape[1]
        written = some.new_zeros(len(rows.own), width, *some.shape[2:]) if before is None else before.clone()
        fitted = written[chosen_b].zero_()
        fitted[:, : some.shape[1]] = some[:, :width]
        written[chosen_b] = fitted
        whole[name] = written
    return whole


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, one part after the other, on one mesh."""
    if len(parts) == 1:
        return parts[0]
    fields = [as_dict(part.batch) for part in parts]
    width = max(part.batch.tokens.shape[1] for part in parts)

    def joined(name: str, _: Value) -> Value:
        kind = kind_of(parts[0].batch, name)
        return kind.concatenate([kind.fit(values[name], width) for values in fields])

    batch = map_fields(joined, parts[0].batch)
    return rows_of(batch, np.concatenate([part.owner for part in parts]), parts[0].mesh)


def moved(rows: Rows, to: np.ndarray, mesh: Mesh) -> Rows:
    """The rows on the ranks that `to` [B] names by their index over the row axes of a mesh, over the same processes."""
    same = rows.mesh.sizes == mesh.sizes
    if same and np.array_equal(rows.owner, to):
        return rows
    fields = as_dict(rows.batch)
    kinds = {name: kind for name in fields if not (kind := kind_of(rows.batch, name)).everywhere}
    own = {name: fields[name] for name in kinds}
    if same:
        result = move_rows(own, rows.lengths, rows.owner, to, mesh, kinds)
    else:
        result = hand_over(own, rows.lengths, Owners(rows.owner, rows.mesh), Owners(to, mesh), kinds)
    return rows_of(Batch(schema_of(rows.batch), **{**fields, **result.fields}), to, mesh)


def with_stale(rows: Rows, newest: int, most_age: int | None = None) -> Rows:
    """Rows that say which of their tokens other weights than the newest sampled.

    Args:
      rows: with the versions of their tokens.
      newest: version of the newest weights.
      most_age: bound on the age of a token, in versions; None: there is none.

    Raises:
      RuntimeError: a token that was sampled is older.
    """
    mask_bT = rows.batch.mask
    age_bT = newest - rows.batch.version
    oldest = int(age_bT[mask_bT].max()) if mask_bT.any() else 0
    if most_age is not None and oldest > most_age:
        raise RuntimeError(f"a token is {oldest} versions old, and the bound of --staleness is {most_age}")
    return rows.with_fields(stale=mask_bT & (age_bT != 0))


def failed_rows(rows: Rows) -> int:
    """Number of rows on which a reward function failed."""
    failed_B = rows.batch.get("failed")
    return 0 if failed_B is None else int(failed_B.sum())


def counted_by(rows: Rows, mask: str) -> Rows:
    """The rows with the tokens of their episodes counted by another field than the mask. Collective."""
    units = units_of(rows.batch)
    if units is None or mask == "mask":
        return rows
    masked = rows.batch._replace(mask=getattr(rows.batch, mask))
    counts = episode_fields(masked, units)
    return rows.with_fields(**{name: counts[name] for name in ("episode_tokens", "episode_first")})


def on_cpu(rows: Rows) -> Rows:
    """Move rows to the CPU, where every sum has one order.

    A GPU may add in another order on every rank, and ranks that differ in a last bit may keep other rows.
    """
    return mapped(rows, lambda x: x.cpu())


def mapped(rows: Rows, fn: Callable[[Tensor], Tensor]) -> Rows:
    """The rows with `fn` of every tensor."""
    return rows._replace(batch=map_fields(lambda _, x: trees.map(fn, x), rows.batch))


def own_batch(rows: Rows, numbers: np.ndarray) -> Batch:
    """Some of this rank's rows as a batch of their own, in the given order."""
    return with_across(_chosen(rows, numbers, numbers), ALONE)


def _chosen(rows: Rows, numbers: np.ndarray, own: np.ndarray) -> Batch:
    """The batch of some rows, in the given order.

    Args:
      numbers: of the rows.
      own: those of them that this rank has.
    """
    everywhere = torch.from_numpy(np.asarray(numbers))
    here = torch.from_numpy(rows.local(own))
    return map_kinds(lambda kind, x: kind.select(x, everywhere if kind.everywhere else here), rows.batch)


class StepRecord(NamedTuple):
    """Rows and metrics of one step.

    Attributes:
      drawn, rows: before and after scoring.
      stages: metrics of "drawn", "scored" and "learned" rows.
      engine: metrics of the engine after the sync.
    """

    drawn: Rows
    rows: Rows
    stages: Mapping[str, dict[str, float]]
    engine: dict[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics of the step."""
        return {name: value for part in (*self.stages.values(), self.engine) for name, value in part.items()}


def owned_fields(values: Mapping[str, Tensor]) -> dict[str, Field]:
    """Declarations of the fields that hold values such as these."""
    dtypes = {name: "float" if x.is_floating_point() else "int" for name, x in values.items()}
    return {name: Field("ragged", "source", f"{name} that a row owns", dtype=dtypes[name]) for name in values}


def with_owned(rows: Rows, owned: Sequence[OwnedLines | None], like: Mapping[str, Tensor] | None) -> Rows:
    """The rows with the values that they own.

    Args:
      rows: some rows.
      owned: values of each of this rank's own rows; None: none.
      like: lines of any row of the run, as those of `OwnedValues.none`; None: no row owns any.
    """
    if like is None:
        return rows
    return rows.declaring(owned_fields(like)).with_fields(**owned_lines_of(owned, like, rows.batch.tokens.device))


def owned_lines_of(
    owned: Sequence[OwnedLines | None], like: Mapping[str, Tensor], device: torch.device
) -> dict[str, Ragged]:
    """The fields of rows that own these values; `like` as of `with_owned`."""
    lines = {name: [x[:0] if own is None else own.values[name] for own in owned] for name, x in like.items()}
    values = {name: ragged(lines[name], x[:0]) for name, x in like.items()}
    return {name: Ragged(*(x.to(device) for x in value)) for name, value in values.items()}


def ragged(lines: Sequence[Tensor], none: Tensor) -> Ragged:
    """Rows that own these lines.

    Args:
      lines: of each row.
      none: the lines of a row without any.
    """
    offsets = torch.tensor([0, *map(len, lines)], dtype=torch.int64).cumsum(0)
    return Ragged(torch.cat([none, *lines]), offsets)
