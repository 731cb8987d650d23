"""Rows of a step on disk: every rank writes its own, and any mesh reads them by their numbers.

    rollouts/step-7/
      rows-3.safetensors   per-token fields of the rows that rank 3 of the row axes has, end to end, without padding
      table.safetensors    fields of kind "row" of all rows, and the rank that has each
      record.json          the step, its metrics, digests of the weights after it

There are two stages: "drawn", the rows as the source gave them, and "scored", what the roles and the advantage chain
have made of them. Nothing is gathered. A step is whole or not there: it is written beside and renamed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from funrl.batch import FIELDS, Batch, as_dict, fields_by
from funrl.mesh.collectives import gather_objects, psum
from funrl.mesh.mesh import AXES, Mesh
from funrl.trainer.generation import generating_ranks
from funrl.trainer.shard_server import CheckpointError, DamagedError
from funrl.trainer.step_rows import Rows, rows_of

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
      table: "STAGE/FIELD" -> [B, ...], and "STAGE/owner" -> [B].
    """

    path: Path
    record: dict[str, Any]
    table: dict[str, Tensor]

    def owner(self, stage: str) -> np.ndarray:
        """[B] the row rank that wrote each row."""
        return self.table[f"{stage}/owner"].numpy()

    def lengths(self, stage: str) -> np.ndarray:
        """[B] tokens of each row."""
        return self.table[f"{stage}/length"].numpy()

    def row_fields(self, stage: str) -> dict[str, Tensor]:
        """Fields [B, ...] of kind "row"."""
        whole = {name.removeprefix(f"{stage}/"): x for name, x in self.table.items() if name.startswith(f"{stage}/")}
        return {name: x for name, x in whole.items() if name in FIELDS}

    def token_rows(self, stage: str, numbers: Iterable[int]) -> dict[str, list[Tensor]]:
        """Per-token fields of some rows, [length, ...] of each, in the given order.

        Raises:
          DamagedError: a file cannot be read.
        """
        owner, lengths = self.owner(stage), self.lengths(stage)
        opened, begins = dict[int, Any](), dict[int, dict[int, int]]()
        found: dict[str, list[Tensor]] = {name: [] for name in self.record["fields"][stage]}
        for number in numbers:
            rank = int(owner[number])
            if rank not in opened:
                own = np.flatnonzero(owner == rank)
                ends = np.cumsum(lengths[own])
                begins[rank] = dict(zip(own.tolist(), (ends - lengths[own]).tolist(), strict=True))
                opened[rank] = self._open(rank)
            begin = begins[rank][number]
            for name, rows in found.items():
                rows.append(self._part(opened[rank], f"{stage}/{name}", begin, begin + int(lengths[number])))
        return found

    def _open(self, rank: int) -> Any:
        try:
            return safe_open(self.path / rows_file(rank), framework="pt")
        except (OSError, SafetensorError) as error:
            raise DamagedError(f"{self.path / rows_file(rank)}: it cannot be read: {error}") from error

    def _part(self, file: Any, name: str, begin: int, end: int) -> Tensor:
        try:
            part = file.get_slice(name)[begin:end]
        except (OSError, SafetensorError) as error:
            raise DamagedError(f"{self.path}: {name} cannot be read: {error}") from error
        if len(part) != end - begin:
            raise DamagedError(f"{self.path}: {name} has fewer tokens than the table says")
        return part


def rows_file(rank: int) -> str:
    """Name of the file of a rank's rows."""
    return f"rows-{rank}.safetensors"


def stage_fields(drawn: Rows, scored: Rows) -> dict[str, dict[str, Tensor]]:
    """The fields of each stage: all that the source gave; then what was written since, and what may be replaced."""
    first, then = as_dict(drawn.batch), as_dict(scored.batch)
    kept = set(fields_by("source")) - set(REPLACED)
    return {"drawn": first, "scored": {name: x for name, x in then.items() if name not in kept or name not in first}}


def save_rows(folder: str | Path, drawn: Rows, scored: Rows, record: Mapping[str, Any]) -> int:
    """Write the rows of a step; collective.

    Args:
      folder: of all steps.
      drawn, scored: the rows of both stages, on one mesh.
      record: with the "step".

    Returns: bytes of all ranks together.

    Raises:
      CheckpointError: on every rank, where one of them cannot write.
    """
    path, mesh = Path(folder) / f"step-{record['step']}", drawn.mesh
    beside = path.with_name(f".{path.name}")
    problem, nbytes = "", 0
    try:
        beside.mkdir(parents=True, exist_ok=True)
        nbytes = _write_own(beside, {"drawn": drawn, "scored": scored}, stage_fields(drawn, scored), record)
    except OSError as error:
        problem = f"{error.filename or beside}: cannot be written: {(error.strerror or str(error)).lower()}"
    own = torch.tensor([float(bool(problem)), float(nbytes)], dtype=torch.float64, device=mesh.device)
    problems, total = psum(own, mesh, AXES).tolist()
    if problems:
        raise CheckpointError(next(one for one in gather_objects(problem, mesh) if one))
    if mesh.rank == 0:
        if path.exists():  # of a run that was interrupted behind its newest checkpoint
            shutil.rmtree(path)
        beside.rename(path)
    return int(total)


