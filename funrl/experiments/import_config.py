"""The command `funrl import`: a configuration of TRL or verl as a file of flags, with what does not mean the same.

    funrl import trl.yaml --to=mine.yaml
    funrl import trl.json --recipe=dpo --devices=8
    funrl import verl.yaml
    funrl import run_qwen.sh

A value that the file leaves out is taken from the other library's defaults, so that both do the same.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from funrl.experiments import names_verl
from funrl.experiments.aliases import DOTTED, flag_in
from funrl.experiments.arguments import full_source, names_of_arguments, recipe_names
from funrl.experiments.names_trl import TRL
from funrl.experiments.names_verl import VERL
from funrl.experiments.renaming import Convert, DifferentError, NameContext
from funrl.experiments.usages import COMMANDS, read_places
from funrl.trainer.declaration import Flag, SettingsError, at_least
from funrl.trainer.settings import settings_flags

TRL_COMMON = {"per_device_train_batch_size": "8", "gradient_accumulation_steps": "1", "num_train_epochs": "3.0",
              "lr_scheduler_type": "linear", "gradient_checkpointing": "true", "bf16": "true"}  # fmt: skip
TRL_SAMPLED = {"num_generations": "8", "max_completion_length": "512", "num_iterations": "1", "epsilon": "0.2",
               "learning_rate": "1e-6", "beta": "0.0", "delta": "none", "loss_type": "dapo",
               "scale_rewards": "group"}  # fmt: skip
TRL_DEFAULTS = {
    "rloo": {**TRL_SAMPLED, "num_generations": "2", "beta": "0.05"},
    "dpo": {"learning_rate": "1e-6", "loss_type": "sigmoid"},
    "sft": {"learning_rate": "2e-5"},
    "reward_model": {"learning_rate": "1e-4"},
}
for _of_grpo in ("loss_type", "scale_rewards", "delta"):
    del TRL_DEFAULTS["rloo"][_of_grpo]
IGNORED = ("defaults", "hydra", "ray_kwargs", "global_profiler", "_target_")  # parts of a Hydra file without a meaning


class Renamed(NamedTuple):
    """A line of the table: theirs with its value, ours, and what differs."""

    theirs: str
    ours: str
    difference: str


class Imported(NamedTuple):
    """A configuration in this library's names.

    Attributes:
      flags: texts by name, `experiment` included.
      rows: what was made of each name.
    """

    flags: Mapping[str, str]
    rows: Sequence[Renamed]


def import_config(argv: Sequence[str]) -> int:
    """Run `funrl import`; return the exit status."""
    to = Flag("to", None, str, True, "the file to write")
    recipe = Flag("recipe", None, str, True, "of TRL's trainer: grpo, rloo, dpo, sft or reward_model")
    devices = Flag("devices", 1, int, False, "GPUs that TRL's run has", bounds=(at_least(1),))
    try:
        (path,), values = read_places([to, recipe, devices], argv, COMMANDS["import"].usage)
        found = imported(path, values["recipe"], values["devices"])
        text = (
            "\n".join([*(f"# {line}".rstrip() for line in difference_table(found.rows)), "", *written(found.flags)])
            + "\n"
        )
        if values["to"] is None:
            print(text, end="")
            return 0
        if Path(values["to"]).exists():
            raise SettingsError(f"--to={values['to']}: is there already; give another name")
        Path(values["to"]).write_text(text, encoding="utf-8")
        print("\n".join(difference_table(found.rows)))
        print(f"\nfunrl --config={values['to']} runs it; the table is in the file too")
    except (SettingsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def imported(path: str, recipe: str | None = None, devices: int = 1) -> Imported:
    """Read a configuration of TRL or verl. Args: as the command's. Raises: SettingsError."""
    content = flattened(path)
    if any("." in name for name in content):
        theirs = names_verl.DEFAULTS | content
        try:
            return _imported(path, content, theirs, VERL, names_verl.recipe_of(theirs), {})
        except DifferentError as error:
            raise SettingsError(f"{path}: {error}") from error
    if recipe not in (None, "grpo", *TRL_DEFAULTS):
        raise SettingsError(f"--recipe={recipe}: TRL's trainers are {', '.join(('grpo', *TRL_DEFAULTS))} here")
    recipe = recipe or _guess(content)
    theirs = TRL_COMMON | TRL_DEFAULTS.get(recipe, TRL_SAMPLED) | content
    if recipe == "grpo":
        loss = theirs["loss_type"]
        recipe = loss if loss in ("dr_grpo", "cispo", "sapo") else "grpo"
        recipe = "gspo" if theirs.get("importance_sampling_level") == "sequence" else recipe
    return _imported(path, content, theirs, TRL, recipe, {"mesh": f"dp{devices}"} if devices > 1 else {})


def _imported(
    path: str,
    content: Mapping[str, str],
    theirs: dict[str, str],
    names: Mapping[str, Convert],
    recipe: str,
    more: Mapping[str, str],
) -> Imported:
    if recipe not in recipe_names():
        raise SettingsError(f"{path}: there is no recipe {recipe}")
    common = settings_flags()
    arguments = names_of_arguments(full_source(recipe)) or frozenset()
    ours = {name: flag.default for name, flag in common.items()} | dict(more)
    context, made, rows = NameContext(theirs, ours, arguments, recipe), {"experiment": recipe, **more}, []
    for name, text in theirs.items():
        shown = f"{name}={text}" + ("" if name in content else " (default)")
        own = name in arguments and names is TRL
        if own or (name not in names and name in common):
            made[name] = "" if text.lower() in ("none", "null") else text
            continue
        if name not in names:
            rows.append(Renamed(shown, "-", "not known here; left out"))
            continue
        try:
            meaning = names[name](text, context)
        except DifferentError as error:
            rows.append(Renamed(shown, "-", str(error)))
            continue
        made |= {ours_name: "" if x.lower() in ("none", "null") else x for ours_name, x in meaning.flags.items()}
        rows.append(Renamed(shown, " ".join(f"{k}={v}" for k, v in meaning.flags.items()) or "-", meaning.difference))
    known = ["experiment", *common, *sorted(arguments)]
    return Imported({name: made[name] for name in known if name in made}, _merged(rows))


