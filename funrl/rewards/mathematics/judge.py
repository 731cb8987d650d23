"""Comparison of two answers, with the verdict of a teacher: structures by ours, formulas by math-verify."""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from funrl.rewards.mathematics.notation import LONGEST_READ_ANSWER, ReadAnswer, read_answer, squeezed, tidy
from funrl.rewards.mathematics.numbers import LARGEST_POWER, decimal_of, fraction_of

TIMEOUT_S = 3  # of reading a formula, and of one comparison
FEWEST_DIGITS = 6  # significant ones of a decimal that may stand for a number that it only approximates
_LARGEST_EXPONENT = 300.0  # decimal, of a float
_PRECISION = 40  # digits of numbers that are not rational
_NEGLIGIBLE = Fraction(1, 10**20)  # difference of two of them, relative to them
_SIMPLE = r"\d+(?:\.\d+)?|\.\d+"
_SHORT_FRACTION = r"\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))"
_FRACTION = re.compile(
    rf"([-+]?)\s*\(?(?:\\frac\s*(?:\{{\s*([-+]?)({_SIMPLE})\s*\}}|(\d))\s*(?:\{{\s*({_SIMPLE})\s*\}}|(\d))"
    rf"|({_SIMPLE})\s*/\s*({_SIMPLE}))\)?"
)
_MIXED = re.compile(rf"([-+]?)\s*(\d+)\s*(?:{_SHORT_FRACTION}|(?<=\s)(\d+)\s*/\s*(\d+))")
_TEN = r"10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d))"
_POWER = re.compile(rf"(?:([-+]?(?:{_SIMPLE}))\s*(?:\\times|\\cdot|\*|x)\s*|([-+]?)){_TEN}")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_BASE = re.compile(r"([0-9A-Fa-f]+)\s*_\s*\{?\s*(\d+)\s*\}?")
_ANGLE = re.compile(rf"({_SIMPLE})\s*\^\\circ")
_TOO_LARGE = re.compile(r"\d{6,}\s*(?:!|\})*\s*!|\\d?t?binom\s*\{\s*\d{5,}|\d{5,}\s*\\choose")
_TOTAL = re.compile(r"[a-zA-Z](?: ?(?:[-+] ?)?[a-zA-Z])+ ?= ?([^=]+)")  # a + b = 5, where 5 is wanted
_APART = re.compile(r"(?<![_^\d])\d+ \d|(?<![\d.])0\d")  # two numbers, not one
_COUNTING = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_ORDERING = (
    "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
_WORDS = {word: n for words in (_COUNTING, _ORDERING) for n, word in enumerate(words.split())}


def same_answer(wanted: str, given: str) -> bool:
    r"""True if a given answer is the right one.

    - Numbers are compared exactly. A decimal of at least `FEWEST_DIGITS` significant digits may stand for a number that
      rounds to it, as 0.333333 for 1/3.
    - A unit may be left out; two units are compared, as 500 cm and 5 m. The per cent sign is such a unit: 50\% is 50,
      and not 0.5.
    - Pairs are ordered, sets and lists of solutions are not. An interval is its brackets and ends, and the inequality
      that says the same. A pair of numbers may be an open interval.
    - Formulas are equal as math-verify finds.

    Args:
      wanted: the right answer, without \boxed{}.
      given: as long; what has more than `LONGEST_READ_ANSWER` characters is only compared as a text.
    """
    wanted = wanted.strip()
    given = given.strip()
    if wanted == given:
        return bool(wanted)
    number = decimal_of(wanted)
    if number is not None and number == decimal_of(given):
        return True
    if not wanted or max(len(wanted), len(given)) > LONGEST_READ_ANSWER:
        return False
    try:
        return squeezed(wanted) == squeezed(given) or _same(_read(wanted), _read(given))
    except RecursionError:  # brackets in brackets
        return False


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> ReadAnswer:
    return read_answer(tidy(text))


def _same(wanted: ReadAnswer, given: ReadAnswer) -> bool:
    kinds = {wanted.kind, given.kind}
    if kinds == {"formula"}:
        return _same_values(wanted, given)
    if kinds <= {"formula", "words"}:
        return _same_atoms(wanted, given)
    if kinds == {"interval"}:
        named = len({wanted.name, given.name} - {""}) > 1  # 0 < x < 1 is not 0 < y < 1
        return not named and wanted.text == given.text and _same_in_order(wanted.items, given.items)
    if kinds == {"union"} or kinds == {"list"}:
        return len(wanted.items) == len(given.items) and _same_in_any_order(wanted.items, given.items)
    if kinds <= {"set", "list"}:
        return _covers(wanted.items, given.items) and _covers(given.items, wanted.items)
    if kinds <= {"tuple", "list"} or kinds == {"matrix"} or kinds == {"row"}:
        return _same_in_order(wanted.items, given.items)
    if kinds == {"tuple", "interval"}:
        interval = wanted if wanted.kind == "interval" else given
        return interval.text == "()" and _same_in_order(wanted.items, given.items)
    if "formula" in kinds and kinds & {"set", "list"} and max(len(wanted.items), len(given.items)) == 1:
        return _same(*(answer.items[0] if answer.items else answer for answer in (wanted, given)))
    return False


def _same_values(wanted: ReadAnswer, given: ReadAnswer) -> bool:
    """Compare formulas or equations: x = 5 and 5 are the same, x + y = 3 and 3 are not."""
    if wanted.name != given.name and all(answer.name or "=" in answer.text for answer in (wanted, given)):
        equations = [f"{answer.name}={answer.text}" if answer.name else answer.text for answer in (wanted, given)]
        return _same_formulas(equations[0], equations[1], Fraction(1))
    if "=" in wanted.text:
        return "=" in given.text and _same_atoms(wanted, given)
    total = _TOTAL.fullmatch(given.text)
    return _same_atoms(wanted, given if total is None else read_answer(total[1]))


def _same_in_order(wanted: Sequence[ReadAnswer], given: Sequence[ReadAnswer]) -> bool:
    return len(wanted) == len(given) and all(map(_same, wanted, given))


def _same_in_any_order(wanted: Sequence[ReadAnswer], given: Sequence[ReadAnswer]) -> bool:
    rest = list(given)
    for answer in wanted:
        place = next((n for n, other in enumerate(rest) if _same(answer, other)), None)
        if place is None:
            return False
        del rest[place]
    return True


def _covers(answers: Sequence[ReadAnswer], others: Sequence[ReadAnswer]) -> bool:
    return all(any(_same(answer, other) for answer in answers) for other in others)


def _same_atoms(wanted: ReadAnswer, given: ReadAnswer) -> bool:
    """Compare words or formulas with their units."""
    if squeezed(wanted.text).lower() == squeezed(given.text).lower() and "words" in (wanted.kind, given.kind):
        return True
    if wanted.kind == given.kind == "words":
        return _parts_of_words(wanted.text) == _parts_of_words(given.text)
    scale = Fraction(1)  # from one unit to the other, where none is left out
    if wanted.unit is not None and given.unit is not None:
        if wanted.unit.powers != given.unit.powers:  # they measure different things
            return False
        scale = given.unit.factor / wanted.unit.factor
    numbers = (number_in(wanted.text), number_in(given.text))
    if numbers[0] is not None and numbers[1] is not None:
        given_value = numbers[1] * scale
        return numbers[0] == given_value or _rounds(given.text, numbers[0] / scale) or _rounds(wanted.text, given_value)
    if "words" in (wanted.kind, given.kind):
        return False
    if scale == 1 and squeezed(wanted.text) == squeezed(given.text):
        return True
    if _BASE.fullmatch(wanted.text) or _BASE.fullmatch(given.text):  # one may leave its base out
        digits, _, base = re.sub(r"[\s{}]", "", wanted.text.lower()).partition("_")
        others, _, other = re.sub(r"[\s{}]", "", given.text.lower()).partition("_")
        return digits == others and (base == other or not base or not other)
    return _same_formulas(wanted.text, given.text, scale)


def _parts_of_words(text: str) -> frozenset[str]:
    """The things that words list."""
    return frozenset(part.strip() for part in re.split(r",|;|\band\b|\bor\b", text) if part.strip())


def number_in(text: str) -> Fraction | None:
    r"""The number that a tidy text is, exactly: 1,200.50, 3/4, \frac12, 1\frac{1}{2}, 2.5 \cdot 10^{-7}, third."""
    text = text.strip()
    while text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    plain = decimal_of(text)
    if plain is not None:
        return fraction_of(plain)
    if text.lower() in _WORDS:
        return Fraction(_WORDS[text.lower()])
    for pattern, value in ((_FRACTION, _fraction), (_MIXED, _mixed), (_POWER, _power), (_REPEATING, _repeating)):
        match = pattern.fullmatch(text)
        if match is not None:
            return value([group or "" for group in match.groups()])
    return None


def _fraction(groups: list[str]) -> Fraction | None:
    sign, inner, *parts = groups
    above, below = (part for part in parts if part)
    return None if not Fraction(below) else _signed(sign, _signed(inner, Fraction(above) / Fraction(below)))


def _mixed(groups: list[str]) -> Fraction | None:
    sign, whole, *parts = groups
    above, below = (int(part) for part in parts if part)
    return None if not below else _signed(sign, int(whole) + Fraction(above, below))


def _power(groups: list[str]) -> Fraction | None:
    factor, sign, *powers = groups
    power = int("".join(powers))
    if abs(power) > LARGEST_POWER:
        return None
    return (Fraction(factor) if factor else _signed(sign, Fraction(1))) * Fraction(10) ** power


def _repeating(groups: list[str]) -> Fraction:
    sign, whole, first, period = groups
    shift = 10 ** len(first)
    repeated = Fraction(int(period), shift * (10 ** len(period) - 1))
    return _signed(sign, Fraction(int((whole + first) or 0), shift) + repeated)


def _signed(sign: str, number: Fraction) -> Fraction:
    return -number if sign == "-" else number


def _rounds(text: str, value: Fraction) -> bool:
    """True if a text is a decimal of enough digits to which a number rounds."""
    match = re.fullmatch(r"[-+]?\$?([\d,]*)\.(\d+)", text.strip())
    if match is None or len((match[1] + match[2]).replace(",", "").lstrip("0")) < FEWEST_DIGITS:
        return False
    return round(value, len(match[2])) == number_in(text)


def _same_formulas(wanted: str, given: str, scale: Fraction) -> bool:
    """Compare formulas as mathematics: `wanted` with `scale` times `given`."""
    import sympy
    from math_verify import verify

    try:
        left = parsed_formula(wanted)
        right = parsed_formula(given)
        if left is None or right is None:
            return False
        number = _value(left)
        other = _value(right)
        if number is None or other is None:
            endless = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
            infinite = [formula.doit() for formula in (left, right) if not formula.free_symbols]
            if any(formula in endless for formula in infinite):
                return infinite in ([sympy.oo] * 2, [-sympy.oo] * 2)
            return scale == 1 and verify([left], [right], timeout_seconds=_timeout_s())
    except Exception:  # of sympy, on a formula that may be anything
        return False
    gap = abs(number.real - other.real * scale) + abs(number.imaginary - other.imaginary * scale)
    if number.imaginary or other.imaginary:
        return gap <= _NEGLIGIBLE * (abs(number.real) + abs(number.imaginary))
    exact = number.exact and other.exact
    near = gap <= (0 if exact else _NEGLIGIBLE * max(abs(number.real), abs(other.real)))
    return near or _rounds(given, number.real / scale) or _rounds(wanted, other.real * scale)


@functools.lru_cache(maxsize=1024)
def parsed_formula(text: str) -> Any:
    """The expression of a tidy formula, its decimals exact; None: it is too large. Raises: what math-verify does."""
    import sympy

    balanced = all(text.count(left) == text.count(right) for left, right in ("()", "{}"))
    if not balanced or _TOO_LARGE.search(text) or _APART.search(text):
        return None
    text = _ANGLE.sub(r"(\\frac{\1\\pi}{180})", text) if "\\" in text.replace("\\circ", "") else text
    formula = _within_time(lambda: _parsed(text))
    if not hasattr(formula, "free_symbols") or _digits(formula) > LARGEST_POWER:
        return None
    decimals = {number: sympy.Rational(str(number)) for number in formula.atoms(sympy.Float)}
    imaginary = {symbol: sympy.I for symbol in formula.free_symbols if symbol.name == "i"}
    return formula.xreplace(decimals | imaginary) if decimals or imaginary else formula


def _parsed(text: str) -> Any:
    """Parse all of a formula: math-verify's own `parse` falls back to any fraction in a text that it cannot read."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex

    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )  # units are ours, so that 5m is 5 times m
    normal = normalize_latex(text, config=config)
    is_real = not should_treat_as_complex(normal)
    return latex2sympy(normal, is_real=is_real, convert_degrees=False, normalization_config=None)


def _within_time(work: Callable[[], object]) -> Any:
    """The result of work. Raises: TimeoutError, as does math-verify's timeout, which is no Exception."""
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    try:
        return timeout(_timeout_s())(work)()
    except TimeoutException:
        raise TimeoutError(f"a formula took more than {TIMEOUT_S} s") from None


class _Value(NamedTuple):
    """A number that a formula has, in `_PRECISION` digits unless it is exact."""

    real: Fraction
    imaginary: Fraction
    exact: bool


def _value(formula: Any) -> _Value | None:
    """The number that a formula has; None: it has variables, or no finite value."""
    import sympy

    if formula.free_symbols or not isinstance(formula, sympy.Expr):
        return None
    number = _within_time(lambda: _evaluated(formula))
    if not number.is_number or not number.is_finite:
        return None
    real, imaginary = (Fraction(str(part)) for part in number.as_real_imag())
    return _Value(real, imaginary, bool(number.is_Rational))


def _evaluated(formula: Any) -> Any:
    import sympy

    number = formula.doit()
    return number if number.is_Rational else sympy.N(number, _PRECISION)


def _digits(formula: object) -> float:
    """A bound on the digits of the numbers that a formula has or makes."""
    import sympy

    if isinstance(formula, sympy.Integer):
        return 1.0 + abs(int(formula)).bit_length() * math.log10(2)
    if isinstance(formula, sympy.Rational):
        return _digits(sympy.Integer(formula.p)) + _digits(sympy.Integer(formula.q))
    parts = [_digits(part) for part in getattr(formula, "args", ())]
    if isinstance(formula, (sympy.Pow, sympy.exp, sympy.factorial)):
        power: Any = formula.args[-1]
        known = power.is_Number and parts[-1] < _LARGEST_EXPONENT
        size = abs(float(power)) if known else 1.0 if power.free_symbols else 10 ** min(parts[-1], _LARGEST_EXPONENT)
        digits = parts[0] if isinstance(formula, sympy.Pow) else math.log10(size + 10)
        return max(digits * size, *parts)
    return sum(parts) if parts else 1.0


def _timeout_s() -> Any:
    """math-verify's timeouts are signals, which only the main thread can take: the pool's must do in others."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every formula that takes long
    return TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
