"""The weights that a run begins with: of a Hugging Face directory, or random ones of the seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from funrl import trees
from funrl.mesh import collectives
from funrl.mesh.rules import shard
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.left_out import remarks_on_files
from funrl.models.huggingface.peft_files import describe_adapter
from funrl.models.placed import Placed
from funrl.trainer.jobs.job import Job


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
    return hf.load(directory, job.initial_dtype, mesh, layouts=placed.stored, model=job.model)[1]


def random_weights(job: Job) -> trees.Tree:
    """Whole random weights of the seed, on the CPU."""
    return job.model.init(torch.Generator().manual_seed(job.settings.run.seed), job.master)
