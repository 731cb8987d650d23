"""The command `funrl join`: a generator for a run that was started with `--place="train:dp2 generate:join"`.

    funrl join RUN_DIR                 one device
    funrl join RUN_DIR --mesh=tp2      a model that is split over two

It may be started before the run, during it, several times, and on other machines that see the run's directory. SIGTERM
and Ctrl-C let it go: what it has not completed goes to others.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from funrl.cli.line import read_words
from funrl.cli.replay import recorded_command
from funrl.cli.run import PLAIN_ERRORS
from funrl.cli.usages import COMMANDS
from funrl.mesh.launch import WorkerError, launch
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.joining import generators_join
from funrl.mesh.text import parse
from funrl.processes.connections import PeerError
from funrl.processes.environment import read_environment
from funrl.track.records.run_directory import RunDirectory
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.jobs.row_source import waiting_of
from funrl.trainer.placement.joined import join_run
from funrl.trainer.settings.declaration import Flag, SettingsError, at_least
from funrl.trainer.settings.settings import with_flags

RUN_LOOK_S = 0.5  # between two looks for the directory of a run


def join_command(argv: Sequence[str]) -> int:
    """Run `funrl join ...` until the run has ended; return the exit status.

    Args:
      argv: "join" and its arguments.
    """
    own = (
        Flag("mesh", "dp1", str, optional=False, text="mesh of the generator: one replica"),
        Flag("wait", 30, int, optional=False, text="minutes to wait for the run", bounds=(at_least(0),)),
    )
    (run,), line = read_words(own, argv, COMMANDS["join"].usage)
    mesh = line.values["mesh"]
    sizes = parse(mesh)
    if any(size > 1 for axis, size in sizes.items() if axis != "tensor"):
        raise SettingsError(f"--mesh={mesh}: a generator is one replica, such as tp2; start more of them for more")
    wait_s = 60.0 * line.values["wait"]
    job = joining_job(run, mesh, wait_s)
    try:
        ending, units, loads = launch(
            functools.partial(_generate, job, run, wait_s),
            job.sizes,
            job.device,
            (*PLAIN_ERRORS, PeerError),
            waiting=waiting_of(job),
        )
    except (WorkerError, PeerError, *PLAIN_ERRORS) as error:
        print(f"error: {str(error).rstrip()}", file=sys.stderr)
        return 1
    if not read_environment():
        event = "the run has ended" if ending == "ended" else "this generator has left the run"
        print(f"{event}: it has written {units} groups, with {loads} versions of the weights")
    return 0


def joining_job(run: str, mesh: str, wait_s: float) -> RLJob:
    """The job of a run on a generator's mesh, when the run's config.json is there.

    Args:
      run: its directory.
      mesh: of the generator.
      wait_s: bound on the time to wait for it.

    Raises:
      SettingsError: it is not there in time, or generators cannot join the run.
    """
    file = RunDirectory(Path(run)).config
    deadline = time.monotonic() + wait_s
    if not file.exists() and wait_s:
        print(
            f"waiting {wait_s / 60:g} minutes (--wait) for {file}, which a run writes when it begins", file=sys.stderr
        )
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(RUN_LOOK_S)
    recorded = {}
    with contextlib.suppress(OSError, ValueError):  # which the next call explains
        recorded = json.loads(file.read_text())
    if "flags" in recorded and not generators_join(recorded["flags"].get("place")):
        raise SettingsError(f'{run}: its ranks generate themselves; start it with --place="train:dp1 generate:join"')
    command = recorded_command(run, mesh)
    job = prepare(with_flags(command.settings, generate_mesh=mesh), command.compose)
    assert isinstance(job, RLJob)
    return job


def _generate(job: RLJob, run: str, wait_s: float, mesh: Mesh) -> tuple[str, int, int]:
    def note(text: str) -> None:
        if mesh.rank == 0:
            print(text, file=sys.stderr, flush=True)

    ending, counts = join_run(job, run, mesh, note, wait_s)
    return ending, counts.units, counts.loads
