"""One page about a run: what it reached, its curves, where the time went, what the policy said before and after.

    funrl report runs/ppo-20250101-120000

writes report.html into that directory, from config.json, metrics.jsonl and samples.jsonl. The page stands alone: styles
and drawings are inside, there is no script, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funrl.data.json_lines import DataError
from funrl.data.mixture import weighted_files
from funrl.track.charts import Band, Series, line_chart, number, smoothing, stacked_chart
from funrl.track.guards import findings
from funrl.track.report_charts import CHARTS, LIKELIHOOD, LOSS, PAIR_CHARTS, REWARD_CHARTS, Chart
from funrl.track.report_evaluation import evaluation_table
from funrl.track.report_headline import headline, tiles_of
from funrl.track.report_style import STYLE
from funrl.track.run_directory import RunDirectory, write_text
from funrl.track.run_files import (
    ReportError,
    RunFiles,
    finite_values,
    has_pairs,
    is_supervised,
    read_run,
    seconds_of,
)
from funrl.track.samples import Sample, first_and_last

PHASES = {  # in the order of a step, with the page's colour of each
    "generate": 0, "reward": 5, "score_policy": 2, "score_reference": 6, "score_critic": 4, "advantage": 7,
    "update_critic": 3, "update_policy": 1, "reshard": 8, "verify": 11, "eval": 9, "other": 10,
}  # fmt: skip
ORDER = "Answers are shown with their digits in the usual order; the model writes the ones first."
LONGEST_TEXT = 4000  # characters of a prompt or completion on the page
SAMPLES = 5  # from the start, and from the end


def write_report(run_dir: str | Path, running: bool | None = None) -> Path:
    """Write report.html from the files of a run and return its path.

    Args:
      running: whether the run goes on; None: as the lock of its directory tells.

    Raises:
      ReportError: the directory or one of its files is missing, empty or broken.
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
    title, first = _title(run.config), _headline_charts(run)
    body = "".join(
        (
            _header(run, title),
            _noticed(run),
            section("", '<div class="grid two">', [*(_chart(run, chart) for chart in first), *_reward_parts(run)]),
            section(
                "Training",
                _legend(run) + '<div class="grid three">',
                [_chart(run, chart) for chart in CHARTS if chart not in first],
            ),
            _time(run),
            _samples(run),
            section("Held-out prompts", "<div>", [evaluation_table(run.evaluation)] if run.evaluation else []),
            _configuration(run),
        )
    )
    return whole_page(title, body)


def whole_page(title: str, body: str) -> str:
    """A page that stands alone."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)} - funrl</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _headline_charts(run: RunFiles) -> tuple[Chart, ...]:
    if not is_supervised(run):
        return REWARD_CHARTS
    return PAIR_CHARTS if has_pairs(run) else (LOSS, LIKELIHOOD)


def _chart(run: RunFiles, chart: Chart) -> str:
    series = [
        Series(name, finite_values(run, key), colour, chart.dots or key.startswith("eval/"))
        for colour, (key, name) in enumerate(chart.keys)
    ]
    notes = []
    broken = [row["step"] for row in run.rows if any(key in row and row[key] is None for key, _ in chart.keys)]
    if broken:
        notes.append(f"not finite at {len(broken)} of {len(run.rows)} steps, first at step {broken[0]}")
    if chart.log and any(value == 0 for one in series for _, value in one.points):
        notes.append("exact zeros are drawn on the lower edge")
    steps = run.rows[0]["step"], run.rows[-1]["step"]
    return line_chart(chart.title, chart.unit, series, steps, chart.log, chart.bounds, "; ".join(notes))


def _reward_parts(run: RunFiles) -> list[str]:
    """A figure of each reward's mean, where there are several."""
    found = {match[1] for row in run.rows for key in row if (match := re.fullmatch(r"reward/(.+)/mean", key))}
    keys = tuple((f"reward/{name}/mean", name) for name in sorted(found))
    chart = Chart("Rewards", "mean of each, of the completions to which it applies", keys)
    return [_chart(run, chart)] if keys else []


