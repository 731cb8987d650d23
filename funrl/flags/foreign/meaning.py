"""Tables of another library's names, and the meaning of a name in a configuration.

A table is a text with a row for each case: names | conditions | flags | reason. The first row of a name whose
conditions hold has its meaning; if none does, a run behaves so anyway. `[section]` is the prefix of the names below it.
A row without names continues the names above.

| condition | holds if |
|---|---|
| `=a,b`, `name=a,b` | the value, or that of another name, is one of these numbers or words; `none` is a missing one |
| `?`, `name?` | it is true |
| `--argument` | the recipe has this argument |
| `grpo,dr_grpo` | the run has one of these recipes |
| a word of `Library.values` | its function returns a truth |
| `!...` | the condition does not hold |

Flags are `flag=text`, or `differs` with the nearest ones if no flags give the same run, or `only VALUE` if other values
differ; `-` stands for none. A text may contain `{}`, the value, and `{name}`: a function of `Library.values`, or the
value of another name. A flag without a text is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from funrl.mesh.text import ROW_AXES, SHORT, MeshError, devices, parse
from funrl.trainer.settings.records import TRACKERS

TRUTHS = {"true": True, "1": True, "": True, "false": False, "0": False}


class DifferentError(ValueError):
    """No flag has the same meaning; the message gives the difference."""


class Meaning(NamedTuple):
    """Meaning of a name of another library.

    Attributes:
      flags: names and texts of flags; empty if a run behaves so anyway; the nearest ones if it differs.
      reason: the difference, or how a number was computed; "" if there is nothing to say.
      differs: whether no flags give the same run.
    """

    flags: Mapping[str, str]
    reason: str = ""
    differs: bool = False


class NameContext(NamedTuple):
    """Everything that a meaning may depend on.

    Attributes:
      theirs: all given names, with their texts.
      ours: values of this library's flags.
      arguments: names of the recipe's arguments.
      recipe: name of the recipe.
      records: prompts, pairs or demonstrations of the training data; None: not known.
      complete: whether `theirs` is a complete configuration, with the other library's defaults.
    """

    theirs: Mapping[str, str]
    ours: Mapping[str, Any]
    arguments: frozenset[str]
    recipe: str
    records: int | None = None
    complete: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks with separate rows, on the mesh of the flags."""
        try:
            return devices(parse(str(self.ours["mesh"])), [SHORT[s] for s, axis in SHORT.items() if axis in ROW_AXES])
        except MeshError as error:
            raise DifferentError(str(error)) from error


class NameCase(NamedTuple):
    """A row of a table: a case of a name."""

    conditions: tuple[str, ...]
    flags: str
    reason: str


class Library(NamedTuple):
    """Another library's names.

    Attributes:
      title: its name.
      rows: cases of each name.
      idle: further names, which change only memory, speed, files or output.
      defaults: values of names that are not given.
      values: functions that compute a text of a row, or the truth of a condition.
    """

    title: str
    rows: Mapping[str, list[NameCase]]
    idle: re.Pattern[str]
    defaults: Mapping[str, str]
    values: Mapping[str, Callable[[NameQuery], object]]

    def meaning(self, name: str, text: str, context: NameContext) -> Meaning:
        """The meaning of a value; an unknown name and a value that cannot be read differ."""
        if name not in self.rows:
            idle = self.idle.fullmatch(name) is not None
            reason = "has no effect on results" if idle else "not set" if is_none(text) else "unknown"
            return Meaning({}, reason, differs=reason == "unknown")
        query = NameQuery(self, text, context)
        try:
            row = next((row for row in self.rows[name] if all(map(query.holds, row.conditions))), NameCase((), "-", ""))
            return query.meaning(row)
        except DifferentError as error:
            return Meaning({}, str(error), differs=True)


