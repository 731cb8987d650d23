"""Other libraries' names and values in terms of this one's flags: what tables of names are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from funrl.mesh.text import ROW_AXES, SHORT, MeshError, devices, parse

# Recipes that sample nothing.
TEXT_RECIPES = frozenset(
    {
        *("sft", "eaft", "asft", "dpo", "simpo", "cpo", "orpo", "alphapo", "tpo", "kto"),
        *("reward_model", "process_reward_model"),
    }
)


class DifferentError(ValueError):
    """No flag has the same meaning; the message names what there is, and the difference.

    Attributes:
      nearest: flags that come closest to the meaning, with their texts.
    """

    def __init__(self, message: str, nearest: Mapping[str, str] | None = None):
        super().__init__(message)
        self.nearest: Mapping[str, str] = nearest or {}


class NoEffectError(DifferentError):
    """A name decides memory, speed, files or what is shown, and no number that a run learns from."""


class Meaning(NamedTuple):
    """Meaning of a name of another library.

    Attributes:
      flags: names and texts of flags; none where it is what a run does anyway.
      difference: what is not quite the same, or how a number was computed; "" where nothing is.
    """

    flags: Mapping[str, str]
    difference: str = ""


class NameContext(NamedTuple):
    """Everything that a meaning may depend on.

    Attributes:
      theirs: all names that are given, with their texts.
      ours: values of this library's flags.
      arguments: names of the recipe's arguments.
      recipe: its name.
      records: prompts, pairs or demonstrations of the training data; None: not known.
    """

    theirs: Mapping[str, str]
    ours: Mapping[str, Any]
    arguments: frozenset[str]
    recipe: str
    records: int | None = None

    def given(self, name: str) -> bool:
        """True if a name of theirs has a value that is not none."""
        return not is_none(self.theirs.get(name, "none"))

    def is_on(self, name: str, default: str = "false") -> bool:
        """Truth of a name of theirs. Raises: DifferentError."""
        return is_true(self.theirs[name] if self.given(name) else default)

    @property
    def texts(self) -> bool:
        """True if the run learns from given texts."""
        return self.recipe in TEXT_RECIPES

    @property
    def ranks(self) -> int:
        """Ranks with rows of their own, on the mesh of the flags."""
        try:
            return devices(parse(str(self.ours["mesh"])), [SHORT[s] for s, axis in SHORT.items() if axis in ROW_AXES])
        except MeshError as error:
            raise DifferentError(str(error)) from error

    def number(self, name: str, default: str) -> Fraction:
        """The number that a name of theirs has. Raises: DifferentError."""
        text = self.theirs.get(name, default)
        try:
            return Fraction(text)
        except (ValueError, ZeroDivisionError):
            raise DifferentError(f"{name}={text}: a number is needed") from None


Convert = Callable[[str, NameContext], Meaning]


def same(*ours: str, difference: str = "") -> Convert:
    """The same meaning by other names."""
    return lambda text, context: Meaning(dict.fromkeys(ours, text), difference)


def choice(ours: str, values: Mapping[str, str], rest: str, difference: str = "") -> Convert:
    """A flag whose values have other names.

    Args:
      values: theirs to ours.
      rest: said of any other value.
    """

    def convert(text: str, context: NameContext) -> Meaning:
        if text.lower() not in values:
            raise DifferentError(f"{text} is not one of {', '.join(values)}: {rest}")
        return Meaning({ours: values[text.lower()]}, difference)

    return convert


def argument(ours: str, rest: str) -> Convert:
    """An argument of the recipe.

    Args:
      rest: said where the recipe does not have it.
    """

    def convert(text: str, context: NameContext) -> Meaning:
        if ours not in context.arguments:
            raise DifferentError(f"{context.recipe} has no --{ours}: {rest}")
        return Meaning({ours: text})

    return convert


def no_effect(text: str) -> Convert:
    """A name that decides no number of a run.

    Args:
      text: what decides the same here.
    """

    def convert(_: str, context: NameContext) -> Meaning:
        raise NoEffectError(text)

    return convert


def default_only(value: str, text: str) -> Convert:
    """One value is how a run goes anyway; nothing has the meaning of others."""

    def convert(given: str, context: NameContext) -> Meaning:
        if not (is_none(given) or is_same(given, value)):
            raise DifferentError(text)
        return Meaning({}, text)

    return convert


def default_shown(value: str, text: str) -> Convert:
    """One value is how a run goes anyway; others would only write or show something else."""

    def convert(given: str, context: NameContext) -> Meaning:
        if not (is_none(given) or is_same(given, value)):
            raise NoEffectError(text)
        return Meaning({}, text)

    return convert


def is_none(text: str) -> bool:
    """True for a text that stands for no value."""
    return text.strip().lower() in ("none", "null", "", "{}", "[]")


def is_same(text: str, value: str) -> bool:
    """True for two texts of one number, one truth value or one word."""
    try:
        return Fraction(text) == Fraction(value)
    except (ValueError, ZeroDivisionError):
        return text.strip("[]() ").lower() == value


def items(text: str) -> list[str]:
    """The items of a list as it is written in YAML, Python or a shell."""
    return [part for one in text.split(",") if (part := one.strip(" '\"[]"))]


def number_text(number: Fraction) -> str:
    """A number as a flag takes it."""
    return f"{float(number):.15g}"


def whole(number: Fraction, what: str) -> str:
    """A whole number of at least 1 as text. Raises: DifferentError."""
    if number.denominator != 1 or number < 1:
        raise DifferentError(f"{what} would be {float(number):g}, which is not a whole number")
    return str(number.numerator)


def rounded(number: Fraction) -> str:
    """A number as text, at least 1."""
    return str(max(1, round(number)))


def is_true(text: str) -> bool:
    """Truth of a text. Raises: DifferentError."""
    meaning = {"true": True, "1": True, "": True, "false": False, "0": False}.get(text.lower())
    if meaning is None:
        raise DifferentError(f"{text} is neither true nor false")
    return meaning