def _legend(run: RunFiles) -> str:
    reach = smoothing(len(run.rows))
    return f"<p class=lead>Faint: every step. Bold: the mean of {2 * reach + 1} steps.</p>" if reach else ""


def _noticed(run: RunFiles) -> str:
    """Messages of the guards about the run."""
    items = [f"<li>step {found.step}: {escaped(found.text)}</li>" for found in findings(run.rows)]
    return section("Noticed", '<div><ul class="noticed">', [*items, "</ul>"] if items else [])


def section(heading: str, opening: str, parts: Sequence[str]) -> str:
    """A part of the page; "" where nothing is in it."""
    inside = "".join(parts)
    head = f"<h2>{heading}</h2>" if heading else ""
    return f"<section>{head}{opening}{inside}</div></section>" if inside else ""


def _header(run: RunFiles, title: str) -> str:
    config, flags = run.config, run.config.get("flags") or {}
    facts = [
        ("model", _base(flags.get("model")) or "from scratch"),
        ("mesh", config.get("mesh") or "dp1"),
        ("seed", config.get("seed")),
        ("started", str(config.get("started") or "")[:16].replace("T", " ")),
    ]
    chips = "".join(f"<li>{escaped(k)} <b>{escaped(v)}</b></li>" for k, v in facts if v not in (None, ""))
    tiles = "".join(
        f'<div class="tile"><dt>{label}</dt><dd>{value}</dd><dd class="sub">{below}</dd></div>'
        for label, value, below in tiles_of(run)
    )
    return (
        f'<header><p class="over">funrl run</p><h1>{escaped(title)}</h1><ul class="chips">{chips}</ul>'
        f'<p class="headline">{headline(run)}</p><dl class="tiles">{tiles}</dl></header>'
    )


def _title(config: dict[str, Any]) -> str:
    flags = config.get("flags") or {}
    name = str(config.get("experiment") or "run")
    task = _files(flags.get("data")) or _files(flags.get("prompts")) or flags.get("task")
    shown = name.upper() if len(name) <= 5 else name.capitalize().replace("_", " ")
    return f"{shown}{f' on {task}' if task else ''}"


def _files(text: Any) -> str:
    """Names of the files that a flag gives, without folders and weights."""
    try:
        return " + ".join(Path(one.path).name for one in weighted_files(str(text))) if text else ""
    except DataError:
        return _base(text)


def _time(run: RunFiles) -> str:
    """Time by phase: one bar for the whole run, and every step."""
    rows = [row for row in run.rows if isinstance(row.get("time_s/step"), (int, float))]
    keys = {k.removeprefix("time_s/") for row in rows for k in row if k.startswith("time_s/")} - {"step"}
    names = [name for name in PHASES if name in keys] + sorted(keys - set(PHASES))
    if not rows or not names:
        return ""
    colours = _phase_colours(names)
    layers = [
        Band(name, [max(0.0, float(row.get(f"time_s/{name}") or 0.0)) for row in rows], colours[name]) for name in names
    ]
    rest = [row["time_s/step"] - sum(layer.values[i] for layer in layers) for i, row in enumerate(rows)]
    if sum(rest) > 0.005 * seconds_of(run):
        layers.append(Band("other", [max(0.0, value) for value in rest], PHASES["other"]))
    shares = _shares(layers, len(rows))
    steps = [row["step"] for row in rows]
    return section("Time", '<div class="grid time">', [shares, stacked_chart("By step", "seconds", steps, layers)])


def _phase_colours(names: Sequence[str]) -> dict[str, int]:
    """The page's colour of each phase; those that have none of their own take what is free, then that of "other"."""
    colours = {name: PHASES[name] for name in names if name in PHASES}
    free = [colour for colour in PHASES.values() if colour not in (*colours.values(), PHASES["other"])]
    rest = [name for name in names if name not in colours]
    return colours | {name: free[at] if at < len(free) else PHASES["other"] for at, name in enumerate(rest)}


