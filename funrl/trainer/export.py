"""A Hugging Face directory of any checkpoint, made on one machine without the devices of its run."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import AXES, single
from funrl.mesh.rules import Layout
from funrl.models import Model, hf
from funrl.models.generation_config import GENERATION
from funrl.models.lora import FIRST, SECOND, trained_part, with_lora
from funrl.models.low_rank import LowRank, merged
from funrl.models.peft_files import write_peft
from funrl.rollout.certificate import digest
from funrl.trainer.base_model import OWN_BASE, check_base, lora_in
from funrl.trainer.checkpoint import Recorded, complete_checkpoints, recorded
from funrl.trainer.job import TORCH_DTYPES
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
    if adapter and lora is None:
        raise CheckpointError(f"--adapter: {found.path} holds all weights and no adapters; leave it out")
    if lora is None:
        shutil.copytree(outline, target, dirs_exist_ok=True)  # the tokenizer as it is
        hf.write(target, model, _under_their_names(model, _arrays(found, model.shapes)))
        return target
    base = found.facts["base"]["directory"] or Path(run_dir) / OWN_BASE
    adapted = with_lora(model, lora)
    own = dict(_arrays(found, trained_part(adapted, adapted.shapes)))
    if adapter:
        not_its_own = shutil.ignore_patterns("config.json", GENERATION)
        shutil.copytree(outline, target, ignore=not_its_own, dirs_exist_ok=True)
        write_peft(target, adapted, own, Path(base).absolute())
        return target
    shutil.copytree(outline, target, dirs_exist_ok=True)
    hf.write(target, model, _under_their_names(model, _merged(found, adapted, own, base)))
    return target


def _under_their_names(model: Model, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names, and in the shapes, of the Hugging Face directory."""
    for name, x in named:
        theirs, shape = model.names[name]
        yield theirs, x.reshape(shape)


def _merged(
    found: Recorded, model: Model, own: Mapping[str, Tensor], directory: str | Path
) -> Iterator[tuple[str, Tensor]]:
    """All weights of a model with adapters, these merged, one after the other.

    Args:
      own: what learned, by name.
      directory: of the base, each of whose weights is compared with the one that the checkpoint knows.
    """
    assert model.adapters is not None
    base, lora = hf.check_directory(directory), model.adapters.lora
    read, there = hf.weight_reader(directory, base), {name.removeprefix("decoder/"): name for name in base.names}
    for name, _ in trees.named(model.adapters.plain.shapes):
        if name in own:
            yield name, own[name]
            continue
        short = name.removeprefix("decoder/")
        digests = {}
        if short in there:
            weight = read(there[short]).to(TORCH_DTYPES[found.facts["dtype"]])
            layout = Layout(tuple(weight.shape), ((),) * weight.ndim, (1,) * len(AXES))
            digests[short] = int(digest(weight, layout, 0, weight.dtype))
        check_base(found.path, found.facts, digests, directory, (short,))
        factors = own.get(name + FIRST), own.get(name + SECOND)
        if factors[0] is not None and factors[1] is not None:
            weight = merged(LowRank(weight, *factors, lora.alpha / lora.rank))
        yield name, weight


def _arrays(found: Recorded, shapes: trees.Tree) -> Iterator[tuple[str, Tensor]]:
    """Weights of the role that a run saves, in whole, by name."""
    begin, server = f"roles/{found.facts['lead']}/params/", ShardServer()
    like = {begin + name: x for name, x in trees.named(shapes)}
    missing = [name for name, x in like.items() if name not in found.arrays or found.arrays[name].shape != x.shape]
    if missing:
        raise CheckpointError(f"{found.path}: {missing[0]} is not there, or not as {OUTLINE}/config.json says")
    dtypes = {name: TENSOR_DTYPES[found.arrays[name].dtype] for name in like}
    like = {name: torch.empty(x.shape, dtype=dtypes[name], device="meta") for name, x in like.items()}
    try:
        for name, x in read_tensors(str(found.path), found.arrays, like, {}, single(), server):
            yield name.removeprefix(begin), x
    except ShardError as error:
        raise CheckpointError(f"{found.path}: it cannot be read: {error}") from error
    finally:
        server.close()
