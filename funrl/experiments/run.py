"""What all experiments share: flags in, checks, ranks started, the result said.

An experiment is a module with a function `algorithm(...) -> Algorithm`. The arguments of that function, with their
defaults and the lines of its docstring, are flags beside the common ones of `Settings`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from funrl.mesh.launch import WorkerError, launch
from funrl.mesh.mesh import Mesh
from funrl.runtime.job import Job, SettingsError, load_function, prepare
from funrl.runtime.loop import Outcome, train
from funrl.runtime.run_directory import open_run
from funrl.runtime.settings import Settings

GROUPS = {"job": "What to do", "devices": "Where", "rollout": "Generation", "update": "Training", "output": "Output"}


class Command(NamedTuple):
    """A parsed command line; small, hashable and picklable, so that a spawned rank can read it again.

    Attributes:
      settings: the common flags.
      source: "module:function" of the algorithm.
      arguments: (name, value) of the algorithm's own flags.
    """

    settings: Settings
    source: str
    arguments: tuple[tuple[str, Any], ...]


def main(module: str, argv: Sequence[str] | None = None, **defaults: Any) -> int:
    """Runs the experiment of a module from the command line and returns the exit status.

    Args:
      module: such as "funrl.experiments.ppo".
      argv: the command line; the default is the program's.
      defaults: values of common flags that suit this experiment better than those of `Settings`.
    """
    argv = list(sys.argv if argv is None else argv)
    speaks = os.environ.get("RANK", "0") == "0"  # under torchrun every rank comes through here
    try:
        command = parse(module, argv, defaults)
        if command is None:
            return 0
        job = _job(command)
        config = dataclasses.asdict(command.settings) | dict(command.arguments) | {"algorithm": command.source}
        name = module.rsplit(".", 1)[-1]
        run_dir = str(open_run(command.settings.run_dir, name, config).path) if speaks else None
    except (ValueError, OSError, flags.Error) as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        outcome = launch(functools.partial(_rank, command, run_dir), job.sizes, job.device)
    except WorkerError as error:
        print(f"error: {error}\nwhat was written until then is in {run_dir}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; what was written until then is in {run_dir}", file=sys.stderr)
        return 130
    if speaks:
        print(_conclusion(outcome, run_dir))
    if outcome.error and speaks:
        print(f"error: {outcome.error}", file=sys.stderr)
    return 1 if outcome.error else 0


def parse(module: str, argv: Sequence[str], defaults: Mapping[str, Any]) -> Command | None:
    """The command line as a `Command`; None where help was asked for and printed.

    Raises:
      flags.Error, ValueError: an unknown flag, a value of the wrong type, an algorithm that is not there.
    """
    given = [a.split("=", 1)[1] for a in argv if re.match(r"--?algorithm=", a)]
    source = given[-1] if given else f"{module}:algorithm"
    compose = load_function(source)
    table = flags.FlagValues()
    fields = dataclasses.fields(Settings)
    for field in fields:
        _define(table, field.name, field.type, defaults.get(field.name, field.default), field.metadata["help"])
    own = inspect.signature(compose).parameters
    texts = _argument_texts(compose)
    types = typing.get_type_hints(compose)
    for name, parameter in own.items():
        if name in table:
            raise SettingsError(f"{source}: its argument {name!r} has the name of a common flag; rename it")
        if parameter.default is inspect.Parameter.empty:
            raise SettingsError(f"{source}: its argument {name!r} needs a default, which becomes the flag's")
        _define(table, name, types.get(name, float), parameter.default, texts.get(name, ""))
    flags.DEFINE_string("algorithm", source, "module:function or FILE.py:function that makes the algorithm", table)
    if any(a in ("--help", "-h", "-help", "--helpfull", "--helpshort") for a in argv[1:]):
        print(_help(module, table, list(own)))
        return None
    rest = table(list(argv))[1:]
    if rest:
        raise SettingsError(f"{rest[0]!r} is not a flag; flags are written --name=value, see --help")
    values: dict[str, Any] = {field.name: table[field.name].value for field in fields}
    return Command(Settings(**values), source, tuple((name, table[name].value) for name in own))


@functools.lru_cache(maxsize=1)
def _job(command: Command) -> Job:
    """Checked once: forked ranks inherit the result, spawned ones make it again."""
    compose = load_function(command.source)
    return prepare(command.settings, lambda: compose(**dict(command.arguments)))


def _rank(command: Command, run_dir: str | None, mesh: Mesh) -> Outcome:
    return train(_job(command), mesh, run_dir)


def _define(table: flags.FlagValues, name: str, kind: Any, default: Any, text: str) -> None:
    """One flag of the type that an annotation such as `int`, "float | None" or `str` says."""
    word = (
        kind if isinstance(kind, str) else " ".join(getattr(k, "__name__", "") for k in typing.get_args(kind) or [kind])
    )
    if "bool" in word:
        flags.DEFINE_boolean(name, default, text, table)
    elif "int" in word:
        flags.DEFINE_integer(name, default, text, flag_values=table)
    elif "float" in word:
        flags.DEFINE_float(name, default, text, flag_values=table)
    else:
        flags.DEFINE_string(name, default, text, table)


def _argument_texts(compose: Callable) -> dict[str, str]:
    """What the docstring's Args section says of each argument."""
    section = re.search(r"Args:\n((?:[ ]+.*\n?)+)", inspect.getdoc(compose) or "")
    texts: dict[str, str] = {}
    for line in section[1].splitlines() if section else []:
        match = re.match(r"  (\w+(?:, \w+)*): (.*)", line)
        if match:
            texts |= dict.fromkeys(match[1].split(", "), match[2])
        elif texts:
            last = list(texts.values())[-1]
            texts |= {k: f"{v} {line.strip()}" for k, v in texts.items() if v == last}
    return texts


def _help(module: str, table: flags.FlagValues, own: Sequence[str]) -> str:
    """All flags, grouped, a line or two each, with their defaults."""
    summary = (inspect.getdoc(sys.modules[module]) or "").splitlines()[0] if module in sys.modules else ""
    lines = [f"python -m {module} [--flag=value ...]", summary]
    groups = {
        title: [f.name for f in dataclasses.fields(Settings) if f.metadata["group"] == key]
        for key, title in GROUPS.items()
    }
    groups["What to do"].append("algorithm")
    groups["The algorithm"] = list(own)
    for title, names in groups.items():
        lines += ["", f"{title}:"]
        for name in names:
            default = table[name].default
            value = "" if default is None else f"={default}"
            lines.append(f"  {f'--{name}{value}':<38} {table[name].help}")
    return "\n".join(lines)


def _conclusion(outcome: Outcome, run_dir: str | None) -> str:
    changes = [
        f"{name} {outcome.first[name]:.3f} -> {outcome.last[name]:.3f}"
        for name in outcome.first
        if name in outcome.last
    ]
    return f"held out: {', '.join(changes)}\nresults in {run_dir} (open report.html)"
