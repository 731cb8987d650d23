"""The command `funrl`: one experiment or recipe, with its flags.

funrl ppo --mesh=dp4,tp2
funrl ppo --help
funrl --config=runs/ppo-20260101-120000/config.json
funrl evaluate RUN_DIR --data=test.jsonl
funrl generate RUN_DIR "a prompt"
funrl export RUN_DIR --step=50
funrl import trl.yaml --to=mine.yaml
funrl report RUN_DIR
funrl compare RUN_DIR OTHER_RUN_DIR
funrl replay RUN_DIR --step=50
funrl bisect RUN_DIR OTHER_RUN_DIR
funrl watch RUN_DIR
funrl explain grpo --kl_coef=0.1
funrl doctor ppo --mesh=dp4,tp2; funrl doctor --config=FILE
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

import funrl
from funrl.cli.inference_flags import inference_help, read_inference
from funrl.cli.run import main as run
from funrl.cli.usages import COMMANDS, read_places
from funrl.flags import parser as flags
from funrl.flags.arguments import (
    RECIPES,
    arguments_of,
    docstring,
    find_recipe,
    first_line,
    full_source,
    recipe_names,
)
from funrl.flags.config_file import read_config
from funrl.processes.output import lasting_output
from funrl.trainer.settings.declaration import Flag, SettingsError, at_least

USAGE = "funrl NAME [--flag=value ...], such as funrl ppo --mesh=dp4,tp2; funrl NAME --help lists the flags of NAME"
EXPLAINED = ("evaluate", "generate")  # their help lists all of their flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run what a command line names; return the exit status.

    Args:
      argv: the program's name and its arguments; the default is the process's.
    """
    with lasting_output():
        return _main(list(sys.argv if argv is None else argv))


def _main(argv: list[str]) -> int:
    if len(argv) < 2:
        print(f"usage: {USAGE}; funrl --help lists the names", file=sys.stderr)
        return 2
    place = 2 if argv[1] == "doctor" else 1  # of the experiment
    if len(argv) > place and argv[place].startswith("-") and flags.flag_name(argv[place]) == "config":
        try:
            argv.insert(place, _name_in_config(argv))
        except SettingsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    name, program = argv[1], [f"funrl {argv[1]}", *argv[2:]]
    if name in (*flags.HELP, "help"):
        print(listing())
        return 0
    if name in ("--version", "version"):
        print(f"funrl {funrl.__version__}")
        return 0
    if name == "flags":
        print(flags.page())
        return 0
    if name in COMMANDS and name not in EXPLAINED and any(text in flags.HELP for text in argv[2:]):
        print(f"{COMMANDS[name].summary}: {COMMANDS[name].usage}")
        return 0
    if name == "export":
        return export(argv[1:])
    if name == "import":
        from funrl.cli.import_config import import_config

        return import_config(argv[1:])
    if name in ("report", "compare"):
        return pages(name, argv[1:])
    if name == "watch":
        return watch(argv[1:])
    if name in EXPLAINED:
        return inference(name, argv[1:])
    if name == "replay":
        from funrl.cli.replay import replay_command

        return replay_command(argv[1:])
    if name == "bisect":
        from funrl.cli.bisect import bisect_command

        return bisect_command(argv[1:])
    if name == "explain":
        return explain_recipe(argv[1:])
    if name == "doctor":
        from funrl.cli.doctor import doctor

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


def _name_in_config(argv: Sequence[str]) -> str:
    """The experiment that the file of --config names, or `rl` where it names an algorithm alone."""
    config = read_config(str(flags.read([flags.CONFIG], argv).values["config"]))
    if config.experiment in (*experiment_names(), *recipe_names()):
        return str(config.experiment)
    if "algorithm" in config.values:
        return "rl"
    raise SettingsError(f"--config={config.path}: it has no `experiment`; write `funrl NAME --config={config.path}`")


