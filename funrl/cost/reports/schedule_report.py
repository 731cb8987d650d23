"""Report of the simulation of asynchronous runs: splits of the devices, and rules of admission at the best of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from funrl.algos.core import Algorithm
from funrl.asynchrony.admission import AdmissionRule
from funrl.cost.dry_run import plain_job
from funrl.cost.placement.pool_settings import pool_settings
from funrl.cost.schedules.lengths import LengthLaw
from funrl.cost.schedules.simulation import AsyncRun, Simulated, UpdateLaw
from funrl.cost.schedules.splits import (
    DeviceSplit,
    Workload,
    async_run,
    lengths_of,
    rule_of,
    scoring_times,
    shared_split,
    simulate_rule,
    simulate_split,
    simulate_splits,
    split_key,
    verdict_times,
)
from funrl.cost.schedules.update_times import ScoredUpdate
from funrl.cost.tables import duration_text, table
from funrl.cost.tracing.hardware import Hardware
from funrl.mesh import mesh as meshes
from funrl.mesh.pools.placement import Placement, RankPool
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import JUDGE
from funrl.trainer.settings.settings import Settings, with_flags

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
      transfer: seconds until the generator ranks have new weights.

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
