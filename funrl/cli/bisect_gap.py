"""`funrl bisect RUN_DIR --gap`: the first layer and operation in which engine and trainer differ.

It computes the row that the run has saved again, with its weights, dtype and meshes (`funrl.trainer.gap_search`).
"""

from __future__ import annotations

import datetime
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from funrl.cli.replay import Notes, recorded_command
from funrl.cli.run import PLAIN
from funrl.mesh.launch import WaitLimits, WorkerError, launch
from funrl.mesh.mesh import Mesh
from funrl.trainer.gap_row import GAP_FOLDER, newest_gap
from funrl.trainer.gap_search import GapSearch, search_gap
from funrl.trainer.jobs.job import Job
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources.observing import Observer


def bisect_gap(run_dir: str) -> int:
    """Compare engine and trainer on the newest row that a run has saved; return the exit status: 0 if none differs.

    Raises:
      SettingsError: there is no such run, or it has saved no row.
    """
    command = recorded_command(run_dir, defaults=True)  # the loss has no part in log-probabilities
    path = newest_gap(Path(run_dir) / GAP_FOLDER)
    if path is None:
        raise SettingsError(f"{Path(run_dir) / GAP_FOLDER} has no row: no gap of this run has been saved")
    job = prepare(command.settings, command.compose)
    timeout = datetime.timedelta(minutes=command.settings.waiting.timeout)
    try:
        program = functools.partial(_rank, job, path)
        search = launch(program, job.sizes, job.device, PLAIN, waiting=WaitLimits(timeout))
    except (WorkerError, *PLAIN) as error:
        print(f"error: {str(error).rstrip()}", file=sys.stderr)
        return 2
    print("\n".join(report_lines(search)))
    return 0 if search.first is None else 1


def _rank(job: Job, path: Path, mesh: Mesh) -> GapSearch:
    return search_gap(job, path, mesh, cast(Observer, Notes(mesh.rank == 0)).note)


def report_lines(search: GapSearch) -> Iterator[str]:
    """Lines that say where engine and trainer differ."""
    row = search.row
    yield f"step {row.step}, {row}: engine {row.engine}, trainer {row.trainer} nats"
    if search.first is not None:
        place = "after the layers" if search.layer is None else f"layer {search.layer}"
        yield f"first difference: {place}, {search.first}"
        return
    yield f"alone the row has the same bits in both: {search.engine} nats"
    for name, before, now in (("engine", row.engine, search.engine), ("trainer", row.trainer, search.trainer)):
        if before != now:
            yield f"in the run the {name} had {before}: look at what {_BESIDE[name]}"


_BESIDE = {
    "engine": "was in its batch (pages, preempted and shared prompts, drafts) and at the weights of earlier versions",
    "trainer": "was packed with the row (micro-batch, padding)",
}
