"""Read files of other libraries as names and texts: YAML with Hydra's references, JSON, and shell scripts.

Variables of a script are expanded as in a shell: `$NAME`, `${NAME}`, `${NAME:-default}` and `$((1024 * 2))`. A value
that depends on anything else, such as an argument, a command or an assignment inside an `if`, stays as written;
`meaning.is_unresolved` detects such values.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from funrl.flags.config_file import load_yaml
from funrl.flags.foreign.answers import DOTTED, flag_in
from funrl.trainer.settings.declaration import SettingsError, refusing

IGNORED = ("defaults", "hydra", "ray_kwargs", "global_profiler", "_target_")  # parts of a Hydra file without a meaning
OPENING = {"if", "for", "while", "until", "case"}
CLOSING = {"fi", "done", "esac"}


def flattened(path: str) -> dict[str, str]:
    """The values of a configuration by name, with dots where it is nested. Raises: SettingsError."""
    file = Path(path)
    if not file.is_file():
        raise SettingsError(f"{path}: no such file")
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        if file.suffix not in (".yaml", ".yml", ".json"):
            values: dict[str, str | None] = dict(read_script(text))
        else:
            nested = json.loads(text) if file.suffix == ".json" else load_yaml(text, yaml.BaseLoader)
            nested = nested if isinstance(nested, dict) else {}
            values = {name: _resolved(x, nested, name.split(".")[:-1]) for name, x in _leaves(nested)}
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {' '.join(str(error).split())}") from error
    content = {name: x for name, x in values.items() if x is not None}
    if not content:
        raise SettingsError(f"{path}: it has no argument of TRL or verl")
    return content


def _leaves(nested: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in nested.items():
        if key in IGNORED:
            continue
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_text(item) for item in value)
    if isinstance(value, dict):
        return "null" if not value else str(value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _resolved(text: str, nested: Mapping[str, Any], place: Sequence[str], depth: int = 0) -> str | None:
    """A value with Hydra's references resolved; None if it is not given, or refers to a missing part of the file."""
    reference = re.fullmatch(r"\$\{(oc\.select:)?(\.*)([\w.]+)(?:,(.*))?\}", text)
    if depth > 8:
        return text
    if reference is None:
        inner = re.sub(
            r"\$\{[\w.:]+\}", lambda match: _resolved(match[0], nested, place, depth=depth + 1) or match[0], text
        )
        return None if text in ("???", "") else inner
    select, dots, name, default = reference.groups()
    names = [*place[: len(place) + 1 - len(dots)], *name.split(".")] if dots else name.split(".")
    value = functools.reduce(lambda value, key: value.get(key) if isinstance(value, dict) else None, names, nested)  # type: ignore
    if value is None or isinstance(value, dict):
        return default if select else text
    return _resolved(_text(value), nested, names[:-1], depth=depth + 1)


def read_script(text: str) -> dict[str, str]:
    """The arguments of a shell script: verl's name=value, TRL's --name value, with the script's variables."""
    words = _words(text)
    variables: dict[str, str] = {"HOME": os.path.expanduser("~")}
    dotted: dict[str, str] = {}
    flags: dict[str, str] = {}
    depth = 0
    for number, word in enumerate(words):
        depth += (word in OPENING) - (word in CLOSING)
        assigned = re.fullmatch(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", word, re.DOTALL)
        if match := DOTTED.fullmatch(word):
            dotted[match[1]] = _unclear(shell_expanded(match[2], variables), depth)
        elif assigned:
            variables[assigned[1]] = _unclear(shell_expanded(assigned[2], variables), depth)
        elif word.endswith(".py") or (number and words[number - 1] == "trl"):
            flags = _trainer_of(word)  # earlier words are for the launcher
        elif name := flag_in(word):
            after = words[number + 1] if number + 1 < len(words) else "--"
            value = word.split("=", 1)[1] if "=" in word else "true" if after.startswith("--") else after
            flags[name] = _unclear(shell_expanded(value, variables), depth)
    if not dotted:
        return flags
    if not is_plain_config(flags.get("config-name", "")):
        dotted["config-name"] = flags["config-name"]
    return {name: value.strip("[]") for name, value in dotted.items()}


def is_plain_config(name: str) -> bool:
    """True if verl's defaults are those of its ppo_trainer.yaml."""
    return name.removesuffix(".yaml") in ("", "ppo_trainer")


def _trainer_of(word: str) -> dict[str, str]:
    """The trainer that a command or script of TRL runs."""
    trainer = re.search(r"(?:^|/)(grpo|rloo|dpo|kto|cpo|orpo|gkd|sft|reward)(?:\.py)?$", word)
    return {"recipe": "reward_model" if trainer[1] == "reward" else trainer[1]} if trainer else {}


def _words(text: str) -> list[str]:
    """The words of a script; an arithmetic or command substitution is one word."""
    text = re.sub(r"\$\(\((.*?)\)\)", lambda match: "$((" + re.sub(r"\s", "", match[1]) + "))", text)
    text = re.sub(r"\$\((?!\()([^()]*)\)", lambda match: "$(" + re.sub(r"\s", "_", match[1]) + ")", text)
    with refusing("not a shell script: "):
        lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=";")
        lexer.whitespace_split = True
        return [word for word in lexer if word.strip(";")]


def _unclear(value: str, depth: int) -> str:
    """The value, marked if only some runs of the script have it."""
    return f"$(if ...: {value})" if depth > 0 else value


def shell_expanded(text: str, variables: Mapping[str, str]) -> str:
    """Expand known variables in a shell's text.

    >>> shell_expanded("${SIZE:-8}/$((2 * N))", {"N": "3"})
    '8/6'
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        default = match[3]
        known = variables.get(name)
        if match[2] and match[2].endswith("-") and (known is None or (match[2] == ":-" and not known)):
            return shell_expanded(default, variables)
        return match[0] if known is None else known

    for _ in range(4):
        text = re.sub(r"\$\{(\w+)(?:(:?-)((?:[^{}]|\{[^{}]*\})*))?\}|\$([A-Za-z_]\w*)", value, text)
    return re.sub(r"\$\(\((.*?)\)\)", lambda match: _computed(match, variables), text)


def _computed(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """The number of an arithmetic expansion, or its text if its operands are not known whole numbers."""
    numbers = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
    if not re.fullmatch(r"[\d\s()+*/%-]{1,200}", numbers) or "**" in numbers:
        return match[0]
    try:
        return str(eval(numbers.replace("/", "//")))
    except (SyntaxError, TypeError, ZeroDivisionError):
        return match[0]
