"""Numbers in answers, read exactly and compared by value."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

_LOOSE = re.compile(r"\s*([-+]?\$?(?:\d[\d,]*+(?:\.\d+)?+|\.\d+)(?:[eE][-+]?\d+)?)")
_NUMBER = re.compile(r"[-+]?\$?(?:[1-9]\d{0,2}(?:,\d{3})++(?:\.\d*)?|\d++(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
LARGEST_POWER = 5000  # of ten, beyond which a number is not expanded
_WRITTEN = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")

_GOES_ON = re.compile(r"[ \t]*[-+*/:^][ \t]*\d|[.,]\d|\d")  # further parts of what is no single number


def decimal_of(text: str) -> Decimal | None:
    """The number that a text consists of: "$1,200.50" is 1200.5, "1e-05" is 0.00001; None: it is another text.

    It takes time linear in the text, whatever the exponent.
    """
    match = _NUMBER.fullmatch(text.strip())
    return None if match is None else _decimal(match[0])


def number_after(mark: str, text: str) -> Decimal | None:
    """The number right after the last `mark`: "$1,200.50" is 1200.5; None where there is none, as in "1/2"."""
    _, separator, rest = text.rpartition(mark)
    match = _LOOSE.match(rest) if separator else None
    if match is None or _GOES_ON.match(rest, match.end()):
        return None
    return _decimal(match[1])


def right_answer_text(answer: Any) -> str:
    """Text of a right answer: a text as it is, a number in digits without an exponent.

    >>> [right_answer_text(x) for x in ("1/2", 72, 72.0, 1e-05, 1e22, Decimal("2.50"))]
    ['1/2', '72', '72', '0.00001', '10000000000000000000000', '2.50']

    Raises:
      ValueError: it is neither a text nor a finite number.
    """
    if isinstance(answer, (str, bool)):
        return str(answer)
    answer = answer.item() if hasattr(answer, "item") and getattr(answer, "ndim", None) == 0 else answer
    if isinstance(answer, Rational) and answer.denominator != 1:
        return f"{right_answer_text(answer.numerator)}/{right_answer_text(answer.denominator)}"
    if not isinstance(answer, (Real, Decimal)):
        raise ValueError(f"the right answer is {type(answer).__name__} {str(answer)[:100]}, neither text nor a number")
    number = Decimal(int(answer.numerator)) if isinstance(answer, Rational) else Decimal(str(answer))
    if not number.is_finite():
        raise ValueError(f"the right answer is {answer}, not a finite number")
    whole = isinstance(answer, float) and number == number.to_integral_value()
    return format(number.to_integral_value() if whole else number, "f")


def same_text_or_number(answer: object, given: str) -> bool:
    """True if a text is the right answer, blanks around either aside, or the same number where the answer is one.

    An answer that is text is a number only as Python writes floats, "72.0" and "1e-05": a version 3.10 is not 3.1.

    Raises:
      ValueError: as `right_answer_text`.
    """
    wanted = right_answer_text(answer).strip()
    given = given.strip()
    if given == wanted:
        return True
    if isinstance(answer, bool):
        return False
    if isinstance(answer, str):  # "72.0" and "1e-05", which tables hold where their numbers were made text, are numbers
        is_number = _WRITTEN.fullmatch(wanted) is not None and len(wanted) <= 30 and repr(float(wanted)) == wanted
        if not is_number or not ("e" in wanted or wanted.endswith(".0")):
            return False
    return _WRITTEN.fullmatch(given) is not None and decimal_of(given) == decimal_of(wanted)


def fraction_of(number: Decimal) -> Fraction | None:
    """A decimal as a fraction; None beyond `LARGEST_POWER`."""
    size = max(abs(number.adjusted()), len(number.as_tuple().digits))
    return Fraction(number) if size <= LARGEST_POWER else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(re.sub(r"[$,]", "", text))
    except InvalidOperation:  # an exponent of too many digits
        return None
