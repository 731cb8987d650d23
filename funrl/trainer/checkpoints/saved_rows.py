"""Rows of a step on disk: every rank writes its own, and any mesh reads them by their numbers.

    rollouts/step-7/
      rows-3.safetensors   fields of the rows that rank 3 of the row axes has: the lines of each row (tokens, or values
                           of a ragged field), end to end, without padding
      table.safetensors    fields that every rank has of all rows, the rank that has each row, and how many lines each
                           row has of a field that is not per token
      record.json          the step, its metrics, digests of the weights after it, declarations of further fields

There are two stages: "drawn", the rows as the source gave them, and "scored", what the roles and the advantage chain
have made of them. Nothing is gathered. A step is whole or not there: it is written beside and renamed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from funrl import trees
from funrl.batch import Batch, as_dict, kind_of, schema_of
from funrl.fields import FIELDS, Field, Schema
from funrl.kinds import Value, from_row_lines, row_lines
from funrl.mesh.collectives import gather_objects, psum
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.rows import gather_table
from funrl.trainer.checkpoints.checkpoint import step_folders as saved_steps
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.steps.step_rows import Rows, rows_of
from funrl.trainer.storage.shard_server import CheckpointError, DamagedError

ROLLOUTS = "rollouts"  # folder of a run
ROWS_FORMAT = 1
STAGES = ("drawn", "scored")
# Fields of a source that an advantage chain may replace; the others of a source are as they were drawn.
REPLACED = ("mask", "length", "score", "token_reward", "label")
WIDTH_MULTIPLE = 8  # of a rank's rows that are read


class SavedRows(NamedTuple):
    """Rows of one step on disk.

    Attributes:
      path: the folder.
      record: "step", "metrics" by stage, "weights" (digests by role and name), "fields" by stage, and more.
      table: "STAGE/FIELD" -> [B, ...] of a field that every rank has, or [B] lines of each row; "STAGE/owner" -> [B].
      schema: declarations of the fields.
    """

    path: Path
    record: dict[str, Any]
    table: dict[str, Tensor]
    schema: Schema

    def owner(self, stage: str) -> np.ndarray:
        """[B] the row rank that wrote each row."""
        return self.table[f"{stage}/owner"].numpy()

    def lengths(self, stage: str) -> np.ndarray:
        """[B] tokens of each row."""
        return self.table[f"{stage}/length"].numpy()

    def row_fields(self, stage: str) -> dict[str, Tensor]:
        """Fields [B, ...] that every rank has of all rows."""
        whole = {name.removeprefix(f"{stage}/"): x for name, x in self.table.items() if name.startswith(f"{stage}/")}
        return {name: x for name, x in whole.items() if name in self.schema and self.schema[name].kind.everywhere}

    def counts(self, stage: str, name: str) -> np.ndarray:
        """[B] lines of each row of another field."""
        return self.table[f"{stage}/{'length' if self.schema[name].kind.per_token else name}"].numpy()

    def lines(self, stage: str, numbers: Iterable[int], names: Sequence[str] | None = None) -> dict[str, list[Tensor]]:
        """The lines of some rows, [count, ...] of each, in the given order, of the fields that are not everywhere.

        Args:
          stage: of the rows.
          numbers: of the rows.
          names: of some of these fields; None: of all.

        Raises:
          DamagedError: a file cannot be read.
        """
        numbers = list(numbers)
        owner = self.owner(stage)
        opened = dict[int, Any]()
        rows: dict[str, list[Tensor]] = {}
        for name in self.record["fields"][stage] if names is None else names:
            counts = self.counts(stage, name)
            begins = np.zeros(len(owner), dtype=np.int64)
            for rank in set(owner[numbers].tolist()):
                own = owner == rank
                begins[own] = np.cumsum(counts[own]) - counts[own]
            rows[name] = []
            for number in numbers:
                rank = int(owner[number])
                begin = int(begins[number])
                try:
                    if rank not in opened:
                        opened[rank] = safe_open(self.path / rows_file(rank), framework="pt")
                    part = opened[rank].get_slice(f"{stage}/{name}")[begin : begin + int(counts[number])]
                except (OSError, SafetensorError) as error:
                    raise DamagedError(f"{self.path / rows_file(rank)}: it cannot be read: {error}") from error
                if len(part) != counts[number]:
                    raise DamagedError(f"{self.path}: {name} has fewer lines than the table says")
                rows[name].append(part)
        return rows


def rows_file(rank: int) -> str:
    """Name of the file of a rank's rows."""
    return f"rows-{rank}.safetensors"