def export(argv: Sequence[str]) -> int:
    """Run `funrl export RUN [--step=N] [--to=DIR] [--adapter] [--overwrite]`; return the exit status."""
    step = Flag("step", None, int, True, "of the checkpoint", bounds=(at_least(0),))
    to = Flag("to", None, str, True, "the directory to write")
    adapter = Flag("adapter", False, bool, False, "adapters alone, as PEFT has them, instead of merged")
    overwrite = Flag("overwrite", False, bool, False, "a model that --to holds may be lost")
    try:
        (run,), values = read_places([step, to, adapter, overwrite], argv, COMMANDS["export"].usage)
        from funrl.trainer.checkpoints.export import export_checkpoint

        what = "adapter" if values["adapter"] else "model"
        done = export_checkpoint(run, **values)
        print(f"the {what} after step {done.step} is in {done.directory}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def pages(name: str, argv: Sequence[str]) -> int:
    """Run `funrl report RUN` or `funrl compare RUN RUN ... [--to=FILE.html]`; return the exit status."""
    from funrl.track.report.compare import write_comparison
    from funrl.track.report.page import write_report

    to = Flag("to", "compare.html", str, False, "the file to write")
    try:
        runs, values = read_places([to] if name == "compare" else [], argv, COMMANDS[name].usage, most=None)
        if name == "report":
            for run in runs:
                print(f"open {write_report(run)}")
        else:
            print(f"open {write_comparison(runs, values['to'])}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def watch(argv: Sequence[str]) -> int:
    """Run `funrl watch RUN` until the run ends or ctrl-C is pressed; return the exit status."""
    try:
        (run,), _ = read_places([], argv, COMMANDS["watch"].usage)
        from funrl.track.watch import watch_run

        watch_run(run)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def explain_recipe(argv: Sequence[str]) -> int:
    """Run `funrl explain RECIPE|FILE.py:NAME [--latex] [--ARGUMENT=VALUE]`; return the exit status."""
    latex = Flag("latex", False, bool, False, "LaTeX instead of text")
    usage = COMMANDS["explain"].usage
    try:
        (recipe, *more) = [text for text in argv[1:] if not text.startswith("-")] or [""]
        if not recipe or more:
            raise SettingsError(f"usage: {usage}")
        source = full_source(recipe)
        arguments = arguments_of(find_recipe(source), source)
        (_,), values = read_places([latex, *arguments.flags.values()], argv, usage)
        from funrl.algos.explanation import explain_algorithm

        found = explain_algorithm(find_recipe(source)(**{name: values[name] for name in arguments.flags}))
        print(found.latex if values["latex"] else f"{recipe}: {first_line(source)}\n\n{found}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def inference(name: str, argv: Sequence[str]) -> int:
    """Run `funrl evaluate` or `funrl generate`; return the exit status."""
    if any(text in flags.HELP for text in argv[1:]):
        print(inference_help(name))
        return 0
    try:
        (model, *texts), values = read_inference(name, argv)
        from funrl.cli import evaluate
        from funrl.processes.workers import WorkerError

        try:
            if name == "evaluate":
                if texts:
                    raise SettingsError(f"{texts[0]!r} is not a flag; usage: {COMMANDS[name].usage}")
                found = evaluate.evaluate(model, **values)
                if found.directory:
                    print(f"{found}\nresults in {found.directory}")
            else:
                prompts = values.pop("prompts", None)
                if (prompts is None) == (not texts):
                    raise SettingsError(f"give prompts, or --prompts=FILE; usage: {COMMANDS[name].usage}")
                evaluate.complete_prompts(model, prompts or [{"prompt": text} for text in texts], **values)
        except WorkerError as error:
            print(f"error: {str(error).rstrip()}", file=sys.stderr)
            return 1
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def experiment_names() -> tuple[str, ...]:
    """The programs of funrl/experiments: their docstrings give the command that runs them."""
    names = sorted(file.stem for file in Path(str(funrl.__file__)).with_name("experiments").glob("*.py"))
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
    return "\n".join([*parts, "", *(f"{command.summary}: {command.usage}" for command in COMMANDS.values())])


def _lines(entries: Sequence[tuple[str, str]], column: int) -> list[str]:
    width = max(72, min(shutil.get_terminal_size((100, 24)).columns, 120))
    lines = [f"  {name:<{column}}{text}" for name, text in entries]
    return [line if len(line) <= width else line[: width - 3].rstrip() + "..." for line in lines]


if __name__ == "__main__":
    sys.exit(main())
