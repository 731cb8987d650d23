"""Completions and evaluations without training: a model or a checkpoint, prompts and rewards, on any mesh.

They are those of a run: the same format of prompts, engine, rewards and statistics. The evaluation of a checkpoint on a
run's held-out prompts is the one that the run made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funrl import seeds, trees
from funrl.algos import Algorithm, chain, clipped_surrogate, group_center, reduce, to_tokens, token_mean
from funrl.data.tokenizer import load_tokenizer
from funrl.mesh.mesh import Mesh
from funrl.models import Model, hf
from funrl.models.shared_reading import load_shared
from funrl.rewards.pool import Pool
from funrl.rollout.engine import awake
from funrl.trainer.build import Parts, build, sync
from funrl.trainer.checkpoint import Recorded
from funrl.trainer.checks import check_together, data_files, names_of_fields
from funrl.trainer.clock import Clock
from funrl.trainer.declaration import SettingsError, blaming
from funrl.trainer.export import OUTLINE, checkpoint_of, lead_weights
from funrl.trainer.job import Job, devices_of, job_of
from funrl.trainer.job_checks import check_code, check_meshes
from funrl.trainer.job_data import (
    Given,
    Task,
    embedded_prompts,
    eval_prompts,
    name_of_files,
    prompts_of,
    rewarded_task,
)
from funrl.trainer.job_models import Models, located, models_of
from funrl.trainer.job_source import generation_of
from funrl.trainer.observing import Show
from funrl.trainer.prompt_data import format_of, with_chat_template
from funrl.trainer.roles import RoleState
from funrl.trainer.settings import Settings, check_values
from funrl.trainer.sharding import rank_memory
from funrl.trainer.sources import EVAL_SEED, prompt_source
from funrl.trainer.state import State

ALL = 1 << 31  # prompts, where no number says how many


class StoredModel(NamedTuple):
    """A model on disk.

    Attributes:
      directory: of Hugging Face; of a checkpoint, with everything but weights.
      checkpoint: that has these; None: the directory does.
      flags: of the run that the model is from; {} of any other model.
    """

    directory: str
    checkpoint: Recorded | None
    flags: Mapping[str, Any]


CHECKPOINT = re.compile(r"step-(\d+)")


def find_stored_model(model: str | Path, step: int | None = None) -> StoredModel:
    """The model of a directory, of a name in the local Hugging Face cache, or of a run.

    Args:
      model: of a run, its directory: of one that has ended the model, else the newest checkpoint; or a checkpoint of
        it, RUN/checkpoints/step-N.
      step: of the run's checkpoint.

    Raises:
      SettingsError, CheckpointError: there are none.
    """
    folder = hf.find_directory(model)
    if not folder.exists():
        raise SettingsError(f"{model}: no such directory, and no such model in the local cache")
    checkpoint = CHECKPOINT.fullmatch(folder.name)
    if checkpoint and folder.parent.name == "checkpoints" and step is None:
        return find_stored_model(folder.parent.parent, int(checkpoint[1]))
    flags = _run_flags(folder)
    if flags is None:
        if (folder / "adapter_config.json").is_file():
            raise SettingsError(f"{model} holds adapters alone; give the directory of their run, or its model/")
        if step is not None:
            raise SettingsError(f"--step={step}: {model} is not the directory of a run")
        return StoredModel(str(folder), None, {})
    if step is None and (folder / "model" / "config.json").is_file():
        return StoredModel(str(folder / "model"), None, flags)
    found = checkpoint_of(folder, step)
    return StoredModel(str(found.path.parent / OUTLINE), found, flags)


def _run_flags(folder: Path) -> Mapping[str, Any] | None:
    """The flags of a run; None where the directory is not one of a run."""
    try:
        record = json.loads((folder / "config.json").read_text())
        return record["flags"] if "experiment" in record else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prepare_inference(settings: Settings, stored: StoredModel, given: Given | None = None, most: int = ALL) -> Job:
    """Check flags and files of a job that trains nothing and completes the prompts of --eval_data.

    Without these, they are the held-out prompts that the settings mean, as those of a run do.

    Args:
      settings: the flags; `model` plays no part.
      stored: the model.
      most: prompts at most, which the seed chooses.

    Raises:
      ValueError: the first thing that cannot work, named.
    """
    given, algorithm = given or Given(), _algorithm()
    check_values(settings)
    check_together(settings)
    settings = located(settings)
    sizes, device = devices_of(settings)
    with blaming("model"):
        model = read_stored_model(stored, settings.model_code)
    tokenizer = with_chat_template(load_tokenizer(stored.directory), settings)
    models, directories = models_of(algorithm, settings, model, tokenizer)
    check_code(settings, models, "policy")
    generating = check_meshes(settings, models, sizes, rank_memory(device, Mesh(sizes).world))
    task = _task(settings, given, tokenizer, most)
    return job_of(settings, algorithm, Models(model, tokenizer, models, directories), sizes, generating, device, task)


def _algorithm() -> Algorithm:
    """The least that a policy can be part of; nothing of it is run."""
    return Algorithm(
        advantage=chain(group_center(), to_tokens()), losses={"policy": reduce(clipped_surrogate(), token_mean())}
    )


def _task(settings: Settings, given: Given, tokenizer: Any, most: int) -> Task:
    form = format_of(settings, names_of_fields(settings))
    heldout = eval_prompts(settings, given, form, tokenizer, most)
    if heldout is not None:
        name = "records" if settings.eval_data is None else name_of_files(data_files(settings, "eval_data"))
        return rewarded_task(name, (), heldout, settings, given)
    if settings.prompts is None:
        task = embedded_prompts(settings, tokenizer)
    else:
        task = prompts_of(settings, tokenizer, given, rewarded=False)
    return task._replace(prompts=(), heldout=task.heldout[:most])


def run_inference(
    job: Job, stored: StoredModel, seed: int, mesh: Mesh, pool: Pool | None, show: Show
) -> dict[str, float]:
    """Complete and reward all prompts of a job, on this rank.

    Args:
      seed: of the samples; with 0 they are those of a run's evaluations.
      pool: this rank's reward workers.
      show: given the table of all completions.

    Returns: the metrics of the evaluation.
    """
    assert isinstance(job.task, Task)
    parts = build(job, mesh, show.note)._replace(pool=pool)
    placed = parts.roles["policy"].placed
    params = stored_weights(stored, placed.model, job.dtype, placed.stored, mesh)
    sync(parts, State({"policy": RoleState(params, ())}))
    del params
    clock = Clock()
    generation = generation_of(job, parts, _frozen(job, parts), clock, show)
    generation = generation._replace(table_prompts=None, eval_seed=(EVAL_SEED + seed) % seeds.LIMIT)
    source = prompt_source(generation, clock, show)
    assert parts.generator is not None
    with awake(parts.generator.engine):
        return source.evaluate({}, 0)


def read_stored_model(stored: StoredModel, code: str) -> Model:
    """The model without its weights, of which everything but the numbers is checked. Raises: ModelError."""
    read = hf.check_directory if stored.checkpoint is None else hf.load_model
    return read(stored.directory, code)


def stored_weights(
    stored: StoredModel, model: Model, dtype: torch.dtype, layouts: trees.Tree, mesh: Mesh
) -> trees.Tree:
    """This rank's shards of the weights. Collective.

    Args:
      model: as `read_stored_model` gives it.
      layouts: a tree of them.
    """
    if stored.checkpoint is None:
        return load_shared(stored.directory, model, dtype, mesh, layouts)
    found = dict(lead_weights(stored.checkpoint, model, dtype, dict(trees.named(layouts)), mesh))
    return trees.map_named(lambda name, _: found[name], model.shapes)


def _frozen(job: Job, parts: Parts) -> dict[str, trees.Tree]:
    """StoredModel of the other models, such as a reward model's."""
    placed = {name: parts.roles[name].placed for name in job.directories}
    return {
        name: load_shared(folder, placed[name].model, job.dtype, parts.mesh, placed[name].stored)
        for name, folder in job.directories.items()
    }
