"""Values of other libraries' names, as texts: lists, numbers and truth values."""

from __future__ import annotations

from fractions import Fraction


class DifferentError(ValueError):
    """No flag has the same meaning; the message gives the difference."""


def is_none(text: str) -> bool:
    """True for a text that means no value."""
    return text.strip().lower() in ("none", "null", "", "{}", "[]")


def is_same(text: str, value: str) -> bool:
    """True if two texts mean the same number, bool or word."""
    try:
        return Fraction(text) == Fraction(value)
    except (ValueError, ZeroDivisionError):
        return text.strip("[]() ").lower() == value


def is_true(text: str) -> bool:
    """A text as a bool. Raises: DifferentError."""
    truth = {"true": True, "1": True, "": True, "false": False, "0": False}.get(text.lower())
    if truth is None:
        raise DifferentError(f"{text} is neither true nor false")
    return truth


def items(text: str) -> list[str]:
    """The items of a list written in YAML, Python or a shell."""
    return [item for part in text.split(",") if (item := part.strip(" '\"[]"))]


def number_text(number: Fraction) -> str:
    """A number as a flag takes it."""
    return f"{float(number):.15g}"


def whole(number: Fraction, name: str) -> str:
    """A whole number of at least 1 as text. Raises: DifferentError."""
    if number.denominator != 1 or number < 1:
        raise DifferentError(f"{name} would be {float(number):g}, which is not a whole number")
    return str(number.numerator)
