"""Units after a number: centimetres, dollars, degrees, per cent, apples."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_UNITS = {  # of each base unit: names and how many of it they are; names match with and without a final s
    "length": {
        "nm": "1e-9",
        "mm millimeter millimetre": "0.001",
        "cm centimeter centimetre": "0.01",
        "m meter metre": "1",
        "dm decimeter decimetre": "0.1",
        "km kilometer kilometre": "1000",
        "in inch inches": "0.0254",
        "ft foot feet": "0.3048",
        "yd yard": "0.9144",
        "mi mile": "1609.344",
    },
    "time": {
        "ms millisecond": "0.001",
        "s sec second": "1",
        "min minute": "60",
        "h hr hour": "3600",
        "day": "86400",
        "week wk": "604800",
    },
    "am": {"am": "1"},
    "pm": {"pm": "1"},
    "month": {"month mo": "1", "year yr": "12"},
    "mass": {
        "mg milligram": "1e-6",
        "g gram": "0.001",
        "kg kilogram": "1",
        "lb lbs pound": "0.45359237",
        "oz ounce": "0.028349523125",
        "tonne": "1000",
    },
    "volume": {"ml milliliter millilitre": "0.001", "l liter litre": "1", "gal gallon": "3.785411784"},
    "dollar": {"$ \\$ us$ us\\$ dollar usd": "1", "cent \u00a2": "0.01"},
    "euro": {"\u20ac euro eur": "1"},
    "sterling": {"\u00a3 gbp": "1"},
    "rupee": {"\u20b9 rupee": "1"},
    "yen": {"\u00a5 yen": "1"},
    "degree": {"\u00b0 degree deg": "1"},
    "radian": {"rad radian": "1"},
    "kelvin": {"k kelvin": "1"},
    "celsius": {"\u00b0c celsius": "1"},
    "fahrenheit": {"\u00b0f fahrenheit": "1"},
    "newton": {"n newton": "1"},
    "joule": {"j joule": "1", "kj kilojoule": "1000"},
    "watt": {"w watt": "1", "kw kilowatt": "1000"},
    "volt": {"v volt": "1"},
    "hertz": {"hz hertz": "1"},
    "percent": {"% percent percentage pct percentage_point": "1"},
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


_KNOWN = {
    name: (base, Fraction(factor))
    for base, lines in _UNITS.items()
    for names, factor in lines.items()
    for name in names.split()
}


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
    base_powers = tuple(sorted((base, power) for base, power in powers.items() if power))
    return Unit(base_powers, factor) if base_powers else None


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
