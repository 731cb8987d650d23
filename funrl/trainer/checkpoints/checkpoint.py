"""Checkpoints: a walk over the names of the state. Every rank writes and reads its own part, in any layout.

A checkpoint is a directory `step-N` in orbax's layout, which `shard_server` writes. It is made beside and renamed when
every rank has written, so that there is a whole one or none.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import Layout
from funrl.optim import layouts_of
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.roles import State
from funrl.trainer.storage.row_shards import HeldRows, read_held_rows
from funrl.trainer.storage.shard_server import COMPLETE, Array, CheckpointError, DamagedError, record_digest
from funrl.trainer.storage.shards import TENSOR_DTYPES, Database, ShardError, ShardServer, read_tensors

CHECKPOINT_FORMAT = 1
SCALARS = {bool: "bool", int: "int64", float: "float64"}


class Recorded(NamedTuple):
    """The record of a checkpoint.

    Attributes:
      path: its directory.
      arrays: everything in it, by name.
      facts: of the run: "step", "mesh", "first" and "last" evaluations, "score".
    """

    path: Path
    arrays: dict[str, Array]
    facts: dict[str, Any]

    def database(self, server: ShardServer) -> Database:
        """Its arrays, as a server reads them."""
        return Database(str(self.path), self.arrays, server)


def state_layouts(parts: Parts, state: State) -> dict[str, Layout]:
    """The layouts of the tensors of a state that are split over ranks, by name; the others are whole on every rank."""
    layouts = {}
    for name, role in state.roles.items():
        stored = parts.roles[name].stored
        role_layouts = {"params": stored, "opt_state": layouts_of(role.opt_state, stored)}
        for part, tree in role_layouts.items():
            layouts |= {f"roles/{name}/{part}/{leaf}": layout for leaf, layout in trees.named(tree)}
    for name in state.earlier:
        stored = trees.named(parts.roles[parts.main_role].stored)
        layouts |= {f"earlier/{name}/params/{leaf}": layout for leaf, layout in stored}
    for name in state.following:
        layouts |= {f"following/{name}/{leaf}": layout for leaf, layout in trees.named(parts.roles[name].stored)}
    return layouts


def tensors_of(state: State) -> dict[str, Tensor]:
    """The tensors of a state, by name."""
    return {name: x for name, x in trees.named(state) if isinstance(x, Tensor)}


def numbers_of(state: State) -> dict[str, int | float | bool]:
    """The numbers of a state, by name.

    Raises:
      CheckpointError: a leaf is neither a tensor nor a number.
    """
    numbers = {name: x for name, x in trees.named(state) if not isinstance(x, Tensor)}
    for name, x in numbers.items():
        if type(x) not in SCALARS:
            raise CheckpointError(f"{name} of the state is a {type(x).__name__}; a checkpoint has tensors and numbers")
    return numbers


def scalar_arrays(numbers: Mapping[str, int | float | bool]) -> dict[str, Array]:
    """The arrays that hold numbers."""
    return {name: Array((), SCALARS[type(x)], (), scalar=True) for name, x in numbers.items()}


def complete_checkpoints(folder: str | Path) -> dict[int, Path]:
    """The checkpoints of a folder by step, oldest first, whole at the time when they were written."""
    return {step: path for step, path in step_folders(folder).items() if (path / COMPLETE).exists()}


def incomplete_checkpoints(folder: str | Path) -> list[Path]:
    """Steps after the newest whole checkpoint that lack their record, oldest first: something has taken it away.

    Older ones are what the removal of a checkpoint has left when it was interrupted.
    """
    newest = max(complete_checkpoints(folder), default=-1)
    return [path for step, path in step_folders(folder).items() if step > newest and path.is_dir()]


def newest_checkpoint(folder: str | Path, damaged: dict[Path, str]) -> Recorded | None:
    """The newest checkpoint whose record can be read and whose files have their sizes; None: there is none.

    Args:
      damaged: checkpoints to pass over and what is wrong with them; further ones are added, the newest first.

    Raises:
      CheckpointError: another version has written the newest.
    """
    for path in reversed(incomplete_checkpoints(folder)):
        damaged.setdefault(path, f"{path / COMPLETE}: it is missing")
    for path in reversed(complete_checkpoints(folder).values()):
        if path in damaged:
            continue
        try:
            return recorded(path)
        except DamagedError as error:
            damaged[path] = str(error)
    return None


def adopt_rescued(folder: str | Path) -> list[str]:
    """Move checkpoints that stand in a folder of their own, as a failing run saves them elsewhere, to the others.

    Returns: a line on each that was found.
    """
    remarks = []
    for path in sorted(Path(folder).glob("[!.]*/step-*")):
        target = Path(folder) / path.name
        if step_of(path) is None or not (path / COMPLETE).exists():
            continue
        if target.exists():
            remarks.append(f"{path} is not read, as {target} is there too")
            continue
        path.rename(target)
        remarks.append(f"{path} is now {target}")
    return remarks


def sweep(folder: str | Path) -> None:
    """Remove what interrupted saves have left."""
    for path in Path(folder).glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def recorded(path: str | Path) -> Recorded:
    """Read the record of a checkpoint, and check the sizes of its files.

    Raises:
      DamagedError: a file is missing or has another size, or the record cannot be read.
      CheckpointError: another version of this program has written it.
    """
    path = Path(path)
    try:
        record, files = _parsed(path)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path / COMPLETE}: it cannot be read: {_reason(error)}") from error
    for name, size in files.items():
        actual = (path / name).stat().st_size if (path / name).exists() else None
        if actual != size:
            raise DamagedError(f"{path / name}: {'it is missing' if actual is None else f'{actual} bytes of {size}'}")
    return record


def _parsed(path: Path) -> tuple[Recorded, dict[str, int]]:
    """The record of a checkpoint, and the sizes of its files by name. Raises what a damaged record causes."""
    facts = json.loads((path / COMPLETE).read_text())
    if facts.pop("digest") != record_digest(facts):
        raise ValueError("its checksum is wrong")
    if type(facts["format"]) is not int:
        raise ValueError(f"its format is {facts['format']}")
    if facts["format"] != CHECKPOINT_FORMAT:
        raise CheckpointError(
            f"{path}: its format is {facts['format']}, this version of funrl reads {CHECKPOINT_FORMAT}; take the "
            "version that wrote it"
        )
    arrays = {name: _array(*entry) for name, entry in facts.pop("arrays").items()}
    files = {_inside(name): size for name, size in facts.pop("files").items()}
    if type(facts["step"]) is not int or facts["step"] != step_of(path):
        raise ValueError(f"it is of step {facts['step']}")
    if not arrays or not files:
        raise ValueError(f"it has no {'files' if arrays else 'arrays'}")
    for name in ("first", "last", "run", "frozen", "lora", "base", "provenance", "outline"):
        dict(facts.get(name, {}).items())
    dict((facts.get("unfinished") or {}).items())
    return Recorded(path, arrays, facts), files


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else None


def step_folders(folder: str | Path) -> dict[int, Path]:
    """Folders of steps, oldest first."""
    paths = {step: path for path in Path(folder).glob("step-*") if (step := step_of(path)) is not None}
    return {step: paths[step] for step in sorted(paths)}


def _array(shape: list[int], dtype: str, chunk: list[int] | tuple[int, ...] = ()) -> Array:
    """An array of a record. Raises: ValueError, TypeError."""
    if dtype not in TENSOR_DTYPES or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{dtype} {shape} is no array")
    if chunk and (len(chunk) != len(shape) or not all(type(length) is int and length >= 0 for length in chunk)):
        raise ValueError(f"{chunk} is no chunk of {shape}")
    return Array(tuple(shape), dtype, tuple(chunk))


def _inside(name: str) -> str:
    """The name of a file in the checkpoint's folder. Raises: ValueError."""
    if "\0" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name!r} is no file of it")
    return name


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)


