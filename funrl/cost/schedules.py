"""Ways to split devices between training and generation, each simulated, and rules of admission at the best of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from funrl.algos.core import Algorithm
from funrl.asynchrony.admission import AdmissionRule
from funrl.cost.decoding import tokens_to_read, verdicts_of_step
from funrl.cost.dry_run import plain_job
from funrl.cost.pools import pool_settings
from funrl.cost.rows import rows_of_step
from funrl.cost.search import parameters, role_seconds, split_of, training_bytes, training_seconds
from funrl.cost.simulation import (
    AsyncRun,
    LengthLaw,
    ScoredUpdate,
    Simulated,
    UpdateLaw,
    UpdateTimes,
    VerdictTimes,
    engine_times,
    law_of_mean,
    law_of_run,
    parse_lengths,
    rows_together,
    simulate_run,
)
from funrl.cost.tables import duration_text, table
from funrl.cost.tracing.hardware import USABLE, Hardware, message_seconds
from funrl.cost.tracing.turns import turns_of
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.placement import Placement, RankPool
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import JUDGE
from funrl.trainer.settings.settings import Settings, with_flags
from funrl.trainer.sources.judging import JudgeJob

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


STALENESS = (0, 1, 2, 4)  # of the second table
RESULT_COLUMNS = ("a step", "steps/h", "tokens/s", "age mean", "max", "trainer busy", "generators busy")


class Schedules(NamedTuple):
    """Simulated runs.

    Attributes:
      rule: of the splits.
      lengths: of completions.
      splits: the fastest that fits first.
      rules: rules at the best split that is not shared, with their results.
    """

    rule: AdmissionRule
    lengths: LengthLaw
    splits: Sequence[DeviceSplit]
    rules: Sequence[tuple[AdmissionRule, Simulated]]


def wants_schedules(settings: Settings) -> bool:
    """True if a dry run simulates asynchronous runs."""
    return settings.asynchrony.staleness > 0 or settings.estimate.lengths is not None


def schedules_of(settings: Settings, algorithm: Algorithm, hardware: Hardware, tokens: int) -> Schedules:
    """Simulate the runs of the flags.

    Args:
      tokens: of a prompt.

    Raises:
      ValueError: a flag cannot work.
    """
    job = plain_job(settings, algorithm, hardware.memory)
    assert isinstance(job, RLJob)
    rule = rule_of(settings)
    work = Workload(lengths_of(settings, job.sampling.max_new_tokens), tokens, hardware)

    def on_devices(count: int) -> RLJob:
        return _wider(settings, algorithm, hardware, job.sizes, count)

    splits, runs = simulate_splits(job, on_devices, work, rule)
    best = next((split for split in splits if not split.shared), None)
    rules = [] if best is None else _tried_rules(runs[best], rule, best.result)
    return Schedules(rule, work.lengths, splits, rules)


def placed_schedules(
    settings: Settings, placement: Placement, algorithm: Algorithm, work: Workload, transfer: float
) -> Schedules:
    """Simulate the run of a placement, beside one in which all its devices do both if they can.

    Args:
      settings: the flags.
      placement: of the ranks.
      work: rows of the run.
      transfer: seconds until the ranks that generate have new weights.

    Raises:
      ValueError: a flag cannot work.
    """
    training = pool_settings(settings, placement.train, learns=True)
    job = plain_job(training, algorithm, work.hardware.memory)
    assert isinstance(job, RLJob)
    scoring = [_times_of_pool(job, settings, algorithm, work, name, pool) for name, pool in placement.scoring.items()]
    models = {name: model for name, model in job.models.items() if name not in placement.scoring}
    judge = None if JUDGE in placement.scoring else job.judge
    job = dataclasses.replace(job, generate_sizes=placement.generate.sizes, models=models, judge=judge)
    rule = rule_of(settings)
    run = async_run(job, len(placement.generate.ranks), work, rule)._replace(transfer=transfer)
    if scoring:
        run = run._replace(update=ScoredUpdate(run.update, scoring))
    own = tuple((name, len(pool.ranks)) for name, pool in placement.scoring.items())
    splits = [simulate_split(job, run, work, rule)._replace(scoring=own)]
    try:
        shared = _wider(training, algorithm, work.hardware, placement.train.sizes, placement.world)
        splits.append(shared_split(shared, work, rule)[0])
    except ValueError:  # such as a number of devices that the mesh does not divide
        pass
    rules = _tried_rules(run, rule, splits[0].result)
    return Schedules(rule, work.lengths, sorted(splits, key=split_key), rules)


def _times_of_pool(
    training: RLJob, settings: Settings, algorithm: Algorithm, work: Workload, name: str, pool: RankPool
) -> UpdateLaw:
    """Times of the ranks of a role, or of the judge of the job that trains. Raises: ValueError: a flag cannot work."""
    if name == JUDGE and training.judge is not None:
        return verdict_times(training, training.judge._replace(sizes=pool.sizes), work)
    own = pool_settings(settings, pool, learns=False)
    job = plain_job(own, algorithm, work.hardware.memory)
    assert isinstance(job, RLJob)
    return scoring_times(job, name, work)


def _tried_rules(run: AsyncRun, rule: AdmissionRule, result: Simulated) -> list[tuple[AdmissionRule, Simulated]]:
    """A run under other rules than its own too.

    Args:
      run: of a split of the devices.
      rule: its own rule.
      result: of the run under it.
    """
    staleness = sorted({*STALENESS, rule.staleness})
    windows = sorted({1, rule.window, rule.places})
    tried = [rule._replace(staleness=s, window=w) for s in staleness for w in windows if s or w == 1]
    return [(other, result if other == rule else simulate_rule(run, other)) for other in tried]


def _wider(settings: Settings, algorithm: Algorithm, hardware: Hardware, sizes: Mapping[str, int], count: int) -> RLJob:
    """The job on `count` devices, whose mesh has another number of them along `data`. Raises: ValueError."""
    unit = meshes.Mesh(dict(sizes)).world // sizes["data"]
    if count % unit:
        raise SettingsError(f"{count} devices are not a multiple of {unit}")
    mesh = meshes.text({**sizes, "data": count // unit})
    job = plain_job(with_flags(settings, mesh=mesh, generate_mesh=None), algorithm, hardware.memory)
    assert isinstance(job, RLJob)
    return job


def schedules_text(schedules: Schedules) -> str:
    """Tables and the best split."""
    rule, law, splits, rules = schedules
    head = (
        f"asynchronous, S={rule.staleness:g}, W={rule.window}: no group is more than {rule.most_age} "
        f"version{'s' * (rule.most_age != 1)} behind; "
        f"completions of {law.mean:,.0f} tokens in the mean, {law.most:,} at most"
    )
    rows = [(_devices(split), *_numbers(split.result), "yes" if split.fits else "no") for split in splits]
    lines = [head, "", *table(("devices", *RESULT_COLUMNS, "fits"), rows), "", _best(splits)]
    if apart := [name for name, _ in splits[0].scoring or splits[-1].scoring]:
        lines[-1:-1] = [f"trainer busy: with its waits for the scores of {', '.join(apart)}", ""]
    if rules:
        cells = [(f"{other.staleness:g}", str(other.window), *_numbers(result)) for other, result in rules]
        best = next(split for split in splits if not split.shared)
        lines += ["", f"{_devices(best)}, by staleness and window:", *table(("S", "W", *RESULT_COLUMNS), cells)]
    return "\n".join(lines)


def _best(splits: Sequence[DeviceSplit]) -> str:
    """The line that names the best split."""
    best = splits[0]
    if not best.fits:
        return "no split fits"
    if best.shared:
        return f"the best: shared devices, {duration_text(best.result.step)} a step"
    shared = next(split for split in splits if split.shared)
    gain = shared.result.step / best.result.step
    beside = f", {gain:.2f} times as fast as shared devices" if shared.fits else "; shared devices do not fit"
    return f"the best: {_devices(best)}, {duration_text(best.result.step)} a step{beside}"


def _devices(split: DeviceSplit) -> str:
    if split.shared:
        return f"{split.train} shared"
    pools = [("train", split.train), ("generate", split.generate), *split.scoring]
    return ", ".join(f"{name} {count}" for name, count in pools)


def _numbers(result: Simulated) -> tuple[str, ...]:
    return (
        duration_text(result.step),
        f"{result.steps_per_hour:,.1f}",
        f"{result.tokens:,.0f}",
        f"{result.age_mean:.2f}",
        str(result.age_max),
        f"{result.trainer_busy:.0%}",
        f"{result.generators_busy:.0%}",
    )


def schedules_object(schedules: Schedules) -> dict[str, Any]:
    """The numbers as JSON has them."""
    rule, law, splits, rules = schedules
    return {
        "staleness": rule.staleness,
        "window": rule.window,
        "most_age": rule.most_age,
        "length_mean": law.mean,
        "length_max": law.most,
        "splits": [split._asdict() | {"result": split.result._asdict()} for split in splits],
        "rules": [{"staleness": other.staleness, "window": other.window} | result._asdict() for other, result in rules],
    }
