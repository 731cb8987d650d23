"""Usage of the commands beside the experiments, and the reading of their lines. Nothing here imports torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from funrl.cli.inference_flags import USAGES
from funrl.flags import parser as flags
from funrl.trainer.settings.declaration import Flag, SettingsError


class SmallCommand(NamedTuple):
    """A command beside the experiments.

    Attributes:
      summary: what it gives.
      usage: how it is called.
    """

    summary: str
    usage: str


COMMANDS = {
    "evaluate": SmallCommand("Evaluation of a model or a run", USAGES["evaluate"]),
    "generate": SmallCommand("Completions", USAGES["generate"]),
    "export": SmallCommand(
        "A model of a checkpoint", "funrl export RUN_DIR [--step=N] [--to=DIR] [--adapter] [--overwrite]"
    ),
    "report": SmallCommand("The page of a run", "funrl report RUN ..."),
    "compare": SmallCommand("The page of several runs", "funrl compare RUN RUN ... [--to=FILE.html]"),
    "watch": SmallCommand("A run that goes on, in the terminal", "funrl watch RUN"),
    "import": SmallCommand(
        "TRL's or verl's configuration",
        "funrl import FILE [--to=FILE] [--recipe=NAME] [--devices=N] [--records=N] [--partial]",
    ),
    "replay": SmallCommand(
        "A step made again, bit by bit", "funrl replay RUN_DIR --step=N [--mesh=MESH] [--tolerance=X]"
    ),
    "bisect": SmallCommand("The first difference between two runs", "funrl bisect RUN_DIR OTHER_RUN_DIR"),
    "explain": SmallCommand(
        "An algorithm's advantage and losses as formulas",
        "funrl explain RECIPE|FILE.py:NAME [--latex] [--ARGUMENT=VALUE]",
    ),
    "doctor": SmallCommand("This machine, and whether a command would run", "funrl doctor [NAME --flag=value ...]"),
}


def read_places(
    own: Sequence[Flag], argv: Sequence[str], usage: str, least: int = 1, most: int | None = 1
) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Read the line of a command that takes directories or files, and a few flags.

    Args:
      own: all flags that it takes.
      argv: the program's name and its arguments.
      usage: the line that says how it is called.
      least, most: how many places it takes; None: any number.

    Returns: the places, and the values of the flags by name.

    Raises:
      SettingsError: another number of places, a flag that is not known, or as `flags.read`.
    """
    flags.refuse_repeated(argv)
    given = flags.read(own, argv)
    places = tuple(text for text in given.unknown if not text.startswith("-"))
    for name in [flags.flag_name(text) for text in given.unknown if text.startswith("-")][:1]:
        near = difflib.get_close_matches(name, [flag.name for flag in own], 1)
        hint = f"did you mean --{near[0]}? " if near else ""
        raise SettingsError(f"--{name} is not a flag; {hint}usage: {usage}")
    if len(places) < least or (most is not None and len(places) > most):
        raise SettingsError(f"usage: {usage}")
    return places, given.values
