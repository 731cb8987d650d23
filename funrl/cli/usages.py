"""Usage of the commands beside the experiments. Nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple

from funrl.cli.inference_flags import USAGES


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
