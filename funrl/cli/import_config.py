"""The command `funrl import`: translate a configuration of TRL or verl into a file of flags.

    funrl import trl.yaml --to=mine.yaml
    funrl import trl.json --recipe=dpo --devices=8
    funrl import verl.yaml --records=7473
    funrl import run_qwen.sh --partial

The file gives the same run: the same losses on the same batches, with the same updates. If some values have no
equivalent here, the command lists them and writes nothing, unless `--partial` is given. Values that the configuration
leaves out are taken from the other library's defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from funrl.cli.line import read_words
from funrl.cli.usages import COMMANDS
from funrl.flags.arguments import full_source, names_of_arguments
from funrl.flags.foreign import trl, verl
from funrl.flags.foreign.files import flattened
from funrl.flags.foreign.meaning import (
    DifferentError,
    Library,
    NameContext,
    is_none,
    is_same,
)
from funrl.flags.foreign.trl import COMMON, TRAINERS, TRL
from funrl.flags.foreign.verl import DEFAULTS, VERL
from funrl.trainer.settings.declaration import NONE, Flag, SettingsError, at_least, one_of, refusing
from funrl.trainer.settings.settings import settings_flags


class Renamed(NamedTuple):
    """A line of the table: their name with its value, our flags, and the difference.

    Attributes:
      lost: whether the run would change.
    """

    theirs: str
    ours: str
    difference: str
    lost: bool = False


class Imported(NamedTuple):
    """A configuration translated to this library's names.

    Attributes:
      flags: texts by name, `experiment` included; the nearest ones if there is no equivalent.
      rows: translation of each name.
      source: origin of the configuration, such as "TRL's GRPOConfig".
    """

    flags: Mapping[str, str]
    rows: Sequence[Renamed]
    source: str

    @property
    def lost(self) -> list[Renamed]:
        """Values without an equivalent here."""
        return [row for row in self.rows if row.lost]


def import_config(argv: Sequence[str]) -> int:
    """Run `funrl import`; return the exit status."""
    most = "write the file even if some values have no equivalent here: leave them out or use the nearest"
    records = "number of training records, to convert epochs to steps"
    flags = [
        Flag("to", None, str, optional=True, text="the file to write"),
        Flag("recipe", None, str, optional=True, text="recipe of TRL's trainer", bounds=(one_of(*TRAINERS),)),
        Flag("devices", 1, int, optional=False, text="number of GPUs of TRL's run", bounds=(at_least(1),)),
        Flag("records", None, int, optional=True, text=records, bounds=(at_least(1),)),
        Flag("partial", False, bool, optional=False, text=most),
    ]
    (path,), line = read_words(flags, argv, COMMANDS["import"].usage)
    config = imported(path, line.values["recipe"], line.values["devices"], records=line.values["records"])
    lost = [f"  {row.theirs}: {row.difference}" for row in config.lost]
    if lost and not line.values["partial"]:
        problem = f"{path}: {len(lost)} values have no equivalent here; --partial writes the rest"
        raise SettingsError("\n".join([problem, *lost]))
    rows = [f"  {row.theirs} -> {row.ours}; {row.difference}".rstrip("; ") for row in config.rows]
    table = [f"read as {config.source}", *rows, *(["differs from their run:"] if lost else []), *lost]
    text = "\n".join([*(f"# {line}" for line in table), *written(config.flags), ""])
    to = line.values["to"]
    if to is None:
        print(text, end="")
        return 0
    if Path(to).exists():
        raise SettingsError(f"--to={to} exists already; give another name")
    Path(to).write_text(text, encoding="utf-8")
    print("\n".join(table))
    rewards = {"reward", "reward_model"} if "prompts" in config.flags else set(config.flags)
    missing = {"model": {"model"}, "prompts or data": {"prompts", "data"}, "reward": rewards}
    needed = [name for name, given in missing.items() if not given & set(config.flags)]
    print(f"funrl --config={to}{' with --' * bool(needed)}{', --'.join(needed)} runs it; it contains this table too")
    return 0


def imported(path: str, recipe: str | None = None, devices: int = 1, records: int | None = None) -> Imported:
    """Read a configuration of TRL or verl. Args: those of the command. Raises: SettingsError."""
    content = flattened(path)
    of_script = content.pop("recipe", None)
    mesh: dict[str, str] = {}
    with refusing(f"{path}: ", DifferentError):
        if any(map(verl.is_of_verl, content)):
            library = VERL
            source = "verl's configuration"
            theirs = DEFAULTS | content
            recipe = verl.recipe_of(theirs)
        else:
            library = TRL
            trainer = _trainer(path, content, recipe or of_script)
            theirs = COMMON | TRAINERS[trainer] | content
            title = "Reward" if trainer == "reward_model" else trainer.upper()
            source = f"TRL's {title}Config" + ("" if recipe or of_script else "; --recipe names another")
            recipe = trl.recipe_of_trainer(trainer, theirs)
            mesh = {"mesh": f"dp{devices}"} if devices > 1 else {}
    common = settings_flags()
    arguments = names_of_arguments(full_source(recipe)) or frozenset()
    ours = {name: flag.default for name, flag in common.items()} | mesh
    context = NameContext(theirs, ours, arguments, recipe, records, complete=True)
    texts, rows = _translated(library, context, content)
    texts = {"experiment": recipe, **mesh, **texts}
    known = ["experiment", *common, *sorted(arguments)]
    return Imported({name: texts[name] for name in known if name in texts}, _merged(rows), source)


def _trainer(path: str, content: Mapping[str, str], recipe: str | None) -> str:
    """The recipe of TRL's trainer. Raises: SettingsError."""
    trainer = recipe or trl.guess_trainer(content)
    if trainer is None:
        raise SettingsError(f"{path}: several of TRL's trainers have these names; give --recipe={'|'.join(TRAINERS)}")
    return trainer