def stage_fields(drawn: Rows, scored: Rows) -> dict[str, dict[str, Value]]:
    """The fields of each stage: all that the source gave; then what was written since, and what may be replaced."""
    first = as_dict(drawn.batch)
    then = as_dict(scored.batch)
    kept = set(schema_of(drawn.batch).by("source")) - set(REPLACED)
    return {"drawn": first, "scored": {name: x for name, x in then.items() if name not in kept or name not in first}}


def draft_folder(folder: str | Path, step: int) -> Path:
    """Folder of a step while its files are written."""
    return Path(folder) / f".step-{step}"


def save_rows(
    folder: str | Path,
    drawn: Rows,
    scored: Rows,
    record: Mapping[str, Any],
    beside: Callable[[Path], int] | None = None,
) -> int:
    """Write the rows of a step; collective.

    Args:
      folder: of all steps.
      drawn, scored: the rows of both stages, on one mesh.
      record: with the "step".
      beside: writes further files of this rank to the step's folder, and gives their bytes.

    Returns: bytes of all ranks together.

    Raises:
      CheckpointError: on every rank, where one of them cannot write.
    """
    path = Path(folder) / f"step-{record['step']}"
    mesh = drawn.mesh
    draft = draft_folder(folder, record["step"])
    problem = ""
    nbytes = 0
    fields = stage_fields(drawn, scored)
    stages = {stage: _stage(rows, fields[stage]) for stage, rows in zip(STAGES, (drawn, scored), strict=True)}
    try:
        draft.mkdir(parents=True, exist_ok=True)
        nbytes = _write_own(draft, stages, record)
        nbytes += 0 if beside is None else beside(draft)
    except OSError as error:
        problem = f"{error.filename or draft}: cannot be written: {(error.strerror or str(error)).lower()}"
    own = torch.tensor([float(bool(problem)), float(nbytes)], dtype=torch.float64, device=mesh.device)
    problems, total = psum(own, mesh, AXES).tolist()
    if problems:
        raise CheckpointError(next(text for text in gather_objects(problem, mesh) if text))
    if mesh.rank == 0:
        if path.exists():  # of a run that was interrupted behind its newest checkpoint
            shutil.rmtree(path)
        draft.rename(path)
    return int(total)


class _Stage(NamedTuple):
    """The rows of a stage as they are written.

    Attributes:
      rows: of the stage.
      table: fields that every rank has, and the lines of each row of those that are not per token.
      lines: this rank's rows of the others, end to end.
    """

    rows: Rows
    table: dict[str, Tensor]
    lines: dict[str, Tensor]


def _stage(rows: Rows, fields: Mapping[str, Value]) -> _Stage:
    own_lengths = rows.lengths[rows.own]
    counts = dict[str, Tensor]()
    table = {"owner": torch.from_numpy(rows.owner.copy())}
    lines = dict[str, Tensor]()
    for name, x in fields.items():
        kind = kind_of(rows.batch, name)
        if kind.everywhere:
            table[name] = x.cpu().clone().contiguous()
            continue
        lines[name] = row_lines(kind, x, own_lengths).cpu().contiguous()
        if not kind.per_token:
            counts[name] = torch.from_numpy(kind.counts(x, own_lengths))
    if counts:
        gathered = gather_table(counts, rows.owner, rows.mesh, rows.mesh.row_axes)
        table |= {name: x.clone() for name, x in gathered.items()}  # a file cannot hold views of one memory
    return _Stage(rows, table, lines)


