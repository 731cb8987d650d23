"""Units after a number: centimetres, dollars, degrees, per cent, apples."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

PERCENT = "percent"
_LENGTHS = {
    "nm": Fraction(1, 10**9), "mm millimeter millimetre": Fraction(1, 1000), "cm centimeter centimetre": Fraction(1, 100),
    "dm decimeter decimetre": Fraction(1, 10), "m meter metre": 1, "km kilometer kilometre": 1000,
    "in inch inches": Fraction(254, 10000), "ft foot feet": Fraction(3048, 10000), "yd yard": Fraction(9144, 10000),
    "mi mile": Fraction(1609344, 1000),
}  # fmt: skip
_TIMES = {
    "ms millisecond": Fraction(1, 1000), "s sec second": 1, "min minute": 60, "h hr hour": 3600, "day": 86400,
    "week wk": 604800,
}  # fmt: skip
_MASSES = {
    "mg milligram": Fraction(1, 10**6), "g gram": Fraction(1, 1000), "kg kilogram": 1, "lb lbs pound": Fraction(45359237, 10**8),
    "oz ounce": Fraction(45359237, 16 * 10**8), "tonne": 1000,
}  # fmt: skip
_OTHERS = {
    "volume": {"ml milliliter millilitre": Fraction(1, 1000), "l liter litre": 1, "gal gallon": Fraction(3785411784, 10**9)},
    "dollar": {"$ \\$ dollar usd": 1, "cent \u00a2": Fraction(1, 100)},
    "euro": {"\u20ac euro eur": 1},
    "pound sterling": {"\u00a3 gbp": 1},
    "rupee": {"\u20b9 rupee": 1},
    "yen": {"\u00a5 yen": 1},
    "month": {"month mo": 1, "year yr": 12},
    "degree": {"\u00b0 degree deg": 1},
    "radian": {"rad radian": 1},
    "kelvin": {"k kelvin": 1},
    "celsius": {"\u00b0c celsius": 1},
    "fahrenheit": {"\u00b0f fahrenheit": 1},
    "newton": {"n newton": 1},
    "joule": {"j joule": 1, "kj kilojoule": 1000},
    "watt": {"w watt": 1, "kw kilowatt": 1000},
    "volt": {"v volt": 1},
    "hertz": {"hz hertz": 1},
    PERCENT: {"% percent percentage pct per_cent percentage_point": 1},
}
_SPEEDS = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour"}
_NO_UNIT = ("unit", "", "in_total", "total")


class Unit(NamedTuple):
    """A unit: a product of powers of base units, times a factor.

    Attributes:
      powers: (base unit, power), in the order of the names.
      factor: of the product.
    """

    powers: tuple[tuple[str, int], ...]
    factor: Fraction


def _known_units() -> dict[str, tuple[str, Fraction]]:
    """Base unit and factor of each name."""
    tables = {"length": _LENGTHS, "time": _TIMES, "mass": _MASSES, **_OTHERS}
    known = {}
    for base, lines in tables.items():
        for names, factor in lines.items():
            for name in names.split():
                known[name] = (base, Fraction(factor))
    return known


_KNOWN = _known_units()


def unit_of(text: str) -> Unit | None:
    r"""The unit that a text names; one that is not known is a base unit of its own.

    >>> unit_of("cm^2") == unit_of("square centimeters"), unit_of("km/h") == unit_of("miles per hour")
    (True, False)

    Returns: None where it names none, as "units" and "".
    """
    text = re.sub(r"[\s~]+", " ", text.replace("\\cdot", "*").replace("\\%", "%")).strip(" .,")
    text = _SPEEDS.get(text.lower(), text)
    text = re.sub(r"(?i)\b(sq|square|cu|cubic)\b\.? (\w+)", _as_power, text)
    text = re.sub(r"(?i)(\w+) (squared|cubed)\b", lambda m: f"{m[1]}^{2 if m[2].lower() == 'squared' else 3}", text)
    text = re.sub(r"(?i)\bper cent\b", "percent", text)
    powers: dict[str, int] = {}
    factor = Fraction(1)
    sign = 1
    for part in re.split(r"(\bper\b|/|\*)", text):
        if part in ("/", "per"):
            sign = -1
            continue
        name, power = _power_of(part)
        if name.lower().replace(" ", "_") in _NO_UNIT or part == "*":
            continue
        base, scale = _base_of(name)
        powers[base] = powers.get(base, 0) + sign * power
        factor *= scale ** (sign * power)
    found = tuple(sorted((base, power) for base, power in powers.items() if power))
    return Unit(found, factor) if found else None


def is_known(text: str) -> bool:
    """True if a text without blanks names a unit of the table, such as "cm", "km/h" or "dollars"."""
    parts = re.split(r"/", _SPEEDS.get(text.lower(), text))
    return all(_table_entry(_power_of(part)[0]) is not None for part in parts)


def _as_power(match: re.Match[str]) -> str:
    return f"{match[2]}^{2 if match[1].lower().startswith('sq') else 3}"


def _power_of(text: str) -> tuple[str, int]:
    """A unit's name and its power: "cm^2" gives "cm" and 2."""
    match = re.fullmatch(r"(.+?)\^\{?(-?\d)\}?", text.strip())
    return (text.strip(), 1) if match is None else (match[1].strip(), int(match[2]))


def _base_of(name: str) -> tuple[str, Fraction]:
    known = _table_entry(name)
    if known is not None:
        return known
    lowered = name.lower()
    return (lowered[:-1] if len(lowered) > 2 and lowered.endswith("s") else lowered), Fraction(1)


def _table_entry(name: str) -> tuple[str, Fraction] | None:
    lowered = name.lower()
    if name in ("M", "S", "G"):  # no metre, second or gram
        return None
    singular = lowered[:-1] if len(lowered) > 2 and lowered.endswith("s") else lowered
    return _KNOWN.get(lowered) or _KNOWN.get(singular)
