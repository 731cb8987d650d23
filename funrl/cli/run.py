"""The part that all experiments share: read flags, start ranks, print the result.

An experiment is a recipe (a function that returns an `Algorithm`) and defaults for its task. The arguments of the
recipe, with their defaults and docstrings, are flags in addition to those of `Settings`. An argument with the name of a
`Settings` flag gets that flag's value; one that a flag cannot express, such as a function, keeps its default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from funrl.cli.command import Command, Experiment, help_of, read_command, with_mesh, with_models
from funrl.flags import parser as flags
from funrl.flags.arguments import recipe_name, recipe_names
from funrl.models.errors import ModelError
from funrl.processes.environment import LauncherError, read_environment
from funrl.processes.output import lasting_output
from funrl.rollout.ray.cluster import ClusterError
from funrl.track.records.run_directory import RunDirectory, RunDirectoryError, check_can_go_on, expanded
from funrl.track.records.run_lock import leave_nothing, owned_run
from funrl.track.records.services import TrackerError
from funrl.trainer.storage.shard_server import CheckpointError

if TYPE_CHECKING:  # both import torch, which is loaded after the checks that do not need it
    from funrl.mesh.mesh import Mesh
    from funrl.rewards.pool import Pool
    from funrl.trainer.jobs.job import Job
    from funrl.trainer.loop import Outcome

# Metrics of an evaluation that the last line leaves out.
ASIDE = ("_ci_low", "_ci_high", "response_length", "clip_ratio", "examples")
SMALL_EVALUATION = 100  # below this many held-out examples, the last line gives their number
# Errors whose message is enough: no traceback is shown.
PLAIN_ERRORS = (RunDirectoryError, ModelError, FloatingPointError, CheckpointError, TrackerError, ClusterError)


def main(name: str, argv: Sequence[str] | None = None, algorithm: str | None = None, **defaults: object) -> int:
    """Run an experiment from the command line; return the exit status. Failing to print does not end the run.

    Args:
      name: name of the experiment, such as "ppo".
      argv: the program's name and its arguments; the default is the process's.
      algorithm: its recipe, in the form of --algorithm; None: the recipe of that name, or if there is none, the command
        line must name one.
      defaults: values of flags, of `Settings` or of this recipe, that replace the usual defaults.
    """
    if sys.__stderr__ is not None:  # a closed one's descriptor may be that of another file
        faulthandler.enable(sys.__stderr__)  # a rank that crashes in native code shows where
    with lasting_output():
        return _main(name, argv, algorithm, defaults)


def _main(name: str, argv: Sequence[str] | None, algorithm: str | None, defaults: dict[str, object]) -> int:
    algorithm = algorithm or (name if name in recipe_names() else None)
    experiment = Experiment(name, algorithm, defaults)
    argv = list(sys.argv if argv is None else argv)
    run_dir = None
    try:
        first = not read_environment()  # under torchrun and srun every rank runs this
    except LauncherError as error:
        return _ended(2, f"error: {error}", True)
    with contextlib.ExitStack() as owned:
        try:
            if any(text in flags.HELP for text in argv[1:]):
                print(help_of(experiment, argv))
                return 0
            command = read_command(experiment, argv, writes=first)
            _say(command.notes, first)
            command = with_models(command)
            if command.settings.estimate.dry_run:
                from funrl.cost.report import dry_run

                text = dry_run(command.settings, command.compose, argv)
                if first:
                    print(text)
                return 0
            printed = len(command.notes)
            command = with_mesh(command)
            _say(command.notes[printed:], first)
            from funrl.trainer.env_check import check_first_episode
            from funrl.trainer.jobs.provenance import input_digests

            inputs = input_digests(_job(command).settings, command.source) if first else {}
            asked = command.settings.run
            if asked.resume:
                _say(_check_resume(command, inputs), first)
            check_first_episode(_job(command))
            if first:
                owner = owned_run(asked.run_dir, name, command.flags, asked.resume)
                run_dir = str(owned.enter_context(owner).path)
        except (ValueError, OSError, ImportError) as error:
            return _ended(2, f"error: {error}", first)
        except KeyboardInterrupt:
            return _ended(130, "interrupted; nothing was started" if first else "", first)
        return _run(command, run_dir, first, inputs)


def _say(notes: Sequence[str], first: bool) -> None:
    if first and notes:
        print("\n".join(notes), file=sys.stderr)


def _run(command: Command, run_dir: str | None, first: bool, inputs: Mapping[str, str]) -> int:
    """Train on every rank and print the result; return the exit status.

    Args:
      inputs: digests of the run's files, known on the first rank.
    """
    from funrl.api.warm_start import warm_started
    from funrl.mesh.launch import WorkerError, launch
    from funrl.processes.workers import interrupt_asked, stop_asked
    from funrl.trainer.jobs.row_source import open_rewards, waiting_of

    job = _job(command)
    status = 0
    outcome = None
    problem = ""
    try:
        with _signals(), warm_started(job) as started:
            program = functools.partial(_rank, command, run_dir, inputs, started.start)
            outcome = launch(
                program,
                job.launched,
                job.device,
                PLAIN_ERRORS,
                before=lambda rank: open_rewards(_job(command), rank),
                waiting=waiting_of(job),
            )
        if outcome.error:  # the same on every rank
            status = 1
            problem = f"error: {outcome.error}" if first else ""
        elif outcome.stopped is not None:
            status, event = (130, "interrupted") if interrupt_asked() else (143, "terminated")
            saved = f"{event} after step {outcome.stopped}, which is saved; --resume --run_dir={run_dir} continues"
            problem = saved if first else ""
    except KeyboardInterrupt:
        terminated = stop_asked() and not interrupt_asked()
        status, problem = (143, "terminated") if terminated else (130, "interrupted")
        problem = f"{problem}{_newest(run_dir)}" if first else ""
    except BaseException as error:  # a rank's SystemExit is a failure too
        text = _explained(error)
        status = 1
        problem = f"error: {text}{'' if '--resume' in text else _newest(run_dir)}"
        if stop_asked() and not interrupt_asked() and isinstance(error, (WorkerError, *PLAIN_ERRORS)):
            status = 143
            problem = "terminated before the first step was done"
    if run_dir is not None and not (status and leave_nothing(RunDirectory(Path(run_dir)))):
        from funrl.track.report.page import write_report  # here, for it imports numpy
        from funrl.track.report.run_files import ReportError

        try:
            report = f"open {write_report(run_dir)}"
        except ReportError as error:  # the run stopped before its first step, or the disk is full
            report = f"no report: {error}"
        except KeyboardInterrupt:
            report = "no report"
        print("\n".join([*_held_out(outcome), f"results in {run_dir}; {report}"]))
    return _ended(status, problem, first)


@functools.lru_cache(maxsize=1)
def _prepared(command: Command) -> Job:
    """The job, cached: forked ranks inherit it, spawned ranks build it again."""
    from funrl.trainer.jobs.prepare import prepare

    return prepare(command.settings, command.compose)


def _job(command: Command, inputs: Mapping[str, str] | None = None) -> Job:
    """The job, with digests of the files that it reads where they are given."""
    from funrl.trainer.jobs.provenance import Provenance

    origin = Provenance(recipe_name(command.source), command.flags, inputs or {})
    return dataclasses.replace(_prepared(command), provenance=origin)


def _check_resume(command: Command, inputs: Mapping[str, str]) -> Sequence[str]:
    """Check the checkpoint that a run resumes from, before any work; return lines on what has changed."""
    from funrl.trainer.checkpoints.resumable import check_resume

    folder = expanded(str(command.settings.run.run_dir))
    check_can_go_on(folder)
    return check_resume(_job(command, inputs), folder)


def _rank(
    command: Command, run_dir: str | None, inputs: Mapping[str, str], start: str | None, mesh: Mesh, pool: Pool | None
) -> Outcome:
    from funrl.track.observe import RunObserver
    from funrl.trainer.placement.ranks import run_rank

    job = dataclasses.replace(_job(command, inputs), start=start)
    try:
        with RunObserver(job, run_dir, mesh.rank) as observer:
            return run_rank(job, mesh, observer, pool=pool)
    finally:
        if "WORLD_SIZE" in os.environ:  # torchrun ends a rank once another one has failed: first it says how it ended
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Handle signals: interrupt a run whose terminal is gone; stop a terminated run with its state saved.

    Before its first step, a terminated run is interrupted too. Under torchrun every rank handles signals itself.
    """
    from funrl.processes.workers import ask_to_stop

    def interrupt(sign: int, _: object) -> None:
        if sign != signal.SIGTERM or not ask_to_stop():
            raise KeyboardInterrupt

    if "WORLD_SIZE" in os.environ:
        yield
        return
    heard = [sign for sign in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(sign) is not signal.SIG_IGN]  # nohup
    before = {sign: signal.signal(sign, interrupt) for sign in heard}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _explained(error: BaseException) -> str:
    """An error's message and notes if they are enough, else its traceback."""
    from funrl.mesh.launch import WorkerError

    if isinstance(error, (WorkerError, *PLAIN_ERRORS)):
        return "\n".join([str(error).rstrip(), *getattr(error, "__notes__", ())])
    return f"rank {os.environ.get('RANK', 0)} failed:\n{''.join(traceback.format_exception(error)).rstrip()}"


