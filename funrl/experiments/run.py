"""What all experiments share: flags in, checks, ranks started, the result said.

An experiment is a module with a function `algorithm(...) -> Algorithm`. The arguments of that function, with their
defaults and the lines of its docstring, are flags beside the common ones of `Settings`. An argument that has the name
of a common flag is given that flag's value. An argument that no flag can say, such as a function, keeps its default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import functools
import inspect
import math
import os
import re
import shutil
import signal
import socket
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from funrl.cost.dry_report import dry_run
from funrl.loading import load
from funrl.mesh.launch import WorkerError, launch
from funrl.mesh.mesh import Mesh
from funrl.models.config import ModelError
from funrl.track.progress import discard_output
from funrl.track.report import ReportError, write_report
from funrl.track.run_directory import RunDirectoryError, open_run
from funrl.trainer.job import prepare, resolved
from funrl.trainer.loop import Outcome, train
from funrl.trainer.settings import Settings, SettingsError

PLAIN = (RunDirectoryError, ModelError, FloatingPointError)  # their messages say all that a user needs
GROUPS = {"job": "What to do", "devices": "Where", "rollout": "Generation", "update": "Training", "output": "Output"}


class Kind(NamedTuple):
    """A kind of experiment.

    Attributes:
      settings: the class of the common flags.
      hidden: those of its fields that have no meaning here, and are no flags.
      prepare: (settings, compose) -> a job with `sizes` and `device`, checked.
      run: (job, mesh, run_dir) -> how it ended.
      dry_run: (settings, compose) -> what it would cost.
    """

    settings: type[Settings]
    hidden: tuple[str, ...]
    prepare: Callable[[Any, Callable[[], Any]], Any]
    run: Callable[[Any, Mesh, str | None], Outcome]
    dry_run: Callable[[Any, Callable[[], Any]], str]

    @property
    def fields(self) -> list[dataclasses.Field]:
        return [field for field in dataclasses.fields(self.settings) if field.name not in self.hidden]


REINFORCEMENT = Kind(Settings, (), prepare, train, dry_run)


class Command(NamedTuple):
    """A parsed command line; small, hashable and picklable, so that a spawned rank can read it again.

    Attributes:
      settings: the common flags.
      source: "module:function" of the algorithm.
      arguments: (name, value) of the algorithm's own flags.
      kind: what is done with them.
    """

    settings: Settings
    source: str
    arguments: tuple[tuple[str, Any], ...]
    kind: Kind = REINFORCEMENT


def main(module: str, argv: Sequence[str] | None = None, kind: Kind = REINFORCEMENT, **defaults: Any) -> int:
    """Runs the experiment of a module from the command line and returns the exit status.

    Args:
      module: such as "funrl.experiments.ppo".
      argv: the command line; the default is the program's.
      kind: what the experiment does; the default is reinforcement learning.
      defaults: values of common flags that suit this experiment better than those of `Settings`.
    """
    argv = list(sys.argv if argv is None else argv)
    speaks = os.environ.get("RANK", "0") == "0"  # under torchrun every rank comes through here
    run_dir = None
    try:
        command = parse(module, argv, defaults, kind)
        if command is None:
            return 0
        if command.settings.dry_run:
            compose = load("algorithm", command.source)
            if speaks:
                print(kind.dry_run(command.settings, lambda: compose(**dict(command.arguments))))
            return 0
        for name in ("hardware", "prompt_tokens", "text_tokens"):
            if getattr(command.settings, name, None) is not None:
                raise SettingsError(f"--{name} says what --dry_run takes; give --dry_run too")
        job = _job(command)
        if speaks:
            config = dataclasses.asdict(command.settings) | dict(command.arguments) | {"algorithm": command.source}
            run_dir = str(open_run(command.settings.run_dir, module.rsplit(".", 1)[-1], config).path)
    except (ValueError, OSError, ImportError, flags.Error) as error:
        return _say(2, f"error: {error}", speaks)
    except KeyboardInterrupt:
        return _say(130, "interrupted; nothing was started" if speaks else "", speaks)
    status, outcome, problem = 0, None, ""
    try:
        with _terminated_as_interrupted():
            program, minutes = functools.partial(_rank, command, run_dir), command.settings.timeout
            outcome = launch(program, job.sizes, job.device, PLAIN, datetime.timedelta(minutes=minutes))
        if outcome.error:  # which every rank knows
            status, problem = 1, f"error: {outcome.error}" if speaks else ""
    except (WorkerError, *PLAIN) as error:
        status, problem = 1, f"error: {error}"
    except KeyboardInterrupt:
        status, problem = 130, "interrupted" if speaks else ""
    if speaks and run_dir is not None:
        try:
            print(_conclusion(outcome, run_dir, _report(run_dir)), flush=True)
        except OSError:  # whoever read it has gone
            discard_output()
    return _say(status, problem, speaks)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Ends a run that a job scheduler terminates, or whose terminal is gone, as it ends one that the user interrupts.
    Under torchrun, which waits for its ranks, they end at once."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if "WORLD_SIZE" in os.environ:
        yield
        return
    before = {sign: signal.signal(sign, interrupt) for sign in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _say(status: int, problem: str, speaks: bool) -> int:
    """Says what the problem is, and of a rank of torchrun that does not speak otherwise, which one has it."""
    if problem and speaks:
        print(problem.rstrip(), file=sys.stderr)
    elif problem:
        print(f"rank {os.environ['RANK']} on {socket.gethostname()}: {problem.rstrip()}", file=sys.stderr)
    return status


def parse(module: str, argv: Sequence[str], defaults: Mapping[str, Any], kind: Kind = REINFORCEMENT) -> Command | None:
    """The command line as a `Command`; None where help was asked for and printed.

    Raises:
      flags.Error, ValueError: an unknown flag, a value of the wrong type, an algorithm that is not there.
    """
    given = [a.split("=", 1)[1] for a in argv if re.match(r"--?algorithm=", a)]
    source = given[-1] if given else f"{module}:algorithm"
    compose = load("algorithm", source)
    table = flags.FlagValues()
    for field in kind.fields:
        _define(table, field.name, field.type, defaults.get(field.name, field.default), field.metadata["help"])
    texts = _argument_texts(compose)
    types = typing.get_type_hints(compose)
    own, kept = [], {}
    for name, parameter in inspect.signature(compose).parameters.items():
        type_ = types.get(name, float)
        if name not in table and parameter.default is inspect.Parameter.empty:
            raise SettingsError(f"{source}: its argument {name!r} needs a default, which becomes the flag's")
        if name not in table and not _sayable(type_):
            kept[name] = parameter.annotation
            continue
        own.append(name)
        if name not in table:
            _define(table, name, type_, parameter.default, texts.get(name, ""))
    flags.DEFINE_string("algorithm", source, "module:function or FILE.py:function that makes the algorithm", table)
    if any(a in ("--help", "-h", "-help", "--helpfull", "--helpshort") for a in argv[1:]):
        print(_help(module, table, own, kind))
        return None
    for name in kept:
        if any(re.match(rf"--?(no)?{name}(=|$)", a) for a in argv[1:]):
            raise SettingsError(f"--{name} is not a flag: {source} takes {kept[name]} there; give it in a FILE.py")
    rest = _read(table, argv)
    if rest:
        raise SettingsError(f"{rest[0]!r} is not a flag; flags are written --name=value, see --help")
    common: dict[str, Any] = {field.name: table[field.name].value for field in kind.fields}
    settings = kind.settings(**common)
    values = {name: table[name].value for name in own} | dataclasses.asdict(resolved(settings))
    return Command(settings, source, tuple((name, values[name]) for name in own), kind)


@functools.lru_cache(maxsize=1)
def _job(command: Command) -> Any:
    """Checked once: forked ranks inherit the result, spawned ones make it again."""
    compose = load("algorithm", command.source)
    return command.kind.prepare(command.settings, lambda: compose(**dict(command.arguments)))


def _rank(command: Command, run_dir: str | None, mesh: Mesh) -> Outcome:
    return command.kind.run(_job(command), mesh, run_dir)


def _read(table: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Gives the flags their values and returns what is no flag."""
    try:
        rest = table(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(table), 1)
        hint = f"did you mean --{near[0]}? " if near else ""
        raise SettingsError(f"--{error.flagname} is not a flag; {hint}--help lists all flags") from None
    except flags.IllegalFlagValueError as error:
        given = re.match(r"flag (--(\w+)=.*?): ", str(error), re.DOTALL)
        if given is None:
            raise
        kind = {"int": "a whole number", "float": "a number", "bool": "true or false"}
        wanted = kind.get(table[given[2]].flag_type(), table[given[2]].flag_type())
        raise SettingsError(f"{given[1]}: {wanted} is needed") from None
    for name in table:
        value = table[name].value
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingsError(f"--{name}={value}: a finite number is needed")
        if value == "" and table[name].default is None:
            table[name].value = None
    return rest


