"""A Hugging Face directory of any checkpoint, made on one machine without the devices of its run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import AXES, Mesh, single
from funrl.mesh.rules import Layout
from funrl.models import Model, hf
from funrl.models.generation_config import GENERATION
from funrl.models.lora import FIRST, SECOND, plain_name, trained_part, with_lora
from funrl.models.low_rank import LowRank, merged
from funrl.models.peft_files import write_peft
from funrl.models.resize import with_vocabulary
from funrl.models.weight_dtypes import weight_dtype
from funrl.trainer.base_model import base_directory, check_base, lora_in
from funrl.trainer.checkpoint import Recorded, complete_checkpoints, recorded
from funrl.trainer.job_models import TORCH_DTYPES
from funrl.trainer.shard_server import CheckpointError
from funrl.trainer.shards import TENSOR_DTYPES, ShardError, ShardServer, read_tensors
from funrl.trainer.weight_digests import weight_digests

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
        end = Path(run_dir) / "model"
        rest = f"; the model at its end is {end}" if (end / "config.json").is_file() else ""
        raise CheckpointError(f"{run_dir} has no checkpoint; --save_every makes some{rest}")
    if step is not None and step not in found:
        raise CheckpointError(f"--step={step}: {run_dir} has checkpoints of steps {', '.join(map(str, found))}")
    return recorded(found[max(found) if step is None else step])


def export_checkpoint(
    run_dir: str | Path, step: int | None = None, to: str | Path | None = None, adapter: bool = False
) -> Path:
    """Write a Hugging Face directory of a checkpoint; one file of weights at a time is in memory.

    Adapters are merged with the base that they were trained on, which must be where it was.

    Args:
      step: of the checkpoint; None: the newest.
      to: the directory; None: model-step-N in that of the run, or adapter-step-N.
      adapter: write adapters alone, as PEFT has them.

    Returns: the directory.

    Raises:
      CheckpointError: there is no such checkpoint, it cannot be read, or its base has changed.
    """
    found = checkpoint_of(run_dir, step)
    outline, lora = found.path.parent / OUTLINE, lora_in(found.facts)
    model = hf.load_model(outline)
    name = f"{'adapter' if adapter else 'model'}-step-{found.facts['step']}"
    target = Path(run_dir) / name if to is None else Path(to)
    if not adapter:
        shutil.copytree(outline, target, dirs_exist_ok=True)  # the tokenizer as it is
        hf.write(target, model, _named_weights(found, model))
        return target
    if lora is None:
        raise CheckpointError(f"--adapter: {found.path} holds all weights and no adapters; leave it out")
    adapted = with_lora(model, lora)
    own = dict(stored_weights_of(found, trained_part(adapted, adapted.shapes), None, {}, single()))
    shutil.copytree(outline, target, ignore=shutil.ignore_patterns("config.json", GENERATION), dirs_exist_ok=True)
    write_peft(target, adapted, own, base_directory(found).absolute())
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

    Adapters are merged with their base.

    Args:
      model: what `OUTLINE` describes.
      dtype: of the weights; None: as they are stored.
      layouts: of those that are split, by name.

    Raises:
      CheckpointError: on every rank, where they cannot be read, or the base has changed.
    """
    if lora_in(found.facts) is None:
        yield from stored_weights_of(found, model.shapes, dtype, layouts, mesh)
    else:
        for name, x in _merged_weights(found, model, layouts, mesh):
            yield name, x if dtype is None else x.to(weight_dtype(name, dtype))


def _merged_weights(
    found: Recorded, model: Model, layouts: Mapping[str, Layout], mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint of adapters, merged in the dtype of the run, one after the other.

    Each weight of the base is compared with what the checkpoint knows of it.
    """
    lora, directory = lora_in(found.facts), base_directory(found)
    assert lora is not None
    adapted, dtype = with_lora(model, lora), TORCH_DTYPES[found.facts["dtype"]]
    own = dict(stored_weights_of(found, trained_part(adapted, adapted.shapes), None, {}, mesh))
    base = with_vocabulary(hf.check_directory(directory), model.config.vocab)
    read, there = hf.weight_reader(directory, base, dtype), {plain_name(name): name for name in base.names}
    whole = {name: tuple(x.shape) for name, x in trees.named(base.shapes)}
    for name, x in trees.named(model.shapes):
        if name in own:
            yield name, own[name].to(mesh.device)
            continue
        layout = layouts.get(name) or Layout(tuple(x.shape), ((),) * x.ndim, tuple(mesh.sizes[axis] for axis in AXES))
        short, box = plain_name(name), layout.box(mesh.rank)
        fits = short in there and whole.get(there[short]) == layout.shape
        weight = read(there[short], box) if fits else None
        digests = {} if weight is None else weight_digests({short: weight}, {short: layout}, mesh)
        check_base(found.path, found.facts, digests, directory, (short,))
        assert weight is not None
        if name + FIRST in own:
            out = own[name + SECOND].ndim - 1
            a = own[name + FIRST][(slice(None), *(slice(*edge) for edge in box[out:]))]
            b = own[name + SECOND][tuple(slice(*edge) for edge in box[:out])]
            weight = merged(LowRank(weight, a, b, lora.alpha / lora.rank))
        yield name, weight.to(mesh.device)


def stored_weights_of(
    found: Recorded, tree: trees.Tree, dtype: torch.dtype | None, layouts: Mapping[str, Layout], mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards of weights of the role that a checkpoint is about, as they are stored. Collective.

    Args:
      tree: tensors of their whole shapes.
      dtype, layouts: as in `lead_weights`.
    """
    begin, server = f"roles/{found.facts['lead']}/params/", ShardServer()
    like = {begin + name: x for name, x in trees.named(tree)}
    missing = [name for name, x in like.items() if name not in found.arrays or found.arrays[name].shape != x.shape]
    if missing:
        raise CheckpointError(f"{found.path}: {missing[0]} is not there, or not as {OUTLINE}/config.json says")
    dtypes = {name: weight_dtype(name, dtype) if dtype else TENSOR_DTYPES[found.arrays[name].dtype] for name in like}
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
