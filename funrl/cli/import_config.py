"""The command `funrl import`: a configuration of TRL or verl as a file of flags.

    funrl import trl.yaml --to=mine.yaml
    funrl import trl.json --recipe=dpo --devices=8
    funrl import verl.yaml --records=7473
    funrl import run_qwen.sh --partial

The file makes the same run: the same losses of the same batches, by the same updates. What has no equal here is listed
and nothing is written, unless `--partial` accepts that list. A value that the configuration leaves out is taken from
the other library's defaults.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from funrl.cli.usages import COMMANDS, read_places
from funrl.flags.arguments import full_source, names_of_arguments, recipe_names
from funrl.flags.foreign import names_verl
from funrl.flags.foreign.foreign_files import flattened, is_unresolved
from funrl.flags.foreign.names_trl import TRL
from funrl.flags.foreign.names_trl_losses import recipe_of_trainer
from funrl.flags.foreign.names_trl_trainers import CLASSES, COMMON, TRAINERS, TRL_NO_EFFECT, guessed_trainer
from funrl.flags.foreign.names_verl import VERL
from funrl.flags.foreign.renaming import Convert, DifferentError, Meaning, NameContext, NoEffectError, is_none, is_same
from funrl.trainer.settings.declaration import NONE, Flag, SettingsError, at_least
from funrl.trainer.settings.settings import settings_flags


class Renamed(NamedTuple):
    """A line of the table: theirs with its value, ours, and what differs.

    Attributes:
      lost: whether the run would be another one.
    """

    theirs: str
    ours: str
    difference: str
    lost: bool = False


class Imported(NamedTuple):
    """A configuration in this library's names.

    Attributes:
      flags: texts by name, `experiment` included; what comes nearest where there is no equal.
      rows: what was made of each name.
      source: whose configuration it is, such as "TRL's GRPOConfig".
    """

    flags: Mapping[str, str]
    rows: Sequence[Renamed]
    source: str

    @property
    def lost(self) -> list[Renamed]:
        """Values without an equal here."""
        return [row for row in self.rows if row.lost]

    @property
    def needed(self) -> list[str]:
        """Flags without which the file is not a whole run."""
        reward = {"reward", "reward_model"} & set(self.flags) or "prompts" not in self.flags
        missing = [name for name in ("model",) if name not in self.flags]
        missing += [] if {"prompts", "data"} & set(self.flags) else ["prompts or data"]
        return missing + ([] if reward else ["reward"])


class _Source(NamedTuple):
    """Reading of a configuration.

    Attributes:
      name: whose it is.
      names: the meaning of each name.
      idle: names that decide nothing.
      theirs: values with the other library's defaults.
      recipe: of the run.
      flags: that the run has besides.
    """

    name: str
    names: Mapping[str, Convert]
    idle: Mapping[str, bool]
    theirs: Mapping[str, str]
    recipe: str
    flags: Mapping[str, str]


def import_config(argv: Sequence[str]) -> int:
    """Run `funrl import`; return the exit status."""
    flags = [
        Flag("to", None, str, True, "the file to write"),
        Flag("recipe", None, str, True, f"of TRL's trainer: {', '.join(TRAINERS)}"),
        Flag("devices", 1, int, False, "GPUs that TRL's run has", bounds=(at_least(1),)),
        Flag("records", None, int, True, "records of the training data, which epochs count", bounds=(at_least(1),)),
        Flag("partial", False, bool, False, "leave out, or take the nearest of, what has no equal here"),
    ]
    try:
        (path,), values = read_places(flags, argv, COMMANDS["import"].usage)
        found = imported(path, values["recipe"], values["devices"], values["records"])
        if found.lost and not values["partial"]:
            raise SettingsError(_refusal(path, found))
        _write(found, values["to"])
    except (SettingsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _refusal(path: str, found: Imported) -> str:
    several = "values have" if len(found.lost) > 1 else "value has"
    lines = [f"  {row.theirs}: {row.difference}" for row in found.lost]
    return "\n".join([f"{path}: {len(found.lost)} {several} no equal here; --partial writes the rest", *lines])


def _write(found: Imported, to: str | None) -> None:
    """Print the file, or write it and print its table."""
    table = [f"read as {found.source}", "", *difference_table(found.rows)]
    if found.lost:
        table += ["", "another run than theirs:", *(f"  {row.theirs}: {row.difference}" for row in found.lost)]
    text = "\n".join([*(f"# {line}".rstrip() for line in table), "", *written(found.flags)]) + "\n"
    if to is None:
        print(text, end="")
        return
    if Path(to).exists():
        raise SettingsError(f"--to={to}: is there already; give another name")
    Path(to).write_text(text, encoding="utf-8")
    print("\n".join(table))
    more = f" with --{', --'.join(found.needed)}" if found.needed else ""
    print(f"\nfunrl --config={to}{more} runs it; the table is in the file too")


def imported(path: str, recipe: str | None = None, devices: int = 1, records: int | None = None) -> Imported:
    """Read a configuration of TRL or verl. Args: as the command's. Raises: SettingsError."""
    content = flattened(path)
    try:
        source = (
            _of_verl(content) if any(map(names_verl.is_of_verl, content)) else _of_trl(path, content, recipe, devices)
        )
    except DifferentError as error:
        raise SettingsError(f"{path}: {error}") from error
    if source.recipe not in recipe_names():
        raise SettingsError(f"{path}: there is no recipe {source.recipe}")
    return _imported(content, source, records)


