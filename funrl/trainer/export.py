"""A Hugging Face directory of any checkpoint, made on one machine without the devices of its run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh, single
from funrl.mesh.rules import Layout
from funrl.models import Model, hf
from funrl.trainer.checkpoint import Recorded, complete_checkpoints, recorded
from funrl.trainer.shard_server import CheckpointError
from funrl.trainer.shards import TENSOR_DTYPES, ShardError, ShardServer, read_tensors

OUTLINE = "model"  # beside the checkpoints: what a Hugging Face directory has but the weights


def write_outline(folder: str | Path, model: Model, tokenizer: Any) -> None:
    """Write config and tokenizer of the model of a run beside its checkpoints."""
    hf.write(Path(folder) / OUTLINE, model, (), tokenizer)


def checkpoint_of(run_dir: str | Path, step: int | None = None) -> Recorded:
    """A checkpoint of a run.

    Args:
      step: its step; None: the newest.

    Raises:
      CheckpointError: there is none, or it is damaged.
    """
    folder = Path(run_dir) / "checkpoints"
    found = complete_checkpoints(folder)
    if not found:
        raise CheckpointError(f"{run_dir} has no checkpoint; --save_every makes some")
    if step is not None and step not in found:
        raise CheckpointError(f"--step={step}: {run_dir} has checkpoints of steps {', '.join(map(str, found))}")
    return recorded(found[max(found) if step is None else step])


def export_checkpoint(run_dir: str | Path, step: int | None = None, to: str | Path | None = None) -> Path:
    """Write a Hugging Face directory of a checkpoint; one file of weights at a time is in memory.

    Args:
      step: of the checkpoint; None: the newest.
      to: the directory; None: model-step-N in that of the run.

    Returns: the directory.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be read.
    """
    found = checkpoint_of(run_dir, step)
    outline = found.path.parent / OUTLINE
    model = hf.load_model(outline)
    target = Path(to) if to is not None else Path(run_dir) / f"model-step-{found.facts['step']}"
    shutil.copytree(outline, target, dirs_exist_ok=True)  # the tokenizer as it is
    hf.write(target, model, _named_weights(found, model))
    return target


def _named_weights(found: Recorded, model: Model) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names, and in the shapes, of the Hugging Face directory."""
    for name, x in lead_weights(found, model, None, {}, single()):
        theirs, shape = model.names[name]
        yield theirs, x.reshape(shape)


def lead_weights(
    found: Recorded, model: Model, dtype: torch.dtype | None, layouts: Mapping[str, Layout], mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards of the weights that a checkpoint is about, by their names in the model. Collective.

    Args:
      model: what `OUTLINE` describes.
      dtype: of the weights; None: as they are stored.
      layouts: of those that are split, by name.

    Raises:
      CheckpointError: on every rank, where they cannot be read.
    """
    begin, server = f"roles/{found.facts['lead']}/params/", ShardServer()
    like = {begin + name: x for name, x in trees.named(model.shapes)}
    missing = [name for name, x in like.items() if name not in found.arrays or found.arrays[name].shape != x.shape]
    if missing:
        raise CheckpointError(f"{found.path}: {missing[0]} is not there, or not as {OUTLINE}/config.json says")
    dtypes = {name: dtype or TENSOR_DTYPES[found.arrays[name].dtype] for name in like}
    local = {begin + name: layout for name, layout in layouts.items()}
    shapes = {name: local[name].local_shape(mesh.rank) if name in local else x.shape for name, x in like.items()}
    like = {name: torch.empty(shapes[name], dtype=dtypes[name], device="meta") for name in like}
    try:
        for name, x in read_tensors(str(found.path), found.arrays, like, local, mesh, server):
            yield name.removeprefix(begin), x
    except ShardError as error:
        raise CheckpointError(f"{found.path}: it cannot be read: {error}") from error
    finally:
        server.close()
