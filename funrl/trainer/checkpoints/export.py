"""Export of a checkpoint to a Hugging Face directory, on one machine without the devices of its run."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh, single
from funrl.mesh.rules import Layout, whole_layout
from funrl.models import Model
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.generation_config import GENERATION
from funrl.models.huggingface.names import names_of
from funrl.models.huggingface.peft_files import write_peft
from funrl.models.huggingface.resize import with_vocabulary
from funrl.models.lora import FIRST, SECOND, plain_name, trained_part, with_lora
from funrl.models.low_rank import LowRank, merged
from funrl.models.model import Lora
from funrl.models.nf4_base import quantized, whole_weights_of
from funrl.models.weight_dtypes import TORCH_DTYPES, weight_dtype
from funrl.trainer.checkpoints.base_model import base_directory, check_base, has_nf4_base, lora_in
from funrl.trainer.checkpoints.checkpoint import (
    Recorded,
    complete_checkpoints,
    incomplete_checkpoints,
    recorded,
    step_of,
)
from funrl.trainer.checkpoints.weight_digests import weight_digests
from funrl.trainer.jobs.job import Job
from funrl.trainer.jobs.provenance import TOKENIZER_FILES
from funrl.trainer.storage.shard_server import COMPLETE, CheckpointError, DamagedError
from funrl.trainer.storage.shards import TENSOR_DTYPES, ShardError, ShardServer, read_tensors

OUTLINE = "model"  # beside the checkpoints: what a Hugging Face directory has but the weights
MODEL_FILES = re.compile(
    r"(generation_)?config\.json|.*\.safetensors(\.index\.json)?|(pytorch_model|adapter_model).*|adapter_config\.json|"
    + "|".join(map(re.escape, TOKENIZER_FILES))
)  # files of a model, its tokenizer or its adapters


def write_outline(folder: str | Path, model: Model, job: Job) -> dict[str, str]:
    """Write config and tokenizer of the model of a run beside its checkpoints; return the digests of the files."""
    hf.write(Path(folder) / OUTLINE, model, (), tokenizer=job.tokenizer, dtype=job.save_dtype)
    return outline_digests(folder)


def outline_digests(folder: str | Path) -> dict[str, str]:
    """Digests of the files of a model's outline beside checkpoints, by name; other files there are left out."""
    files = sorted((Path(folder) / OUTLINE).glob("*"))
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.is_file() and MODEL_FILES.fullmatch(file.name)
    }


def check_outline(record: Recorded) -> None:
    """Compare the outline beside a checkpoint with its record; those of earlier versions have none of it.

    Raises:
      DamagedError: a file is missing, changed or added.
    """
    known = record.facts.get("outline")
    if not known:
        return
    folder = record.path.parent
    digests = outline_digests(folder)
    for name in sorted(known.keys() | digests.keys()):
        if known.get(name) != digests.get(name):
            what = "it is missing" if name not in digests else "its checksum is wrong" if name in known else "it is new"
            raise DamagedError(f"{folder / OUTLINE / name}: {what}")


def checkpoint_of(run_dir: str | Path, step: int | None = None) -> Recorded:
    """A checkpoint of a run.

    Args:
      run_dir: of the run.
      step: its step; None: the newest.

    Raises:
      CheckpointError: there is none, or it or the outline beside it is damaged.
    """
    folder = Path(run_dir) / "checkpoints"
    paths = complete_checkpoints(folder)
    damaged = incomplete_checkpoints(folder)
    if (step is None and damaged) or step in map(step_of, damaged):
        path = damaged[-1] if step is None else folder / f"step-{step}"
        others = f"; --step takes another: {', '.join(map(str, paths))}" if paths else ""
        raise DamagedError(f"{path / COMPLETE}: it is missing{others}")
    if not paths:
        end = Path(run_dir) / "model"
        rest = f"; the model at its end is {end}" if (end / "config.json").is_file() else ""
        raise CheckpointError(f"{run_dir} has no checkpoint; --save_every makes some{rest}")
    if step is not None and step not in paths:
        raise CheckpointError(f"--step={step}: {run_dir} has checkpoints of steps {', '.join(map(str, paths))}")
    record = recorded(paths[max(paths) if step is None else step])
    try:
        check_outline(record)
    except DamagedError as error:
        raise DamagedError(f"{error}; --resume of the run writes it anew") from error
    return record


class Exported(NamedTuple):
    """A directory that was written, and the step of its checkpoint."""

    directory: Path
    step: int