def _of_verl(content: Mapping[str, str]) -> _Source:
    theirs = {**names_verl.DEFAULTS, **content}
    idle = {name: names_verl.decides_nothing(name) for name in theirs}
    return _Source("verl's configuration", VERL, idle, theirs, names_verl.recipe_of(theirs), {})


def _of_trl(path: str, content: dict[str, str], recipe: str | None, devices: int) -> _Source:
    recipe = recipe or content.pop("recipe", None)
    content.pop("recipe", None)
    if recipe is not None and recipe not in TRAINERS:
        raise SettingsError(f"--recipe={recipe}: TRL's trainers are {', '.join(TRAINERS)} here")
    trainer = recipe or guessed_trainer(content)
    if trainer is None:
        raise SettingsError(f"{path}: several of TRL's trainers have these names; give --recipe={'|'.join(TRAINERS)}")
    theirs = COMMON | TRAINERS[trainer] | content
    idle = dict.fromkeys(TRL_NO_EFFECT, True)
    flags = {"mesh": f"dp{devices}"} if devices > 1 else {}
    guess = "" if recipe else "; --recipe names another"
    return _Source(f"TRL's {CLASSES[trainer]}{guess}", TRL, idle, theirs, recipe_of_trainer(trainer, theirs), flags)


def _imported(content: Mapping[str, str], source: _Source, records: int | None) -> Imported:
    common = settings_flags()
    arguments = names_of_arguments(full_source(source.recipe)) or frozenset()
    ours = {name: flag.default for name, flag in common.items()} | dict(source.flags)
    context = NameContext(source.theirs, ours, arguments, source.recipe, records)
    made: dict[str, str] = {"experiment": source.recipe, **source.flags}
    rows: list[Renamed] = []
    given: dict[str, str] = {}  # flags that the file itself decides; a default of theirs yields to them
    for name, text in sorted(source.theirs.items(), key=lambda one: one[0] in content):
        shown = f"{name}={text}" + ("" if name in content else " (default)")
        meaning, lost = _meaning(name, text, source, context)
        flags = {
            ours_name: NONE if not x or (x == text and is_none(x)) else x for ours_name, x in meaning.flags.items()
        }
        twice = [k for k, x in flags.items() if k in given and not is_same(x, given[k])]
        if twice:
            lost = (f"--{twice[0]} is {given[twice[0]]} by another name, and {flags[twice[0]]} by this one", True)
        made |= flags
        given |= flags if name in content else {}
        rows.append(Renamed(shown, " ".join(f"{k}={v}" for k, v in flags.items()) or "-", *lost))
    known = ["experiment", *common, *sorted(arguments)]
    return Imported({name: made[name] for name in known if name in made}, _merged(rows), source.name)


def _meaning(name: str, text: str, source: _Source, context: NameContext) -> tuple[Meaning, tuple[str, bool]]:
    """The meaning of a value; what differs, and whether the run is another one."""
    if name not in source.names and source.idle.get(name):
        return Meaning({}), ("decides no number of the run", False)
    if name not in source.names:
        return Meaning({}), ("not set", False) if is_none(text) else ("not known here", True)
    try:
        meaning = source.names[name](text, context)
    except NoEffectError as error:
        return Meaning({}), (str(error), False)
    except DifferentError as error:
        return Meaning(error.nearest), (str(error), True)
    if meaning.flags and any(is_unresolved(value) for value in meaning.flags.values()):
        return Meaning({}), ("the file does not say what this is; write its value", True)
    return meaning, (meaning.difference, False)


def _merged(rows: Sequence[Renamed]) -> list[Renamed]:
    """Neighbours and others that became the same flags share a line; what is the same under another name comes last."""
    together: dict[tuple[str, str, bool], list[str]] = {}
    for row in rows:
        together.setdefault((row.ours, row.difference, row.lost), []).append(row.theirs)
    merged = [Renamed(", ".join(theirs), *same) for same, theirs in together.items()]
    merged = [row for row in merged if row.ours != "-" or row.difference]
    return sorted(merged, key=lambda row: (not row.lost, not row.difference, row.ours == "-"))


def difference_table(rows: Sequence[Renamed]) -> list[str]:
    """The rows as aligned lines, wrapped."""
    widths = (58, 34, 60)
    head = [*_line(Renamed("theirs", "here", "difference"), widths), "-" * (sum(widths) + 4)]
    return head + [line for row in rows for line in _line(row, widths)]


def _line(row: Renamed, widths: Sequence[int]) -> list[str]:
    cells = [textwrap.wrap(text, width) or [""] for text, width in zip(row[:3], widths, strict=True)]
    height = max(len(cell) for cell in cells)
    cells = [cell + [""] * (height - len(cell)) for cell in cells]
    return ["  ".join(f"{part:<{w}}" for part, w in zip(parts, widths, strict=True)).rstrip()
            for parts in zip(*cells, strict=True)]  # fmt: skip


def written(values: Mapping[str, str]) -> Iterator[str]:
    """The flags as lines of YAML."""
    for name, text in values.items():
        plain = re.fullmatch(r"[\w./,+@=~-][\w./,+@=:~ -]*", text) and not re.search(r": |:$| $", text)
        yield f"{name}: {text if plain else json.dumps(text)}"
