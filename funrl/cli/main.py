"""The command `funrl`: one experiment or recipe, with its flags.

funrl ppo --mesh=dp4,tp2
funrl ppo --help
funrl --config=runs/ppo-20260101-120000/config.json
funrl evaluate RUN_DIR --data=test.jsonl
funrl generate RUN_DIR "a prompt"
funrl serve RUN_DIR --port=8000
funrl export RUN_DIR --step=50
funrl import trl.yaml --to=mine.yaml
funrl report RUN_DIR
funrl plan grpo --model=config.json --gpus=8,16 --hardware=h200 --launch=slurm
funrl ray --nodes=2 -- grpo --mesh=dp16
funrl replay RUN_DIR --rows
funrl replay RUN_DIR OTHER_RUN_DIR
funrl explain grpo --kl_coef=0.1
funrl show sft --data=FILE --model=DIR; funrl show FILE --model=DIR
funrl audit traces.jsonl --model=DIR
funrl doctor ppo --mesh=dp4,tp2; funrl doctor --config=FILE
funrl compile grpo --mesh=dp4,tp4 --target=v5e:4x4
funrl --help
"""

from __future__ import annotations

import difflib
import importlib
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import funrl
from funrl.cli.inference_flags import inference_flags, inference_help
from funrl.cli.line import given_config, read_words
from funrl.cli.run import main as run
from funrl.cli.usages import COMMANDS
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
from funrl.processes.output import lasting_output
from funrl.trainer.settings import successors
from funrl.trainer.settings.declaration import Flag, SettingsError, at_least, one_of
from funrl.trainer.settings.records import SAVED_DTYPES

USAGE = "funrl NAME [--flag=value ...], such as funrl ppo --mesh=dp4,tp2; funrl NAME --help lists the flags of NAME"
EXPLAINED = ("evaluate", "generate", "serve")  # their help lists all their flags
# Commands with a module of their own, which is imported when one is named: many import torch.
MODULES = {
    "audit": "funrl.cli.audit:audit_command",
    "import": "funrl.cli.import_config:import_config",
    "ray": "funrl.cli.ray_job:ray_command",
    "replay": "funrl.cli.replay:replay_command",
    "compile": "funrl.cli.compile_ahead:compile_command",
    "doctor": "funrl.cli.doctor:doctor",
    "plan": "funrl.cli.plan:plan_command",
    "serve": "funrl.cli.serve:serve_command",
    "show": "funrl.cli.show:show_command",
}


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
    try:
        place = 2 if argv[1] in ("doctor", "show") else 1  # index of the experiment
        if argv[1] == "ray" and "--" in argv:
            place = argv.index("--") + 1
        if len(argv) > place and argv[place].startswith("-") and flags.flag_name(argv[place]) == "config":
            argv.insert(place, _name_in_config(argv))
        name = argv[1]
        asks_help = any(text in flags.HELP for text in argv[2:])
        if name in COMMANDS:
            if asks_help:
                print(_command_help(name))
                return 0
            return _command(name)(argv[1:])
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return _program(name, argv[2:])


def _command_help(name: str) -> str:
    if name == "plan":
        from funrl.cli.plan import plan_help

        return plan_help()
    return inference_help(name) if name in EXPLAINED else f"{COMMANDS[name].summary}: {COMMANDS[name].usage}"


def _command(name: str) -> Callable[[Sequence[str]], int]:
    """The function of a command; it takes the command's name and arguments and returns the exit status."""
    if name in MODULES:
        module, _, function = MODULES[name].partition(":")
        return getattr(importlib.import_module(module), function)
    own = {"export": export, "report": report_runs, "explain": explain_recipe}
    return own.get(name, inference)


