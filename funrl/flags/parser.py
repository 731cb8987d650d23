"""A command line's flags: those of `Settings` and a recipe's arguments, read, explained and listed."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags as absl

from funrl.trainer.settings.declaration import RUN_KINDS, Flag, SettingsError
from funrl.trainer.settings.settings import Settings, flag_groups, flag_value, refuse_beside, settings_flags

HELP = ("--help", "-h", "-help", "--helpfull", "--helpshort")
ALGORITHM = Flag(
    name="algorithm",
    default=None,
    type=str,
    optional=False,
    text="recipe: its name, module:function or FILE.py:function",
    group="models",
)
CONFIG = Flag(
    name="config",
    default=None,
    type=str,
    optional=True,
    text="file of flags: .yaml, .json, .py, or config.json of a run",
    group="models",
)
_INTRODUCTION = """\
Every run takes these; the arguments of its recipe are flags too, which `funrl NAME --help` shows. A note in parentheses
names the only kind of run that a flag applies to; a flag is refused without what it needs, but by
--dry_run where data would have to be read. `funrl flags > docs/flags.md` writes this page."""
KIND_TEXTS = {"rl": "reinforcement learning", "supervised": "learning from given texts"}


class Read(NamedTuple):
    """A command line that was read.

    Attributes:
      values: value of every flag, by name.
      given: names of the flags that the command line has.
      unknown: texts that do not belong to a flag, in order.
    """

    values: Mapping[str, Any]
    given: frozenset[str]
    unknown: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The unknown texts without dashes, such as directories."""
        return tuple(text for text in self.unknown if not text.startswith("-"))

    @property
    def unknown_flags(self) -> tuple[str, ...]:
        """The unknown texts with dashes."""
        return tuple(text for text in self.unknown if text.startswith("-"))


class _Parser(absl.ArgumentParser):
    """Parse a text with `Flag.parse`."""

    def __init__(self, flag: Flag):
        self.flag = flag

    def parse(self, argument: Any) -> Any:
        return self.flag.parse(argument) if isinstance(argument, str) else argument


def read(flags: Iterable[Flag], argv: Sequence[str]) -> Read:
    """Read a command line; unknown flags are listed, not refused.

    Args:
      flags: all known flags.
      argv: the program's name and its arguments.

    Raises:
      SettingsError: a value has the wrong type or violates a bound.
    """
    table = absl.FlagValues()
    for flag in flags:
        definition = absl.Flag(
            _Parser(flag),
            serializer=None,
            name=flag.name,
            default=flag.default,
            help_string=flag.text,
            boolean=flag.type is bool,
        )
        absl.DEFINE_flag(definition, table, module_name="funrl")
    table.set_gnu_getopt(True)
    try:
        rest = table(list(argv), known_only=True)[1:]
    except absl.Error as error:  # "flag --steps=0: it must be at least 1"
        raise SettingsError(str(error).removeprefix("flag ")) from None
    given = frozenset(name for name in table if table[name].present)
    return Read(table.flag_values_dict(), given, tuple(rest))


def flag_name(text: str) -> str:
    """The name in --name=value."""
    return text.lstrip("-").split("=", 1)[0]


def refuse_repeated(argv: Sequence[str]) -> None:
    """Refuse a flag that a command line gives twice, since the last one would win silently.

    Args:
      argv: the program's name and its arguments.

    Raises:
      SettingsError: naming the flag and both values.
    """
    known = settings_flags()
    given: dict[str, str] = {}
    for text in argv[1 : argv.index("--") if "--" in argv else None]:
        if not text.startswith("--"):
            continue
        name = flag_name(text)
        name = name.removeprefix("no") if name.removeprefix("no") in known else name
        if name in given:
            raise SettingsError(f"{given[name]} and {text}: --{name} is given twice; give it once")
        given[name] = text


