"""From a command line to a `Command`: read and check flags, compose the algorithm.

Checks that do not need torch run before a recipe's module, which imports it, is loaded, so a mistyped flag is reported
at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from funrl.cli.line import Line, read_line
from funrl.flags import parser as flags
from funrl.flags.arguments import (
    Arguments,
    arguments_of,
    check_recipe_names,
    find_recipe,
    first_line,
    full_source,
    names_of_arguments,
)
from funrl.flags.foreign.answers import check_names, names_given
from funrl.flags.foreign.meaning import NameContext
from funrl.track.records.run_directory import RunDirectory, check_unused, expanded
from funrl.trainer.settings.declaration import Flag, SettingsError, kinds_of, refusing, run_kind
from funrl.trainer.settings.scorers import resolved
from funrl.trainer.settings.settings import (
    Settings,
    flag_values,
    for_kind,
    settings_flags,
    settings_of,
)


class Experiment(NamedTuple):
    """A program that trains.

    Attributes:
      name: its name, such as "ppo".
      algorithm: its recipe, in the form of --algorithm; None: the command line must name one.
      defaults: values of flags, of `Settings` or of this recipe, that replace the usual defaults.
    """

    name: str
    algorithm: str | None
    defaults: Mapping[str, object]

    @property
    def common(self) -> list[Flag]:
        """The flags that do not depend on the recipe."""
        own = [flag._replace(default=self.defaults.get(name, flag.default)) for name, flag in settings_flags().items()]
        return [*own, flags.ALGORITHM._replace(default=self.algorithm), flags.CONFIG]

    def arguments(self, source: str) -> tuple[Arguments, list[Flag]]:
        """A recipe's arguments, and its flags beyond `Settings`, with this experiment's defaults for its own recipe."""
        arguments = arguments_of(find_recipe(source), source)
        mine = self.defaults if self.algorithm and full_source(self.algorithm) == source else {}
        strange = set(mine) - set(settings_flags()) - set(arguments.flags)
        if strange:
            raise TypeError(
                f"the experiment {self.name} has defaults for {sorted(strange)}, which {source} does not take"
            )
        own = [flag for name, flag in arguments.flags.items() if name not in settings_flags()]
        return arguments, [flag._replace(default=mine.get(flag.name, flag.default)) for flag in own]


class Command(NamedTuple):
    """A parsed and checked command line; hashable and picklable, so that a spawned rank can prepare the job too.

    Attributes:
      experiment: name of the program.
      settings: all flags of `Settings`, defaults included.
      source: "module:function" or "FILE.py:function" of the recipe.
      arguments: (name, value) of the recipe's arguments that are flags.
      kind: kind of the run, one of `declaration.RUN_KINDS`.
      notes: lines to print before the run.
    """

    experiment: str
    settings: Settings
    source: str
    arguments: tuple[tuple[str, object], ...]
    kind: str
    notes: tuple[str, ...] = ()

    @property
    def flags(self) -> dict[str, object]:
        """All flags by name, the recipe and its arguments included."""
        return flag_values(self.settings) | dict(self.arguments) | {"algorithm": self.source}

    def compose(self) -> Any:
        """The algorithm."""
        return find_recipe(self.source)(**dict(self.arguments))


def with_models(command: Command) -> Command:
    """The command with runs and checkpoints replaced by directories of models.

    Raises:
      ValueError: a run or checkpoint has no model.
    """
    from funrl.trainer.checkpoints.stored_models import with_model_directories

    return command._replace(settings=with_model_directories(command.settings))


def with_mesh(command: Command) -> Command:
    """The command with auto:N replaced by a mesh and with --fsdp groups on several nodes; notes say what was chosen.

    Raises:
      ValueError: this machine does not have N devices, or the run fits no mesh of them.
    """
    from funrl.api.meshes import choose_mesh

    chosen, note = choose_mesh(command.settings, command.compose)
    return command if note is None else command._replace(settings=chosen, notes=(*command.notes, note))


def read_command(experiment: Experiment, argv: Sequence[str], writes: bool, rewarded: bool = True) -> Command:
    """Read and check a command line.

    Args:
      experiment: the experiment.
      argv: the program's name and its arguments.
      writes: whether this process writes the run directory.
      rewarded: whether an algorithm that reads rewards must be given some.

    Raises:
      ValueError, OSError: the first flag that cannot work, with its value and a way out.
    """
    line = read_line(experiment.name, argv)
    with line.blamed():
        common = flags.read(experiment.common, line.argv)
        source, settings = _read_common(experiment, common, line)
        if writes and settings.run.run_dir and not settings.estimate.dry_run and not settings.run.resume:
            check_unused(RunDirectory(expanded(settings.run.run_dir)))
        return _read_recipe(experiment, common, line, source=source, settings=settings, rewarded=rewarded)


def _read_common(experiment: Experiment, common: flags.Read, line: Line) -> tuple[str, Settings]:
    """The recipe's source and the settings, after all checks that need neither torch nor the recipe itself."""
    if common.values["algorithm"] is None:
        raise SettingsError("--algorithm is needed: a recipe listed by `funrl --help`, or FILE.py:function")
    source = full_source(common.values["algorithm"])
    check_recipe_names(source)
    names = names_of_arguments(source)
    if common.unknown:
        arguments = experiment.arguments(source)[0].flags if names is None else names
        _refuse_other_names(common, line, source, frozenset(arguments))
    if names is not None:
        flags.refuse_unknown(common.unknown, {*common.values, *names}, later=names)
    settings = settings_of(**{name: common.values[name] for name in settings_flags()})
    from funrl.trainer.settings.checks import check_files, check_settings

    check_settings(settings)
    check_files(settings)
    return source, settings


