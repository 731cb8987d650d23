"""The policy's first weights: from a Hugging Face directory, or by a supervised warm start from scratch.

The warm start is cached by everything that its result depends on, so that a second run skips it. A cache that cannot be
read is made again and takes the place of the damaged one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from funrl import trees
from funrl.algos.recipes.sft import sft
from funrl.batch import Batch
from funrl.compiled_kernels.kernel_library import cache_folder
from funrl.data.packing import pad_rows
from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh, single
from funrl.mesh.rules import shard
from funrl.models.flat import saved_fields
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.left_out import remarks_on_files
from funrl.models.huggingface.names import names_of
from funrl.models.placed import Placed, place
from funrl.optim import chain, clip_by_global_norm, fused_adamw, warmup_cosine
from funrl.seeds import derived_seed
from funrl.trainer.jobs.job import Job
from funrl.trainer.sources.observing import WarmstartObserver
from funrl.trainer.steps.learn import learn
from funrl.trainer.steps.roles import Role, RoleState
from funrl.trainer.steps.step_rows import UpdatePlan, rows_of

BATCH = 128  # demonstrations a step
LR = 3e-3
SHOW_EVERY = 10  # steps
DIGEST = "sha256"  # file with the checksum of a cached warm start
ABANDONED_S = 86400.0  # a draft of a cached warm start that is older is nobody's any more
VERSION = 2  # of this procedure: a change of it that changes the weights raises the number


def initial_weights(job: Job, placed: Placed, stage: WarmstartObserver, kept: str | Path | None = None) -> trees.Tree:
    """This rank's shards of the weights that a run begins with, in the dtype of the master weights.

    Those that adapters stand on, and that do not learn, are in the dtype to compute in where they are read.

    Args:
      job: says which model, and how many warm-start steps.
      placed: that model on the train mesh.
      stage: shows progress.
      kept: directory in which this run has kept them, if it has.
    """
    mesh = placed.mesh
    directory = kept or job.settings.models.model
    if directory is not None:
        for remark in remarks_on_files(directory, job.model) if mesh.rank == 0 else ():
            stage.note(remark)
        return hf.load(directory, job.initial_dtype, mesh, layouts=placed.stored, model=job.model)[1]
    if job.warmstart_steps == 0:
        return sharded(first_draw(job), placed)
    try:
        cached = cache_directory() / _key(job)
        problem = _problem(cached, job)
    except OSError as error:
        cached = None
        problem = ""
        stage.note(f"the warm start is not cached: {error}")
    # One rank's file system may lag behind another's: all of them take the cache, or none.
    problems = [p for p in collectives.gather_objects(problem, mesh) if p is not None]
    if cached is not None and not problems:
        try:
            _, stored = hf.load(cached, job.master, mesh, layouts=placed.stored, model=job.model)
            stage.note(f"warm start: {job.warmstart_steps} supervised steps taken from the cache, {cached}")
            return stored
        except (OSError, ValueError, RuntimeError) as error:  # the same on every rank
            problems = [_reason(error)]
    if any(problems):
        stage.note(f"the cached warm start in {cached} is damaged ({max(problems)}); it is made again")
    whole = fine_tune(job, mesh, stage)
    if mesh.rank == 0 and cached is not None:
        _store(cached, job, whole, stage)
    return sharded(whole, placed)


def first_draw(job: Job) -> trees.Tree:
    """Whole random weights of the seed, on the CPU."""
    return job.model.init(torch.Generator().manual_seed(job.settings.run.seed), job.master)


def sharded(whole: trees.Tree, placed: Placed) -> trees.Tree:
    """This rank's shards of whole weights."""
    return trees.to_device(shard(whole, placed.stored, placed.mesh), placed.mesh.device)


def fine_tune(job: Job, mesh: Mesh, stage: WarmstartObserver) -> trees.Tree:
    """Whole weights after supervised fine-tuning on the task's demonstrations, the same on every rank of any mesh.

    Only the first rank trains, alone and with one thread: every mesh gets identical weights, and a small model gains
    nothing from further ranks. The others wait for it in short collectives, so that no wait reaches the timeout.
    """
    steps = job.warmstart_steps
    progress = supervised_steps(job, mesh.device) if mesh.rank == 0 else None
    weights = None
    loss = 0.0
    for step in range(1, steps + 1):
        if progress is not None:
            weights, loss = next(progress)
        if step % SHOW_EVERY == 0 or step == steps:
            loss = collectives.from_first_rank(loss, mesh)
            stage.supervised(step, steps, {"train/loss": loss})
    return collectives.from_first_rank(None if weights is None else trees.to_device(weights, "cpu"), mesh)


