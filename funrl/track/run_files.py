"""Files of a run as its pages read them: configuration, metrics, samples, and whether it goes on."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from funrl.track.report_evaluation import newest_table
from funrl.track.run_directory import RunDirectory, RunDirectoryError, read_lines
from funrl.track.run_lock import is_owned
from funrl.track.samples import Sample, read_samples


class ReportError(ValueError):
    """A run directory that no report can be made of; the message says which file and why."""


class RunFiles(NamedTuple):
    """Content of a run directory.

    Attributes:
      config: its config.json.
      rows: metrics in the order of steps.
      samples: in the order in which they were drawn.
      evaluation: rows of the newest one.
      running: whether the run goes on.
    """

    config: dict[str, Any]
    rows: list[dict[str, Any]]
    samples: list[Sample]
    evaluation: list[dict[str, Any]]
    running: bool = False


def read_run(directory: RunDirectory) -> RunFiles:
    """Read the files of a run. Of a step that was written twice (a resumed run), the later line counts."""
    if not directory.path.is_dir():
        raise ReportError(f"{directory.path}: no such directory")
    for path in (directory.config, directory.metrics):
        if not path.is_file():
            raise ReportError(f"{directory.path}: is not the directory of a run: it has no {path.name}")
    running = is_owned(directory.path)  # before its files are read: a run that ends meanwhile has more to tell
    try:
        config = json.loads(directory.config.read_bytes())
        rows = {row["step"]: row for row in read_lines(directory.metrics) if isinstance(row.get("step"), int)}
        samples, evaluation = read_samples(directory.samples), newest_table(directory.eval_samples)
    except RunDirectoryError as error:
        raise ReportError(str(error)) from None
    except ValueError as error:
        raise ReportError(f"{directory.config}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ReportError(f"{directory.config}: a JSON object is needed, not {type(config).__name__}")
    if not rows:
        raise ReportError(f"{directory.metrics}: no step has been written yet")
    return RunFiles(config, [rows[step] for step in sorted(rows)], samples, evaluation, running)


def is_supervised(run: RunFiles) -> bool:
    """True if a run learns from given texts."""
    return any("train/loss" in row for row in run.rows)


def has_pairs(run: RunFiles) -> bool:
    """True if a run learns from given pairs of texts."""
    return is_supervised(run) and any("preference/accuracy" in row for row in run.rows)


def finite_values(run: RunFiles, key: str) -> list[tuple[int, float]]:
    """The finite values of a metric with their steps."""
    points = ((row["step"], row.get(key)) for row in run.rows)
    return [(step, float(v)) for step, v in points if isinstance(v, (int, float)) and math.isfinite(v)]


def seconds_of(run: RunFiles) -> float:
    """Seconds of all steps."""
    return sum(value for _, value in finite_values(run, "time_s/step"))


def steps_wanted(run: RunFiles) -> int | None:
    """Steps that the run was to take, where its config.json says."""
    total = (run.config.get("flags") or {}).get("steps")
    return total if isinstance(total, int) else None