class NameQuery(NamedTuple):
    """A name's value, for which a meaning is needed."""

    library: Library
    text: str
    context: NameContext

    def holds(self, condition: str) -> bool:
        """True if a condition of a row holds. Raises: DifferentError."""
        name, equals, values = condition.partition("=")
        if condition.startswith("!"):
            return not self.holds(condition[1:])
        if condition.startswith("--"):
            return condition[2:] in self.context.arguments
        if condition.endswith("?"):
            return any(is_true(text) for text in self.texts(condition[:-1]) if not is_none(text) or not name[:-1])
        if equals:
            wanted = [self.filled(value) for value in values.split(",")]
            return any(is_same(text, value) for text in self.texts(name) or ["none"] for value in wanted)
        if condition in self.library.values:
            return bool(self.library.values[condition](self))
        return self.context.recipe in condition.split(",")

    def texts(self, name: str) -> list[str]:
        """Texts of a name, or of those that end with it; "" is the name of the value itself. Raises: DifferentError."""
        theirs = self.context.theirs
        texts = [theirs[key] for key in theirs if f".{key}".endswith(f".{name}")] if name else [self.text]
        if self.context.complete and any(map(is_unresolved, texts)):
            raise DifferentError("the file does not define this value; write it out")
        return [",".join(items(text)) if text.startswith("[") else text for text in texts]

    def given(self, name: str) -> bool:
        """True if a name has a value other than none."""
        return not all(map(is_none, self.texts(name)))

    def value(self, name: str) -> str:
        """Text of a computed value, or of a name. Raises: DifferentError."""
        if compute := self.library.values.get(name):
            return str(compute(self))
        texts = [text for text in self.texts(name) if not name or not is_none(text)]
        defaults = (text for key, text in self.library.defaults.items() if f".{key}".endswith(f".{name}"))
        return texts[0] if texts else next(defaults, "none")

    def number(self, name: str) -> Fraction:
        """Number of a name or computed value. Raises: DifferentError."""
        text = self.value(name)
        try:
            return Fraction(text)
        except (ValueError, ZeroDivisionError):
            raise DifferentError(f"{name or 'value'}={text}: a number is needed") from None

    def filled(self, text: str) -> str:
        """A text with its values filled in. Raises: DifferentError."""
        return re.sub(r"\{([\w.]*)\}", lambda match: self.value(match[1]), text)

    def meaning(self, row: NameCase) -> Meaning:
        """The meaning of a row. Raises: DifferentError."""
        reason = self.filled(row.reason)
        if row.flags.startswith("only "):
            (text,) = self.texts("")
            return Meaning({}, reason, not (is_none(text) or is_same(text, row.flags[5:])))
        words = row.flags.split()
        pairs = [word.split("=", 1) for word in words if "=" in word]
        flags = {self.filled(flag): text for flag, template in pairs if (text := self.filled(template))}
        if missing := [
            flag for flag in flags if flag not in {"experiment", *self.context.ours, *self.context.arguments}
        ]:
            return Meaning({}, f"{self.context.recipe} has no --{missing[0]}", differs=True)
        return Meaning(flags, reason, words[0] == "differs")


def read_names(text: str) -> dict[str, list[NameCase]]:
    """The rows of each name of a table."""
    rows: dict[str, list[NameCase]] = {}
    names: list[str] = []
    section = ""
    for line in text.strip().splitlines():
        cells = [*(cell.strip() for cell in line.split("|")), ""]
        if line.startswith("["):
            section = line.strip("[]")
            continue
        names = [section + name for name in cells[0].split()] or names
        for name in names:
            rows.setdefault(name, []).append(NameCase(tuple(cells[1].split()), cells[2], cells[3]))
    return rows


def is_unresolved(text: str) -> bool:
    """True for a value that depends on something outside its file."""
    return "$" in text or "`" in text


def is_none(text: str) -> bool:
    """True for a text that means no value."""
    return text.strip().lower() in ("none", "null", "", "{}", "[]")


def is_true(text: str) -> bool:
    """A text as a bool. Raises: DifferentError."""
    if text.lower() not in TRUTHS:
        raise DifferentError(f"{text} is neither true nor false")
    return TRUTHS[text.lower()]


def is_same(text: str, value: str) -> bool:
    """True if a text, or an item of a list, means this number, bool or word."""
    if value == "none":
        return is_none(text)
    try:
        return Fraction(text) == Fraction(value)
    except (ValueError, ZeroDivisionError):
        return value.lower() in (text.lower(), *(item.lower() for item in items(text)))


def items(text: str) -> list[str]:
    """The items of a list written in YAML, Python or a shell."""
    return [item for part in text.split(",") if (item := part.strip(" '\"[]()"))]


def whole(number: Fraction, name: str) -> str:
    """A whole number of at least 1 as text. Raises: DifferentError."""
    if number.denominator != 1 or number < 1:
        raise DifferentError(f"{name} would be {float(number):g}, which is not a whole number")
    return str(number.numerator)


def number_text(number: Fraction) -> str:
    """A number as a flag takes it."""
    return f"{float(number):.15g}"


def _trackers(query: NameQuery) -> str:
    """The trackers of a list that this library has too."""
    names = items(query.text.replace("azure_ml", "mlflow"))
    return ",".join(name for name in names if name in TRACKERS)


COMMON_VALUES: dict[str, Callable[[NameQuery], object]] = {  # of each library
    "complete": lambda query: query.context.complete,
    "has_records": lambda query: query.context.records is not None,
    "list": lambda query: ",".join(items(query.text)),
    "recipe": lambda query: query.context.recipe,
    "records": lambda query: query.context.records,
    "trackers": _trackers,
}