def _write_own(beside: Path, stages: Mapping[str, _Stage], record: Mapping[str, Any]) -> int:
    """Write this rank's files of a step; their bytes."""
    rows = stages["drawn"].rows
    nbytes = 0
    mesh = rows.mesh
    lines = {f"{stage}/{name}": x for stage, written in stages.items() for name, x in written.lines.items()}
    replicating = [axis for axis in AXES if axis not in mesh.row_axes]
    if not any(int(mesh.index(axis)) for axis in replicating):  # of ranks that hold the same rows, one
        nbytes += (beside / rows_file(rows.index)).write_bytes(save(lines))
    if mesh.rank == 0:
        table = {f"{stage}/{name}": x for stage, written in stages.items() for name, x in written.table.items()}
        shapes = {  # by which a rank without rows reads them
            stage: {name: [str(x.dtype).removeprefix("torch."), list(x.shape[1:])] for name, x in written.lines.items()}
            for stage, written in stages.items()
        }
        further = {name: x for name, x in schema_of(stages["scored"].rows.batch).items() if name not in FIELDS}
        declared = {name: [field.kind.name, field.writer, field.text, field.dtype] for name, field in further.items()}
        facts = {"mesh": str(mesh), "fields": shapes, "declared": declared}
        nbytes += (beside / "table.safetensors").write_bytes(save(table))
        nbytes += (beside / "record.json").write_text(json.dumps({"format": ROWS_FORMAT, **record, **facts}))
    return nbytes


def forget_rows(folder: str | Path, after: int) -> None:
    """Remove the rows of later steps, which are made again, and what was begun."""
    for path in (*Path(folder).glob(".step-*"), *(p for step, p in saved_steps(folder).items() if step > after)):
        shutil.rmtree(path, ignore_errors=True)


def keep_newest(folder: str | Path, count: int) -> None:
    """Remove all but the newest steps."""
    for path in list(saved_steps(folder).values())[:-count]:
        shutil.rmtree(path, ignore_errors=True)


def open_rows(folder: str | Path, step: int, fields: Mapping[str, Field] = FIELDS) -> SavedRows:
    """The rows of a step.

    Args:
      folder: of all steps.
      step: number of the step.
      fields: declarations of further fields, as the algorithm has them; those of other fields are read.

    Raises:
      CheckpointError: they are not there.
      DamagedError: they cannot be read, or another version of this program has written them.
    """
    path = Path(folder) / f"step-{step}"
    if not path.is_dir():
        steps = ", ".join(map(str, saved_steps(folder))) or "none"
        raise CheckpointError(f"{folder} has no rows of step {step}, which --save_rollouts keeps; there are: {steps}")
    try:
        record = json.loads((path / "record.json").read_text())
        if record["format"] != ROWS_FORMAT:
            raise ValueError(f"its format is {record['format']}, this version reads {ROWS_FORMAT}")
        if "pictures" in record:
            raise ValueError("an earlier version has saved it without its pictures")
        declared = {name: as_saved for name, as_saved in record.get("declared", {}).items() if name not in fields}
        saved = {name: Field(kind, writer, text, dtype=dtype) for name, (kind, writer, text, dtype) in declared.items()}
        return SavedRows(path, record, load_file(path / "table.safetensors"), FIELDS | fields | saved)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedError(f"{path}: it cannot be read: {error}") from error


def read_rows(saved: SavedRows, mesh: Mesh, stage: str = "drawn") -> Rows:
    """Rows of a stage on the ranks of a mesh, each as many; every rank reads its own.

    Raises:
      DamagedError: a file cannot be read.
    """
    lengths = saved.lengths(stage)
    owner = generating_ranks(len(lengths), 1, mesh.size(mesh.row_axes))
    own = np.flatnonzero(owner == int(mesh.index(mesh.row_axes)))
    width = -(-int(lengths[own].max(initial=1)) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    fields: dict[str, Value] = dict(saved.row_fields(stage))
    for name, parts in saved.lines(stage, own.tolist()).items():
        dtype, dims = saved.record["fields"][stage][name]
        lines = torch.cat([torch.zeros(0, *dims, dtype=getattr(torch, dtype)), *parts])
        fields[name] = from_row_lines(saved.schema[name].kind, lines, saved.counts(stage, name)[own], width)
    fields = trees.map(lambda x: x.to(mesh.device), fields)
    return rows_of(Batch(saved.schema, **fields), owner, mesh)