def _translated(
    library: Library, context: NameContext, content: Mapping[str, str]
) -> tuple[dict[str, str], list[Renamed]]:
    """Flags of a configuration, and a row of the table for each name."""
    texts: dict[str, str] = {}
    decided: dict[str, str] = {}  # flags that the file itself sets; these win over their library's defaults
    rows: list[Renamed] = []
    for name, value in sorted(context.theirs.items(), key=lambda item: item[0] in content):
        meaning = library.meaning(name, value, context)
        flags = {flag: NONE if x == value and is_none(x) else x for flag, x in meaning.flags.items()}
        if name not in content and not flags and not meaning.differs:
            continue
        ours = " ".join(f"{flag}={x}" for flag, x in flags.items()) or "-"
        row = Renamed(f"{name}={value}", ours, meaning.reason, meaning.differs)
        if twice := [flag for flag, x in flags.items() if flag in decided and not is_same(x, decided[flag])]:
            reason = f"--{twice[0]} would be {decided[twice[0]]} by another name, but {flags[twice[0]]} by this one"
            row = row._replace(difference=reason, lost=True)
        rows.append(row if name in content else row._replace(theirs=f"{row.theirs} (default)"))
        texts |= flags
        decided |= flags if name in content else {}
    return texts, rows


def _merged(rows: Sequence[Renamed]) -> list[Renamed]:
    """Merge rows that became the same flags; rows that only change the name come last."""
    together: dict[tuple[str, str, bool], list[str]] = {}
    for row in rows:
        together.setdefault((row.ours, row.difference, row.lost), []).append(row.theirs)
    merged = [Renamed(", ".join(theirs), *same) for same, theirs in together.items()]
    merged = [row for row in merged if row.ours != "-" or row.difference]
    return sorted(merged, key=lambda row: (not row.lost, not row.difference, row.ours == "-"))


def written(values: Mapping[str, str]) -> Iterator[str]:
    """The flags as lines of YAML."""
    for name, text in values.items():
        plain = re.fullmatch(r"[\w./,+@=~-][\w./,+@=:~ -]*", text) and not re.search(r": |:$| $", text)
        yield f"{name}: {text if plain else json.dumps(text)}"
