"""The command `funrl replay`: repeat a run or a step of it, or compare two runs, and name what differs.

    funrl replay RUN_DIR                    a run with an environment: generate again, with the logged answers;
                                            an asynchronous run: generate each token again by the logged weights
    funrl replay RUN_DIR --rows             train on the saved rows, and generate nothing
    funrl replay RUN_DIR --rows --step=7    that step, from the newest checkpoint before it
    funrl replay RUN_DIR RUN_DIR            compare the files of two runs, and repeat nothing

A repeated run must have saved the rows of its steps (`--save_rollouts`), those from the checkpoint to the step
included. The exit status is 0 if all bits agree, else 1.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from funrl.api.warm_start import warm_started
from funrl.cli.command import Command
from funrl.cli.first_difference import first_difference, reading_config
from funrl.cli.line import read_words
from funrl.cli.run import PLAIN_ERRORS
from funrl.cli.usages import COMMANDS
from funrl.environments.logged import LoggedEnvironment
from funrl.flags.arguments import arguments_of, find_recipe, full_source
from funrl.flags.config_file import had_no_effect
from funrl.mesh.launch import WaitLimits, WorkerError, launch
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.placement import generators_on_ray, read_placement, training_sizes
from funrl.mesh.text import parse, text
from funrl.rollout.engine_abilities import ENGINES
from funrl.track.records.run_directory import RunDirectory
from funrl.track.records.segments import segment_of_step
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints
from funrl.trainer.checkpoints.saved_rows import ROLLOUTS, open_rows, saved_steps
from funrl.trainer.differences import by_phase
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.models import first_model
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.placement.logged import logged_source, read_groups
from funrl.trainer.replay import Replayed, replay
from funrl.trainer.settings.declaration import START_FLAGS, Flag, SettingsError, above, at_least
from funrl.trainer.settings.scorers import Given, has_environment
from funrl.trainer.settings.settings import settings_flags, settings_of, with_flags
from funrl.trainer.settings.successors import REMOVED_FLAGS
from funrl.trainer.sources.observing import Observer
from funrl.trainer.startup import MakeSource

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
        Flag("step", None, int, optional=True, text="to repeat; default: all from the first", bounds=(at_least(1),)),
        Flag("rows", False, bool, optional=False, text="train on the saved rows, and generate nothing"),
        Flag("mesh", None, str, optional=True, text="a mesh that differs from the run's"),
        Flag(
            "tolerance", None, float, optional=True, text="largest difference that counts as equal", bounds=(above(0),)
        ),
    )
    (run, *other), line = read_words(own, argv, COMMANDS["replay"].usage, most=2)
    if other:
        if given := [name for name, value in line.values.items() if value]:
            raise SettingsError(f"--{given[0]} is for repeating a run; two runs are compared as they are")
        lines, agrees = first_difference(run, *other)
        print("\n".join(lines))
        return 0 if agrees else 1
    step = line.values["step"]
    mesh = line.values["mesh"]
    last = step or max(saved_steps(Path(run) / ROLLOUTS), default=1)
    command = recorded_command(run, mesh, last)
    _check_one_start(command, run, step, mesh=mesh)
    logged = _logged(command, run) if not line.values["rows"] else None
    timeout = datetime.timedelta(minutes=command.settings.waiting.timeout)
    job = _job(command, run, logged)
    try:
        with warm_started(job) as started:
            program = functools.partial(_rank, started, run, step, logged)
            steps = launch(program, job.sizes, job.device, PLAIN_ERRORS, waiting=WaitLimits(timeout))
    except (WorkerError, *PLAIN_ERRORS) as error:
        print(f"error: {str(error).rstrip()}", file=sys.stderr)
        return 2
    verdicts = [verdict_lines(repeated, line.values["tolerance"] or 0.0) for repeated in steps]
    for lines, _ in verdicts:
        print("\n".join(lines))
    return 0 if all(agrees for _, agrees in verdicts) else 1


def _rank(
    job: Job, run: str, step: int | None, logged: LoggedEnvironment | MakeSource | None, mesh: Mesh
) -> list[Replayed]:
    return replay(job, run, step, mesh, cast(Observer, Notes(mesh.rank == 0)), logged)


def _logged(command: Command, run: str) -> LoggedEnvironment | MakeSource | None:
    """The environment that answers as the log of a run says, or the source of an asynchronous run's groups.

    None: a run without either, whose rows alone are saved.

    Raises:
      SettingsError: episodes of the run cannot be generated again.
    """
    groups = read_groups(run)
    episodes = has_environment(command.settings)
    if groups is None and not episodes:
        return None
    flags = json.loads(RunDirectory(Path(run)).config.read_text())["flags"]  # of the newest start
    engine = command.settings.engines.engine
    tokens = command.settings.sampling.new_tokens_per_step
    agents = _agents(run)
    problem = ""
    if not ENGINES[engine].repeats and flags.get("place") is not None:
        problem = f"the bits of what the engine samples depend on the rows beside (--engine={engine})"
    elif tokens is not None and episodes:
        problem = f"turns were sampled in several steps (--new_tokens_per_step={tokens})"
    elif episodes and not agents:
        problem = "no episodes are saved, which --save_rollouts does"
    if problem:
        raise SettingsError(f"{run} cannot be generated again: {problem}; --rows repeats its training on saved rows")
    if groups is None:
        return LoggedEnvironment(agents)
    return functools.partial(logged_source, groups)


def _agents(run: str) -> Sequence[str]:
    """Names of the agents of a run's saved episodes; none where there are no episodes."""
    folder = Path(run) / ROLLOUTS
    records = (open_rows(folder, step).record for step in saved_steps(folder))
    return next((record["agents"] for record in records if "agents" in record), ())