def _refuse_other_names(common: flags.Read, line: Line, source: str, arguments: frozenset[str]) -> None:
    """Refuse names of TRL and verl; the error gives ours. Raises: SettingsError."""
    known = dict.fromkeys([*common.values, *arguments]) | dict(settings_flags())
    context = NameContext({}, common.values, arguments, source.rpartition(":")[2])
    advice = ""
    if line.config is not None and not set(line.config.values) <= set(known):
        advice = f"\n`funrl import {line.config.path}` translates the whole file"
    with refusing(ending=advice):
        check_names(names_given(common.unknown), known, context)


def _read_recipe(
    experiment: Experiment, common: flags.Read, line: Line, source: str, settings: Settings, rewarded: bool
) -> Command:
    """The command, with the arguments of the recipe. From here on torch is imported."""
    arguments, own = experiment.arguments(source)
    rest = flags.read(own, ["", *common.unknown])
    for name in map(flags.flag_name, rest.unknown):
        if name in arguments.unsayable:
            raise SettingsError(
                f"--{name} is not a flag: {source} takes {arguments.unsayable[name]} there; give it in a FILE.py"
            )
    flags.refuse_unknown(rest.unknown, {*common.values, *rest.values})
    implied = resolved(settings)
    values = {
        **common.values,
        **rest.values,
        "max_new_tokens": implied.sampling.max_new_tokens,
        "reward_weights": implied.rewards.reward_weights,
    }
    chosen = tuple((name, values[name]) for name in arguments.flags)
    command = Command(experiment.name, settings, source, arguments=chosen, kind="", notes=line.notes)
    from funrl.algos.core import Algorithm
    from funrl.trainer.steps.roles import reads_scores

    algorithm = command.compose()
    kind = run_kind(algorithm, settings.examples.data)
    flags.refuse_idle(common.given - set(arguments.flags) - line.recorded, kind, source, settings=settings)
    settings = for_kind(settings, kind)
    from funrl.trainer.settings.checks import check_settings

    reads = not isinstance(algorithm, Algorithm) or reads_scores(algorithm)
    check_settings(settings, kind, rewarded and reads)
    return command._replace(settings=settings, kind=kind)


def help_of(experiment: Experiment, argv: Sequence[str]) -> str:
    """The help of an experiment with the recipe of the command line, or with its own if none is given.

    Raises:
      ValueError: there is no such recipe.
    """
    given = experiment.algorithm
    with contextlib.suppress(SettingsError):  # errors of other flags, which --help ignores
        given = flags.read(experiment.common, argv).values["algorithm"]
    program = argv[0] if argv[0].startswith("funrl ") else f"python -m funrl.experiments.{experiment.name}"
    summary = first_line(f"funrl.experiments.{experiment.name}:") if given == experiment.algorithm else ""
    if given is None:
        return flags.help_text(program, summary, experiment.common, None)
    source = full_source(given)
    arguments, own = experiment.arguments(source)
    known = {flag.name: flag.default for flag in (*experiment.common, *own)}
    known["max_new_tokens"] = resolved(Settings()).sampling.max_new_tokens
    kinds = kinds_of(find_recipe(source)(**{name: known[name] for name in arguments.flags}))
    kind = kinds[0] if len(kinds) == 1 else None
    return flags.help_text(program, summary or first_line(source), [*experiment.common, *own], kind)
