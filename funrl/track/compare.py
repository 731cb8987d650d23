"""Several runs on one page: their curves in one chart each, what their configurations differ in, and what they say.

    funrl compare runs/a runs/b --to=compare.html

The page stands alone, as a report does: no script, nothing is loaded from elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funrl.track.charts import Series, line_chart
from funrl.track.report import (
    ORDER,
    escaped,
    is_embedded,
    sample_card,
    section,
    shown_value,
    whole_page,
)
from funrl.track.report_charts import CHARTS, LOSS, PAIR_CHARTS, REWARD_CHARTS, Chart
from funrl.track.report_headline import tiles_of
from funrl.track.run_directory import RunDirectory, write_text
from funrl.track.run_files import ReportError, RunFiles, finite_values, is_supervised, read_run

MOST_RUNS = 8  # colours that differ well
SAMPLE_PROMPTS = 6
NOT_COMPARED = ("run_dir", "resume")  # flags that differ between any two runs


def write_comparison(run_dirs: Sequence[str | Path], to: str | Path) -> Path:
    """Write a page about several runs and return its path.

    Raises:
      ReportError: a directory or one of its files is missing, empty or broken; or there are fewer than two.
    """
    if not 2 <= len(run_dirs) <= MOST_RUNS:
        raise ReportError(f"{len(run_dirs)} runs: two to {MOST_RUNS} can be compared")
    runs = dict(zip(_names(run_dirs), (read_run(RunDirectory(Path(one))) for one in run_dirs), strict=True))
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
    figures = [figure for chart, key, kind in _curves(runs) if (figure := _chart(runs, chart, key, kind))]
    body = "".join(
        (
            _header(runs),
            section("", '<div class="grid two">', figures[:2]),
            section("Curves", '<div class="grid three">', figures[2:]),
            _differences(runs),
            _samples(runs),
        )
    )
    return whole_page(f"{len(runs)} runs", body)


def _curves(runs: Mapping[str, RunFiles]) -> list[tuple[Chart, str, str]]:
    """Every metric that has a chart, once: a chart, the metric, and its name there."""
    rewarded = [chart for chart in REWARD_CHARTS if any(not is_supervised(run) for run in runs.values())]
    charts = dict.fromkeys((*rewarded, LOSS, *PAIR_CHARTS, *CHARTS))
    found = {key: (chart, key, kind) for chart in reversed(charts) for key, kind in reversed(chart.keys)}
    return list(found.values())[::-1]


def _names(run_dirs: Sequence[str | Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    paths = [Path(os.path.abspath(one)) for one in run_dirs]
    if len(set(paths)) < len(paths):
        raise ReportError(f"{next(p for p in paths if paths.count(p) > 1)}: is given twice")
    count = 1
    while len({path.parts[-count:] for path in paths}) < len(paths):
        count += 1
    return ["/".join(path.parts[-count:]) for path in paths]


def _header(runs: Mapping[str, RunFiles]) -> str:
    """The runs with their colours, and the numbers that say best how each went."""
    rows = ""
    labels = list(dict.fromkeys(label for run in runs.values() for label, _, _ in tiles_of(run)))
    for colour, (name, run) in enumerate(runs.items()):
        tiles = {label: (value, below) for label, value, below in tiles_of(run)}
        cells = "".join("<td>{}<small>{}</small></td>".format(*tiles.get(label, ("-", ""))) for label in labels)
        rows += f'<tr><th><i class="key c{colour}"></i>{escaped(name)}</th>{cells}</tr>'
    head = "".join(f"<th>{label}</th>" for label in labels)
    return (
        f'<header><p class="over">funrl compare</p><h1>{len(runs)} runs</h1></header>'
        f'<section><div class="card wide"><table class="runs"><tr><th></th>{head}</tr>{rows}</table></div></section>'
    )


def _chart(runs: Mapping[str, RunFiles], chart: Chart, key: str, kind: str) -> str:
    """One metric of all runs that have it; "" where none does."""
    dots = chart.dots or key.startswith("eval/")
    series = [Series(name, finite_values(run, key), colour, dots) for colour, (name, run) in enumerate(runs.items())]
    steps = [run.rows[at]["step"] for run in runs.values() for at in (0, -1)]
    title = chart.title if len(chart.keys) == 1 else f"{chart.title}, {kind}"
    return line_chart(title, chart.unit, series, (min(steps), max(steps)), chart.log, chart.bounds, named=True)


def _differences(runs: Mapping[str, RunFiles]) -> str:
    """A table of the flags, versions and facts that are not alike in all runs."""
    configs = [_facts(run.config) for run in runs.values()]
    keys = [key for key in dict.fromkeys(key for config in configs for key in config) if key not in NOT_COMPARED]
    rows = ""
    for key in keys:
        values = [shown_value(config[key]) if key in config else "-" for config in configs]
        if len(set(values)) > 1:
            rows += f"<tr><th>{escaped(key)}</th>" + "".join(f"<td>{escaped(x)}</td>" for x in values) + "</tr>"
    if not rows:
        return section("Configuration", "<div>", ['<p class="lead">The runs have the same flags and versions.</p>'])
    head = "".join(f'<th><i class="key c{i}"></i>{escaped(name)}</th>' for i, name in enumerate(runs))
    table = f'<div class="card wide"><table class="differ"><tr><th></th>{head}</tr>{rows}</table></div>'
    return section("What differs in the configuration", "<div>", [table])


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment, every flag, and the versions of packages."""
    versions = {f"version of {name}": version for name, version in (config.get("versions") or {}).items()}
    facts = {name: config.get(name) for name in ("experiment", "machine")}
    return facts | (config.get("flags") or {}) | versions


def _samples(runs: Mapping[str, RunFiles]) -> str:
    """The last completions of prompts that most runs have, side by side."""
    last = [{sample.prompt: sample for sample in run.samples} for run in runs.values()]  # of a prompt the latest
    prompts = list(dict.fromkeys(prompt for samples in last for prompt in samples))
    prompts.sort(key=lambda prompt: -sum(prompt in samples for samples in last))
    columns = ""
    for colour, (name, samples) in enumerate(zip(runs, last, strict=True)):
        cards = "".join(
            sample_card(samples[prompt])
            if prompt in samples
            else '<article class="card"><p class="about">-</p></article>'
            for prompt in prompts[:SAMPLE_PROMPTS]
        )
        columns += f'<div><h3><i class="key c{colour}"></i>{escaped(name)}</h3>{cards}</div>'
    lead = f"<p class=lead>{ORDER}</p>" if all(is_embedded(run.config) for run in runs.values()) else ""
    style = f'style="grid-template-columns:repeat({len(runs)},minmax(240px,1fr));overflow-x:auto"'
    return section("What the policies say", f'{lead}<div class="grid samples" {style}>', [columns] if prompts else [])
