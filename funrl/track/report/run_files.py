"""Files of a run as its page reads them: configuration, metrics and samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funrl.track.records.run_directory import RunDirectory, RunDirectoryError, read_lines
from funrl.track.records.samples import Sample, read_samples
from funrl.track.records.segments import SegmentError, segments_of

EVALUATION_ROWS = 16  # on a page


class ReportError(ValueError):
    """A run directory that no page can be made of; the message says which file and why."""


class RunFiles(NamedTuple):
    """Content of a run directory.

    Attributes:
      config: its config.json.
      rows: metrics in the order of steps.
      samples: in the order in which they were written.
      evaluation: rows of the newest one, spread over its prompts.
      groups: of the largest gradients, of the newest step that has been explained.
    """

    config: dict[str, Any]
    rows: list[dict[str, Any]]
    samples: list[Sample]
    evaluation: list[dict[str, Any]]
    groups: Sequence[dict[str, Any]] = ()


def read_run(directory: RunDirectory) -> RunFiles:
    """Read the files of a run. Of a step that was written twice (a resumed run), the later line counts."""
    if not directory.path.is_dir():
        raise ReportError(f"{directory.path}: no such directory")
    for path in (directory.config, directory.metrics):
        if not path.is_file():
            raise ReportError(f"{directory.path}: is not the directory of a run: it has no {path.name}")
    try:
        config = json.loads(directory.config.read_bytes())
        segments_of(config if isinstance(config, dict) else {})
        rows = {row["step"]: row for row in read_lines(directory.metrics) if isinstance(row.get("step"), int)}
        samples = read_samples(directory.samples)
        evaluation = newest_evaluation(directory.eval_samples)
        groups = newest_lines(directory.groups)
    except RunDirectoryError as error:
        raise ReportError(str(error)) from None
    except SegmentError as error:
        raise ReportError(f"{directory.config}: {error}") from None
    except ValueError as error:
        raise ReportError(f"{directory.config}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ReportError(f"{directory.config}: a JSON object is needed, not {type(config).__name__}")
    if not rows:
        raise ReportError(f"{directory.metrics}: no step has been written yet")
    return RunFiles(config, [rows[step] for step in sorted(rows)], samples, evaluation=evaluation, groups=groups)


def newest_evaluation(path: Path) -> list[dict[str, Any]]:
    """Rows of the newest evaluation in eval_samples.jsonl, spread over its prompts; none where there is no file.

    Raises:
      RunDirectoryError: as `read_lines`.
    """
    newest = newest_lines(path)
    firsts = [row for row in newest if not row.get("sample")]  # one of each prompt, where these are enough
    rows = firsts if len(firsts) >= min(EVALUATION_ROWS, len(newest)) else newest
    return rows[:: max(1, len(rows) // EVALUATION_ROWS)][:EVALUATION_ROWS]


def newest_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of the newest step in a file; none where there is no file. Raises: RunDirectoryError."""
    lines = list(read_lines(path)) if path.exists() else []
    return [row for row in lines if row.get("step") == lines[-1].get("step")]


def finite_values(run: RunFiles, key: str) -> list[tuple[int, float]]:
    """The finite values of a metric with their steps."""
    points = ((row["step"], row.get(key)) for row in run.rows)
    return [(step, float(v)) for step, v in points if isinstance(v, (int, float)) and math.isfinite(v)]
