"""Checkpoints: a walk over the names of the state. Written whole by rank 0, read by every rank in its own layouts.

A checkpoint is a directory `step-N` with `state.safetensors` (tensors by name) and `state.json` (numbers by name). It
is written beside and renamed, so that there is a whole one or none; the one before goes when the new one is there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from funrl import trees
from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh
from funrl.mesh.reshard import export_weights
from funrl.mesh.rules import Layout
from funrl.optim import layouts_of
from funrl.trainer.build import Parts
from funrl.trainer.declaration import SettingsError
from funrl.trainer.job import Job
from funrl.trainer.observing import Observer
from funrl.trainer.sources import Source
from funrl.trainer.state import State

TENSORS, NUMBERS = "state.safetensors", "state.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file and what is wrong."""


def state_layouts(parts: Parts, state: State) -> dict[str, Layout]:
    """The layouts of the tensors of a state that are split over ranks, by name; the others are whole on every rank."""
    found = {}
    for name, role in state.roles.items():
        stored = parts.roles[name].placed.stored
        trees_of = {"params": stored, "opt_state": layouts_of(role.opt_state, stored)}
        for part, tree in trees_of.items():
            found |= {f"roles/{name}/{part}/{leaf}": layout for leaf, layout in trees.named(tree)}
    return found


def save(folder: str | Path, state: State, layouts: dict[str, Layout], mesh: Mesh) -> Path:
    """Write `folder`/step-N. Collective: every rank takes part; rank 0 writes, and needs the whole state's memory.

    Raises:
      CheckpointError: on every rank, where rank 0 cannot write.
    """
    folder = Path(folder)
    named = trees.named(state)
    tensors = {name: x for name, x in named if isinstance(x, Tensor)}
    numbers = {name: x for name, x in named if not isinstance(x, Tensor)}
    whole: dict[str, Tensor] = {}
    for name, x in _whole(tensors, layouts, mesh):
        if mesh.rank == 0:
            whole[name] = x.detach().to("cpu", copy=True).contiguous()
    problem = None
    if mesh.rank == 0:
        try:
            _write(folder, state.step, whole, numbers)
        except (OSError, SafetensorError) as error:
            problem = f"{folder}: the checkpoint of step {state.step} cannot be written: {error}"
    problems = [p for p in collectives.gather_objects(problem, mesh) if p is not None]
    if problems:
        raise CheckpointError(problems[0])
    return folder / f"step-{state.step}"


def newest(folder: str | Path) -> Path | None:
    """The newest checkpoint of a folder; None where there is none."""
    found = {int(m[1]): p for p in Path(folder).glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name))}
    return found[max(found)] if found else None


def load(path: str | Path, state: State, layouts: dict[str, Layout], mesh: Mesh) -> State:
    """The state of a checkpoint, each tensor in this rank's layout and in the dtype and on the device of `state`'s.

    Args:
      state: of the same run before its first step: its names, shapes and dtypes count. What is empty there may have
        any sizes, in as many dims.

    Raises:
      CheckpointError: a file is missing or damaged, or holds another state; the message lists the names.
    """
    path = Path(path)
    try:
        numbers = json.loads((path / NUMBERS).read_text())
        with safe_open(path / TENSORS, framework="pt") as file:
            names = set(file.keys()) | set(numbers)
            wanted = {name for name, _ in trees.named(state)}
            if names != wanted:
                raise CheckpointError(
                    f"{path}: it holds the state of another run: missing {sorted(wanted - names)[:3]}, unknown "
                    f"{sorted(names - wanted)[:3]}; give the flags that the run was started with"
                )
            values = [
                _read(file, path, name, x, layouts.get(name), mesh) if isinstance(x, Tensor) else numbers[name]
                for name, x in trees.named(state)
            ]
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: it cannot be read: {error}") from error
    return trees.fill(state, values)


def shared_folder(observer: Observer, mesh: Mesh) -> str | None:
    """The folder of the checkpoints, which rank 0 knows."""
    return collectives.gather_objects(observer.checkpoint_folder(), mesh)[0]


def save_when_due(job: Job, parts: Parts, source: Source, state: State, folder: str | None) -> None:
    """Save a state every `--save_every` steps, and after the last one."""
    every = job.settings.save_every
    if every and folder is not None and (state.step % every == 0 or state.step == job.settings.steps):
        whole = state._replace(source=source.gathered(state.source))
        save(folder, whole, state_layouts(parts, state), parts.mesh)


def resumed(job: Job, parts: Parts, source: Source, state: State, folder: str | None, observer: Observer) -> State:
    """The newest checkpoint's state where `--resume` is given and there is one; else the given one."""
    if not job.settings.resume or folder is None:
        return state
    path = newest(folder)
    paths = set(collectives.gather_objects(path and path.name, parts.mesh))
    if len(paths) > 1:
        raise SettingsError(f"--resume: the ranks see different checkpoints in {folder}: {sorted(map(str, paths))}")
    if path is None:
        observer.note(f"--resume: there is no checkpoint in {folder} yet; the run begins")
        return state
    state = load(path, state, state_layouts(parts, state), parts.mesh)
    observer.resumed(state.step)
    observer.note(f"resumed after step {state.step} from {path}")
    # The engine is given the weights that it had: that load has been counted.
    return state._replace(source=source.shared(state.source), version=state.version - 1)


def _whole(tensors: dict[str, Tensor], layouts: dict[str, Layout], mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Every tensor whole, a bucket at a time."""
    split = {name: x for name, x in tensors.items() if name in layouts}
    yield from ((name, x) for name, x in tensors.items() if name not in layouts)
    names = {name: (name, layouts[name].shape) for name in split}
    yield from export_weights(split, {name: layouts[name] for name in split}, mesh, names)


def _write(folder: Path, step: int, whole: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    beside, path = folder / f".step-{step}", folder / f"step-{step}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    save_file(whole, beside / TENSORS)
    (beside / NUMBERS).write_text(json.dumps(numbers))
    shutil.rmtree(path, ignore_errors=True)
    beside.rename(path)
    for other in folder.glob("step-*"):
        if other != path:
            shutil.rmtree(other, ignore_errors=True)


def _read(file: Any, path: Path, name: str, x: Tensor, layout: Layout | None, mesh: Mesh) -> Tensor:
    """This rank's part of a tensor."""
    stored = file.get_slice(name)
    shape = tuple(x.shape) if layout is None else layout.shape
    if not x.numel() and len(stored.get_shape()) == len(shape):
        return file.get_tensor(name).to(x)
    if tuple(stored.get_shape()) != shape:
        raise CheckpointError(f"{path}: {name} has shape {list(stored.get_shape())}, this run needs {list(shape)}")
    box = tuple((0, n) for n in shape) if layout is None else layout.box(mesh.rank)
    part = stored[tuple(slice(low, high) for low, high in box)] if shape else file.get_tensor(name)
    return torch.empty_like(x).copy_(part)