def load(
    record: Recorded,
    state: State,
    layouts: Mapping[str, Layout],
    *,
    mesh: Mesh,
    server: ShardServer,
    held: HeldRows | None = None,
) -> State:
    """Load the state of a checkpoint: each tensor in this rank's layout, in the dtype of `state`'s, on its device.

    Args:
      record: the same on every rank.
      state: of the same run before its first step: its names, shapes and dtypes count. What is empty there may have
        any sizes, in as many dims.
      layouts: of the tensors that are split.
      mesh: all ranks.
      server: reads.
      held: leaves of rows; each rank is given a share. None: there are none.

    Raises:
      CheckpointError: it holds another state; the message lists the names.
      DamagedError: it cannot be read. Every rank raises it.
    """
    tensors = tensors_of(state)
    numbers = numbers_of(state)
    _check_names(record, {*tensors, *numbers})
    for name, x in tensors.items():
        shape = record.arrays[name].shape
        expected = layouts[name].shape if name in layouts else tuple(x.shape)
        any_size = not x.numel() and name not in layouts and len(shape) == x.ndim
        if shape != expected and not any_size:
            raise CheckpointError(
                f"{record.path}: {name} has shape {list(shape)}, this run needs {list(expected)}; "
                "--resume needs the same model and flags"
            )
    rows = frozenset() if held is None else held.names
    dtypes = {name: x.dtype for name, x in tensors.items() if name not in rows}
    dtypes |= {name: TENSOR_DTYPES[record.arrays[name].dtype] for name in numbers}
    database = record.database(server)
    try:
        values = dict(read_tensors(database, dtypes, layouts, mesh=mesh))
        if held is not None:
            values |= read_held_rows(database, held, mesh)
    except ShardError as error:
        raise DamagedError(f"{record.path}: it cannot be read: {error}") from error
    return trees.fill(state, [values[n].item() if n in numbers else values[n] for n, _ in trees.named(state)])


def _check_names(record: Recorded, wanted: set[str]) -> None:
    """Raise CheckpointError where a checkpoint has other leaves than a state."""
    missing = sorted(wanted - set(record.arrays))
    unknown = sorted(set(record.arrays) - wanted)
    if any(name.startswith(("source/begun/paused", "source/begun/columns/")) for name in unknown):
        raise CheckpointError(
            f"{record.path}: it has unfinished completions of --new_tokens_per_step in the form of an earlier version "
            "of funrl, which this one cannot continue; end the run with the version that wrote it"
        )
    if missing or unknown:
        raise CheckpointError(
            f"{record.path}: it holds the state of another run: missing {missing[:3]}, unknown {unknown[:3]}; "
            "--resume needs the flags that the run was started with"
        )
