"""The part that all experiments share: flags in, ranks started, the result printed.

An experiment is a recipe (a function that returns an `Algorithm`) and defaults that suit its task. The arguments of the
recipe, with their defaults and the lines of its docstring, are flags beside those of `Settings`. An argument that has
the name of one of these is given that flag's value; one that no flag can say, such as a function, keeps its default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from funrl.experiments import flags
from funrl.experiments.arguments import recipe_names
from funrl.experiments.command import Command, Experiment, help_of, read_command, with_mesh
from funrl.mesh.environment import read_environment
from funrl.mesh.output import lasting_output
from funrl.mesh.text import MeshError
from funrl.models.config import ModelError
from funrl.track.report import write_report
from funrl.track.run_directory import RunDirectory, RunDirectoryError, check_can_go_on, expanded
from funrl.track.run_files import ReportError
from funrl.track.run_lock import owned_run
from funrl.track.services import TrackerError
from funrl.trainer.shard_server import CheckpointError

if TYPE_CHECKING:  # both import torch, which comes after the checks that need none
    from funrl.mesh.mesh import Mesh
    from funrl.rewards.pool import Pool
    from funrl.trainer.loop import Outcome

ASIDE = ("_ci_low", "_ci_high", "response_length", "clip_ratio")  # of an evaluation; the last line leaves them out
# Their messages say all that a user needs.
PLAIN = (RunDirectoryError, ModelError, FloatingPointError, CheckpointError, TrackerError)


def main(name: str, argv: Sequence[str] | None = None, algorithm: str | None = None, **defaults: Any) -> int:
    """Run an experiment from the command line; return the exit status. What it prints does not end it.

    Args:
      name: of the experiment, such as "ppo".
      argv: the program's name and its arguments; the default is the process's.
      algorithm: its recipe, as --algorithm takes it; None: the recipe of that name, or if there is none, the one that
        the command line must name.
      defaults: values of flags, of `Settings` or of this recipe, that suit the experiment better than theirs.
    """
    with lasting_output():
        return _main(name, argv, algorithm, defaults)


def _main(name: str, argv: Sequence[str] | None, algorithm: str | None, defaults: dict[str, Any]) -> int:
    algorithm = algorithm or (name if name in recipe_names() else None)
    experiment, argv = Experiment(name, algorithm, defaults), list(sys.argv if argv is None else argv)
    run_dir = None
    try:
        first = not read_environment()  # under torchrun and srun every rank comes through here
    except MeshError as error:
        return _ended(2, f"error: {error}", True)
    with contextlib.ExitStack() as owned:
        try:
            if any(text in flags.HELP for text in argv[1:]):
                print(help_of(experiment, argv))
                return 0
            command = read_command(experiment, argv, writes=first)
            _say(command.notes, first)
            if command.settings.dry_run:
                from funrl.cost.dry_report import dry_run

                text = dry_run(command.settings, command.compose)
                if first:
                    print(text)
                return 0
            said, command = len(command.notes), with_mesh(command)
            _say(command.notes[said:], first)
            _job(command)
            if command.settings.resume:
                _check_resume(command)
            if first:
                run_dir = str(owned.enter_context(_owned(command, name)).path)
        except (ValueError, OSError, ImportError) as error:
            return _ended(2, f"error: {error}", first)
        except KeyboardInterrupt:
            return _ended(130, "interrupted; nothing was started" if first else "", first)
        return _run(command, run_dir, first)


def _say(notes: Sequence[str], first: bool) -> None:
    if first and notes:
        print("\n".join(notes), file=sys.stderr)


def _owned(command: Command, name: str) -> contextlib.AbstractContextManager[RunDirectory]:
    """The directory of a run, whose owner this process is."""
    settings = command.settings
    config = dataclasses.asdict(settings) | dict(command.arguments) | {"algorithm": command.source}
    return owned_run(settings.run_dir, name, config, settings.resume)


def _run(command: Command, run_dir: str | None, first: bool) -> int:
    """Train on every rank and print the result; return the exit status."""
    from funrl.mesh.launch import WorkerError, launch
    from funrl.mesh.processes import stop_asked

    job, status, outcome, problem = _job(command), 0, None, ""
    try:
        with _signals():
            program, rewards = functools.partial(_rank, command, run_dir), functools.partial(_rewards, command)
            timeout, beat_s = datetime.timedelta(minutes=command.settings.timeout), command.settings.heartbeat
            outcome = launch(program, job.sizes, job.device, PLAIN, timeout, before=rewards, heartbeat_s=beat_s)
        if outcome.error:  # which every rank knows
            status, problem = 1, f"error: {outcome.error}" if first else ""
        elif outcome.stopped is not None:
            status, problem = 143, _stopped(outcome.stopped, run_dir) if first else ""
    except KeyboardInterrupt:
        status, problem = (143, "terminated") if stop_asked() else (130, "interrupted")
        problem = problem if first else ""
    except BaseException as error:  # a rank's SystemExit is a failure too
        text = _explained(error)
        status, problem = 1, f"error: {text}{'' if '--resume' in text else _newest(run_dir)}"
        if stop_asked() and isinstance(error, (WorkerError, *PLAIN)):
            status, problem = 143, "terminated before the first step was done"
    if run_dir is not None:
        print(_conclusion(outcome, run_dir, _report(run_dir)))
    return _ended(status, problem, first)


@functools.lru_cache(maxsize=1)
def _job(command: Command) -> Any:
    """Checked once: forked ranks inherit the result, spawned ones make it again."""
    from funrl.trainer.job import prepare

    return prepare(command.settings, command.compose)


def _check_resume(command: Command) -> None:
    """Check the checkpoint that a run is to go on from, before any work."""
    from funrl.trainer.resumable import check_resume

    folder = expanded(str(command.settings.run_dir))
    check_can_go_on(folder)
    check_resume(_job(command), folder)


def _rewards(command: Command, rank: int) -> contextlib.AbstractContextManager[Pool | None]:
    from funrl.trainer.job_source import open_rewards

    return open_rewards(_job(command), rank)


def _rank(command: Command, run_dir: str | None, mesh: Mesh, pool: Pool | None) -> Outcome:
    from funrl.track.observe import RunObserver
    from funrl.trainer.loop import train_loop

    job = _job(command)
    with RunObserver(job, run_dir, mesh.rank) as observer:
        return train_loop(job, mesh, observer, pool=pool)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """End a run whose terminal is gone like one that the user interrupts. One that a job scheduler terminates stops
    with its state saved; before its first step it is interrupted too. Under torchrun every rank sees to it itself."""
    from funrl.mesh.processes import ask_to_stop

    def interrupt(sign: int, _: Any) -> None:
        if sign != signal.SIGTERM or not ask_to_stop():
            raise KeyboardInterrupt

    if "WORLD_SIZE" in os.environ:
        yield
        return
    before = {sign: signal.signal(sign, interrupt) for sign in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _stopped(step: int, run_dir: str | None) -> str:
    """The way on for a run that was asked to stop."""
    return f"terminated after step {step}, which is saved; --resume --run_dir={run_dir} continues"


def _explained(error: BaseException) -> str:
    """The message of an error that needs no more, else all that Python knows of it; with what was said besides."""
    from funrl.mesh.launch import WorkerError

    if isinstance(error, (WorkerError, *PLAIN)):
        return "\n".join([str(error).rstrip(), *getattr(error, "__notes__", ())])
    return f"rank {os.environ.get('RANK', 0)} failed:\n{''.join(traceback.format_exception(error)).rstrip()}"


def _newest(run_dir: str | None) -> str:
    """The way on for a run that has failed, where it has left a checkpoint."""
    from funrl.trainer.checkpoint import complete_checkpoints

    steps = complete_checkpoints(f"{run_dir}/checkpoints") if run_dir is not None else {}
    return f"\nthe state after step {max(steps)} is saved; --resume --run_dir={run_dir} continues" if steps else ""


def _ended(status: int, problem: str, first: bool) -> int:
    """The exit status, after printing the problem; a rank of torchrun that is not the first adds which one it is."""
    where = "" if first else f"rank {os.environ['RANK']} on {socket.gethostname()}: "
    if problem:
        print(where + problem.rstrip(), file=sys.stderr)
    return status


def _report(run_dir: str) -> str:
    """Write the report of whatever was written; return what there is to open."""
    try:
        return f"open {write_report(run_dir, running=False)}"
    except ReportError as error:  # it stopped before its first step, or the disk is full
        return f"no report: {error}"
    except KeyboardInterrupt:
        return "no report"


def _conclusion(outcome: Outcome | None, run_dir: str, report: str) -> str:
    changes = [
        f"{name} {outcome.first[name]:.3f} -> {outcome.last[name]:.3f}"
        for name in (outcome.first if outcome else {})
        if outcome and name in outcome.last and not name.endswith(ASIDE) and name.count("/") == 1
    ]
    return "\n".join(([f"held out: {', '.join(changes)}"] if changes else []) + [f"results in {run_dir}; {report}"])
