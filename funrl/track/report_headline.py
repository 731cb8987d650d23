"""Headline of a run's page: what the run reached, in a sentence and in a row of numbers."""

from __future__ import annotations

from funrl.track.charts import number
from funrl.track.run_files import RunFiles, finite_values, has_pairs, is_supervised, seconds_of, steps_wanted


def headline(run: RunFiles) -> str:
    """One sentence on how a run went, or goes, and where it is unless it came to its end."""
    last, total = run.rows[-1]["step"], steps_wanted(run)
    duration = _duration(seconds_of(run))
    when = f"in {last} steps" + (f" and {duration}" if duration else "")
    sentence = f"The run {'has taken' if run.running else 'took'} {when.removeprefix('in ')}."
    for key, name in _headlines(run):
        values = finite_values(run, key)
        if len(values) > 1:
            ends = _ends(values, smooth=not key.startswith("eval/"))
            before, after = (number(value) for value in ends)
            verb = "stayed at" if before == after else "rose from" if ends[1] > ends[0] else "fell from"
            rest = f"<b>{before}</b>" if before == after else f"<b>{before}</b> to <b>{after}</b>"
            sentence = f"{name.capitalize()} {verb} {rest} {when}."
            break
    if run.running:
        sentence += f" <mark>Running, step {last}{f' of {total}' if total else ''}.</mark>"
    elif total and last < total:
        sentence += f" <mark>Ended at step {last} of {total}.</mark>"
    return sentence


def _headlines(run: RunFiles) -> list[tuple[str, str]]:
    """The metrics that say best how a run went, with their names, the best of them first.

    Of a run with rewards: the share of problems solved, or the reward where there is something between.
    """
    if has_pairs(run):
        return [("eval/accuracy", "held-out pair accuracy"), ("eval/loss", "held-out loss")]
    if is_supervised(run):
        return [("eval/loss", "held-out loss"), ("train/loss", "training loss")]
    between = any(
        abs(row["eval/reward"] - row["eval/accuracy"]) > 1e-9
        for row in run.rows
        if row.get("eval/reward") is not None and row.get("eval/accuracy") is not None
    )
    held_out = ("eval/reward", "held-out reward") if between else ("eval/accuracy", "held-out accuracy")
    return [held_out, ("reward/mean", "reward")]


def tiles_of(run: RunFiles) -> list[tuple[str, str, str]]:
    """Label, value and what stands below it, for whatever the run has measured."""
    tiles = []
    margin = [("eval/margin", "held-out margin")] if has_pairs(run) else []
    for key, name in (*_headlines(run), *margin):
        values = finite_values(run, key)
        if values:
            before, after = _ends(values, smooth=not key.startswith("eval/"))
            best = (min if key.endswith("/loss") else max)(value for _, value in values)
            below = f"from {number(before)}, best {number(best)}" if len(values) > 1 else "measured once"
            tiles.append((name.capitalize(), number(after), below))
    seconds, steps = seconds_of(run), [value for _, value in finite_values(run, "time_s/step")]
    if seconds:
        middle = sorted(steps)[len(steps) // 2]
        tiles.append(("Time", _duration(seconds), f"{number(middle)} s a step (median)"))
    speed = [value for _, value in finite_values(run, "perf/tokens_per_s")]
    if speed:
        tiles.append(("Throughput", number(sorted(speed)[len(speed) // 2]), "tokens a second (median)"))
    gap = finite_values(run, "rollout/logprob_gap_max")
    if gap:
        step, worst = max(gap, key=lambda point: point[1])
        tiles.append(("Log-prob gap", number(worst), f"nats, the largest, at step {step}"))
    memory = [value for _, value in finite_values(run, "memory/peak_gb")]
    if memory:
        tiles.append(("Memory", f"{number(max(memory))} GB", "at its peak"))
    return tiles


def _ends(values: list[tuple[int, float]], smooth: bool) -> tuple[float, float]:
    """The first and the last value; of a noisy metric the means of the first and last twentieth."""
    count = max(1, len(values) // 20) if smooth else 1
    first, last = values[:count], values[-count:]
    return sum(v for _, v in first) / count, sum(v for _, v in last) / count


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{number(seconds)} s" if seconds else ""
    minutes = round(seconds / 60) if seconds >= 3600 else int(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if seconds >= 3600 else f"{minutes} min {int(seconds % 60)} s"
