"""The command `funrl`: one experiment or recipe, with its flags.

funrl ppo --mesh=dp4,tp2
funrl ppo --help
funrl export RUN_DIR --step=50
funrl doctor ppo --mesh=dp4,tp2
funrl --help
"""

from __future__ import annotations

import difflib
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from funrl.experiments import flags
from funrl.experiments.arguments import RECIPES, docstring, first_line, recipe_names
from funrl.experiments.run import main as run
from funrl.experiments.run import print_whole
from funrl.trainer.declaration import Flag, SettingsError, at_least

USAGE = "funrl NAME [--flag=value ...], such as funrl ppo --mesh=dp4,tp2; funrl NAME --help lists the flags of NAME"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what a command line names; return the exit status.

    Args:
      argv: the program's name and its arguments; the default is the process's.
    """
    argv = list(sys.argv if argv is None else argv)
    if len(argv) < 2:
        print(f"usage: {USAGE}; funrl --help lists the names", file=sys.stderr)
        return 2
    name, program = argv[1], [f"funrl {argv[1]}", *argv[2:]]
    if name in flags.HELP:
        print_whole(listing())
        return 0
    if name == "flags":
        print_whole(flags.page())
        return 0
    if name == "export":
        return export(argv[1:])
    if name == "doctor":
        from funrl.experiments.doctor import doctor

        return doctor(argv[1:])
    if name in experiment_names():
        sys.argv = program
        runpy.run_module(f"funrl.experiments.{name}", run_name="__main__")
        raise AssertionError("an experiment ends with sys.exit")
    if name in recipe_names():
        return run(name, program)
    near = difflib.get_close_matches(name, (*experiment_names(), *recipe_names()), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    print(f"error: {name!r} is not an experiment or a recipe; {hint}funrl --help lists all", file=sys.stderr)
    return 2


def export(argv: Sequence[str]) -> int:
    """Run `funrl export RUN [--step=N] [--to=DIR] [--adapter]`; return the exit status."""
    step = Flag("step", None, int, True, "of the checkpoint", bounds=(at_least(0),))
    to = Flag("to", None, str, True, "the directory to write")
    adapter = Flag("adapter", False, bool, False, "adapters alone, as PEFT has them, instead of merged")
    try:
        given = flags.read([step, to, adapter], argv)
        places = [text for text in given.unknown if not text.startswith("-")]
        if len(places) != 1 or len(given.unknown) > 1:
            raise SettingsError("usage: funrl export RUN_DIR [--step=N] [--to=DIR] [--adapter]")
        from funrl.trainer.export import export_checkpoint

        what = "adapter" if given.values["adapter"] else "model"
        print_whole(f"the {what} is in {export_checkpoint(places[0], **given.values)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def experiment_names() -> tuple[str, ...]:
    """The programs of this folder: their docstrings give the command that runs them."""
    names = sorted(file.stem for file in Path(__file__).parent.glob("*.py"))
    return tuple(
        name
        for name in names
        if re.search(rf"python -m funrl\.experiments\.{name}\b", docstring(f"funrl.experiments.{name}:"))
    )


def listing() -> str:
    """List the experiments and recipes, a line each."""
    experiments = [(name, first_line(f"funrl.experiments.{name}:")) for name in experiment_names()]
    rest = [name for name in recipe_names() if name not in experiment_names()]
    recipes = [(name, first_line(f"{RECIPES}.{name}:{name}")) for name in rest]
    column = max(len(name) for name, _ in experiments + recipes) + 2
    parts = [USAGE, "", "Experiments, with defaults for the embedded task:", *_lines(experiments, column)]
    parts += ["", "Other recipes, with their own defaults:", *_lines(recipes, column)]
    parts += ["", "A model of a checkpoint: funrl export RUN_DIR [--step=N] [--to=DIR] [--adapter]"]
    return "\n".join([*parts, "This machine, and whether a command would run: funrl doctor [NAME --flag=value ...]"])


def _lines(entries: Sequence[tuple[str, str]], column: int) -> list[str]:
    width = max(72, min(shutil.get_terminal_size((100, 24)).columns, 120))
    lines = [f"  {name:<{column}}{text}" for name, text in entries]
    return [line if len(line) <= width else line[: width - 3].rstrip() + "..." for line in lines]


if __name__ == "__main__":
    sys.exit(main())
