"""The weights that a run on the embedded task begins with: a model that `funrl sft` makes once, and that is cached.

That of the default flags and seed is part of the package: `python tools/warm_start.py` makes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock

import funrl
from funrl.compiled_kernels.kernel_library import cache_folder
from funrl.data.cached_datasets import files_digest
from funrl.models.flat import saved_fields
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.weight_files import WHOLE
from funrl.processes.environment import read_environment
from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs.datasets import embedded_examples
from funrl.trainer.jobs.job import Job
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.startup import random_weights

DIGEST = "sha256"  # file with the checksum of a cached model
SHIPPED = Path(funrl.__file__).parent / "tasks" / "warm_starts"  # a folder like the cache's
PROGRAM = "funrl.experiments.sft"
PROGRESS_LINES = 10  # lines of progress
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "SLURM_")  # variables


@contextlib.contextmanager
def warm_started(job: Job) -> Iterator[Job]:
    """Give the job the directory of its warm start, which is made unless it is in the package or the cache.

    A job without a warm start stays as it is. Where torchrun or srun has started the ranks, only the first one makes
    the model and has the directory; the others wait for it. Where the cache cannot be written, the directory is a
    temporary one, and is removed at the end of the `with` block.

    Raises:
      SettingsError: `funrl sft` fails; with its last lines.
    """
    if not job.warmstart_steps or read_environment():
        yield job
        return
    shipped = SHIPPED / _key(job)
    if _problem(shipped, job) is None:
        _print(f"warm start: {job.warmstart_steps} steps of funrl sft, part of the package, {shipped}")
        yield dataclasses.replace(job, start=str(shipped))
        return
    with contextlib.ExitStack() as temporary:
        try:
            folder = cache_folder() / "warmstart"
            folder.mkdir(parents=True, exist_ok=True)
            directory = _cached(folder / _key(job), job)
        except OSError as error:
            _print(f"the warm start is not cached: {error}")
            folder = temporary.enter_context(tempfile.TemporaryDirectory(prefix="funrl-warmstart-"))
            directory = _cached(Path(folder) / _key(job), job)
        yield dataclasses.replace(job, start=str(directory))


def sft_flags(job: Job) -> dict[str, object]:
    """Flags of the `funrl sft` that makes the warm start of a job, but for its paths."""
    return {
        **embedded_task(job.settings.examples.task).warmstart_flags,
        "lr_schedule": "cosine",
        "lr_warmup_steps": job.warmstart_steps // 20,
        "steps": job.warmstart_steps,
        "seed": job.settings.run.seed,
        "dtype": job.settings.models.dtype,
        "device": "cpu",
        "eval_every": job.warmstart_steps,
        "sample_every": job.warmstart_steps,
        "save_every": 0,
    }


def demonstration_count(job: Job) -> int:
    """Number of demonstrations that the `funrl sft` of a job's warm start reads."""
    task = embedded_task(job.settings.examples.task)
    return min(task.warmstart_demonstrations, job.warmstart_steps * task.warmstart_flags["batch_prompts"])


def _cached(directory: Path, job: Job) -> Path:
    """The directory of the model, made if it is not there; processes that want the same one wait for each other."""
    with FileLock(f"{directory}.lock"):
        problem = _problem(directory, job)
        if problem is None:
            _print(f"warm start: {job.warmstart_steps} steps of funrl sft, taken from the cache, {directory}")
            return directory
        if problem:
            _print(f"the cached warm start in {directory} is damaged ({problem}); it is made again")
            _remove(directory)
        draft = Path(tempfile.mkdtemp(dir=directory.parent, prefix="draft-"))
        try:
            _make(draft, job)
            os.rename(draft / "run" / "model", directory)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return directory


def _make(draft: Path, job: Job) -> None:
    """Run `funrl sft` on demonstrations of the task, from random weights; the model is in run/model of the draft.

    It is one process with one thread on the CPU: every machine and mesh gets about the same weights, and every run on
    this machine the same ones.
    """
    flags = sft_flags(job)
    task = embedded_task(job.settings.examples.task)
    hf.save(draft / "initial", job.model, random_weights(job), job.tokenizer)
    with open(draft / "demonstrations.jsonl", "w") as file:
        for record in task.demonstrations(job.settings.run.seed, demonstration_count(job)):
            file.write(json.dumps(record) + "\n")
    words = ["--model=initial", "--data=demonstrations.jsonl"]
    words += [*(f"--{name}={value}" for name, value in flags.items()), "--run_dir=run"]
    _print(f"warm start: python -m {PROGRAM} {shlex.join(words)}")
    _run(words, draft)
    (draft / "run" / "model" / DIGEST).write_text(_digest(draft / "run" / "model"))


def _run(words: Sequence[str], folder: Path) -> None:
    """Run `funrl sft` in a folder, and show some of the lines that it prints of its steps."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    package = str(Path(funrl.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment["OMP_NUM_THREADS"] = "1"
    lines: list[str] = []
    command = [sys.executable, "-m", PROGRAM, *words]
    reader, writer = os.pipe()
    with open(reader, errors="replace") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=writer, stderr=writer)
        os.close(writer)
        try:
            for line in output:
                lines = [*lines[-20:], line.rstrip()]
                step = re.match(r"\s*(\d+)/(\d+)\s+(\S+)", line)
                if step and int(step[1]) % max(1, int(step[2]) // PROGRESS_LINES) == 0:
                    _print(f"warm start: step {step[1]}/{step[2]}, loss {step[3]}")
        except BaseException:
            process.kill()
            raise
        finally:
            status = process.wait()
    if status:
        raise SettingsError("the warm start failed: " + "\n".join(lines))


def _key(job: Job) -> str:
    """A hash of everything that the weights depend on."""
    embedded = embedded_task(job.settings.examples.task)
    demonstrations = embedded.demonstrations(job.settings.run.seed, 16)
    examples = embedded_examples(demonstrations, "demonstrations", embedded.tokenizer())
    facts = {
        "flags": sft_flags(job),
        "config": saved_fields(job.model.config),
        "task": job.task.name,
        "count": demonstration_count(job),
        "demonstrations": demonstrations,
        "tokens": [text for example in examples for text in example.texts],  # another version may train others
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _problem(directory: Path, job: Job) -> str | None:
    """Reason not to take a cached model: "" where there is none; None where it is whole."""
    if not os.path.lexists(directory):
        return ""
    try:
        if (directory / DIGEST).read_text() != _digest(directory):
            return "its checksum is wrong"
        if hf.check_directory(directory).config.vocab != job.model.config.vocab:
            return "it holds another model"
    except Exception as error:  # whatever the damage
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _digest(directory: Path) -> str:
    """A checksum of a model's config and weights."""
    return files_digest({name: directory / name for name in ("config.json", WHOLE)})


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
