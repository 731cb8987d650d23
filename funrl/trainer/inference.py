"""Completions and evaluations without training: a model or a checkpoint, prompts and rewards, on any mesh.

They are those of a run: the same format of prompts, engine, rewards and statistics. The evaluation of a checkpoint on a
run's held-out prompts is the one that the run made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from funrl import seeds, trees
from funrl.algos import Algorithm, chain, clipped_surrogate, group_center, reduce, to_tokens, token_mean
from funrl.compiled_kernels.exact.dispatch import keep_alignment
from funrl.data.pictures import PROCESSOR_FILES, picture_form, with_most_pixels, with_picture_form
from funrl.data.processors.form import PictureForm
from funrl.data.tokenizer import TextTokenizer, load_tokenizer
from funrl.mesh.mesh import Mesh
from funrl.models import Model
from funrl.models.huggingface import directories as hf
from funrl.rewards.pool import Pool
from funrl.rollout.engine import onload_engine
from funrl.trainer.checkpoints.export import lead_weights
from funrl.trainer.checkpoints.stored_models import StoredModel, with_model_directories
from funrl.trainer.jobs.build import build, load_first
from funrl.trainer.jobs.datasets import (
    embedded_prompts,
    episode_task,
    eval_prompts,
    format_of,
    given_environment,
    name_of_files,
    prompts_of,
    rewarded_task,
    with_chat_template,
)
from funrl.trainer.jobs.job import RLJob, Task
from funrl.trainer.jobs.models import located, models_of
from funrl.trainer.jobs.prepare import checked_job, devices_of, lay_out
from funrl.trainer.jobs.row_source import generation_of
from funrl.trainer.settings.checks import check_together, data_files, names_of_fields
from funrl.trainer.settings.declaration import blaming
from funrl.trainer.settings.scorers import Given, own_environment
from funrl.trainer.settings.settings import Settings, check_values
from funrl.trainer.sources.evaluation import EVAL_SEED
from funrl.trainer.sources.heldout import evaluate_heldout
from funrl.trainer.sources.observing import Show
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts
from funrl.trainer.steps.roles import RoleState, State
from funrl.trainer.steps.sync import sync

ALL = 1 << 31  # prompts, where no number says how many


def prepare_inference(settings: Settings, stored: StoredModel, given: Given | None = None, most: int = ALL) -> RLJob:
    """Check flags and files of a job that trains nothing and completes the prompts of --eval_data.

    Without these, they are the held-out prompts that the settings mean, as those of a run do.

    Args:
      settings: the flags; `model` plays no part.
      stored: the model.
      most: prompts at most, which the seed chooses.

    Raises:
      ValueError: the first thing that cannot work, named.
    """
    given = given or Given()
    algorithm = _algorithm()
    check_values(settings)
    check_together(settings, with_prompts(settings, given))
    settings = located(with_model_directories(settings))
    sizes, device = devices_of(settings)
    with blaming("model"):
        model = read_stored_model(stored, settings.models.model_code)
    tokenizer = with_chat_template(load_tokenizer(stored.directory), settings)
    with blaming("model"):
        tokenizer = with_picture_form(tokenizer, stored_picture_form(stored, model))
    models = models_of(algorithm, settings, model, tokenizer)
    devices = lay_out(settings, algorithm, models, sizes, device)
    return checked_job(settings, algorithm, models, devices, _task(settings, given, tokenizer, most))


def stored_picture_form(stored: StoredModel, model: Model) -> PictureForm | None:
    """The form in which the model takes pictures, with the bound that its run had; None: it sees none.

    Raises:
      DataError: the files of its processor cannot be used.
    """
    form = picture_form(model.config, _processor_directory(stored))
    most = stored.flags.get("max_pixels")
    return form if form is None or not isinstance(most, int) else with_most_pixels(form, most)


def _processor_directory(stored: StoredModel) -> str:
    """The directory that bounds the pixels of pictures: the model's, or that of the model that its run began with."""
    began = stored.flags.get("model")
    if any((Path(stored.directory) / name).exists() for name in PROCESSOR_FILES) or not isinstance(began, str):
        return stored.directory
    return began


def with_prompts(settings: Settings, given: Given) -> Given:
    """Given objects as checks of flags see them: data to evaluate on takes the place of prompts."""
    data = given.eval_records is not None or settings.examples.eval_data is not None
    return given._replace(records=() if data else given.records)


def _algorithm() -> Algorithm:
    """The least that a policy can be part of; nothing of it is run."""
    return Algorithm(
        advantage=chain(group_center(), to_tokens()), losses={"policy": reduce(clipped_surrogate(), token_mean())}
    )


def _task(settings: Settings, given: Given, tokenizer: TextTokenizer, most: int) -> Task:
    form = format_of(settings, names_of_fields(settings))
    heldout = eval_prompts(settings, given, form, tokenizer, most)
    if heldout is not None:
        name = "records" if settings.examples.eval_data is None else name_of_files(data_files(settings, "eval_data"))
        environment = given_environment(settings, given)
        if environment is not None:
            return episode_task(name, (), heldout, settings, environment)
        return rewarded_task(name, (), heldout, settings, given)
    if settings.examples.prompts is None and own_environment(settings, given) is None:
        task = embedded_prompts(settings, tokenizer)
    else:
        task = prompts_of(settings, tokenizer, given, rewarded=False)
    return task._replace(prompts=(), heldout=task.heldout[:most])


@keep_alignment()
def run_inference(
    job: RLJob, stored: StoredModel, seed: int, mesh: Mesh, pool: Pool | None, show: Show
) -> dict[str, float]:
    """Complete and reward all prompts of a job, on this rank.

    Args:
      seed: of the samples; with 0 they are those of a run's evaluations.
      pool: this rank's reward workers.
      show: given the table of all completions.

    Returns: the metrics of the evaluation.
    """
    parts = dataclasses.replace(build_with_weights(job, stored, mesh, show.note), pool=pool)
    clock = Clock(mesh.device)
    frozen = {}  # weights of the other models, such as a reward model's
    for name, folder in job.directories.items():
        placed = parts.roles[name].placed
        _, frozen[name] = hf.load(folder, job.dtype, parts.mesh, layouts=placed.stored, model=placed.model)
    generation = generation_of(job, parts, frozen, clock, show)
    evaluation = generation.evaluation._replace(table_prompts=None, seed=(EVAL_SEED + seed) % seeds.LIMIT)
    with onload_engine(generation.engine.engine):
        return evaluate_heldout(generation._replace(evaluation=evaluation), clock, show, 0)


def build_with_weights(job: RLJob, stored: StoredModel, mesh: Mesh, note: Callable[[str], None]) -> GeneratingParts:
    """The parts of a job whose engine holds a stored model's weights. Collective."""
    parts = build(job, mesh, note)
    placed = parts.roles[job.main_role].placed
    params = stored_weights(stored, placed.model, job.dtype, placed.stored, mesh)
    sync(parts, State({job.main_role: RoleState(params, ())}))
    load_first(parts.generator.frozen, placed, params, parts.generator.to_whole, trains=False)
    return parts


def read_stored_model(stored: StoredModel, code: str) -> Model:
    """The model without its weights, whose files are checked but for their numbers. Raises: ModelError."""
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
        return hf.load(stored.directory, dtype, mesh, layouts=layouts, model=model)[1]
    weights = dict(lead_weights(stored.checkpoint, model, dtype, layouts=dict(trees.named(layouts)), mesh=mesh))
    return trees.map_named(lambda name, _: weights[name], model.shapes)
