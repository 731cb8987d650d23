"""One page about a run: what it reached, its curves, where the time went, what the policy said before and after.

    funrl report runs/ppo-20250101-120000

writes report.html into that directory, from config.json, metrics.jsonl and samples.jsonl. The page stands alone: its
styles, its drawings and the script that shows values under the pointer are inside; nothing is loaded from elsewhere.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from funrl.track.records.guards import findings
from funrl.track.records.run_directory import RunDirectory, write_text
from funrl.track.records.samples import first_and_last
from funrl.track.records.segments import SEGMENTS, in_words, segments_of, values_over_time
from funrl.track.report.charts import Figure, Series, line_figure, number
from funrl.track.report.figures import CHARTS, MAIN_CHARTS, Chart
from funrl.track.report.rendering import render_page
from funrl.track.report.run_files import ReportError, RunFiles, finite_values, read_run
from funrl.trainer.settings.declaration import HELD_OUT_SET

RESULTS = {  # the metrics that say how a run went, the best of them first
    "eval/reward": "held-out reward",
    "eval/accuracy": "held-out accuracy",
    "eval/loss": "held-out loss",
    "reward/mean": "reward",
    "train/loss": "training loss",
    "eval/margin": "held-out margin",
}
RESOURCES = {  # metric -> title, statistic, unit
    "time_s/step": ("Time", statistics.median, "s a step (median)"),
    "perf/tokens_per_s": ("Throughput", statistics.median, "tokens a second (median)"),
    "rollout/logprob_gap_max": ("Log-prob gap", max, "nats, the largest"),
    "memory/peak_gb": ("Memory", max, "GB at its peak"),
}
MOST_CURVES = 8  # of a chart: colours that differ well
COLOURS = 10
SAMPLES = 5  # from the start, and from the end


def write_report(run_dir: str | Path) -> Path:
    """Write report.html from the files of a run and return its path.

    Raises:
      ReportError: the directory or one of its files is missing, empty or broken, or the page cannot be written.
    """
    directory = RunDirectory(Path(run_dir))
    text = render(read_run(directory))
    try:
        write_text(directory.report, text)
    except OSError as error:
        raise ReportError(f"{directory.report}: cannot be written: {error.strerror}") from None
    return directory.report


def render(run: RunFiles) -> str:
    """The page as text."""
    flags = run.config.get("flags") or {}
    facts = {
        "model": Path(str(flags.get("model") or "from scratch")).name,
        "data": flags.get("data") or flags.get("prompts") or flags.get("env") or flags.get("task"),
        "mesh": run.config.get("mesh") or "dp1",
        "seed": run.config.get("seed"),
        "started": str(run.config.get("started") or "")[:16].replace("T", " "),
    }
    seconds = _seconds_by_phase(run)
    early, late = first_and_last(run.samples, SAMPLES)
    time_chart = Chart("By step", "seconds", ())
    return render_page(
        "report.html.j2",
        title=str(run.config.get("experiment") or "run"),
        chips={name: value for name, value in facts.items() if value not in (None, "")},
        headline=headline(run),
        tiles=list(_tiles(run)),
        findings=list(findings(run.rows)),
        main_figures=_figures(run, MAIN_CHARTS),
        figures=_figures(run, CHARTS),
        phases=_phases(seconds),
        time_figure=line_figure(time_chart, seconds, _steps(run)),
        samples={heading: group for heading, group in (("At the start", early), ("At the end", late)) if group},
        evaluation=run.evaluation,
        groups=run.groups,
        configuration=_configuration(run.config),
    )


def headline(run: RunFiles) -> str:
    """The sentence that says how a run went, or is going."""
    last = run.rows[-1]["step"]
    total = (run.config.get("flags") or {}).get("steps")
    status = f" The run is to take {total} steps." if isinstance(total, int) and last < total else ""
    seconds = sum(value for _, value in finite_values(run, "time_s/step"))
    duration = f" and {seconds / 60:.1f} min" if seconds else ""
    for key, name in RESULTS.items():
        values = _comparable(run, key)
        if len(values) > 1:
            before, after = _ends(values, key)
            verb = "stayed near" if before == after else "rose from" if after > before else "fell from"
            return f"{name.capitalize()} {verb} {number(before)} to {number(after)} in {last} steps{duration}.{status}"
    return f"The run has taken {last} steps{duration}.{status}"


def _comparable(run: RunFiles, key: str) -> list[tuple[int, float]]:
    """The finite values of a metric; of a held-out metric, those on the newest held-out set."""
    digests = values_over_time(run.config, "inputs").get(HELD_OUT_SET, [])
    begin = digests[-1][0] if len(digests) > 1 and key.startswith("eval/") else -1
    return [(step, value) for step, value in finite_values(run, key) if step > begin]


def _ends(values: Sequence[tuple[int, float]], key: str) -> tuple[float, float]:
    """The first and the last value; of a metric of batches the means of the first and last twentieth."""
    count = 1 if key.startswith("eval/") else max(1, len(values) // 20)
    first, last = (statistics.fmean(value for _, value in part) for part in (values[:count], values[-count:]))
    return first, last


def _tiles(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    """Yield title, value and note of each number at the top of the page."""
    examples = finite_values(run, "eval/examples")
    for key, name in RESULTS.items():
        if values := _comparable(run, key):
            before, after = _ends(values, key)
            best = (min if key.endswith("/loss") else max)(value for _, value in values)
            note = f"from {number(before)}, best {number(best)}" if len(values) > 1 else "measured once"
            count = f", n = {examples[-1][1]:.0f}" if examples and key.startswith("eval/") else ""
            yield name.capitalize(), number(after), note + count
    for key, (name, statistic, unit) in RESOURCES.items():
        if values := finite_values(run, key):
            yield name, number(statistic([value for _, value in values])), unit


def _figures(run: RunFiles, charts: Sequence[Chart]) -> list[Figure]:
    """The charts that a run has metrics for."""
    keys = sorted({key for row in run.rows for key in row})
    figures = []
    for chart in charts:
        names = [key for pattern in chart.patterns for key in keys if re.fullmatch(pattern, key)][:MOST_CURVES]
        series = [Series(name, finite_values(run, name), colour) for colour, name in enumerate(names)]
        broken = [row["step"] for row in run.rows if any(name in row and row[name] is None for name in names)]
        note = f"not finite at {len(broken)} of {len(run.rows)} steps, first at step {broken[0]}" if broken else ""
        figures.append(line_figure(chart, series, _steps(run), note))
    return [figure for figure in figures if figure is not None]


def _steps(run: RunFiles) -> tuple[int, int]:
    return run.rows[0]["step"], run.rows[-1]["step"]


def _seconds_by_phase(run: RunFiles) -> list[Series]:
    """Seconds of each phase at each step that has them, and of what no phase accounts for."""
    rows = [row for row in run.rows if isinstance(row.get("time_s/step"), (int, float))]
    names = dict.fromkeys(key for row in rows for key in row if key.startswith("time_s/") and key != "time_s/step")
    seconds = {name.removeprefix("time_s/"): [max(0.0, float(row.get(name) or 0.0)) for row in rows] for name in names}
    rest = [max(0.0, float(row["time_s/step"]) - sum(x)) for row, *x in zip(rows, *seconds.values(), strict=True)]
    if names and sum(rest) > 0.005 * sum(float(row["time_s/step"]) for row in rows):
        seconds["other"] = rest
    steps = [row["step"] for row in rows]
    return [
        Series(name, list(zip(steps, values, strict=True)), number % COLOURS)
        for number, (name, values) in enumerate(seconds.items())
    ]


def _phases(series: Sequence[Series]) -> list[tuple[Series, float, float]]:
    """The phases, each with its mean seconds of a step and its share of the run."""
    means = [statistics.fmean(seconds for _, seconds in phase.points) for phase in series]
    return [(phase, mean, mean / (sum(means) or 1.0)) for phase, mean in zip(series, means, strict=True)]


def _configuration(config: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """Everything in config.json, as named tables; a flag that changed has all of its values."""
    tables = {
        kind: {name: x[0][1] if len(x) == 1 else in_words(x) for name, x in values_over_time(config, kind).items()}
        for kind in ("flags", "inputs")
    }
    versions = config.get("versions")
    facts = {name: value for name, value in config.items() if name not in (*tables, "versions", SEGMENTS)}
    facts["starts"] = "; ".join(f"after step {start['step']}, {start.get('started')}" for start in segments_of(config))
    return {**tables, "run": facts, "versions": versions if isinstance(versions, Mapping) else {}}
