"""Sums of engine and trainer: where both take them in one order, so that log-probabilities have the same bits."""

from __future__ import annotations

import importlib.util

import torch

from funrl.compiled_kernels.arguments import BITS, FIXED_PARTS
from funrl.compiled_kernels.exact.dispatch import ALIGNED_DTYPES, kernels_work
from funrl.compiled_kernels.packed import parts_of
from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import Mesh
from funrl.models import Model
from funrl.models.decoder.sequence_parallel import is_ring
from funrl.models.lora import added_adapters
from funrl.rollout.native.aligned_trial import aligned_trial_problem
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.settings.settings import given_flag


def check_numerics(job: RLJob, training: Mesh, generating: Mesh) -> None:
    """Refuse --numerics=aligned where engine and trainer may differ. Raises: SettingsError."""
    if job.settings.models.numerics != "aligned":
        return
    problem = sums_problem(job, job.models[job.main_role], training, generating)
    if problem is not None:
        raise job.settings.refusal("{numerics}: {problem}; leave it out", problem=problem)


def check_gpu_kinds(job: Job, mesh: Mesh) -> None:
    """Refuse --numerics=aligned on GPUs of several kinds, whose products add in other orders. Collective.

    Args:
      mesh: of all ranks of the run, those that train and those that generate or score.

    Raises:
      SettingsError: naming the kinds.
    """
    if job.settings.models.numerics != "aligned" or mesh.device.type != "cuda":
        return
    names = sorted(set(gather_objects(torch.cuda.get_device_name(mesh.device), mesh)))
    if len(names) > 1:
        problem = f"ranks have GPUs of several kinds, {' and '.join(names)}"
        raise job.settings.refusal("{numerics}: {problem}; leave it out", problem=problem)


def check_kernels(job: RLJob, device: torch.device) -> None:
    """Refuse --numerics=aligned where its kernels, which have to be on, fail a trial on this GPU.

    Raises:
      SettingsError: saying how they fail.
    """
    problem = aligned_trial_problem(job.models[job.main_role], job.dtype, device)
    if problem is not None:
        problem = f"the kernels of a fixed order fail their trial on this GPU: {problem}"
        raise job.settings.refusal("{numerics}: {problem}; leave it out", problem=problem)


def sums_problem(job: RLJob, model: Model, training: Mesh, generating: Mesh) -> str | None:
    """The reason why engine and trainer may differ by rounding; None: their log-probabilities have the same bits.

    Args:
      job: the run.
      model: the policy.
      training, generating: meshes of the policy and of its engine.
    """
    settings = job.settings
    sums = model.abilities.exact_sums
    if settings.models.backend != "torch" or settings.devices.device == "xla":
        name = "backend" if settings.models.backend != "torch" else "device"
        return f"{given_flag(settings, name)} sums in orders of its own"
    if not settings.engines.abilities.own_steps or settings.engines.float8:
        name = "rollout_dtype" if settings.engines.float8 else "engine"
        return f"{given_flag(settings, name)} has kernels of its own"
    if training.device.type != "cpu":
        return _gpu_problem(job, training, generating)
    if not kernels_work():
        return "there are no C++ kernels here"
    if job.dtype not in BITS:
        return f"there are no C++ kernels for {job.dtype}"
    if isinstance(sums, str):
        return sums
    if (problem := _adapters_problem(job)) is not None:
        return problem
    sizes = training.sizes
    heads = model.abilities.heads
    if is_ring(settings.devices.sequence_parallel, -(-heads // sizes["tensor"]), sizes):
        return "ring attention adds up keys by ranks"
    splits = {training.size("tensor"), generating.size("tensor")}
    if len(splits) > 1 and any(heads % ranks for ranks in splits):
        return f"{' and '.join(map(str, sorted(splits)))} tensor ranks do not all divide {heads} heads"
    return split_problem(sums, splits)


def _adapters_problem(job: RLJob) -> str | None:
    """The reason why an engine computes otherwise than the trainer, which adds adapters; None: it does not."""
    if job.lora is None:
        return None
    if added_adapters(job.models[job.main_role]) is None:
        return "the engine merges adapters of routers, experts or a vision tower, which the trainer adds"
    return "the engines of second policies merge adapters, which the trainer adds" if job.agents.policies else None


def split_problem(sums: tuple[int, ...], splits: set[int]) -> str | None:
    """The reason why some numbers of tensor ranks share sums of these sizes in ways that differ."""
    for size in sums:
        for ranks in splits:
            if parts_of(size) % ranks:
                return (
                    f"a sum over {size} terms has {parts_of(size)} of {FIXED_PARTS} equal parts, which {ranks} tensor "
                    "ranks cannot share"
                )
    return None


def _gpu_problem(job: RLJob, training: Mesh, generating: Mesh) -> str | None:
    """`sums_problem` on GPUs, whose kernels of a fixed order have no form for ranks that share a row."""
    device = training.device.type
    settings = job.settings
    if settings.models.numerics != "aligned":
        return f"the kernels of {device} sum in orders that depend on the batch; --numerics=aligned has others"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, which torch for CUDA and ROCm brings along"
    if job.dtype not in ALIGNED_DTYPES:
        return f"there are no kernels of a fixed order for {job.dtype}"
    for axis in ("tensor", "sequence", "expert"):
        if (ranks := max(training.size(axis), generating.size(axis))) > 1:
            return f"kernels of a fixed order are for one {axis} rank, not for {ranks}"
    if settings.devices.generators is not None:
        return "generators on Ray may have other GPUs"
    if job.lora is not None:
        return "there are no kernels of a fixed order for adapters"
    models = [*job.models.values(), *job.agent_models.values(), *([] if job.judge is None else [job.judge.model])]
    return next((model.abilities.aligned for model in models if model.abilities.aligned is not None), None)