def export_checkpoint(
    run_dir: str | Path,
    step: int | None = None,
    to: str | Path | None = None,
    adapter: bool = False,
    overwrite: bool = False,
    *,
    save_dtype: str | None = None,
) -> Exported:
    """Write a Hugging Face directory of a checkpoint; one file of weights at a time is in memory.

    Adapters are merged with the base that they were trained on, which must be where it was. The files are written
    beside the directory and take their names when all are whole.

    Args:
      run_dir: of the run.
      step: of the checkpoint; None: the newest.
      to: the directory; None: model-step-N in that of the run, or adapter-step-N.
      adapter: write adapters alone, as PEFT has them.
      overwrite: a model, or a part of one, that is in `to` may be lost; other files there stay.
      save_dtype: of the weights; None: that in which the run saves its model.

    Raises:
      CheckpointError: there is no such checkpoint, it cannot be read, its base has changed, or `to` holds a model.
    """
    record = checkpoint_of(run_dir, step)
    if adapter and lora_in(record.facts) is None:
        raise CheckpointError(f"--adapter: {record.path} holds all weights and no adapters; leave it out")
    if adapter and save_dtype is not None:
        raise CheckpointError(f"--save_dtype={save_dtype}: adapters are saved as they were trained; leave it out")
    name = f"{'adapter' if adapter else 'model'}-step-{record.facts['step']}"
    target = Path(run_dir) / name if to is None else Path(to)
    _check_target(target, record, Path(run_dir), overwrite=overwrite or to is None)
    draft = target.absolute().with_name(f".{target.absolute().name}.{os.getpid()}.partial")
    try:
        if adapter:
            _write_adapters(record, draft)
        else:
            _write_model(record, draft, save_dtype)
        _take_places(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Exported(target, record.facts["step"])


def _write_model(record: Recorded, folder: Path, dtype: str | None) -> None:
    """Write a model to a directory of its own, in a dtype; None: in that of the outline."""
    outline = record.path.parent / OUTLINE
    model = hf.load_model(outline)
    shutil.copytree(outline, folder)  # the tokenizer as it is
    hf.write(folder, model, _named_weights(record, model), dtype=dtype or model.config.source.dtype)


def _lora_of(record: Recorded) -> Lora:
    """The adapters of a checkpoint. Raises: CheckpointError, it holds all weights."""
    lora = lora_in(record.facts)
    if lora is None:
        raise CheckpointError(f"{record.path}: it holds all weights and no adapters")
    return lora


def _write_adapters(record: Recorded, folder: Path) -> None:
    """Write adapters alone to a directory of their own."""
    outline = record.path.parent / OUTLINE
    lora = _lora_of(record)
    adapted = with_lora(hf.load_model(outline), lora)
    trained = trained_part(adapted, adapted.shapes)
    own = dict(stored_weights_of(record, trained, None, layouts={}, mesh=single()))
    shutil.copytree(outline, folder, ignore=shutil.ignore_patterns("config.json", GENERATION))
    write_peft(folder, adapted, own, base=base_directory(record).absolute())


def _check_target(target: Path, record: Recorded, run_dir: Path, overwrite: bool) -> None:
    """Raise CheckpointError where an export would take the place of something else."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CheckpointError(f"--to={target}: this is a file, a directory is needed")
    needed = {run_dir: "the directory of the run", record.path.parent / OUTLINE: "what every export of the run needs"}
    if lora_in(record.facts) is not None:
        needed[base_directory(record)] = "the base that the run's adapters stand on"
    began = record.facts.get("provenance", {}).get("flags", {}).get("model")
    if began is not None:
        needed[hf.find_directory(began)] = "the model that the run began with"
    for folder, words in needed.items():
        if folder.exists() and target.samefile(folder):
            raise CheckpointError(f"--to={target}: this is {words}; give another directory")
    existing = sorted(file.name for file in target.iterdir() if MODEL_FILES.fullmatch(file.name))
    if existing and not overwrite:
        names = ", ".join(existing[:3]) + (" and more" if len(existing) > 3 else "")
        raise CheckpointError(
            f"--to={target}: holds {names}, which would be lost; give another directory, or --overwrite"
        )


def _take_places(draft: Path, target: Path) -> None:
    """Move files to the directory that they are for, instead of the files of a model that it holds."""
    if not target.exists():
        os.replace(draft, target)
        return
    for file in list(target.iterdir()):
        if MODEL_FILES.fullmatch(file.name) and not file.is_dir():
            file.unlink()
    for file in draft.iterdir():
        os.replace(file, target / file.name)


def _named_weights(record: Recorded, model: Model) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names, and in the shapes, of the Hugging Face directory."""
    names = names_of(model)
    for name, x in lead_weights(record, model, None, layouts={}, mesh=single()):
        file_name, shape = names[name]
        yield file_name, x.reshape(shape)


def lead_weights(
    record: Recorded, model: Model, dtype: torch.dtype | None, *, layouts: Mapping[str, Layout], mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """Read this rank's shards of the weights that a checkpoint is about, by their names in the model. Collective.

    Adapters are merged with their base.

    Args:
      record: the checkpoint.
      model: what `OUTLINE` describes.
      dtype: of the weights; None: as they are stored.
      layouts: of split leaves, by name.
      mesh: the ranks.

    Raises:
      CheckpointError: on every rank, where they cannot be read, or the base has changed.
    """
    if lora_in(record.facts) is None:
        yield from stored_weights_of(record, model.shapes, dtype, layouts=layouts, mesh=mesh)
        return
    for name, x in _merged_weights(record, model, layouts, mesh=mesh):
        yield name, x if dtype is None else x.to(weight_dtype(name, dtype))


def _merged_weights(
    record: Recorded, model: Model, layouts: Mapping[str, Layout], mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint of adapters, merged in the dtype of the run, one after the other.

    Each weight of the base is compared with what the checkpoint knows of it.
    """
    lora = _lora_of(record)
    nf4 = has_nf4_base(record.facts)
    directory = base_directory(record)
    adapted = with_lora(model, lora)
    own = dict(stored_weights_of(record, trained_part(adapted, adapted.shapes), None, layouts={}, mesh=mesh))
    base = with_vocabulary(hf.check_directory(directory), model.config.vocab)
    base_shapes = {plain_name(name): (name, tuple(x.shape)) for name, x in trees.named(base.shapes)}
    names: dict[str, str] = {}  # of a weight of the base -> of the same weight of the model
    wanted: dict[str, Layout] = {}
    for name, x in trees.named(model.shapes):
        if name in own:
            yield name, own[name].to(mesh.device)
            continue
        base_name, shape = base_shapes.get(plain_name(name), ("", ()))
        if shape != tuple(x.shape):
            check_base(record.path, record.facts, {}, directory=directory, names=(plain_name(name),))
        names[base_name] = name
        wanted[base_name] = whole_layout(x.shape, mesh) if nf4 else layouts.get(name) or whole_layout(x.shape, mesh)
    dtype = TORCH_DTYPES[record.facts["dtype"]]
    for base_name, weight in hf.read_weights(directory, base, dtype, wanted=wanted, mesh=mesh):
        name = names[base_name]
        short = plain_name(name)
        stored = dict(quantized([(short, weight)])) if nf4 else {short: weight}
        places = {leaf: whole_layout(x.shape, mesh) if nf4 else wanted[base_name] for leaf, x in stored.items()}
        check_base(record.path, record.facts, weight_digests(stored, places, mesh), directory=directory, names=stored)
        box = (layouts.get(name) or wanted[base_name]).box(mesh.rank)
        if nf4:
            weight = whole_weights_of(stored, dtype)(short)[tuple(slice(*edge) for edge in box)]
        if name + FIRST in own:
            out = own[name + SECOND].ndim - 1
            a = own[name + FIRST][(slice(None), *(slice(*edge) for edge in box[out:]))]
            b = own[name + SECOND][tuple(slice(*edge) for edge in box[:out])]
            weight = merged(LowRank(weight, a, b, scale=lora.alpha / lora.rank))
        yield name, weight


def stored_weights_of(
    record: Recorded, tree: trees.Tree, dtype: torch.dtype | None, *, layouts: Mapping[str, Layout], mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """Read this rank's shards of weights of the role that a checkpoint is about, as they are stored. Collective.

    Args:
      record: the checkpoint.
      tree: tensors of their whole shapes.
      dtype: as in `lead_weights`.
      layouts: as in `lead_weights`.
      mesh: the ranks.
    """
    prefix = f"roles/{record.facts['lead']}/params/"
    dtypes = {}
    for name, x in trees.named(tree):
        array = record.arrays.get(prefix + name)
        if array is None or array.shape != x.shape:
            raise CheckpointError(f"{record.path}: {prefix}{name} is not there, or not as {OUTLINE}/config.json says")
        dtypes[prefix + name] = weight_dtype(name, dtype) if dtype else TENSOR_DTYPES[array.dtype]
    stored_layouts = {prefix + name: layout for name, layout in layouts.items()}
    server = ShardServer()
    try:
        for name, x in read_tensors(record.database(server), dtypes, stored_layouts, mesh=mesh):
            yield name.removeprefix(prefix), x
    except ShardError as error:
        raise CheckpointError(f"{record.path}: it cannot be read: {error}") from error
    finally:
        server.close()
