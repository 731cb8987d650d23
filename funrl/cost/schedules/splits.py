"""Ways to split devices between training and generation, each simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from funrl.asynchrony.admission import AdmissionRule
from funrl.cost.judge_cost import tokens_to_read, verdicts_of_step
from funrl.cost.row_plan import rows_of_step
from funrl.cost.schedules.engine_times import engine_times
from funrl.cost.schedules.lengths import LengthLaw, law_of_mean, law_of_run, parse_lengths
from funrl.cost.schedules.simulation import AsyncRun, Simulated, UpdateLaw, rows_together, simulate_run
from funrl.cost.schedules.update_times import ScoredUpdate, UpdateTimes, VerdictTimes
from funrl.cost.search.closed_form import training_bytes
from funrl.cost.search.closed_seconds import role_seconds, training_seconds
from funrl.cost.search.closed_split import parameters, split_of
from funrl.cost.tracing.hardware import USABLE, Hardware, message_seconds
from funrl.cost.tracing.turns import turns_of
from funrl.mesh.mesh import Mesh
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.settings.settings import Settings
from funrl.trainer.steps.parts import JudgeJob

MOST_SPLITS = 8  # that are simulated
SIMULATED_STEPS = 10  # of a simulation, after those in which the pipeline fills


class Workload(NamedTuple):
    """Rows of a run.

    Attributes:
      lengths: of the sampled tokens of a row.
      prompt: tokens of a prompt.
      hardware: of each device.
    """

    lengths: LengthLaw
    prompt: int
    hardware: Hardware

    def mean_rows(self, job: RLJob) -> np.ndarray:
        """[rows] tokens of the rows of a step of a job, if all have the mean length."""
        return np.full(rows_of_step(job), self.prompt + self.lengths.mean)


class DeviceSplit(NamedTuple):
    """A way to split devices.

    Attributes:
      train, generate: numbers of devices; a run on shared devices has all in both.
      shared: whether they are the same devices, which take turns.
      fits: whether the formula of memory lets the trainer fit.
      result: of the simulation.
      scoring: names of roles with devices of their own, and how many these are.
    """

    train: int
    generate: int
    shared: bool
    fits: bool
    result: Simulated
    scoring: Sequence[tuple[str, int]] = ()


def rule_of(settings: Settings) -> AdmissionRule:
    """The rule of admission that the flags give."""
    return AdmissionRule(settings.run.batch_prompts, settings.asynchrony.staleness, settings.asynchrony.window)


def lengths_of(settings: Settings, most: int) -> LengthLaw:
    """The law of --lengths, or half of the greatest length in the mean.

    Args:
      most: tokens of the longest completion.
    """
    text = settings.estimate.lengths
    if text is None:
        return law_of_mean(most / 2, most)
    return law_of_run(Path(text)) if Path(text).is_dir() else parse_lengths(text)


def async_run(job: RLJob, generate: int, work: Workload, rule: AdmissionRule) -> AsyncRun:
    """The run that trains on a job's mesh and generates on other devices.

    Args:
      job: on the mesh of its trainer; replicas of the engine have the tensor ranks of its generate mesh. Its judge, if
        it has one, writes while the trainer waits.
      generate: devices of the generators.
      work: its rows.
      rule: of admission.
    """
    settings = job.settings
    hardware = work.hardware
    model = job.models[job.main_role]
    item = job.dtype.itemsize
    width = work.prompt + work.lengths.mean
    split = split_of(job, round(width), hardware)
    rows = math.ceil(split.count / split.rows)
    tensor = job.generate_sizes["tensor"]
    times = engine_times(model, hardware, tensor, item)
    turns = turns_of(settings)
    update: UpdateLaw = UpdateTimes(
        ranks=split.rows,
        token=training_seconds(job, split, hardware) / (rows * width),
        minibatches=settings.updates.minibatches,
    )
    if job.judge is not None:
        update = ScoredUpdate(update, [verdict_times(job, job.judge, work)])
    return AsyncRun(
        rule=rule,
        samples=job.sampling.samples,
        lengths=work.lengths,
        prompt=work.prompt,
        engine=times,
        replicas=generate // tensor,
        slots=rows_together(times, settings.engines.decode_rows, width),
        update=update,
        transfer=message_seconds(hardware, 1, item * parameters(model) / tensor, near=False),
        environment=turns.gaps * turns.seconds,
    )


def scoring_times(job: RLJob, name: str, work: Workload) -> UpdateTimes:
    """Times of the ranks of a role that only scores.

    Args:
      job: on the mesh of these ranks.
      name: of the role.
      work: rows of the run.
    """
    width = work.prompt + work.lengths.mean
    split = split_of(job, round(width), work.hardware)
    rows = math.ceil(split.count / split.rows)
    return UpdateTimes(split.rows, role_seconds(job, split, work.hardware, name) / (rows * width))


def verdict_times(job: RLJob, judge: JudgeJob, work: Workload) -> VerdictTimes:
    """Times of a judge.

    Args:
      job: whose completions it reads.
      judge: on the mesh of its ranks.
      work: rows of the run.
    """
    tensor = judge.sizes["tensor"]
    written = judge.sampling.max_new_tokens
    return VerdictTimes(
        engine=engine_times(judge.model, work.hardware, tensor, job.dtype.itemsize),
        replicas=Mesh(judge.sizes).world // tensor,
        slots=job.settings.engines.decode_rows,
        template=tokens_to_read(job, judge, 0) - job.sampling.max_new_tokens,
        written=written,
        share=verdicts_of_step(job) / rows_of_step(job),
    )


def simulate_rule(run: AsyncRun, rule: AdmissionRule) -> Simulated:
    """The same run under a rule."""
    return simulate_run(run._replace(rule=rule), steps=SIMULATED_STEPS + 3 + int(rule.staleness))


def simulate_splits(
    job: RLJob, on_devices: Callable[[int], RLJob], work: Workload, rule: AdmissionRule
) -> tuple[list[DeviceSplit], dict[DeviceSplit, AsyncRun]]:
    """Simulate splits of a job's devices, and the run in which both share all of them.

    Args:
      job: on all devices.
      on_devices: the job whose trainer has so many devices; it raises ValueError where that cannot be.
      work: rows of the run.
      rule: of admission, of the splits; the shared run has staleness 0.

    Returns: the splits, the fastest that fits first, and the run of each.
    """
    everything = Mesh(job.sizes).world
    split, run = shared_split(job, work, rule)
    runs = {split: run}
    unit = everything // job.sizes["data"]
    for train in _counts(everything, unit, job.generate_sizes["tensor"]):
        try:
            trainer = on_devices(train)
        except ValueError:  # such as rows that cannot be divided
            continue
        trainer_run = async_run(trainer, everything - train, work, rule)
        runs[simulate_split(trainer, trainer_run, work, rule)] = trainer_run
    return sorted(runs, key=split_key), runs


def shared_split(job: RLJob, work: Workload, rule: AdmissionRule) -> tuple[DeviceSplit, AsyncRun]:
    """The run in which all of a job's devices train and generate by turns, simulated."""
    everything = Mesh(job.sizes).world
    run = async_run(job, everything, work, rule._replace(staleness=0, window=1))
    return DeviceSplit(everything, everything, True, _fits(job, work), simulate_rule(run, run.rule)), run


