"""Words of a dry run: a step, and the parts of it that are not counted."""

from __future__ import annotations

from funrl.cost.row_pictures import pictures_text
from funrl.cost.tracing.hardware import Hardware
from funrl.cost.tracing.turns import turns_of
from funrl.data.supervised import TEXT_FIELDS
from funrl.trainer.jobs.demonstrations import learns_from_demonstrations
from funrl.trainer.jobs.job import Job, RLJob, TextJob
from funrl.trainer.settings.scorers import has_environment
from funrl.trainer.sources.pair_rows import SAMPLED_PAIRS
from funrl.trainer.steps.parts import JudgeJob


def step_text(job: Job, tokens: int) -> str:
    """Describe a step in words."""
    count = job.settings.run.batch_prompts
    if isinstance(job, TextJob):
        texts = len(TEXT_FIELDS[job.task.kind])
        each = f"{texts} texts of {tokens:,} tokens" if texts > 1 else f"{tokens:,} tokens{pictures_text(job, tokens)}"
        return f"{count:,} {job.task.kind}, each {each}, all of full length and trained on"
    rows = count * job.sampling.samples
    turns = turns_of(job.settings)
    width = turns.row_tokens(tokens, job.sampling.max_new_tokens)
    if turns.gaps:
        return f"{rows:,} episodes of {turns.replies} replies, {width:,} tokens each, all of full length"
    seen = pictures_text(job, tokens)
    return f"{rows:,} completions, prompt and completion {width:,} tokens{seen}, all of full length"


def left_out(job: Job, judge: JudgeJob | None, hardware: Hardware) -> tuple[str, ...]:
    """Describe the parts of a step that are not counted."""
    settings = job.settings
    out = ["rewards"] * isinstance(job, RLJob) + [
        "tokenizer",
        "files",
        f"the evaluation every {settings.evaluation.eval_every} steps",
    ]
    if job.algorithm.filter is not None and settings.sampling.max_refills > 1:
        out.append(
            f"up to {settings.sampling.max_refills - 1} more batches of completions instead of rows that are filtered"
        )
    if job.model.owned is not None:
        out.append("reading and resizing pictures")
    if isinstance(job, RLJob) and not job.models[job.main_role].pages:
        out.append("generation, which runs transformers' own code")
    if isinstance(job, RLJob) and settings.engines.probe_sync_every:
        out.append(f"the probe of the engine every {settings.engines.probe_sync_every} steps")
    if judge is not None and not judge.model.pages:
        out.append("the judge, which runs transformers' own code")
    if isinstance(job, RLJob) and job.algorithm.example in SAMPLED_PAIRS:
        out.append("the selection of each prompt's best and worst sample for training")
    if isinstance(job, RLJob) and has_environment(settings):
        out.append("branches of episodes, replies of frozen agents, and the work of environments")
    if isinstance(job, RLJob) and learns_from_demonstrations(job.algorithm):
        out.append("the rows of demonstrations, one per prompt")
    if settings.devices.offload:
        copies = "the time of offloading copies" if hardware.accelerator else "it does nothing on a CPU"
        out.append(f"--offload={settings.devices.offload}: {copies}")
    return tuple(out)