def _guess(content: Mapping[str, str]) -> str:
    """The trainer whose configuration this is."""
    if {"num_generations", "max_completion_length", "epsilon", "num_iterations", "reward_funcs"} & set(content):
        return "grpo"
    if {"beta", "f_divergence_type", "label_smoothing", "precompute_ref_log_probs"} & set(content):
        return "dpo"
    return "reward_model" if "center_rewards_coefficient" in content else "sft"


def _merged(rows: Sequence[Renamed]) -> list[Renamed]:
    """Neighbours and others that became the same flags share a line; what is the same under another name comes last."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        found.setdefault((row.ours, row.difference) if row.ours != "-" or "left out" in row.difference
                         else (row.theirs, row.difference), []).append(row.theirs)  # fmt: skip
    merged = [Renamed(", ".join(theirs), next(r.ours for r in rows if r.theirs == theirs[0]), difference)
              for (_, difference), theirs in found.items()]  # fmt: skip
    merged = [row for row in merged if row.ours != "-" or row.difference]
    return sorted(merged, key=lambda row: (not row.difference, row.ours == "-"))


def difference_table(rows: Sequence[Renamed]) -> list[str]:
    """The rows as aligned lines, wrapped."""
    widths = (58, 34, 60)
    head = [*_line(Renamed("theirs", "here", "difference"), widths), "-" * (sum(widths) + 4)]
    return head + [line for row in rows for line in _line(row, widths)]


def _line(row: Renamed, widths: Sequence[int]) -> list[str]:
    cells = [textwrap.wrap(text, width) or [""] for text, width in zip(row, widths, strict=True)]
    height = max(len(cell) for cell in cells)
    cells = [cell + [""] * (height - len(cell)) for cell in cells]
    return ["  ".join(f"{part:<{w}}" for part, w in zip(parts, widths, strict=True)).rstrip()
            for parts in zip(*cells, strict=True)]  # fmt: skip


def written(values: Mapping[str, str]) -> Iterator[str]:
    """The flags as lines of YAML."""
    for name, text in values.items():
        plain = re.fullmatch(r"[\w./,+@=~-][\w./,+@=:~ -]*", text) and not re.search(r": |:$| $", text)
        yield f"{name}: {text if plain or not text else json.dumps(text)}".rstrip()


def flattened(path: str) -> dict[str, str]:
    """The values of a configuration by name, with dots where it is nested. Raises: SettingsError."""
    file = Path(path)
    if not file.is_file():
        raise SettingsError(f"{path}: no such file")
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        if file.suffix not in (".yaml", ".yml", ".json"):
            found = _of_script(text)
        else:
            nested = json.loads(text) if file.suffix == ".json" else yaml.load(text, yaml.BaseLoader)
            if not isinstance(nested, dict):
                raise SettingsError(f"{path}: names with values are needed")
            found = {name: _resolved(x, nested, name.split(".")[:-1]) for name, x in _leaves(nested)}
    except (ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {' '.join(str(error).split())}") from error
    content = {name: x for name, x in found.items() if x is not None}
    if not content:
        raise SettingsError(f"{path}: there is no argument of TRL or verl in it")
    return content


def _leaves(nested: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in nested.items():
        if key in IGNORED:
            continue
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", _said(value)


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_said(item) for item in value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _resolved(text: str, nested: Mapping[str, Any], place: Sequence[str], depth: int = 0) -> str | None:
    """A value with Hydra's references looked up; None where there is nothing to find, or ???."""
    found = re.fullmatch(r"\$\{(oc\.select:)?(\.*)([\w.]+)(?:,(.*))?\}", text)
    if found is None or depth > 8:
        return None if text in ("???", "") or "${" in text else text
    _, dots, name, default = found.groups()
    names = [*place[: len(place) + 1 - len(dots)], *name.split(".")] if dots else name.split(".")
    value = functools.reduce(lambda at, key: at.get(key) if isinstance(at, dict) else None, names, nested)  # type: ignore
    if value is None or isinstance(value, dict):
        return default
    return _resolved(_said(value), nested, names[:-1], depth + 1)


def _of_script(text: str) -> dict[str, str]:
    """The arguments of a shell script: verl's name=value, TRL's --name value, with the script's variables."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise SettingsError(f"not a shell script: {error}") from error
    variables = {name: value for name, sign, value in (word.partition("=") for word in words)
                 if sign and re.fullmatch(r"[A-Za-z_]\w*", name)}  # fmt: skip

    def filled(value: str) -> str:
        for _ in range(4):
            value = re.sub(r"\$\{?(\w+)(?::?-([^}]*))?\}?",
                           lambda one: variables.get(one[1], os.environ.get(one[1], one[2] or f"${one[1]}")),
                           value)  # fmt: skip
        return value

    found = {one[1]: filled(one[2]) for word in words if (one := DOTTED.fullmatch(word))}
    if found:
        return {name: text.strip("[]") for name, text in found.items()}
    for number, word in enumerate(words):
        if (name := flag_in(word)) and name in {*TRL, *settings_flags()}:
            after = words[number + 1] if number + 1 < len(words) else "--"
            found[name] = filled(word.split("=", 1)[1] if "=" in word else "true" if after.startswith("--") else after)
    return found
