"""Cost of a judge in a dry run: its weights, and its verdicts on the completions of a step."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection
from typing import NamedTuple

from funrl import trees
from funrl.algos.reading import reads
from funrl.cost.decoding import EngineWork, completions
from funrl.cost.tracing.costs import Costs, along, plus
from funrl.cost.tracing.estimate import Depth, axes_of, of_depth, traced_layers
from funrl.cost.tracing.hardware import USABLE, Hardware
from funrl.mesh.launch import view
from funrl.models import Model
from funrl.rollout.native.cache_sizes import FREE_SHARE
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.sharding import generate_sizes
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import JUDGE
from funrl.trainer.settings.settings import Settings, with_flags
from funrl.trainer.sources.judging import PLACEHOLDER, TEMPLATE, read_template
from funrl.trainer.steps.parts import GeneratingParts, JudgeJob

CHARACTERS = 4  # of a template per token, as no tokenizer is read


class JudgeCost(NamedTuple):
    """Cost of the verdicts of a step for one rank.

    Attributes:
      costs: of generation, without the weights.
      weights: bytes of weights, which each phase holds.
      axes: as in `Estimate`.
    """

    costs: Costs
    weights: float
    axes: dict[str, tuple[str, tuple[str, ...], dict[str, int]]]


def plain_judge(settings: Settings, directory: str, model: Model, sizes: dict[str, int], memory: float) -> JudgeJob:
    """Build the judge of the flags for cost estimates.

    Args:
      directory, model: of the judge.
      sizes: of the mesh to train on.
      memory: bytes of a device.

    Raises:
      SettingsError: it has a value head, or the template cannot be read.
    """
    if not model.generates:
        raise SettingsError(f"--judge={directory}: it has a value head and cannot write; give it as --reward_model")
    text = TEMPLATE if settings.judging.judge_template is None else read_template(settings.judging.judge_template)
    sampling = Sampling(greedy=True, max_new_tokens=settings.judging.judge_max_new_tokens)
    return JudgeJob(
        directory=directory,
        model=model,
        tokenizer=None,
        template=text,
        pattern=re.compile(settings.judging.judge_pattern),
        sampling=sampling,
        sizes=generate_sizes(settings, sizes, model, memory),
    )


def judging(
    job: RLJob, judge: JudgeJob, parts: GeneratingParts, prompt_tokens: int, held: float, hardware: Hardware
) -> JudgeCost:
    """Cost of verdicts on all completions of a step, greedy baselines included; each reads its whole prompt.

    Args:
      prompt_tokens: of the policy.
      held: bytes that a rank holds besides the judge.

    Raises:
      SettingsError: a verdict with its prompt is longer than the judge's positions.
    """
    read = tokens_to_read(job, judge, prompt_tokens)
    positions = judge.model.config.max_positions
    if read + judge.sampling.max_new_tokens > positions:
        raise SettingsError(
            f"--judge={judge.directory}: it reads {read} tokens and may write {judge.sampling.max_new_tokens} "
            f"(--judge_max_new_tokens), but it has {positions} positions"
        )
    mesh = view(parts.mesh, judge.sizes)
    settings = with_flags(job.settings, batch_prompts=verdicts_of_step(job), kv_cache_gb=None)

    def with_judge(model: Model) -> RLJob:
        return dataclasses.replace(job, settings=settings, model=model)

    def generator_of(shallow: RLJob):
        engine = native_engine(
            shallow.model, mesh, job.dtype, options=NativeOptions(settings.engines.decode_rows), note=lambda _: None
        )
        return parts.generator._replace(engine=engine, mesh=mesh, base=None)

    whole = generator_of(with_judge(judge.model))
    stored = trees.leaves(whole.engine.weights.layouts)
    weights = float(job.dtype.itemsize * sum(math.prod(layout.local_shape(0)) for layout in stored))
    room = FREE_SHARE * (hardware.memory * USABLE - held - weights)

    def costs_at(depth: Depth) -> Costs:
        shallow = with_judge(of_depth(judge.model, depth))
        return completions(
            EngineWork(shallow, generator_of(shallow), whole, prompt_tokens=read, room=room, hardware=hardware),
            judge.sampling,
        )

    few, more = traced_layers(judge.model)
    costs = along(costs_at(few), *((costs_at(depth), count) for depth, count in more))
    return JudgeCost(costs, weights, axes_of(mesh))


def writes_verdicts(judge: JudgeJob, pool: str, apart: Collection[str]) -> bool:
    """True if the ranks of a pool write the verdicts of a judge that can be traced; see `dry_run.estimate`."""
    return judge.model.pages and JUDGE not in apart and pool in ("", "train")


def with_judge_phase(phases: dict[str, Costs], judge: JudgeCost, resting: dict[str, float]) -> dict[str, Costs]:
    """Add a judge: its weights to each phase, and its verdicts as a phase after generation.

    Args:
      phases: costs by phase.
      judge: costs of its verdicts.
      resting: bytes by kind that a rank holds while the judge writes.
    """
    generated = {name: costs for name, costs in phases.items() if name == "generate"}
    with_verdicts = generated | {"score_judge": plus(judge.costs, resting)} | phases
    return {name: plus(costs, {"weights": judge.weights}) for name, costs in with_verdicts.items()}


def verdicts_of_step(job: RLJob) -> int:
    """Number of completions of a step that a judge reads, greedy baselines included."""
    greedy = "greedy_score" in reads(job.algorithm).required
    return job.settings.run.batch_prompts * (job.sampling.samples + greedy)


def tokens_to_read(job: RLJob, judge: JudgeJob, prompt_tokens: int) -> int:
    """Tokens that the judge reads for a completion: the policy's prompt and completion, and the template."""
    characters = len(PLACEHOLDER.sub("", judge.template))
    return prompt_tokens + job.sampling.max_new_tokens + math.ceil(characters / CHARACTERS)