def _program(name: str, words: Sequence[str]) -> int:
    """Run the experiment or recipe with this name, or print its help; return the exit status."""
    pages = {**dict.fromkeys((*flags.HELP, "help"), listing), "flags": flags.page}
    pages |= dict.fromkeys(("--version", "version"), lambda: f"funrl {funrl.__version__}")
    if name in pages:
        print(pages[name]())
        return 0
    program = [f"funrl {name}", *words]
    if name in experiment_names():
        sys.argv = program
        runpy.run_module(f"funrl.experiments.{name}", run_name="__main__")
        raise AssertionError("an experiment ends with sys.exit")
    if name in recipe_names():
        return run(name, program)
    if name in successors.REMOVED_COMMANDS:
        print(f"error: `funrl {name}` is not a command any more; {successors.REMOVED_COMMANDS[name]}", file=sys.stderr)
        return 2
    near = difflib.get_close_matches(name, (*experiment_names(), *recipe_names()), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    print(f"error: {name!r} is not an experiment or a recipe; {hint}funrl --help lists all", file=sys.stderr)
    return 2


def _name_in_config(argv: Sequence[str]) -> str:
    """The experiment that the --config file names, or `rl` if it names only an algorithm."""
    config = given_config(argv)
    if config is None or config.experiment in (*experiment_names(), *recipe_names()):
        return "rl" if config is None else str(config.experiment)
    if "algorithm" in config.values:
        return "rl"
    raise SettingsError(f"--config={config.path}: it has no `experiment`; write `funrl NAME --config={config.path}`")


def export(argv: Sequence[str]) -> int:
    """Run `funrl export RUN`, whose usage line is in `COMMANDS`; return the exit status."""
    own = [
        Flag("step", None, int, optional=True, text="step of the checkpoint", bounds=(at_least(0),)),
        Flag("to", None, str, optional=True, text="the directory to write"),
        Flag(
            "adapter",
            False,
            bool,
            optional=False,
            text="export only the adapters, in PEFT's format, instead of merged weights",
        ),
        Flag("overwrite", False, bool, optional=False, text="replace a model in --to"),
        Flag(
            "save_dtype",
            None,
            str,
            optional=True,
            text="dtype of the weights",
            bounds=(one_of(*SAVED_DTYPES),),
            chosen="that in which the run saves its model",
        ),
    ]
    (run,), line = read_words(own, argv, COMMANDS["export"].usage)
    from funrl.trainer.checkpoints.export import export_checkpoint

    exported = export_checkpoint(run, **line.values)
    kind = "adapter" if line.values["adapter"] else "model"
    print(f"the {kind} after step {exported.step} is in {exported.directory}")
    return 0


def report_runs(argv: Sequence[str]) -> int:
    """Run `funrl report RUN ...`; return the exit status."""
    from funrl.track.report.page import write_report

    folders, _ = read_words([], argv, COMMANDS["report"].usage, most=None)
    for folder in folders:
        print(f"open {write_report(folder)}")
    return 0


def explain_recipe(argv: Sequence[str]) -> int:
    """Run `funrl explain RECIPE|FILE.py:NAME [--ARGUMENT=VALUE]`; return the exit status."""
    usage = COMMANDS["explain"].usage
    (recipe,), _ = read_words([], [text for text in argv if not text.startswith("-")], usage)
    source = full_source(recipe)
    arguments = arguments_of(find_recipe(source), source).flags
    _, line = read_words(list(arguments.values()), argv, usage)
    from funrl.algos.explanation import explain_algorithm

    algorithm = find_recipe(source)(**{name: line.values[name] for name in arguments})
    print(f"{recipe}: {first_line(source)}\n\n{explain_algorithm(algorithm)}")
    return 0


def inference(argv: Sequence[str]) -> int:
    """Run `funrl evaluate` or `funrl generate`; return the exit status."""
    name = argv[0]
    usage = COMMANDS[name].usage
    help_hint = f"{usage}; funrl {name} --help lists the flags"
    most = None if name == "generate" else 1
    (model, *texts), line = read_words(inference_flags(name), argv, help_hint, most=most)
    values = {flag: line.values[flag] for flag in sorted(line.given)}
    prompts = values.pop("prompts", None)
    if name == "generate" and (prompts is None) == (not texts):
        raise SettingsError(f"give prompts, or --prompts=FILE; usage: {usage}")
    from funrl.cli import evaluate
    from funrl.processes.workers import WorkerError

    try:
        if name == "generate":
            evaluate.complete_prompts(model, prompts or [{"prompt": text} for text in texts], **values)
            return 0
        evaluation = evaluate.evaluate(model, **values)
    except WorkerError as error:
        print(f"error: {str(error).rstrip()}", file=sys.stderr)
        return 1
    if evaluation.directory:
        print(f"{evaluation}\nresults in {evaluation.directory}")
    return 0


def experiment_names() -> tuple[str, ...]:
    """The programs of funrl/experiments: modules whose docstring gives the command that runs them."""
    names = sorted(file.stem for file in Path(str(funrl.__file__)).with_name("experiments").glob("*.py"))
    return tuple(
        name
        for name in names
        if re.search(rf"python -m funrl\.experiments\.{name}\b", docstring(f"funrl.experiments.{name}:"))
    )


def listing() -> str:
    """List the experiments and recipes, one per line."""
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