def _shares(layers: Sequence[Band], steps: int) -> str:
    """One bar for the whole run, and what each phase takes of it."""
    sums = [sum(layer.values) for layer in layers]
    whole = sum(sums) or 1.0
    bar = "".join(
        f'<i class="c{x.colour}" style="flex:{s / whole:.4f}"></i>' for x, s in zip(layers, sums, strict=True)
    )
    rows = "".join(
        f'<tr><td><i class="key c{layer.colour}"></i>{escaped(layer.name)}</td><td>{number(total / steps)} s</td>'
        f"<td>{_percent(total / whole)}</td></tr>"
        for layer, total in zip(layers, sums, strict=True)
    )
    return (
        '<figure class="card"><figcaption><b>By phase</b><small>mean of a step, and share of the run</small>'
        f'</figcaption><div class="bar">{bar}</div><table class="phases">{rows}</table></figure>'
    )


def _samples(run: RunFiles) -> str:
    early, late = first_and_last(run.samples, SAMPLES)
    columns = []
    for name, samples in (("At the start", early), ("At the end", late)):
        if samples:
            cards = "".join(sample_card(sample) for sample in samples)
            columns.append(f"<div><h3>{name if late else 'Samples'}</h3>{cards}</div>")
    lead = f"<p class=lead>{ORDER}</p>" if columns and is_embedded(run.config) else ""
    return section("What the policy says", lead + '<div class="grid two samples">', columns)


def is_embedded(config: dict[str, Any]) -> bool:
    """True if a run's config.json says that it completed the embedded task."""
    flags = config.get("flags") or {}
    given = any(flags.get(name) for name in ("prompts", "data", "given_in_python"))
    return flags.get("task") in ("arithmetic", "arithmetic_moe") and not given


def sample_card(sample: Sample) -> str:
    """One sample."""
    reward = sample.reward
    if isinstance(reward, (int, float)):
        tone = "good" if reward > 0.5 else "some" if reward > 0 else "bad"
        pill = f' <span class="pill {tone}">reward {number(reward)}</span>'
    else:
        pill = ""
    pill += "".join(f" <small>{escaped(name)} {number(value)}</small>" for name, value in sample.rewards)
    return (
        f'<article class="card"><p class="about">step {sample.step}{pill}</p>'
        f"<pre><span>{_cut(sample.prompt)}</span>{_cut(sample.completion) or '<em>(empty)</em>'}</pre></article>"
    )


def _configuration(run: RunFiles) -> str:
    """Everything in config.json, folded."""
    config = dict(run.config)
    flags, versions = (_table(name, config.pop(name, None) or {}) for name in ("flags", "versions"))
    return (
        "<section><h2>Configuration</h2><details class=card><summary>All flags, versions and the machine</summary>"
        f'<div class="config"><div>{flags}</div><div>{_table("run", config)}{versions}</div></div></details></section>'
    )


def _table(name: str, values: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escaped(key)}</th><td>{escaped(shown_value(value))}</td></tr>" for key, value in values.items()
    )
    return f"<table><caption>{escaped(name)}</caption>{rows}</table>" if rows else ""


def shown_value(value: Any) -> str:
    """A value of config.json as text."""
    if value is None:
        return "not set"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return value if isinstance(value, str) else json.dumps(value)


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return escaped(text)
    more = len(text) - LONGEST_TEXT
    return f"{escaped(text[:LONGEST_TEXT])}<em> ({more} more characters in samples.jsonl)</em>"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.01 else "&lt;1%"


def _base(path: Any) -> str:
    return Path(str(path)).name if path else ""


def escaped(value: Any) -> str:
    """Text as HTML."""
    return html.escape(str(value), quote=True)


def main(arguments: Sequence[str]) -> int:
    """The command line: one run directory."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print("usage: python -m funrl.track.report RUN_DIR", file=sys.stderr)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    try:
        print(write_report(arguments[0]))
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
