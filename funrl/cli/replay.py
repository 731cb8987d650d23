"""The command `funrl replay`: repeat a step of an earlier run and compare it with the saved results.

    funrl replay RUN_DIR --step=7

The run must have saved the rows of that step and of all steps since the last checkpoint before it (`--save_rollouts`).
The exit status is 0 if all bits agree, else 1.
"""

from __future__ import annotations

import datetime
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from funrl.api.warm_start import warm_started
from funrl.cli.command import Command
from funrl.cli.line import read_words
from funrl.cli.run import PLAIN
from funrl.cli.usages import COMMANDS
from funrl.flags.arguments import arguments_of, find_recipe, full_source
from funrl.mesh.launch import Waiting, WorkerError, launch
from funrl.mesh.mesh import Mesh
from funrl.track.records.run_directory import RunDirectory
from funrl.track.records.segments import segment_of_step
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints
from funrl.trainer.differences import by_phase
from funrl.trainer.jobs.job import Job
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.replay import Replayed, replay
from funrl.trainer.settings.declaration import Flag, SettingsError, above, at_least
from funrl.trainer.settings.settings import settings_flags, settings_of
from funrl.trainer.sources.observing import Observer

SHARDING = {  # on another mesh
    "fsdp": False,
    "fsdp_axes": None,
    "fsdp_models": None,
    "grad_reduce_dtype": "auto",
    "generate_mesh": None,
}
HERE = {
    "run_dir": None,
    "resume": False,
    "overwrite": False,
    "save_rollouts": 0,
    "keep_rollouts": None,
    "save_every": "0",
}


def replay_command(argv: Sequence[str]) -> int:
    """Run `funrl replay ...`; return the exit status.

    Args:
      argv: "replay" and its arguments.
    """
    own = (
        Flag("step", None, int, optional=True, text="to repeat", bounds=(at_least(1),)),
        Flag("mesh", None, str, optional=True, text="a mesh that differs from the run's"),
        Flag(
            "tolerance", None, float, optional=True, text="largest difference that counts as equal", bounds=(above(0),)
        ),
    )
    usage = COMMANDS["replay"].usage
    (run,), line = read_words(own, argv, usage)
    step = line.values["step"]
    mesh = line.values["mesh"]
    if step is None:
        raise SettingsError(f"usage: {usage}")
    command = recorded_command(run, mesh, step)
    _check_one_start(command, run, step, mesh=mesh)
    return _replay(command, run, step, tolerance=line.values["tolerance"] or 0.0)


def _check_one_start(command: Command, run: str, step: int, mesh: str | None) -> None:
    """Refuse a step if repeating it needs steps that an earlier start made with other flags.

    Raises:
      SettingsError: the checkpoint at which the flags changed is gone.
    """
    steps = [number for number in complete_checkpoints(Path(run) / "checkpoints") if number < step]
    for number in range(max(steps, default=0) + 1, step):
        if recorded_command(run, mesh, number) != command:
            raise SettingsError(
                f"--step={step}: the newest checkpoint before it is of step {max(steps, default=0)}, and step {number} "
                "was made with other flags; only steps after the checkpoint at which the flags changed can be repeated"
            )


def recorded_command(run_dir: str, mesh: str | None = None, step: int | None = None, defaults: bool = False) -> Command:
    """The command of an earlier run, from its config.json.

    Args:
      mesh: a different mesh, on which models are not fully sharded; None: the run's.
      step: step whose start gives the flags; None: the newest start.
      defaults: let arguments of the recipe that are not recorded, as `funrl.train` was not given them, have their
        defaults of today; else they are an error.

    Raises:
      SettingsError: there is no such run, or flags alone cannot repeat it.
    """
    file = RunDirectory(Path(run_dir)).config
    try:
        record = json.loads(file.read_text())
        record = record if step is None else segment_of_step(record, step)
        recorded = dict(record["flags"])
        name = str(record["experiment"])
        source = full_source(str(recorded.pop("algorithm")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{file}: not the config.json of a run: {reason}") from None
    arguments = arguments_of(find_recipe(source), source).flags
    known = {**settings_flags(), **arguments}
    for flag, value in recorded.items():
        problem = known[flag].problem(value) if flag in known else "there is no such flag"
        if problem:
            raise SettingsError(f"{file}: --{flag}={value}: {problem}")
    if defaults:
        recorded = {name: flag.default for name, flag in arguments.items() if name not in settings_flags()} | recorded
    missing = sorted(set(arguments) - set(settings_flags()) - set(recorded))
    if missing:
        raise SettingsError(f"{file}: --{missing[0]} is missing; another version of {source} made this run")
    changed = HERE | ({} if mesh is None else SHARDING | {"mesh": mesh})
    fields: dict[str, Any] = {flag: value for flag, value in recorded.items() if flag in settings_flags()} | changed
    values = recorded | fields
    return Command(name, settings_of(**fields), source, tuple((flag, values[flag]) for flag in arguments), "")


def _replay(command: Command, run_dir: str, step: int, tolerance: float) -> int:
    job = prepare(command.settings, command.compose)
    timeout = datetime.timedelta(minutes=command.settings.waiting.timeout)
    try:
        with warm_started(job) as started:
            program = functools.partial(_rank, started, run_dir, step)
            done = launch(program, job.sizes, job.device, PLAIN, waiting=Waiting(timeout))
    except (WorkerError, *PLAIN) as error:
        print(f"error: {str(error).rstrip()}", file=sys.stderr)
        return 2
    agrees = True
    for repeated in done:
        lines, same = verdict_lines(repeated, tolerance)
        print("\n".join(lines))
        agrees = agrees and same
    return 0 if agrees else 1


def _rank(job: Job, run_dir: str, step: int, mesh: Mesh) -> list[Replayed]:
    return replay(job, run_dir, step, mesh, cast(Observer, Notes(mesh.rank == 0)))


class Notes:
    """An observer that only prints remarks."""

    def __init__(self, prints: bool) -> None:
        self.prints = prints

    def note(self, text: str) -> None:
        if self.prints:
            print(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def verdict_lines(repeated: Replayed, tolerance: float) -> tuple[list[str], bool]:
    """Report on a repeated step: lines per phase, and whether all of it agrees.

    Args:
      tolerance: above 0, digests of weights are left out, since their difference has no size.
    """
    compared = [part for part in repeated.differences if not (tolerance and part.kind == "digests")]
    agrees = all(part.agrees(tolerance) for part in compared)
    lines = [f"step {repeated.step}: {'agrees' if agrees and tolerance else 'the same bits' if agrees else 'differs'}"]
    for phase, parts in by_phase(compared):
        equal = [part for part in parts if not part.count]
        names = [part.name for part in equal if part.kind != "metric"]
        names += [f"{len(equal) - len(names)} metrics"] * (len(equal) > len(names))
        if names:
            lines.append(f"  {phase:<22}equal: {', '.join(names)}")
        lines += [f"  {phase:<22}{part}" for part in parts if part.count]
    return lines, agrees
