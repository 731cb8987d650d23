"""Ways to split devices between training and generation, each simulated, and rules of admission at the best of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.asynchrony.admission import AdmissionRule
from funrl.cost.dry_run import RankWork, TraceMemo, plain_job
from funrl.cost.pools import pool_estimate, pool_settings
from funrl.cost.rows import rows_of_step
from funrl.cost.simulation import (
    AsyncRun,
    LengthLaw,
    ScoredUpdate,
    Simulated,
    UpdateLaw,
    UpdateTimes,
    engine_times,
    law_of_mean,
    law_of_run,
    parse_lengths,
    rows_together,
    simulate_run,
)
from funrl.cost.tables import duration_text, table
from funrl.cost.tracing.estimate import Estimate
from funrl.cost.tracing.hardware import USABLE, Hardware, message_seconds
from funrl.cost.tracing.turns import turns_of
from funrl.cost.verdict import step_seconds
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.placement import Placement
from funrl.mesh.text import ROW_AXES, devices
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.settings.declaration import SettingsError, parts
from funrl.trainer.settings.settings import Settings, with_flags

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

    @property
    def room(self) -> float:
        """Bytes of a device that can be used."""
        return self.hardware.memory * USABLE

    def rank(self, pool: str = "train", apart: Collection[str] = (), memo: TraceMemo | None = None) -> RankWork:
        """Work of a rank of a pool."""
        return RankWork(self.prompt, self.hardware, pool, apart, memo)

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


class TracedRanks(NamedTuple):
    """Ranks that train, or score, by traces of their steps.

    Attributes:
      times: of a batch, by a step whose rows have the mean length.
      full: a step whose rows have the greatest length.
    """

    times: UpdateTimes
    full: Estimate

    def on(self, count: int) -> tuple[dict[str, int], UpdateTimes]:
        """The mesh of `count` devices, by another size of `data`, and the times of a batch there.

        Raises:
          SettingsError: they are no multiple of those that share a row.
        """
        sizes = self.full.job.sizes
        world = Mesh(sizes).world
        unit = world // sizes["data"]
        if count % unit:
            raise SettingsError(f"{count} devices are not a multiple of {unit}")
        times = self.times._replace(ranks=self.times.ranks * count // world)
        return {**sizes, "data": count // unit}, times

    def nbytes(self, count: int) -> float:
        """Memory of a rank where the mesh has `count` devices, by another size of `data`, and rows of full length."""
        settings = self.full.job.settings
        over = parts(settings.sharding.fsdp_axes)
        sharded = settings.sharding.fsdp and (not over or "dp" in over)
        share = Mesh(self.full.job.sizes).world / count if sharded else 1.0
        held = ("weights", "optimizer", "gradients")
        phases = self.full.phases.values()
        return max(costs.total + (share - 1) * sum(costs.peak.get(kind, 0.0) for kind in held) for costs in phases)


def traced_ranks(settings: Settings, algorithm: Algorithm, lengths: LengthLaw, work: RankWork) -> TracedRanks:
    """Trace the ranks of a pool.

    Args:
      settings: by `pool_settings`.
      algorithm: of the run.
      lengths: of the sampled tokens of a row.
      work: of a rank, whose rows have the greatest length.

    Raises:
      ValueError: a flag cannot work.
    """
    short = with_flags(settings, max_new_tokens=max(1, round(lengths.mean)))
    mean, full = (pool_estimate(flags, algorithm, work) for flags in (short, settings))
    minibatches = settings.updates.minibatches if work.pool == "train" else 1
    return TracedRanks(times_of(mean, work.hardware)._replace(minibatches=minibatches), full)


def times_of(estimate: Estimate, hardware: Hardware) -> UpdateTimes:
    """Times of the ranks of an estimate, by the tokens of its rows."""
    job = estimate.job
    ranks = devices(job.sizes, ROW_AXES)
    tokens = math.ceil(rows_of_step(job) / ranks) * estimate.tokens
    return UpdateTimes(ranks, step_seconds(estimate, hardware) / tokens)


def async_run(job: RLJob, update: UpdateLaw, generate: int, work: Workload, rule: AdmissionRule) -> AsyncRun:
    """The run that trains on a job's mesh and generates on other devices.

    Args:
      job: on the mesh of its trainer; replicas of the engine have the tensor ranks of its generate mesh.
      update: times of the trainer.
      generate: devices of the generators.
      work: its rows.
      rule: of admission.
    """
    model = job.models[job.main_role]
    tensor = job.generate_sizes["tensor"]
    times = engine_times(model, work.hardware, tensor, job.dtype.itemsize)
    turns = turns_of(job.settings)
    weights = job.dtype.itemsize * trees.count(model.shapes) / tensor
    return AsyncRun(
        rule=rule,
        samples=job.sampling.samples,
        lengths=work.lengths,
        prompt=work.prompt,
        engine=times,
        replicas=generate // tensor,
        slots=rows_together(times, job.settings.engines.decode_rows, work.prompt + work.lengths.mean),
        update=update,
        transfer=message_seconds(work.hardware, 1, weights, near=False),
        environment=turns.gaps * turns.seconds,
    )


def simulate_rule(run: AsyncRun, rule: AdmissionRule) -> Simulated:
    """The same run under a rule."""
    return simulate_run(run._replace(rule=rule), steps=SIMULATED_STEPS + 3 + int(rule.staleness))


def simulate_splits(
    job: RLJob, trainer: TracedRanks, work: Workload, rule: AdmissionRule
) -> tuple[list[DeviceSplit], dict[DeviceSplit, AsyncRun]]:
    """Simulate splits of a job's devices, and the run in which both share all of them.

    Args:
      job: on all devices.
      trainer: traced on all devices.
      work: rows of the run.
      rule: of admission, of the splits; the shared run has staleness 0.

    Returns: the splits, the fastest that fits first, and the run of each.
    """
    everything = Mesh(job.sizes).world
    unit = everything // job.sizes["data"]
    tensor = job.generate_sizes["tensor"]
    runs = dict([shared_split(job, trainer, everything, work, rule)])
    for train in _counts(everything, unit, tensor):
        run = async_run(job, trainer.on(train)[1], everything - train, work, rule)
        generating = run.replicas * tensor
        fits = trainer.nbytes(train) <= work.room
        runs[DeviceSplit(train, generating, False, fits, simulate_rule(run, rule))] = run
    return sorted(runs, key=split_key), runs


def shared_split(
    job: RLJob, trainer: TracedRanks, count: int, work: Workload, rule: AdmissionRule
) -> tuple[DeviceSplit, AsyncRun]:
    """The run in which `count` devices train and generate by turns, simulated. Raises: SettingsError, as in `on`."""
    run = async_run(job, trainer.on(count)[1], count, work, rule._replace(staleness=0, window=1))
    return DeviceSplit(count, count, True, trainer.nbytes(count) <= work.room, simulate_rule(run, run.rule)), run


def split_key(split: DeviceSplit) -> tuple[bool, float]:
    """Sort key of splits: those that fit first, by the seconds of a step."""
    return not split.fits, split.result.step


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

    trainer = traced_ranks(with_flags(settings, generate_mesh=None), algorithm, work.lengths, work.rank())
    splits, runs = simulate_splits(job, trainer, work, rule)
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
      transfer: seconds until the generator ranks have new weights.

    Raises:
      ValueError: a flag cannot work.
    """
    training = pool_settings(settings, placement.train, learns=True)
    job = plain_job(training, algorithm, work.hardware.memory)
    assert isinstance(job, RLJob)
    job = dataclasses.replace(job, generate_sizes=placement.generate.sizes)
    rule = rule_of(settings)
    scoring = [
        traced_ranks(pool_settings(settings, pool, learns=False), algorithm, work.lengths, work.rank(name)).times
        for name, pool in placement.scoring.items()
    ]
    trainer = traced_ranks(training, algorithm, work.lengths, work.rank(apart=placement.scoring))
    update = ScoredUpdate(trainer.times, scoring) if scoring else trainer.times
    run = async_run(job, update, len(placement.generate.ranks), work, rule)._replace(transfer=transfer)
    own = tuple((name, len(pool.ranks)) for name, pool in placement.scoring.items())
    train = len(placement.train.ranks)
    fits = trainer.nbytes(train) <= work.room
    splits = [DeviceSplit(train, len(placement.generate.ranks), False, fits, simulate_rule(run, rule), own)]
    try:
        all_roles = traced_ranks(training, algorithm, work.lengths, work.rank()) if scoring else trainer
        splits.append(shared_split(job, all_roles, placement.world, work, rule)[0])
    except SettingsError:  # such as devices that cannot be divided
        pass
    rules = _tried_rules(run, rule, splits[0].result)
    return Schedules(rule, work.lengths, sorted(splits, key=split_key), rules)


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
