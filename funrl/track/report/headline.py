"""Headline of a run's page: what the run reached, in a sentence and in a row of numbers."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from funrl.track.records.segments import values_over_time
from funrl.track.report.charts import number
from funrl.track.report.run_files import RunFiles, finite_values, has_pairs, is_supervised, seconds_of, steps_wanted
from funrl.trainer.settings.declaration import HELD_OUT_SET


class Headline(NamedTuple):
    """One sentence: `text`, then the value before and after, or the one it stayed at, then `time`.

    Attributes:
      status: how far a run is that has not taken all of its steps.
    """

    text: str
    values: tuple[str, ...]
    time: str
    status: str


class Tile(NamedTuple):
    """A number that says how a run went."""

    label: str
    value: str
    note: str


def headline(run: RunFiles) -> Headline:
    """The sentence that says how a run went, or is going."""
    last = run.rows[-1]["step"]
    total = steps_wanted(run)
    status = ""
    if run.running:
        status = f"Running, step {last}{f' of {total}' if total else ''}."
    elif total and last < total:
        status = f"Ended at step {last} of {total}."
    duration = _duration(seconds_of(run))
    time = f"{last} steps" + (f" and {duration}" if duration else "")
    for key, name in _main_metrics(run):
        values = _comparable(run, key)
        if len(values) < 2:
            continue
        before, after = _ends(values, smooth=not key.startswith("eval/"))
        texts = (number(before), number(after))
        if texts[0] == texts[1]:
            return Headline(f"{name.capitalize()} stayed at", texts[:1], f"in {time}", status=status)
        verb = "rose" if after > before else "fell"
        return Headline(f"{name.capitalize()} {verb} from", texts, f"in {time}", status=status)
    return Headline("The run has taken" if run.running else "The run took", (), time, status=status)


def _main_metrics(run: RunFiles) -> list[tuple[str, str]]:
    """The metrics that say best how a run went, with their names, the best of them first.

    Of a run with rewards: the share of problems solved, or the mean reward where rewards lie between 0 and 1.
    """
    if has_pairs(run):
        return [("eval/accuracy", "held-out pair accuracy"), ("eval/loss", "held-out loss")]
    if is_supervised(run):
        return [("eval/loss", "held-out loss"), ("train/loss", "training loss")]
    accuracies = dict(finite_values(run, "eval/accuracy"))
    rewards = dict(finite_values(run, "eval/reward"))
    graded = any(abs(rewards[step] - accuracies[step]) > 1e-9 for step in rewards.keys() & accuracies.keys())
    by_accuracy = bool(accuracies) and not graded
    held_out = ("eval/accuracy", "held-out accuracy") if by_accuracy else ("eval/reward", "held-out reward")
    return [held_out, ("reward/mean", "reward")]


def _comparable(run: RunFiles, key: str) -> list[tuple[int, float]]:
    """The finite values of a metric; of a held-out metric, those on the newest held-out set."""
    digests = values_over_time(run.config, "inputs").get(HELD_OUT_SET, [])
    begin = digests[-1][0] if len(digests) > 1 and key.startswith("eval/") else -1
    return [(step, value) for step, value in finite_values(run, key) if step > begin]


def tiles_of(run: RunFiles) -> list[Tile]:
    """The numbers at the top of the page, for whatever the run has measured."""
    tiles = []
    margin = [("eval/margin", "held-out margin")] if has_pairs(run) else []
    for key, name in (*_main_metrics(run), *margin):
        values = _comparable(run, key)
        if not values:
            continue
        before, after = _ends(values, smooth=not key.startswith("eval/"))
        best = (min if key.endswith("/loss") else max)(value for _, value in values)
        note = f"from {number(before)}, best {number(best)}" if len(values) > 1 else "measured once"
        counts = finite_values(run, "eval/examples") if key.startswith("eval/") else []
        tiles.append(Tile(name.capitalize(), number(after), note + (f", n = {counts[-1][1]:.0f}" if counts else "")))
    seconds = [value for _, value in finite_values(run, "time_s/step")]
    if any(seconds):
        median = number(statistics.median_high(seconds))
        tiles.append(Tile("Time", _duration(sum(seconds)), f"{median} s a step (median)"))
    speeds = [value for _, value in finite_values(run, "perf/tokens_per_s")]
    if speeds:
        tiles.append(Tile("Throughput", number(statistics.median_high(speeds)), "tokens a second (median)"))
    gaps = finite_values(run, "rollout/logprob_gap_max")
    if gaps:
        step, gap = max(gaps, key=lambda point: point[1])
        tiles.append(Tile("Log-prob gap", number(gap), f"nats, the largest, at step {step}"))
    memory = [value for _, value in finite_values(run, "memory/peak_gb")]
    if memory:
        tiles.append(Tile("Memory", f"{number(max(memory))} GB", "at its peak"))
    return tiles


def _ends(values: list[tuple[int, float]], smooth: bool) -> tuple[float, float]:
    """The first and the last value; of a noisy metric the means of the first and last twentieth."""
    count = max(1, len(values) // 20) if smooth else 1
    first = statistics.fmean(value for _, value in values[:count])
    last = statistics.fmean(value for _, value in values[-count:])
    return first, last


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{number(seconds)} s" if seconds else ""
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"
