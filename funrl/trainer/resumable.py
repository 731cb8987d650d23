"""Comparison of a checkpoint with the run that is to go on from it, before any rank is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from funrl.trainer.base_model import check_lora
from funrl.trainer.checkpoint import Recorded, complete_checkpoints, recorded
from funrl.trainer.job import Job
from funrl.trainer.shard_server import CheckpointError, DamagedError

CHECKPOINTS = "checkpoints"  # folder of a run
CONFIG_SIZES = ("family", "vocab", "embed", "layers", "heads", "kv_heads", "head", "mlp", "tied")  # of a model's config
FACT_WORDS = {"learns": "losses of"}  # of facts, where the name alone is no phrase
RESUME_ADVICE = "give the flags that the run was started with, or another --run_dir"


def run_facts(job: Job) -> dict[str, Any]:
    """Everything about a run that decides which tensors its state has, in words of JSON."""
    sizes = {name: getattr(job.models[job.lead].config, name) for name in CONFIG_SIZES}
    return {"learns": sorted(job.algorithm.losses), "optimizer": job.settings.optimizer, **sizes}


def check_resume(job: Job, run_dir: str | Path) -> None:
    """Check that a run can go on from the newest checkpoint of a directory that can be read, if there is any.

    Raises:
      CheckpointError: none of them can be read, or it is of another run; the message names it and what is wrong.
    """
    found, problem = None, ""
    for path in reversed(complete_checkpoints(Path(run_dir) / CHECKPOINTS).values()):
        try:
            found = recorded(path)
            break
        except DamagedError as error:
            problem = problem or str(error)
        except CheckpointError as error:
            raise CheckpointError(f"--resume: {error}") from error
    if found is not None:
        check_facts(found, job)
    elif problem:
        raise CheckpointError(f"--resume: {problem}; no other checkpoint is left: give another --run_dir")


def check_facts(found: Recorded, job: Job) -> None:
    """Raise CheckpointError where a checkpoint is of a run of other roles, another model, optimizer or adapters."""
    check_lora(found.path, found.facts, job.lora)
    theirs, mine = found.facts.get("run", {}), run_facts(job)
    for name, value in mine.items():
        if name in theirs and theirs[name] != value:
            what = f"{FACT_WORDS.get(name, name)} {_said(theirs[name])}, this one has {_said(value)}"
            raise CheckpointError(f"--resume: {found.path} is of a run with {what}; {RESUME_ADVICE}")


def check_frozen(found: Recorded, digests: Mapping[str, str], job: Job) -> None:
    """Raise CheckpointError where the weights of a role that does not learn are not those that the run began with.

    Args:
      digests: of all weights of each such role, of `role_digests`.
    """
    theirs = found.facts.get("frozen", {})
    if found.facts.get("dtype") != job.settings.dtype:
        return  # of other bits by a flag
    for name, digest in digests.items():
        if name in theirs and theirs[name] != digest:
            settings = job.settings
            where = f"--{name}={job.directories[name]}" if name in job.directories else (
                f"--model={settings.model}" if settings.model is not None else "--seed or the warm start"
            )  # fmt: skip
            raise CheckpointError(
                f"{found.path}: the run began with other weights of its {name}: {where} has changed; put back what it "
                "was, or give another --run_dir"
            )


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