def _write_own(
    beside: Path, rows: Mapping[str, Rows], fields: Mapping[str, Mapping[str, Tensor]], record: Mapping[str, Any]
) -> int:
    """Write this rank's files of a step; their bytes."""
    mesh, nbytes = rows["drawn"].mesh, 0
    tokens = {
        f"{stage}/{name}": _end_to_end(x, rows[stage])
        for stage, held in fields.items()
        for name, x in held.items()
        if FIELDS[name].kind != "row"
    }
    alike = [axis for axis in AXES if axis not in mesh.row_axes]
    if not any(int(mesh.index(axis)) for axis in alike):  # of ranks that hold the same rows, one
        nbytes += (beside / rows_file(rows["drawn"].index)).write_bytes(save(tokens))
    if mesh.rank == 0:
        table = {f"{stage}/owner": torch.from_numpy(rows[stage].owner.copy()) for stage in STAGES}
        for stage, held in fields.items():
            whole = {name: x for name, x in held.items() if FIELDS[name].kind == "row"}
            table |= {f"{stage}/{name}": x.cpu().clone().contiguous() for name, x in whole.items()}
        names = {stage: _declared(stage, tokens) for stage in STAGES}
        whole = {"format": ROWS_FORMAT, **record, "mesh": str(mesh), "fields": names}
        nbytes += (beside / "table.safetensors").write_bytes(save(table))
        nbytes += (beside / "record.json").write_text(json.dumps(whole))
    return nbytes


def _declared(stage: str, tokens: Mapping[str, Tensor]) -> dict[str, Any]:
    """The dtype and further dims of a stage's fields, which a rank without rows reads them by."""
    own = {name.removeprefix(f"{stage}/"): x for name, x in tokens.items() if name.startswith(f"{stage}/")}
    return {name: [str(x.dtype).removeprefix("torch."), list(x.shape[1:])] for name, x in own.items()}


def _end_to_end(x_bT: Tensor, rows: Rows) -> Tensor:
    """This rank's rows of a field without padding, on the CPU."""
    lengths = torch.from_numpy(rows.lengths[rows.own]).to(x_bT.device)
    return x_bT[torch.arange(x_bT.shape[1], device=x_bT.device) < lengths[:, None]].cpu().contiguous()


def saved_steps(folder: str | Path) -> dict[int, Path]:
    """The steps whose rows are there, oldest first."""
    found = {int(m[1]): p for p in Path(folder).glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name))}
    return {step: found[step] for step in sorted(found)}


def forget_rows(folder: str | Path, after: int) -> None:
    """Remove the rows of later steps, which are made again, and what was begun."""
    for path in (*Path(folder).glob(".step-*"), *(p for step, p in saved_steps(folder).items() if step > after)):
        shutil.rmtree(path, ignore_errors=True)


def keep_newest(folder: str | Path, count: int) -> None:
    """Remove all but the newest steps."""
    for path in list(saved_steps(folder).values())[:-count]:
        shutil.rmtree(path, ignore_errors=True)


def open_rows(folder: str | Path, step: int) -> SavedRows:
    """The rows of a step.

    Raises:
      CheckpointError: they are not there.
      DamagedError: they cannot be read, or another version of this program has written them.
    """
    path = Path(folder) / f"step-{step}"
    if not path.is_dir():
        there = ", ".join(map(str, saved_steps(folder))) or "none"
        raise CheckpointError(f"{folder} has no rows of step {step}, which --save_rollouts keeps; there are: {there}")
    try:
        record = json.loads((path / "record.json").read_text())
        if record["format"] != ROWS_FORMAT:
            raise ValueError(f"its format is {record['format']}, this version reads {ROWS_FORMAT}")
        return SavedRows(path, record, load_file(path / "table.safetensors"))
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
    fields = dict(saved.row_fields(stage))
    for name, parts in saved.token_rows(stage, own.tolist()).items():
        dtype, dims = saved.record["fields"][stage][name]
        whole = torch.zeros(len(own), width, *dims, dtype=getattr(torch, dtype))
        for row, part in zip(whole, parts, strict=True):
            row[: len(part)] = part
        fields[name] = whole
    return rows_of(Batch(**{name: x.to(mesh.device) for name, x in fields.items()}), owner, mesh)