def simulate_split(trainer: RLJob, run: AsyncRun, work: Workload, rule: AdmissionRule) -> DeviceSplit:
    """A run whose trainer and generators have devices of their own, simulated.

    Args:
      trainer: the job on the mesh of its trainer.
      run: by `async_run`.
      work: its rows.
      rule: of admission.
    """
    devices = Mesh(trainer.sizes).world
    generating = run.replicas * trainer.generate_sizes["tensor"]
    return DeviceSplit(devices, generating, False, _fits(trainer, work), simulate_rule(run, rule))


def split_key(split: DeviceSplit) -> tuple[bool, float]:
    """Sort key of splits: those that fit first, by the seconds of a step."""
    return not split.fits, split.result.step


def _fits(job: RLJob, work: Workload) -> bool:
    """True if the formula of memory lets the trainer fit."""
    width = work.prompt + work.lengths.most
    return training_bytes(job, width, work.hardware) <= work.hardware.memory * USABLE


def _counts(everything: int, unit: int, tensor: int) -> Sequence[int]:
    """Numbers of devices of a trainer: some of those that leave whole replicas for generation, evenly spaced."""
    counts = [n for n in range(unit, everything, unit) if (everything - n) % tensor == 0]
    stride = math.ceil((len(counts) + 1) / MOST_SPLITS)
    return counts[stride - 1 :: stride]