def refuse_unknown(
    unknown: Sequence[str], names: Collection[str], later: Collection[str] = (), hint: str = "--help lists all flags"
) -> None:
    """Refuse the first of `Read.unknown`, unless it is a flag that is read later.

    Args:
      names: names of all flags, for a suggestion.
      later: names of flags that are read later.
      hint: how to list all flags.

    Raises:
      SettingsError: naming the nearest flag.
    """
    for before, text in zip(("", *unknown), unknown, strict=False):
        name = flag_name(text)
        if not text.startswith("-"):
            if before.lstrip("-") in later:  # the value of --name value
                continue
            raise SettingsError(f"{text!r} is not a flag; flags are written --name=value, see --help")
        if name in later or name.removeprefix("no") in later:
            continue
        near = difflib.get_close_matches(name, list(names), 1)
        meant = f"did you mean --{near[0]}? " if near else ""
        raise SettingsError(f"--{name} is not a flag; {meant}{hint}")


def refuse_idle(given: Collection[str], kind: str, source: str, settings: Settings) -> None:
    """Refuse a given flag that has no effect in this kind of run, or together with other flags.

    Raises: SettingsError.
    """
    for name, flag in settings_flags().items():
        if name in given and flag_value(settings, name) != 0:
            refuse_beside(settings, name)
        if name in given and kind not in flag.kinds:
            raise SettingsError(
                f"--{name} has no effect in {KIND_TEXTS[kind]}, the kind of run of {source}; leave it out"
            )


def help_text(program: str, summary: str, flags: Iterable[Flag], kind: str | None) -> str:
    """All flags that apply to a kind of run (None: to any), by group, with their defaults and bounds.

    Args:
      program: the command.
      summary: one line.
      flags: in the order to show them; neighbours with the same text share it.
    """
    width = max(72, min(shutil.get_terminal_size((100, 24)).columns, 120))
    lines = [f"{program} [--flag=value ...]", *textwrap.wrap(summary, width)]
    groups: dict[str, list[Flag]] = {key: [] for key in (*flag_groups(), "algorithm")}
    for flag in flags:
        if kind is None or kind in flag.kinds:
            groups[flag.group].append(flag)
    for key, members in groups.items():
        if members:
            lines += ["", f"{flag_groups().get(key, 'The algorithm')}:"]
            for together in _sharing_text(members):
                lines += _entry(together, width)
    return "\n".join(lines)


def page() -> str:
    """docs/flags.md: the flags of `Settings` as Markdown tables."""
    lines = ["# Flags", "", _INTRODUCTION]
    for group, title in flag_groups().items():
        lines += ["", f"## {title}", "", "| flag | default | meaning |", "|---|---|---|"]
        for flag in settings_flags().values():
            if flag.group == group:
                default = flag.chosen or "none" if flag.default is None else f"`{_written(flag.default)}`"
                sentences = [flag.text, *(bound.text for bound in flag.bounds), *flag.conditions()]
                text = "; ".join(sentences).replace("|", "\\|")
                only = "" if flag.kinds == RUN_KINDS else f" ({' and '.join(KIND_TEXTS[kind] for kind in flag.kinds)})"
                lines.append(f"| `--{flag.name}` | {default} | {text}{only} |")
    return "\n".join(lines)


def _sharing_text(flags: Sequence[Flag]) -> list[list[Flag]]:
    groups: list[list[Flag]] = []
    for flag in flags:
        if groups and flag.text and groups[-1][0].help() == flag.help():
            groups[-1].append(flag)
        else:
            groups.append([flag])
    return groups


def _entry(flags: Sequence[Flag], width: int) -> list[str]:
    """The lines of flags that share a text."""
    heads = [f"--{f.name}" + ("" if f.default is None else f"={_written(f.default)}") for f in flags]
    lines: list[str] = []
    head = "  " + ", ".join(heads)
    if len(head) > 27:  # the text begins on the next line
        lines.append(head)
        head = ""
    return lines + textwrap.wrap(flags[0].help(), width, initial_indent=f"{head:<28}", subsequent_indent=" " * 28)


def _written(value: Any) -> str:
    """A value as text of a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
