"""Other libraries' names and values in terms of this one's flags: what tables of names are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from funrl.mesh.text import ROW_AXES, SHORT, MeshError, devices, parse

TEXT_RECIPES = frozenset({"sft", "dpo", "simpo", "cpo", "orpo", "alphapo", "reward_model"})  # they sample nothing


class DifferentError(ValueError):
    """No flag has the same meaning; the message names what there is, and the difference."""


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
    """

    theirs: Mapping[str, str]
    ours: Mapping[str, Any]
    arguments: frozenset[str]
    recipe: str

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


def different(text: str) -> Convert:
    """Nothing here has this meaning."""

    def convert(_: str, context: NameContext) -> Meaning:
        raise DifferentError(text)

    return convert


def default_only(value: str, text: str) -> Convert:
    """One value is how a run goes anyway; nothing has the meaning of others."""

    def convert(given: str, context: NameContext) -> Meaning:
        if given.lower() not in (value, "none", "null", ""):
            raise DifferentError(text)
        return Meaning({}, text)

    return convert


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