def _check_one_start(command: Command, run: str, step: int | None, mesh: str | None) -> None:
    """Refuse steps if repeating them needs steps that an earlier start made with other flags.

    Raises:
      SettingsError: the checkpoint at which the flags changed is gone.
    """
    steps = [number for number in complete_checkpoints(Path(run) / "checkpoints") if number < (step or 0)]
    last = step or max(saved_steps(Path(run) / ROLLOUTS), default=1)
    for number in range(max(steps, default=0) + 1, last):
        if recorded_command(run, mesh, number) != command:
            begin = f"--step={step}: the newest checkpoint before it is" if step else f"{run} is repeated from that"
            raise SettingsError(
                f"{begin} of step {max(steps, default=0)}, and step {number} "
                "was made with other flags; only steps after the checkpoint at which the flags changed can be repeated"
                f"{'' if step else ', by --step'}"
            )


def recorded_command(run_dir: str, mesh: str | None = None, step: int | None = None) -> Command:
    """The command of an earlier run, from its config.json.

    Args:
      mesh: a different mesh, on which models are not fully sharded; None: the run's.
      step: step whose start gives the flags; None: the newest start.

    Raises:
      SettingsError: there is no such run, or flags alone cannot repeat it.
    """
    file = RunDirectory(Path(run_dir)).config
    with reading_config(file) as record:
        record = record if step is None else segment_of_step(record, step)
        flags = {flag: value for flag, value in record["flags"].items() if flag not in START_FLAGS}
        recorded = {flag: value for flag, value in flags.items() if not had_no_effect(flag, value)}
        name = str(record["experiment"])
        source = full_source(str(recorded.pop("algorithm")))
    arguments = arguments_of(find_recipe(source), source).flags
    known = {**settings_flags(), **arguments}
    for flag, value in recorded.items():
        removed = REMOVED_FLAGS[flag].successor if flag in REMOVED_FLAGS else "there is no such flag"
        if problem := known[flag].problem(value) if flag in known else removed:
            raise SettingsError(f"{file}: --{flag}={value}: {problem}")
    missing = sorted(set(arguments) - set(settings_flags()) - set(recorded))
    if missing:
        raise SettingsError(f"{file}: --{missing[0]} is missing; another version of {source} made this run")
    placed = recorded.get("place")
    by_turns = {"place": None, "staleness": 0, "window": 1}
    together = {} if placed is None else by_turns | {"mesh": _trained_on(placed, recorded.get("mesh", ""))}
    changed = HERE | together | ({} if mesh is None else SHARDING | {"mesh": mesh})
    fields: dict[str, Any] = {flag: value for flag, value in recorded.items() if flag in settings_flags()} | changed
    values = recorded | fields
    return Command(name, settings_of(**fields), source, tuple((flag, values[flag]) for flag in arguments), "")


def _trained_on(place: str, mesh: str) -> str:
    """The mesh that a recorded run was trained on, whose other ranks generated."""
    sizes = training_sizes(place, parse(mesh)) if generators_on_ray(place) else None
    return text(sizes or read_placement(place, parse(mesh)).train.sizes)


def _job(command: Command, run: str, logged: LoggedEnvironment | MakeSource | None) -> Job:
    """The job of a run, without what is not asked again: a log is in place of its environment, which is not loaded."""
    settings = command.settings
    given = Given()
    abilities = settings.engines.abilities
    if logged is None and not (abilities.repeats or abilities.unpaged):  # neither it nor a server of it has to be here
        model = first_model(settings, given)[0] if settings.models.model is None else None  # by its heads
        given = Given(model=model)
        idle = ("engine", "engine_url", "engine_timeout", "kv_cache_gb")
        settings = with_flags(settings, **{name: settings_flags()[name].default for name in idle})
    if not has_environment(settings):
        return prepare(settings, command.compose, given)
    environment = logged if isinstance(logged, LoggedEnvironment) else LoggedEnvironment(_agents(run))
    if settings.environments.env is not None:
        given = given._replace(environment=environment)
    job = prepare(settings, command.compose, given)
    assert isinstance(job, RLJob)
    return dataclasses.replace(job, task=job.task._replace(environment=environment))


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
