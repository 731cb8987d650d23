"""Start of a run on one rank: first weights, models, source and checks are made once, and the state before a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import shard
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.left_out import remarks_on_files
from funrl.models.huggingface.peft_files import describe_adapter
from funrl.models.nf4_base import quantized
from funrl.models.placed import Placed
from funrl.models.weight_dtypes import weight_dtype
from funrl.processes.processor import products_problem
from funrl.rewards.pool import Pool
from funrl.trainer.checkpoints.base_model import adapter_facts, keep_base, kept_already, own_base
from funrl.trainer.checkpoints.saver import shared_folder
from funrl.trainer.checkpoints.weight_digests import agent_digests, role_digests, with_first_digests
from funrl.trainer.compile_phase import loaded_cache
from funrl.trainer.gap import gap_check
from funrl.trainer.jobs.build import build_run, first_state, first_weights, frozen_weights
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import make_source
from funrl.trainer.jobs.sharding import learns_sharded
from funrl.trainer.phases import Trainer
from funrl.trainer.reward_gradients import explainer
from funrl.trainer.sources.observing import Observer
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.roles import State
from funrl.trainer.steps.skipped import Skips

MakeSource = Callable[[Job, Parts, Mapping[str, trees.Tree], Clock, Observer], Source]


def begin_run(
    job: Job,
    mesh: Mesh,
    observer: Observer,
    source: MakeSource = make_source,
    clock: Clock | None = None,
    pool: Pool | None = None,
) -> tuple[Trainer, State]:
    """Everything that is made once, and the state before the first step. The engine has no weights yet: see `sync`."""
    if problem := products_problem():
        observer.note(problem)
    if learns_sharded(job.settings, job.algorithm.losses):
        observer.note(f"--fsdp: gradients are summed over ranks in {str(job.reduce_dtype).removeprefix('torch.')}")
    clock = clock or Clock(mesh.device)
    parts = build_run(job, mesh, observer.note, pool)
    cache = None if parts.compilations is None else loaded_cache(job, mesh, observer.note)
    folder = shared_folder(observer, mesh)
    weights = first_weights(job, parts, first_base(job, parts, observer, folder))
    frozen = frozen_weights(parts, weights)
    rows_source = source(job, parts, weights_to_evaluate(job, parts, weights), clock, observer)
    trainer = Trainer(
        job,
        parts,
        rows_source,
        frozen,
        clock=clock,
        skips=Skips(job.settings.updates.max_skipped, mesh, observer.note),
        folder=folder,
        compile_cache=cache,
        gap_check=gap_check(job, parts, observer.note),
        explainer=explainer(job, parts, observer),
    )
    return trainer, first_state(job, parts, weights, rows_source.init())


def weights_to_evaluate(job: Job, parts: Parts, weights: Mapping[str, trees.Tree]) -> dict[str, trees.Tree]:
    """Weights of the roles that do not learn, as evaluations have them: of a role that follows the first ones."""
    fixed = {name: tree for name, tree in weights.items() if parts.roles[name].loss is None}
    if isinstance(job, RLJob):  # whose evaluations read none of these
        return fixed
    return {name: trees.clone(tree) if parts.roles[name].follow else tree for name, tree in fixed.items()}


def first_base(job: Job, parts: Parts, observer: Observer, folder: str | None) -> trees.Tree:
    """The weights that a run begins with; a base of adapters that the run itself makes is kept in its directory.

    Args:
      folder: of the checkpoints; None: the run has no directory.
    """
    kept = own_base(job, folder)
    resumed = job.settings.run.resume and kept_already(kept, parts.mesh)
    weights = initial_weights(job, parts.begin, observer.note, kept if resumed else None)
    if kept is not None and not resumed:
        keep_base(kept, job, parts, weights)
    return in_stored_form(job, trees.named(weights))


def in_stored_form(job: Job, named_weights: Iterable[tuple[str, Tensor]]) -> trees.Tree:
    """Weights that a run begins with, given one after the other, in the form in which they are stored between steps.

    Those in 4 bits are of the weights in the dtype to compute in, as a base that is kept or read has them.
    """
    if job.settings.adapters.nf4:
        named_weights = quantized((name, x.to(weight_dtype(name, job.initial_dtype))) for name, x in named_weights)
    return trees.from_named(job.initial_model.shapes, named_weights)


def first_digests(trainer: Trainer, state: State) -> tuple[Job, Mapping[str, object]]:
    """The job with digests of its first weights, and facts on its frozen ones; none without a run directory."""
    job = trainer.job
    parts = trainer.parts
    if trainer.folder is None:
        return job, {}
    frozen = role_digests(parts.roles, trainer.frozen, parts.mesh) | agent_digests(parts)
    facts = {"frozen": frozen, **adapter_facts(job, parts, trainer.frozen)}
    return with_first_digests(job, parts, state.roles[job.main_role].params, facts), facts


def initial_weights(
    job: Job, placed: Placed, note: Callable[[str], None], kept: str | Path | None = None
) -> trees.Tree:
    """This rank's shards of the weights that a run begins with, in the dtype of the master weights.

    The directory of a warm start is read by the first rank alone, as it may be on the disk of one machine.

    Those that adapters stand on, and that do not learn, are in the dtype to compute in where they are read.

    Args:
      placed: the job's model on the train mesh.
      note: shows a line.
      kept: directory in which this run has kept them, if it has.
    """
    mesh = placed.mesh
    directory = kept or job.start
    if kept is None and job.warmstart_steps:
        if mesh.rank == 0 and directory is None:
            raise ValueError(f"the warm start of {job.warmstart_steps} steps is not made; `warm_started` makes it")
        whole = hf.load(str(directory), job.master)[1] if mesh.rank == 0 else None
        whole = collectives.from_first_rank(whole, mesh)
        return trees.to_device(shard(whole, placed.stored, mesh), mesh.device)
    if directory is None:
        return trees.to_device(shard(random_weights(job), placed.stored, mesh), mesh.device)
    for remark in remarks_on_files(directory, job.model) if mesh.rank == 0 else ():
        note(remark)
    if job.settings.adapters.adapter is not None and mesh.rank == 0:
        note(f"going on with the adapters of {job.settings.adapters.adapter} on {directory}; a reference is that base")
        if dropout := describe_adapter(job.settings.adapters.adapter).dropout:
            note(f"the adapters were made with a lora_dropout of {dropout:g}; here they have none")
    wanted = dict(trees.named(placed.stored))
    return in_stored_form(job, hf.read_weights(directory, job.model, job.initial_dtype, wanted=wanted, mesh=mesh))


def random_weights(job: Job) -> trees.Tree:
    """Whole random weights of the seed, on the CPU."""
    return job.model.init(torch.Generator().manual_seed(job.settings.run.seed), job.master)
