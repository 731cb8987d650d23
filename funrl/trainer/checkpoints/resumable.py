"""Comparison of a checkpoint with the run that is to continue it, before any rank is started.

A run continues with its recipe, model function, tokenizer, optimizer and adapters, or not at all. Other
flags, arguments of the recipe, data and rewards are accepted and said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funrl.trainer.checkpoints.base_model import check_lora
from funrl.trainer.checkpoints.checkpoint import Recorded, newest_checkpoint
from funrl.trainer.checkpoints.export import OUTLINE
from funrl.trainer.checkpoints.weight_digests import tokens_digest
from funrl.trainer.jobs.job import Job
from funrl.trainer.jobs.provenance import WEIGHTS, model_function, tokenizer_digest
from funrl.trainer.settings.declaration import HELD_OUT_SET, RECORD_TOKENS, START_FLAGS
from funrl.trainer.storage.shard_server import CheckpointError

CHECKPOINTS = "checkpoints"  # folder of a run
# Of facts, where the name alone is no phrase.
FACT_WORDS = {"learns": "losses of", "follows": "models that --follow names:"}
OWN_FACTS = ("recipe", "learns", "optimizer", "follows")  # decided by flags; the others by the model's files
RESUME_ADVICE = "give the flags that the run was started with, or another --run_dir"


def run_facts(job: Job) -> dict[str, Any]:
    """Everything about a run that stays as it is when it continues, in words of JSON."""
    recipe = {} if job.provenance.recipe is None else {"recipe": job.provenance.recipe}
    own = {"learns": sorted(job.algorithm.losses), "optimizer": job.settings.optimization.optimizer}
    own["follows"] = sorted(job.settings.optimization.follow_rules)
    return (
        recipe | own | model_function(job.models[job.main_role].config) | {"tokenizer": tokenizer_digest(job.tokenizer)}
    )


def check_resume(job: Job, run_dir: str | Path) -> Sequence[str]:
    """Check that a run can continue from the newest readable checkpoint of a directory, if there is any.

    Args:
      job: of the run.
      run_dir: its directory.

    Returns: lines on what is not as it was.

    Raises:
      CheckpointError: none of them can be read, or it is of another run; the message names it and what is wrong.
    """
    damaged = dict[Path, str]()
    try:
        record = newest_checkpoint(Path(run_dir) / CHECKPOINTS, damaged)
    except CheckpointError as error:
        raise CheckpointError(f"--resume: {error}") from error
    if record is not None:
        check_facts(record, job)
        return changes(record, job)
    for problem in damaged.values():
        raise CheckpointError(f"--resume: {problem}; no other checkpoint is left: give another --run_dir")
    return ()


def check_facts(record: Recorded, job: Job) -> None:
    """Check that a checkpoint is of a run with the recipe, roles, model, tokenizer, optimizer and adapters of a job.

    What a checkpoint of an earlier version does not record is not compared.

    Raises:
      CheckpointError: one of them differs.
    """
    before = record.facts.get("run", {})
    for name, value in run_facts(job).items():
        if name in before and before[name] != value:
            what = f"{FACT_WORDS.get(name, name)} {_listed(before[name])}, this one has {_listed(value)}"
            raise CheckpointError(f"--resume: {record.path} is of a run with {what}; {_advice(record, job, name)}")
    check_lora(record.path, record.facts, job.lora, job.settings.adapters.nf4)


def _advice(record: Recorded, job: Job, name: str) -> str:
    """The way out where a fact of a run is another one."""
    if name == "recipe":
        return (
            f"{RESUME_ADVICE}: `funrl export {record.path.parents[1]} --to=DIR` makes a model of the checkpoint, with "
            "which a run of any recipe may begin (--model=DIR)"
        )
    if name in OWN_FACTS or job.settings.models.model is None:
        return RESUME_ADVICE
    return (
        f"--model={job.settings.models.model} has changed, or is another one: give the model of "
        "the run, or another --run_dir "
        f"({record.path.parent / OUTLINE} has config.json and the tokenizer as they were)"
    )


def changes(record: Recorded, job: Job) -> list[str]:
    """Lines on flags and files that are not as they were when a checkpoint was written."""
    before = record.facts.get("provenance", {})
    now = job.provenance
    flags = before.get("flags", {})
    inputs = before.get("inputs", {})
    names = [name for name in flags if name in now.flags and name not in START_FLAGS and flags[name] != now.flags[name]]
    pairs = [f"{name} {_value(flags[name])} -> {_value(now.flags[name])}" for name in names]
    rank_digests = (HELD_OUT_SET, RECORD_TOKENS)  # digests that the ranks take
    files = [name for name in inputs if name not in rank_digests and inputs[name] != now.inputs.get(name, inputs[name])]
    lines = [f"continuing with other flags: {', '.join(pairs)}"] if pairs else []
    if before.get("recipe") is not None and now.recipe is None:
        lines.append(f"continuing with an algorithm given in Python, instead of the recipe {before['recipe']}")
    if files:
        lines.append(f"continuing with other contents of: {', '.join(files)}")
    elif inputs.get(RECORD_TOKENS) not in (None, tokens_digest(job)):
        lines.append(
            "the records give other tokens than when the checkpoint was written, with another version of funrl or of "
            "transformers; `funrl show` prints them"
        )
    return lines


def weights_changed(record: Recorded, job: Job) -> bool:
    """True if the weights that a run begins with are not those of the run that a checkpoint is of."""
    before = record.facts.get("provenance", {}).get("inputs", {}).get(WEIGHTS)
    own = job.provenance.inputs.get(WEIGHTS)
    return (
        before is not None and own is not None and before != own and record.facts["dtype"] == job.settings.models.dtype
    )


def other_held_out(record: Recorded, job: Job) -> bool:
    """True if evaluations of a checkpoint's run are on other examples, or sampled or rewarded in another way."""
    before = record.facts.get("provenance", {}).get("inputs", {}).get(HELD_OUT_SET)
    return before is not None and before != job.provenance.inputs.get(HELD_OUT_SET, before)


def check_frozen(record: Recorded, digests: Mapping[str, str], job: Job) -> None:
    """Check that the weights of frozen roles are the run's initial ones.

    Args:
      record: the checkpoint.
      digests: of all weights of each such role, of `role_digests`.
      job: of the run that continues.

    Raises:
      CheckpointError: the weights of a role differ.
    """
    before = record.facts.get("frozen", {})
    if record.facts.get("dtype") != job.settings.models.dtype:
        return  # of other bits by a flag
    for name, digest in digests.items():
        if name in before and before[name] != digest:
            raise CheckpointError(
                f"{record.path}: the run began with other weights of its {name}: {_origin(name, job)} has changed; put "
                "back what it was, or give another --run_dir"
            )


def _origin(role: str, job: Job) -> str:
    """The flag that a role's weights are from."""
    agents = job.agents.frozen
    if role in agents and agents[role].directory is not None:
        return f"--agents={job.settings.environments.agents}"
    if role in job.directories:
        return job.kind_of_role(role).origin(job.directories[role], role)
    return "--seed or the warm start" if job.settings.models.model is None else f"--model={job.settings.models.model}"


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _value(value: Any) -> str:
    """A flag's value as a command line writes it."""
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