def _sayable(kind: Any) -> bool:
    """Whether a flag can have the values of a type."""
    return all(k in (bool, int, float, str, type(None)) for k in typing.get_args(kind) or [kind])


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


def _help(module: str, table: flags.FlagValues, own: Sequence[str], kind: Kind) -> str:
    """All flags, grouped, a line or two each, with their defaults."""
    summary = (inspect.getdoc(sys.modules[module]) or "").splitlines()[0] if module in sys.modules else ""
    width = max(72, min(shutil.get_terminal_size((100, 24)).columns, 120))
    lines = [f"python -m {module} [--flag=value ...]", *textwrap.wrap(summary, width)]
    groups = {title: [f.name for f in kind.fields if f.metadata["group"] == key] for key, title in GROUPS.items()}
    groups["What to do"].append("algorithm")
    common = {f.name for f in kind.fields}
    groups["The algorithm"] = [name for name in own if name not in common]
    for title, names in groups.items():
        lines += ["", f"{title}:"]
        for name in names:
            default = table[name].default
            head = f"  --{name}" + ("" if default is None else f"={default}")
            if len(head) > 27:  # its text begins on the next line
                lines.append(head)
                head = ""
            lines += textwrap.wrap(
                table[name].help or "", width, initial_indent=f"{head:<28}", subsequent_indent=" " * 28
            )
    return "\n".join(lines)


def _report(run_dir: str) -> str:
    """Writes the report of whatever was written, and says what there is to open."""
    try:
        return f"open {write_report(run_dir)}"
    except ReportError as error:  # it stopped before its first step, or the disk is full
        return f"no report: {error}"
    except KeyboardInterrupt:
        return "no report"


def _conclusion(outcome: Outcome | None, run_dir: str, report: str) -> str:
    changes = [
        f"{name} {outcome.first[name]:.3f} -> {outcome.last[name]:.3f}"
        for name in (outcome.first if outcome else {})
        if outcome and name in outcome.last
    ]
    return "\n".join(([f"held out: {', '.join(changes)}"] if changes else []) + [f"results in {run_dir}; {report}"])
