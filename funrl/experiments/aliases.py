"""TRL's names of flags on a command line, which work where the meaning is the same; verl's, which are answered."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from funrl.experiments.names_trl import TRL
from funrl.experiments.names_verl import VERL
from funrl.experiments.renaming import DifferentError, Meaning, NameContext
from funrl.trainer.declaration import SettingsError

DOTTED = re.compile(r"-{0,2}[+~]*((?:\w+\.)+\w+)=(.*)", re.DOTALL)


def has_others(unknown: Sequence[str]) -> bool:
    """True if a text that is no flag may be a name of TRL or verl."""
    return any(flag_in(text) in TRL or DOTTED.fullmatch(text) for text in unknown)


def flag_in(text: str) -> str:
    """The name in --name=value, "" in a value."""
    return text[2:].split("=", 1)[0] if text.startswith("--") else ""


def our_names(
    argv: Sequence[str], ours: Mapping[str, Any], arguments: Collection[str], recipe: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A command line in this library's names, and what to say of those that were another's, a line each.

    Args:
      argv: the program's name and its arguments.
      ours: values of the flags that are known without the recipe.
      arguments: names of the recipe's arguments; such a name is the recipe's, whatever it is elsewhere.
      recipe: its name.

    Raises:
      SettingsError: a name has no equal here; it says what has.
    """
    foreign = [name for name in TRL if name not in arguments and name not in ours]
    words, theirs = _joined(argv, foreign), {}
    for word in words[1:]:
        if flag_in(word) in foreign:
            theirs[flag_in(word)] = word.split("=", 1)[1]
    context = NameContext(theirs, ours, frozenset(arguments), recipe)
    meant: list[str] = [words[0]]
    notes: dict[str, None] = {}
    for word in words[1:]:
        if dotted := DOTTED.fullmatch(word):
            raise SettingsError(_of_verl(dotted[1], dotted[2], context))
        if (name := flag_in(word)) not in foreign:
            meant.append(word)
            continue
        meaning = _meaning(name, theirs[name], context)
        texts = [f"--{ours_name}={text}" for ours_name, text in meaning.flags.items()]
        meant += texts
        said = f"--{name}={theirs[name]}" + (f" is {' '.join(texts)} here" if texts else ": nothing to do")
        notes[said + f" ({meaning.difference})" * bool(meaning.difference)] = None
    return tuple(meant), tuple(notes)


def _meaning(name: str, text: str, context: NameContext) -> Meaning:
    try:
        return TRL[name](text, context)
    except DifferentError as error:
        raise SettingsError(f"--{name}={text} is TRL's: {error}") from error


def _joined(argv: Sequence[str], foreign: Collection[str]) -> list[str]:
    """The command line with --name=value instead of --name value for names that are not known here."""
    words, rest = [argv[0]], list(argv[1:])
    while rest:
        word = rest.pop(0)
        if flag_in(word) in foreign and "=" not in word:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            word = f"{word}={value}"
        words.append(word)
    return words


def _of_verl(name: str, text: str, context: NameContext) -> str:
    """An answer to a name of verl's."""
    if name not in VERL:
        return f"{name}={text}: flags have no dots; `funrl import FILE` reads a configuration of verl"
    try:
        flags = VERL[name](text, context._replace(theirs={name: text})).flags
    except DifferentError as error:
        return f"{name} is verl's name: {error}"
    named = " ".join(f"--{ours}={value}" for ours, value in flags.items()) or "nothing to give"
    return f"{name} is verl's name; here it is {named} (`funrl import FILE` reads a configuration of verl)"
