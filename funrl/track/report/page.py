"""One page about a run: what it reached, its curves, where the time went, what the policy said before and after.

    funrl report runs/ppo-20250101-120000

writes report.html into that directory, from config.json, metrics.jsonl and samples.jsonl. The page stands alone: its
styles, its drawings and the script that shows values under the pointer are inside; nothing is loaded from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funrl.data.json_lines import DataError
from funrl.data.order import weighted_files
from funrl.track.records.guards import findings
from funrl.track.records.run_directory import RunDirectory, write_text
from funrl.track.records.samples import first_and_last
from funrl.track.records.segments import SEGMENTS, in_words, segments_of, values_over_time
from funrl.track.report.charts import Figure, Series, line_figure, smoothing
from funrl.track.report.figures import (
    CHARTS,
    LIKELIHOOD,
    LOSS,
    PAIR_CHARTS,
    REWARD_CHARTS,
    REWARD_MEANS,
    TIME,
    Chart,
    charts_of_keys,
)
from funrl.track.report.headline import headline, tiles_of
from funrl.track.report.rendering import render_page
from funrl.track.report.run_files import (
    ReportError,
    RunFiles,
    finite_values,
    has_pairs,
    is_supervised,
    read_run,
    reward_range,
)
from funrl.trainer.settings.declaration import START_FLAGS

PHASES: dict[str, int] = {  # in the order of a step, with the page's colour of each
    "generate": 0,
    "reward": 5,
    "score_policy": 2,
    "score_reference": 6,
    "score_critic": 4,
    "advantage": 7,
    "update_critic": 3,
    "update_policy": 1,
    "reshard": 8,
    "verify": 11,
    "eval": 9,
    "other": 10,
}
ORDER = "Answers are shown with their digits in the usual order; the model writes the ones first."
SAMPLES = 5  # from the start, and from the end
LONGEST_CELL = 400  # characters of a prompt or completion in the table of an evaluation
EVALUATION_ROW = {"prompt": "", "completion": "", "answer": "", "reward": None, "correct": False, "tokens": ""}


class Phase(NamedTuple):
    """Time of a phase: mean seconds of a step, and its share of the run."""

    name: str
    colour: int
    seconds: float
    share: float


def write_report(run_dir: str | Path, running: bool | None = None) -> Path:
    """Write report.html from the files of a run and return its path.

    Args:
      run_dir: of the run.
      running: whether the run is in progress; None: the lock of its directory says so.

    Raises:
      ReportError: the directory or one of its files is missing, empty or broken, or the page cannot be written.
    """
    directory = RunDirectory(Path(run_dir))
    run = read_run(directory)
    try:
        write_text(directory.report, render(run if running is None else run._replace(running=running)))
    except OSError as error:
        raise ReportError(f"{directory.report}: cannot be written: {error.strerror}") from None
    return directory.report


def render(run: RunFiles) -> str:
    """The page as text."""
    main_charts = _main_charts(run)
    others = [chart for chart in CHARTS if chart not in main_charts]
    reach = smoothing(len(run.rows))
    phases = _seconds_by_phase(run)
    early, late = first_and_last(run.samples, SAMPLES)
    return render_page(
        "report.html.j2",
        run=run,
        title=_title(run.config),
        chips=_chips(run.config),
        headline=headline(run),
        tiles=tiles_of(run),
        findings=list(findings(run.rows)),
        main_figures=_figures(run, (*main_charts, _rewards_chart(run))),
        figures=_figures(run, (*others, *charts_of_keys({key for row in run.rows for key in row}))),
        smoothed=2 * reach + 1 if reach else 0,
        phases=_phases(phases),
        time_figure=line_figure(TIME, phases, _steps(run), named=True),
        samples={"At the start": early, "At the end": late} if late else {"Samples": early} if early else {},
        rewards=reward_range(run),
        order=ORDER if is_embedded(run.config) else "",
        evaluation=[EVALUATION_ROW | {"finished": True} | row for row in run.evaluation],
        # An answer that is just the completion needs no column.
        has_answers=any(
            row.get("answer") not in (None, "", str(row.get("completion", "")).strip()) for row in run.evaluation
        ),
        has_rewards=any(row.get("reward") is not None for row in run.evaluation),
        end_of=_end_of,
        configuration=_configuration(run.config),
    )


def _main_charts(run: RunFiles) -> tuple[Chart, ...]:
    if not is_supervised(run):
        return REWARD_CHARTS
    return PAIR_CHARTS if has_pairs(run) else (LOSS, LIKELIHOOD)


def _rewards_chart(run: RunFiles) -> Chart:
    """The mean of each reward, where there are several."""
    matches = (re.fullmatch(r"reward/(.+)/mean", key) for row in run.rows for key in row)
    names = sorted({match[1] for match in matches if match})
    return REWARD_MEANS._replace(keys=tuple((f"reward/{name}/mean", name) for name in names))


def _steps(run: RunFiles) -> tuple[int, int]:
    return run.rows[0]["step"], run.rows[-1]["step"]


def _figures(run: RunFiles, charts: Sequence[Chart]) -> list[Figure]:
    figures = []
    for chart in charts:
        series = [
            Series(name, finite_values(run, key), colour, dots=chart.dots or key.startswith("eval/"))
            for colour, (key, name) in enumerate(chart.keys)
        ]
        figures.append(line_figure(chart, series, _steps(run), note="; ".join(_notes(run, chart, series))))
    return [figure for figure in figures if figure is not None]


def _notes(run: RunFiles, chart: Chart, series: Sequence[Series]) -> Iterator[str]:
    broken = [row["step"] for row in run.rows if any(key in row and row[key] is None for key, _ in chart.keys)]
    if broken:
        yield f"not finite at {len(broken)} of {len(run.rows)} steps, first at step {broken[0]}"
    if chart.log and any(value == 0 for curve in series for _, value in curve.points):
        yield "exact zeros are drawn on the lower edge"


def _chips(config: dict[str, Any]) -> list[tuple[str, Any]]:
    flags = config.get("flags") or {}
    facts = {
        "model": Path(str(flags.get("model") or "from scratch")).name,
        "mesh": config.get("mesh") or "dp1",
        "seed": config.get("seed"),
        "started": str(config.get("started") or "")[:16].replace("T", " "),
    }
    return [(name, value) for name, value in facts.items() if value not in (None, "")]


def _title(config: dict[str, Any]) -> str:
    flags = config.get("flags") or {}
    name = str(config.get("experiment") or "run")
    task = _file_names(flags.get("data") or flags.get("prompts")) or flags.get("task")
    shown = name.upper() if len(name) <= 5 else name.capitalize().replace("_", " ")
    return f"{shown} on {task}" if task else shown


def _file_names(flag: Any) -> str:
    """Names of the files that a flag gives, without folders and weights."""
    try:
        return " + ".join(Path(file.path).name for file in weighted_files(str(flag))) if flag else ""
    except DataError:
        return Path(str(flag)).name


def _seconds_by_phase(run: RunFiles) -> list[Series]:
    """Seconds of each phase at each step that has them, and of what no phase accounts for."""
    rows = [row for row in run.rows if isinstance(row.get("time_s/step"), (int, float))]
    keys = {key.removeprefix("time_s/") for row in rows for key in row if key.startswith("time_s/")} - {"step"}
    names = [name for name in PHASES if name in keys] + sorted(keys - set(PHASES))
    seconds = {name: [max(0.0, float(row.get(f"time_s/{name}") or 0.0)) for row in rows] for name in names}
    rest = [max(0.0, float(row["time_s/step"]) - sum(x)) for row, *x in zip(rows, *seconds.values(), strict=True)]
    if names and sum(rest) > 0.005 * sum(float(row["time_s/step"]) for row in rows):
        seconds["other"] = rest
    steps = [row["step"] for row in rows]
    return [
        Series(name, list(zip(steps, values, strict=True)), PHASES.get(name, PHASES["other"]))
        for name, values in seconds.items()
    ]


def _phases(series: Sequence[Series]) -> list[Phase]:
    sums = [sum(seconds for _, seconds in phase.points) for phase in series]
    whole = sum(sums) or 1.0
    return [
        Phase(phase.name, phase.colour, total / len(phase.points), share=total / whole)
        for phase, total in zip(series, sums, strict=True)
    ]


def is_embedded(config: dict[str, Any]) -> bool:
    """True if a run's config.json says that it completed the embedded task."""
    flags = config.get("flags") or {}
    given = any(flags.get(name) for name in ("prompts", "data", "given_in_python"))
    return flags.get("task") in ("arithmetic", "arithmetic_moe") and not given


def _end_of(value: Any) -> str:
    """The last characters of a cell's text."""
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST_CELL else "..." + text[-LONGEST_CELL:]


def _configuration(config: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Everything in config.json, as two columns of named tables."""
    changes = {name: in_words(values) for name, values in values_over_time(config).items() if len(values) > 1}
    starts = [f"after step {segment['step']}, {segment.get('started')}" for segment in segments_of(config)]
    tables = {name: config.get(name) or {} for name in ("flags", "versions", "inputs")}
    facts = {name: value for name, value in config.items() if name not in (*tables, SEGMENTS)}
    others = {
        "run": facts | {"starts": "; ".join(starts)},
        "flags that changed": {name: value for name, value in changes.items() if name not in START_FLAGS},
        "versions": tables["versions"],
        "inputs": tables["inputs"],
    }
    return [{"flags": tables["flags"]}, others]
