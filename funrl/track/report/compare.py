"""Several runs on one page: their curves in one chart each, what their configurations differ in, and what they say.

    funrl compare runs/a runs/b --to=compare.html

The page stands alone, as a report does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funrl.track.records.run_directory import RunDirectory, write_text
from funrl.track.records.segments import in_words, values_over_time
from funrl.track.report.charts import Figure, Series, line_figure
from funrl.track.report.figures import CHARTS, LOSS, PAIR_CHARTS, REWARD_CHARTS, Chart, charts_of_keys
from funrl.track.report.headline import tiles_of
from funrl.track.report.page import ORDER, is_embedded
from funrl.track.report.rendering import render_page, shown_value
from funrl.track.report.run_files import ReportError, RunFiles, finite_values, is_supervised, read_run, reward_range
from funrl.trainer.settings.declaration import START_FLAGS

MOST_RUNS = 8  # colours that differ well
SAMPLE_PROMPTS = 6


def write_comparison(run_dirs: Sequence[str | Path], to: str | Path) -> Path:
    """Write a page about several runs and return its path.

    Raises:
      ReportError: a directory or one of its files is missing, empty or broken; or there are fewer than two.
    """
    if not 2 <= len(run_dirs) <= MOST_RUNS:
        raise ReportError(f"{len(run_dirs)} runs: two to {MOST_RUNS} can be compared")
    names = _names(run_dirs)
    runs = {name: read_run(RunDirectory(Path(path))) for name, path in zip(names, run_dirs, strict=True)}
    try:
        Path(to).absolute().parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(to).absolute(), render_comparison(runs))
    except OSError as error:
        raise ReportError(f"{to}: cannot be written: {error.strerror}") from None
    return Path(to)


def render_comparison(runs: Mapping[str, RunFiles]) -> str:
    """The page as text.

    Args:
      runs: by the names that the page gives them, in the order of their colours.
    """
    tiles = {name: {tile.label: tile for tile in tiles_of(run)} for name, run in runs.items()}
    samples = {name: {sample.question: sample for sample in run.samples} for name, run in runs.items()}
    figures = [_figure(runs, chart, key) for key, chart in _charts(runs).items()]
    return render_page(
        "compare.html.j2",
        title=f"{len(runs)} runs",
        names=list(runs),
        labels=list(dict.fromkeys(label for labels in tiles.values() for label in labels)),
        tiles=tiles,
        figures=[figure for figure in figures if figure is not None],
        differences=_differences(runs),
        order=ORDER if all(is_embedded(run.config) for run in runs.values()) else "",
        samples=samples,
        questions=_shared_questions(list(samples.values())),
        rewards={name: reward_range(run) for name, run in runs.items()},
    )


def _charts(runs: Mapping[str, RunFiles]) -> dict[str, Chart]:
    """One chart of every metric that has one, titled by what it draws of it."""
    rewarded = any(not is_supervised(run) for run in runs.values())
    charts: dict[str, Chart] = {}
    keys = {key for run in runs.values() for row in run.rows for key in row}
    for chart in (*(REWARD_CHARTS if rewarded else ()), LOSS, *PAIR_CHARTS, *CHARTS, *charts_of_keys(keys)):
        for key, name in chart.keys:
            title = chart.title if len(chart.keys) == 1 else f"{chart.title}, {name}"
            charts.setdefault(key, chart._replace(title=title))
    return charts


def _names(run_dirs: Sequence[str | Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    paths = [Path(os.path.abspath(path)) for path in run_dirs]
    if len(set(paths)) < len(paths):
        raise ReportError(f"{next(path for path in paths if paths.count(path) > 1)}: is given twice")
    count = 1
    while len({path.parts[-count:] for path in paths}) < len(paths):
        count += 1
    return ["/".join(path.parts[-count:]) for path in paths]


def _figure(runs: Mapping[str, RunFiles], chart: Chart, key: str) -> Figure | None:
    """One metric of all runs that have it; None where none does."""
    dots = chart.dots or key.startswith("eval/")
    series = [
        Series(name, finite_values(run, key), colour, dots=dots) for colour, (name, run) in enumerate(runs.items())
    ]
    first = min(run.rows[0]["step"] for run in runs.values())
    last = max(run.rows[-1]["step"] for run in runs.values())
    return line_figure(chart, series, (first, last), named=True)


def _differences(runs: Mapping[str, RunFiles]) -> dict[str, list[str]]:
    """Flags, versions and facts that are not the same in all runs, with the text of each run's value."""
    configs = [_facts(run.config) for run in runs.values()]
    names = dict.fromkeys(name for config in configs for name in config if name not in START_FLAGS)
    rows = {name: [shown_value(config[name]) if name in config else "-" for config in configs] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment, every flag, digests of inputs, and versions of packages.

    A value that changed within a run is a text with the steps after which it did.
    """
    facts = {name: config.get(name) for name in ("experiment", "machine")}
    digests = {f"digest of {name}": values for name, values in values_over_time(config, "inputs").items()}
    for name, values in (values_over_time(config) | digests).items():
        facts[name] = values[0][1] if len(values) == 1 else in_words(values)
    versions = {f"version of {name}": version for name, version in (config.get("versions") or {}).items()}
    return facts | versions


def _shared_questions(samples: Sequence[Mapping[tuple[str, ...], Any]]) -> list[tuple[str, ...]]:
    """The prompts, with their pictures, that most runs have, the latest first.

    Args:
      samples: of each run, the latest sample by `Sample.question`.
    """

    def age(question: tuple[str, ...]) -> tuple[int, int]:
        steps = [by_question[question].step for by_question in samples if question in by_question]
        return -len(steps), -min(steps)

    questions = dict.fromkeys(question for by_question in samples for question in by_question)
    return sorted(questions, key=age)[:SAMPLE_PROMPTS]
