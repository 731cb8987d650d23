"""Report of the simulation of asynchronous runs: splits of the devices, and rules of admission at the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funrl.algos.core import Algorithm
from funrl.asynchrony.admission import AdmissionRule
from funrl.cost.dry_run import plain_job
from funrl.cost.rates import duration_text
from funrl.cost.schedules.lengths import LengthLaw, law_of_mean, law_of_run, parse_lengths
from funrl.cost.schedules.simulation import Simulated
from funrl.cost.schedules.splits import DeviceSplit, Workload, simulate_rule, simulate_splits
from funrl.cost.tracing.hardware import Hardware
from funrl.mesh import mesh as meshes
from funrl.mesh.explain import table
from funrl.trainer.jobs.job import RLJob
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
    law = _lengths(settings, job.sampling.max_new_tokens)
    rule = AdmissionRule(settings.run.batch_prompts, settings.asynchrony.staleness, settings.asynchrony.window)
    work = Workload(law, tokens, hardware)
    unit = meshes.Mesh(job.sizes).world // job.sizes["data"]

    def on_devices(count: int) -> RLJob:
        mesh = meshes.text({**job.sizes, "data": count // unit})
        trainer = plain_job(with_flags(settings, mesh=mesh, generate_mesh=None), algorithm, hardware.memory)
        assert isinstance(trainer, RLJob)
        return trainer

    splits, runs = simulate_splits(job, on_devices, work, rule)
    best = next((split for split in splits if not split.shared), None)
    rules = []
    if best is not None:
        staleness = sorted({*STALENESS, rule.staleness})
        windows = sorted({1, rule.window, rule.places})
        tried = [rule._replace(staleness=s, window=w) for s in staleness for w in windows if s or w == 1]
        rules = [(other, simulate_rule(runs[best], other)) for other in tried]
    return Schedules(rule, law, splits, rules)


def _lengths(settings: Settings, most: int) -> LengthLaw:
    text = settings.estimate.lengths
    if text is None:
        return law_of_mean(most / 2, most)
    return law_of_run(Path(text)) if Path(text).is_dir() else parse_lengths(text)


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
    return f"{split.train} shared" if split.shared else f"train {split.train}, generate {split.generate}"


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