def _newest(run_dir: str | None) -> str:
    """The command that continues a failed run, if it has a checkpoint."""
    from funrl.trainer.checkpoints.checkpoint import complete_checkpoints

    newest = max(complete_checkpoints(f"{run_dir}/checkpoints"), default=0) if run_dir is not None else 0
    return f"\nthe state after step {newest} is saved; --resume --run_dir={run_dir} continues" if newest else ""


def _ended(status: int, problem: str, first: bool) -> int:
    """Print the problem and return the exit status; under torchrun, ranks other than the first add their number."""
    where = "" if first else f"rank {os.environ['RANK']} on {socket.gethostname()}: "
    if problem:
        print(where + problem.rstrip(), file=sys.stderr)
    return status


def _held_out(outcome: Outcome | None) -> list[str]:
    """A line on the first and the last evaluation, or on the only one; empty without any."""
    if outcome is None:
        return []
    once = not outcome.last  # the run was stopped before its second evaluation
    first = outcome.first
    last = outcome.last or first
    changes = [
        f"{name} {last[name]:.3f}" if once else f"{name} {first[name]:.3f} -> {last[name]:.3f}"
        for name in first
        if name in last and not name.endswith(ASIDE) and name.count("/") == 1
    ]
    examples = last.get("eval/examples", SMALL_EVALUATION)
    notes = [f"n = {examples:.0f}"] if examples < SMALL_EVALUATION else []
    notes += ["evaluated once"] if once else []
    about = f" ({', '.join(notes)})" if notes else ""
    return [f"held out{about}: {', '.join(changes)}"] if changes else []
