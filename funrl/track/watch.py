"""Display of a run that goes on elsewhere, from its files alone: `funrl watch RUN`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from funrl.track.progress import Progress, open_progress
from funrl.track.records.guards import findings
from funrl.track.records.run_directory import RunDirectory
from funrl.track.records.run_lock import is_owned
from funrl.track.report.page import write_page
from funrl.track.report.run_files import ReportError, RunFiles, read_run, steps_wanted

READ_S = 1.0  # from one reading of the files to the next, at least
REWRITE_S = 10.0  # between two writings of the page, at least
MOST_BUSY = 0.2  # share of the time in which files may be read, and in which the page may be written


def watch_run(run_dir: str | Path, console: Console | None = None) -> None:
    """Show a run in the terminal and keep its report.html up to date until it ends.

    Args:
      run_dir: of the run; one that does not exist yet is waited for.
      console: to print to; None: standard output.

    Raises:
      ReportError: it is not the directory of a run, it has ended without a step, or a file is broken.
    """
    run = RunDirectory(Path(run_dir))
    console = console or Console()
    files = _read_when_possible(
        run, lambda text: console.print(text, highlight=False, soft_wrap=True), may_be_missing=True
    )
    title = f"{files.config.get('experiment') or 'run'}, {run.path.resolve().name}"
    total = steps_wanted(files) or files.rows[-1]["step"]
    began = _end_times(files.rows, run.metrics)[0] - _seconds(files.rows[0])
    with open_progress(total, title, console=console, began=began) as progress:
        _follow(run, files, progress)
        progress.note(f"the run has ended; open {run.report}")


def _read_when_possible(run: RunDirectory, note: Callable[[str], None], *, may_be_missing: bool = False) -> RunFiles:
    """The files of a run as soon as they can be read, unless it has ended; `note` receives what is waited for."""
    waiting = False
    while True:
        may_follow = is_owned(run.path) or (may_be_missing and not run.path.is_dir())
        try:
            return read_run(run)
        except ReportError as error:
            if not may_follow:
                raise
            if not waiting:
                note(f"{error}; waiting")
            waiting = True
        time.sleep(READ_S)


def _follow(run: RunDirectory, files: RunFiles, progress: Progress) -> None:
    shown = -1
    sample = None
    next_page = -math.inf
    noted: set[str] = set()
    while True:
        begin = time.monotonic()
        shown = min(shown, files.rows[-1]["step"])  # a run that was resumed makes steps again
        rows = [row for row in files.rows if row["step"] > shown]
        if rows:
            _show(rows, progress, run.metrics)
            shown = rows[-1]["step"]
        if files.samples and files.samples[-1] != sample:
            sample = files.samples[-1]
            progress.sample(sample)
        if (rows and begin >= next_page) or not files.running:
            new = [finding for finding in findings(files.rows) if finding.cause not in noted]
            noted.update(finding.cause for finding in new)
            for finding in new:
                progress.note(str(finding))
            write_page(files, run.report)
            next_page = _next_time(begin, REWRITE_S)
        if not files.running:
            return
        time.sleep(max(0.0, _next_time(begin, READ_S) - time.monotonic()))
        files = _read_when_possible(run, progress.note)


def _show(rows: Sequence[dict[str, Any]], progress: Progress, metrics: Path) -> None:
    for row, end in zip(rows, _end_times(rows, metrics), strict=True):
        values = {name: x for name, x in row.items() if isinstance(x, (int, float)) and name != "step"}
        progress.record(row["step"], values, end)
    progress.show()


def _next_time(begin: float, least: float) -> float:
    """The time to repeat work that began at `begin` and ends now: after `least` seconds, or later if it is slow."""
    return begin + max(least, (time.monotonic() - begin) / MOST_BUSY)


def _end_times(rows: Sequence[dict[str, Any]], path: Path) -> list[float]:
    """The end of each step, by the clock of `time.monotonic`: that of the last is when the file was written."""
    end = time.monotonic() - max(0.0, time.time() - path.stat().st_mtime)
    ends = []
    for row in reversed(rows):
        ends.append(end)
        end -= _seconds(row)
    return ends[::-1]


def _seconds(row: dict[str, Any]) -> float:
    return float(row.get("time_s/step") or 0.0)
