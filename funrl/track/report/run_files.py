"""Files of a run as its pages read them: configuration, metrics, samples, and whether it still runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from funrl.track.records.run_directory import RunDirectory, RunDirectoryError, read_lines
from funrl.track.records.run_lock import is_owned
from funrl.track.records.samples import Sample, read_samples
from funrl.track.records.segments import SegmentError, segments_of

EVALUATION_ROWS = 16  # on a page


class ReportError(ValueError):
    """A run directory that no page can be made of; the message says which file and why."""


class RewardRange(NamedTuple):
    """The lowest and the highest reward of a run."""

    low: float
    high: float

    def tone(self, reward: float) -> str:
        """Class of a reward's colour: its third of the range. Where all rewards are equal, none is good or bad."""
        if self.high <= self.low:
            return "some"
        share = (reward - self.low) / (self.high - self.low)
        return "good" if share > 2 / 3 else "some" if share > 1 / 3 else "bad"


class RunFiles(NamedTuple):
    """Content of a run directory.

    Attributes:
      config: its config.json.
      rows: metrics in the order of steps.
      samples: in the order in which they were written.
      evaluation: rows of the newest one, spread over its prompts.
      running: whether the run has not ended.
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
    running = is_owned(directory.path)  # before the files are read: a run that ends meanwhile writes more
    try:
        config = json.loads(directory.config.read_bytes())
        segments_of(config if isinstance(config, dict) else {})
        rows = {row["step"]: row for row in read_lines(directory.metrics) if isinstance(row.get("step"), int)}
        samples = read_samples(directory.samples)
        evaluation = newest_evaluation(directory.eval_samples)
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
    return RunFiles(config, [rows[step] for step in sorted(rows)], samples, evaluation=evaluation, running=running)


def newest_evaluation(path: Path) -> list[dict[str, Any]]:
    """Rows of the newest evaluation in eval_samples.jsonl, spread over its prompts; none where there is no file.

    Raises:
      RunDirectoryError: as `read_lines`.
    """
    newest: list[dict[str, Any]] = []
    for row in read_lines(path) if path.exists() else ():
        if newest and row.get("step") != newest[-1].get("step"):
            newest = []
        newest.append(row)
    firsts = [row for row in newest if not row.get("sample")]  # one of each prompt, where these are enough
    rows = firsts if len(firsts) >= min(EVALUATION_ROWS, len(newest)) else newest
    return rows[:: max(1, len(rows) // EVALUATION_ROWS)][:EVALUATION_ROWS]


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


def reward_range(run: RunFiles) -> RewardRange:
    """The lowest and the highest reward of the run's samples and of its newest evaluation.

    Of rewards that are all 0 or 1 it is 0 to 1, also where each is the same.
    """
    values = [sample.reward for sample in run.samples] + [row.get("reward") for row in run.evaluation]
    rewards = [float(x) for x in values if isinstance(x, (int, float)) and math.isfinite(x)]
    if set(rewards) <= {0.0, 1.0}:
        return RewardRange(0.0, 1.0)
    return RewardRange(min(rewards), max(rewards))


def seconds_of(run: RunFiles) -> float:
    """Seconds of all steps."""
    return sum(value for _, value in finite_values(run, "time_s/step"))


def steps_wanted(run: RunFiles) -> int | None:
    """Steps that the run was to take, where its config.json says."""
    total = (run.config.get("flags") or {}).get("steps")
    return total if isinstance(total, int) else None
