"""Usage of the commands other than experiments. Nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple

from funrl.cli.inference_flags import USAGES


class SmallCommand(NamedTuple):
    """A command that is not an experiment.

    Attributes:
      summary: its result, in a few words.
      usage: its usage line.
    """

    summary: str
    usage: str


COMMANDS = {
    "evaluate": SmallCommand("Evaluation of a model or a run", USAGES["evaluate"]),
    "generate": SmallCommand("Completions", USAGES["generate"]),
    "serve": SmallCommand("A model behind an HTTP endpoint", USAGES["serve"]),
    "export": SmallCommand(
        "Export of a checkpoint as a model",
        "funrl export RUN_DIR [--step=N] [--to=DIR] [--adapter] [--save_dtype=X] [--overwrite]",
    ),
    "report": SmallCommand("HTML report of a run", "funrl report RUN ..."),
    "import": SmallCommand(
        "Import from TRL or verl",
        "funrl import FILE [--to=FILE] [--recipe=NAME] [--devices=N] [--records=N] [--partial]",
    ),
    "plan": SmallCommand(
        "A run's cost on GPUs, and the file that starts it",
        "funrl plan NAME [--flag=value ...] [--gpus=8,16] [--launch=sky]",
    ),
    "ray": SmallCommand(
        "A run on a Ray cluster",
        "funrl ray [--nodes=N] [--address=X] [--timeout=MINUTES] [--shutdown_timeout=SECONDS] -- NAME ...",
    ),
    "replay": SmallCommand(
        "A run repeated, or two compared",
        "funrl replay RUN_DIR [RUN_DIR] [--rows] [--step=N] [--mesh=MESH] [--tolerance=X]",
    ),
    "explain": SmallCommand(
        "An algorithm's pieces and formulas", "funrl explain RECIPE|FILE.py:NAME [--ARGUMENT=VALUE]"
    ),
    "compile": SmallCommand("A run compiled for TPUs", "funrl compile NAME [--flag=value ...] --target=v5e:4x4"),
    "show": SmallCommand(
        "Records as trained",
        "funrl show NAME|FILE [--flag=value ...] [--record=N] [--tokens] [--output=FILE]",
    ),
    "audit": SmallCommand(
        "What a log holds",
        "funrl audit FILE --model=DIR [--chat_template=FILE] [--count=N] [--json=FILE] [--output=FILE]",
    ),
    "doctor": SmallCommand("This machine, and whether a command would run", "funrl doctor [NAME --flag=value ...]"),
}