def supervised_steps(job: Job, device: torch.device) -> Iterator[tuple[trees.Tree, float]]:
    """The weights and the loss after each step of the warm start. Weights are updated in place."""
    steps = job.warmstart_steps
    alone = single(device)
    schedule = warmup_cosine(LR, steps // 20, steps)
    optimizer = chain(clip_by_global_norm(1.0, in_place=True), fused_adamw(schedule, b2=0.99))
    placed = place(job.model, alone, dtype=job.dtype)
    ((name, loss),) = sft().losses.items()
    role = Role(placed, loss=loss, optimizer=optimizer, metric="train/loss")
    weights = sharded(first_draw(job), placed)
    states = {name: RoleState(weights, optimizer.init(weights))}
    for step in range(1, steps + 1):
        with one_thread():
            rows = rows_of(demonstration_batch(job, step, device), mesh=alone)
            states, metrics = learn({name: role}, states, rows, UpdatePlan(step))
        yield states[name].params, metrics["train/loss"]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: further threads would round sums in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _sweep(folder: Path) -> None:
    """Remove what runs that were killed have left half written."""
    for left in folder.glob("tmp*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(left)


def demonstration_batch(job: Job, step: int, device: torch.device) -> Batch:
    """Demonstrations of one step, the same on every rank; the mask is true on their completions."""
    assert job.task.demonstrations is not None
    end = [job.tokenizer.eos_token_id]
    pairs = job.task.demonstrations(derived_seed(job.settings.run.seed, step), BATCH)
    encode = functools.partial(job.tokenizer, add_special_tokens=False)
    prompts, completions = (encode(list(texts))["input_ids"] for texts in zip(*pairs, strict=True))
    rows = [p + c + end for p, c in zip(prompts, completions, strict=True)]
    tokens = torch.as_tensor(pad_rows(rows, job.pad, 8), device=device)
    length = torch.tensor([len(r) for r in rows], device=device)
    begin = torch.tensor([len(p) for p in prompts], device=device)
    at_T = torch.arange(tokens.shape[1], device=device)
    return Batch(tokens=tokens, mask=(at_T >= begin[:, None]) & (at_T < length[:, None]), length=length)


def cache_directory() -> Path:
    """Directory of cached warm starts: $XDG_CACHE_HOME/funrl/warmstart, by default below ~/.cache.

    Raises:
      OSError: as `cache_folder`.
    """
    return cache_folder() / "warmstart"


def _key(job: Job) -> str:
    """A hash of everything that the weights depend on. The mesh is not among it: it does not change them."""
    facts = {
        "version": VERSION,
        "config": saved_fields(job.model.config),
        "task": job.task.name,
        "batch": BATCH,
        "lr": LR,
        "steps": job.warmstart_steps,
        "seed": job.settings.run.seed,
        "dtype": job.settings.models.dtype,
        "demonstrations": job.task.demonstrations(0, 16) if job.task.demonstrations else None,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _problem(cached: Path, job: Job) -> str | None:
    """Reason not to take a cached warm start: "" where there is none; None where it is whole."""
    try:
        if not os.path.lexists(cached):
            return ""
        if names_of(hf.load_model(cached)) != names_of(job.model):
            return "it holds another model"
        if (cached / DIGEST).read_text() != _digest(cached):
            return "its checksum is wrong"
        hf.check_directory(cached)
    except Exception as error:  # whatever the damage
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _digest(folder: Path) -> str:
    """A checksum of the weights."""
    with open(folder / hf.WHOLE, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _store(cached: Path, job: Job, whole: trees.Tree, stage: WarmstartObserver) -> None:
    """Write beside and rename, so that a reader sees a whole directory or none."""
    beside = None
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        _sweep(cached.parent)
        beside = tempfile.mkdtemp(dir=cached.parent)
        draft = Path(beside) / "made"
        old = Path(beside) / "old"
        hf.save(draft, job.model, whole, job.tokenizer)
        (draft / DIGEST).write_text(_digest(draft))
        if _problem(cached, job) is not None:  # else another run was quicker
            with contextlib.suppress(FileNotFoundError):
                os.rename(cached, old)  # damaged: nothing takes the name of a directory that is not empty
            try:
                os.rename(draft, cached)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another run was quicker
                    raise
    except (OSError, SafetensorError) as error:
        stage.note(f"the warm start could not be cached in {cached}: {error}")
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
