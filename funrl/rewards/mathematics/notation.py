r"""Answers as people write them, in one notation, and the structures in them.

`tidy` writes a text in one way: LaTeX without sizes and spaces, thousands joined, exponents as powers of ten.
`read_answer` reads what it is: a list, a pair, a set, an interval, a union of intervals, words, or a formula, which may
have a unit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    text = re.sub(r"(?i)\b(?:sq|square)\b\.? (\w+)", r"\1^2", text)
    text = re.sub(r"(?i)\b(?:cu|cubic)\b\.? (\w+)", r"\1^3", text)
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


LONGEST_READ_ANSWER = 500  # characters; a longer one is only compared as a text
_LETTERS = {
    "\u2212": "-",
    "\u2013": "-",
    "\u2215": "/",
    "\u2044": "/",
    "\u00d7": r"\times ",
    "\u00f7": r"\div ",
    "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2208": r"\in ",
    "\u2205": r"\emptyset ",
    "\u211d": r"\mathbb{R}",
    "\u00b0": r"^\circ ",
    "\u00b1": r"\pm ",
    "\u221a": r"\sqrt ",
    "\u00b2": "^2",
    "\u00b3": "^3",
    "\u03b8": r"\theta ",
    "\u00bd": r"\frac{1}{2}",
    "\u00bc": r"\frac{1}{4}",
    "\u00be": r"\frac{3}{4}",
    "\u2019": "'",
    "\u2032": "'",
    "\uff0c": ",",
    "\u2248": r"\approx ",
    "\u00a0": " ",
    "\u2002": " ",
    "\u2003": " ",
    "\u2007": " ",
    "\u2009": " ",
    "\u202f": " ",
}
_RULES = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|biggl?|biggr?|Biggl?|Biggr?|middle)(?![a-zA-Z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|boldsymbol|bm)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*\\pi(?![a-zA-Z])", r"\\frac{\\pi}"),
        (r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|math(?:rm|bf|it|sf)|mbox|hbox|operatorname)\*?\s*\{", r"\\text{"),
        (r"\\(?:quad|qquad|thinspace|medspace|thickspace|enspace|space|hspace\{[^{}]*\})(?![a-zA-Z])", " "),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;: ]|~|&nbsp;", " "),
        (r"\\(?:leqslant|leq|leqq|le)(?![a-zA-Z])|<=|=<", r"\\le "),
        (r"\\(?:geqslant|geq|geqq|ge)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])|&lt;", "<"),
        (r"\\gt(?![a-zA-Z])|&gt;", ">"),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\(?:lbrace|lbrack)(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:langle)(?![a-zA-Z])", "("),
        (r"\\(?:rangle)(?![a-zA-Z])", ")"),
        (r"\\(?:vert|mid|lvert|rvert)(?![a-zA-Z])", "|"),
        (r"\\(?:varnothing)(?![a-zA-Z])", r"\\emptyset"),
        (r"\\(?:Reals|R)(?![a-zA-Z])|\\mathbb\s+R", r"\\mathbb{R}"),
        (r"\\bigcup(?![a-zA-Z])", r"\\cup"),
        (r"\\degree(?:s)?(?![a-zA-Z])|\^\s*\{?\s*\\circ\s*\}?|\^\s*o(?![a-zA-Z])", r"^\\circ "),
        (r"\\(?:implies|Rightarrow|therefore|rightarrow|to)(?![a-zA-Z])", r" \\Rightarrow "),
        (r"\{,\}", "{,}"),
        (r"\*\*", "^"),
        (r"\\infin(?![a-zA-Z])|(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"(?<=-)(?:Infinity|Inf)(?![a-zA-Z])|^\+?Infinity$", r"\\infty "),
    )
]
_BLANK_THOUSANDS = re.compile(r"(?<![\d.,^_}])([1-9]\d{0,2})((?: \d{3})+)(?![\d/]| \d)(?! *\\frac)")
_BRACED_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3})((?:\{,\}\d{3})+)(?!\d)")
_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:,\d{3})+)(?!\d|,\d)")
_EXPONENT = re.compile(r"(?<![a-zA-Z\d.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,9})(?![\w.])")
_NAME = re.compile(
    r"\s*(?:\\?[a-zA-Z]+(?:_\{?\w+\}?)?'?|[a-zA-Z]\([^()=]+\)|\([a-zA-Z\\, _0-9]+\)|\|?\\?[A-Za-z]{1,3}\|?"
    r"|\\text\{[^{}]*\}|\\(?:angle|triangle) ?[A-Z]+|\\overline ?\{[A-Z]+\})\s*"
)
_FUNCTIONS = (
    r"sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan|sqrt|lim|max|min|gcd|lcm|mod|det|frac|pi|theta|alpha|beta"
)
_WORDS = re.compile(rf"[^\\{{}}=<>^_|]*(?<![a-zA-Z\\])(?!(?:{_FUNCTIONS}|infty)\b)[a-zA-Z]{{4,}}[^\\{{}}=<>^_|]*")
_OR = re.compile(
    r"\\text\{[ ,]*(?:or|and)[ ,]*\}|\\text\{[ ,]*(?:or|and) |(?<![a-zA-Z\\])(?:or|and)(?![a-zA-Z])"
    r"|\\(?:lor|vee)(?![a-zA-Z])|;"
)
_RELATION = re.compile(r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|<|>")
_ENVIRONMENT = re.compile(
    r"\\begin\{([pbvBV]?matrix|array|smallmatrix|cases)\}(?:\{[clr|]*\})?((?:(?!\\begin).)*)\\end\{\1\}"
)
_PREFIX = re.compile(
    r"(?i)^\s*(?:\\text\{)?\s*(?:(?:the |my )?(?:final )?answer(?: is)?\s*[:=]?\s*(?:\}|(?=\W|\d))"
    r"|(?:approximately|about|around|roughly|exactly|option|choice)\b\s*\}?\s*(?=\S))"
)
_AFTERNOON = re.compile(r"(?i)\b([ap])\.\s?m\.?(?![a-z])")
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(\d)\s*(?:\\text\{{)?\s*({'|'.join(_SCALES)})\b(?:\s*\}}|(\s+[a-z]+\s*)\}}|)")
_CURRENCY = "US\\\\?\\$|USD|EUR|GBP|\\\\\\$|\\$|\u20ac|\u00a3|\u20b9|\u00a5"


class ReadAnswer(NamedTuple):
    """An answer that is read.

    Attributes:
      kind: "list", "tuple", "set", "interval", "union", "matrix", "row", "words" or "formula".
      text: of words and formulas, without a unit; of intervals the two brackets, such as "(]".
      items: parts of the others; of an interval its two ends.
      unit: of a formula.
      name: what it is the value of, as x in "x = 5".
    """

    kind: str
    text: str = ""
    items: tuple[ReadAnswer, ...] = ()
    unit: Unit | None = None
    name: str = ""


def tidy(text: str) -> str:
    r"""A text in one notation.

    >>> tidy(r"$\dfrac{1}{2}$."), tidy(r"10\,000"), tidy("1e-05"), tidy("5 \u2264 x")
    ('\\frac{1}{2}', '10000', '1 \\cdot 10^{-05}', '5 \\le x')
    """
    text = "".join(_LETTERS.get(letter, letter) for letter in text).strip().rstrip(".")
    text = text.strip("$") if text.endswith("$") and not text.endswith("\\$") else text
    text = re.sub(r"(\d)\\frac", r"\1 \\frac", text) if "\\frac" in text else text
    for pattern, new in _RULES:
        text = pattern.sub(new, text)
    text = re.sub(r"(?<!\\)\$(?!\s*\.?\d)|(?<=[\d}])\$", "", text)  # of formulas; those of money stay
    text = re.sub(r"(?<!\\)\\[()\[\]]", "", text)
    text = re.sub(r"\\text\{\s*(\\[a-zA-Z]+|\d[\d.,/ ]*|)\s*\}", r" \1 ", text)
    text = re.sub(r"^\\text\{\s*([-+]?[\d.,]*\d)(\s[^{}]*\})$", r"\1\\text{\2", text)  # 12 cm
    for pattern in (_BLANK_THOUSANDS, _BRACED_THOUSANDS):
        text = pattern.sub(lambda match: match[1] + re.sub(r"[ {},]", "", match[2]), text)
    text = re.sub(r"(?<=\.\d{3}) (?=(?:\d{3} )*\d{1,3}(?!\d))", "", text)  # 0.123 456
    text = _outside_brackets(text.replace("{,}", ","))
    text = _EXPONENT.sub(r"\1 \\cdot 10^{\2}", text)
    text = re.sub(r"(\d)\s*\^?\{?(?:\\text\{)?\s*(?:st|nd|rd|th)\s*\}{0,2}(?![a-zA-Z])", r"\1", text)
    text = _AFTERNOON.sub(r"\1m", text)
    text = _SCALE.sub(lambda match: rf"{match[1]} \cdot 10^{{{_SCALES[match[2]]}}} {match[3] or ''}", text)
    text = _PREFIX.sub("", text, count=2)
    if text.rstrip().endswith("}") and text.count("}") > text.count("{"):  # of words that were before the answer
        text = text.rstrip()[:-1]
    return re.sub(r"\s+", " ", text).strip().strip("*").rstrip(".,;: ").strip()


def squeezed(text: str) -> str:
    """A text without blanks but those between digits, for comparison letter by letter."""
    return re.sub(r"\\text(?=\{)", "", re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"\s+", " ", text.strip())))


def read_answer(text: str) -> ReadAnswer:
    """Read a tidy text."""
    text = re.sub(r"^\s*(?:=|\\approx|\\Rightarrow)\s*", "", text).strip()
    if "\\Rightarrow" in text:
        text = text.rpartition("\\Rightarrow")[2].strip()
    if text.lower() in (
        "no solution",
        "no solutions",
        "\\text{no solution}",
        "\\text{no solutions}",
        "\\emptyset",
        "\\{\\}",
    ):
        return ReadAnswer("set")
    if re.fullmatch(r"(?:\\text\{)?(?:all )?(?:real numbers|reals)\}?", text.lower()) or text == "\\mathbb{R}":
        return _interval("()", "-\\infty", "\\infty")
    if re.fullmatch(r"\{[^{}\\]*,[^{}]*\}", text):  # {1, 3}
        text = f"\\{text[:-1]}\\}}"
    if "\\begin{" in text:
        return _read_environment(text)
    outward = re.fullmatch(r"([(\[\]])([^()\[\],;]+)[,;]([^()\[\],;]+)([)\[\]])", text)
    if outward is not None and (outward[1] == "]" or outward[4] == "["):  # ]1, 3[
        brackets = ("[" if outward[1] == "[" else "(") + ("]" if outward[4] == "]" else ")")
        return _interval(brackets, outward[2], outward[3])
    return _read_relation(text) or _read_parts(text) or _read_brackets(text) or _read_named(text) or read_atom(text)


def _read_environment(text: str) -> ReadAnswer:
    """A matrix of read cells, or the values of \\begin{cases}; another one is a formula."""
    match = _ENVIRONMENT.fullmatch(text)
    if match is None or match[1] in ("vmatrix", "Vmatrix"):
        return ReadAnswer("formula", text)
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-z])", match[2]) if row.strip()]
    if match[1] == "cases":
        return ReadAnswer("formula", text) if "&" in match[2] else read_answer(", ".join(rows))
    cells = [ReadAnswer("row", items=tuple(read_answer(cell.strip()) for cell in row.split("&"))) for row in rows]
    return ReadAnswer("matrix", items=tuple(cells))


def _interval(brackets: str, begin: str, end: str) -> ReadAnswer:
    return ReadAnswer("interval", brackets, (read_atom(begin), read_atom(end)))


def _read_parts(text: str) -> ReadAnswer | None:
    """A list: parts with commas or "or" between, or the two values of a \\pm."""
    parts = [part for half in split_outside(text, _OR) for part in split_outside(half, re.compile(","))]
    parts = [
        part.strip(" ,").removesuffix("}") if part.count("}") > part.count("{") else part.strip(" ,") for part in parts
    ]
    parts = [part for part in parts if part]
    if len(parts) < 2:
        if len(re.findall(r"\\pm(?![a-zA-Z])", text)) != 1 or re.match(r"\\\{", text) or "," in text:
            return None
        return ReadAnswer("list", items=tuple(read_answer(text.replace("\\pm", sign)) for sign in "+-"))
    if _WORDS.fullmatch(text) and not any(letter.isdigit() for letter in text):
        return None  # a sentence
    items = []
    for part in parts:
        item = read_answer(part)
        items += item.items if item.kind == "list" else [item]
    if all(item.kind in ("interval", "union") for item in items):
        both = re.search(r"and|\\wedge|\\land", text) is not None and _intersection(items)
        return both or _union(items)
    names = [item.name for item in items]
    if len(set(names)) > 1 and "" in names and names[0] and not any(names[1:]):
        items = [item._replace(name=names[0]) for item in items]  # x = 1, 3
    letters = {name.partition("_")[0] for name in names}
    if len(set(names)) == len(names) and len(letters) > 1:  # x = 1, y = 2
        return ReadAnswer("tuple", text="named", items=tuple(sorted(items, key=lambda item: item.name)))
    return ReadAnswer("list", items=tuple(items))


def _intersection(items: Sequence[ReadAnswer]) -> ReadAnswer | None:
    """The interval of x > 1 and x <= 3; None: the items are not a lower and an upper bound."""
    ends = [tuple(end.text for end in item.items) for item in items]
    if len(items) != 2 or any(item.kind != "interval" for item in items):
        return None
    lower, upper = items if ends[0][1] == "\\infty" else items[::-1]
    if lower.items[1].text != "\\infty" or upper.items[0].text != "-\\infty":
        return None
    return ReadAnswer("interval", lower.text[0] + upper.text[1], (lower.items[0], upper.items[1]), name=lower.name)


def _union(items: Sequence[ReadAnswer]) -> ReadAnswer:
    parts = [part for item in items for part in (item.items if item.kind == "union" else (item,))]
    return parts[0] if len(parts) == 1 else ReadAnswer("union", items=tuple(parts))


def _read_brackets(text: str) -> ReadAnswer | None:
    """A pair, a set, an interval, or a union; a formula in brackets alone is that formula."""
    cups = split_outside(text, re.compile(r"\\cup(?![a-zA-Z])|(?<=[\])])\s*U\s*(?=[\[(])"))
    if len(cups) > 1:
        return _union([read_answer(part.strip()) for part in cups])
    body = _enclosed(text)
    if body is None:
        return None
    left, inside, right = body
    parts = [part.strip() for part in split_outside(inside, re.compile("[,;]"))]
    if left == "\\{":
        condition = re.split(r"\||:", inside, maxsplit=1)
        if len(condition) == 2 and _NAME.fullmatch(condition[0].partition("\\in")[0]):
            return read_answer(condition[1].strip())
        return ReadAnswer("set", items=tuple(_items(parts)))
    if len(parts) == 1:
        return read_answer(inside.strip()) if (left, right) in (("(", ")"), ("[", "]")) and inside.strip() else None
    if len(parts) == 2 and (left, right) != ("(", ")"):
        opened = "(" if left in ("]", "(") else "["
        closed = ")" if right in ("[", ")") else "]"
        return _interval(opened + closed, parts[0], parts[1])
    return ReadAnswer("tuple" if left == "(" else "list", items=tuple(_items(parts)))


def _items(parts: Sequence[str]) -> list[ReadAnswer]:
    """Read parts; one with \\pm gives two."""
    items = [read_answer(part) for part in parts if part]
    return [part for item in items for part in (item.items if item.kind == "list" else (item,))]


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """Left bracket, content and right bracket of a text in one pair of brackets; None: it is not in one."""
    match = re.match(r"\\\{|[(\[\]]", text)
    if match is None:
        return None
    left = match[0]
    right = next((end for end in ("\\}", ")", "]", "[") if text.endswith(end)), "")
    inside = text[len(left) : len(text) - len(right)]
    if not right or len(text) < len(left) + len(right) or (left == "\\{") != (right == "\\}"):
        return None
    if left == "]" and right == "]" and "," not in inside:
        return None
    depth = 0
    for sign in re.findall(r"\\\{|\\\}|[()]", inside):
        depth += 1 if sign in ("\\{", "(") else -1
        if depth < 0:
            return None
    return left, inside, right


def _read_relation(text: str) -> ReadAnswer | None:
    """An interval that inequalities of one variable describe: 1 < x <= 3, x > 2."""
    if len(split_outside(text, re.compile(","))) > 1 or len(split_outside(text, _OR)) > 1:
        return None
    unequal = [side.strip() for side in split_outside(text, re.compile(r"\\ne(?![a-zA-Z])"))]
    if len(unequal) == 2 and _is_variable(unequal[0]) and unequal[1]:
        below = _interval("()", "-\\infty", unequal[1])
        above = _interval("()", unequal[1], "\\infty")
        return ReadAnswer("union", items=(below, above))
    sides = [side.strip() for side in split_outside(text, _RELATION)]
    signs = [sign.strip() for sign in _RELATION.findall(text)]
    size = re.fullmatch(r"\|\s*([a-zA-Z])\s*\|", sides[0])
    if size is not None and len(sides) == 2 and signs[0] in ("<", "\\le") and sides[1]:  # |x| < 3
        return _read_relation(f"-{sides[1]} {signs[0]} {size[1]} {signs[0]} {sides[1]}")
    if len(sides) != len(signs) + 1 or len(signs) not in (1, 2) or not all(sides):
        return None
    if len(signs) == 1 and _is_variable(sides[1]):
        sides = sides[::-1]
        signs = [_turned(signs[0])]
    if len(signs) == 1 and _is_variable(sides[0]) and not _is_variable(sides[1]):
        less = signs[0] in ("<", "\\le")
        bracket = {"<": ")", "\\le": "]", ">": "(", "\\ge": "["}[signs[0]]
        interval = (
            _interval(f"({bracket}", "-\\infty", sides[1]) if less else _interval(f"{bracket})", sides[1], "\\infty")
        )
        return interval._replace(name=squeezed(sides[0]))
    if len(signs) != 2 or not _is_variable(sides[1]):
        return None
    if signs[0] in (">", "\\ge"):
        sides = sides[::-1]
        signs = [_turned(sign) for sign in signs[::-1]]
    if not {*signs} <= {"<", "\\le"}:
        return None
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return _interval(brackets, sides[0], sides[2])._replace(name=squeezed(sides[1]))


def _turned(sign: str) -> str:
    return {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}[sign]


def _is_variable(text: str) -> bool:
    return (
        re.fullmatch(r"[a-zA-Z](?:_\{?\w+\}?)?|[a-zA-Z]\([a-z]\)|\\(?!infty|pi\b)[a-zA-Z]+", text.strip()) is not None
    )


def _read_named(text: str) -> ReadAnswer | None:
    """The value in "x = 5" and "x \\in (1, 3)"."""
    for sign in (r"\\in(?![a-zA-Z])", r"(?<![<>!\\])=|\\approx"):
        parts = split_outside(text, re.compile(sign))
        if len(parts) >= 2 and parts[-1].strip() and _NAME.fullmatch(parts[0]):
            name = squeezed(parts[0]).removeprefix("{").removesuffix("}")
            return read_answer(parts[-1].strip())._replace(name=name)
        if len(parts) == 2 and parts[0].strip() and _is_variable(parts[1]) and "in" not in sign:  # 5 = x
            return read_answer(parts[0].strip())._replace(name=squeezed(parts[1]))
    return None


def read_atom(text: str) -> ReadAnswer:
    """Words, or a formula and its unit."""
    text = text.strip()
    money = re.match(rf"([-+]?)\s*({_CURRENCY})\s*(?=[\d.(\\])", text)
    if money is not None:
        inner = read_atom(money[1] + text[money.end() :])
        return inner._replace(unit=unit_of(money[2].removeprefix("\\")))
    percent = re.fullmatch(r"(.*?)\s*\\?%", text)
    if percent is not None:
        return ReadAnswer("formula", percent[1], unit=unit_of("%"))
    if "^\\circ" in text:
        angle = re.fullmatch(r"([^a-zA-Z]+|[^a-zA-Z]*\\frac[^a-zA-Z]+)\^\\circ\s*(?:\\text\{\s*)?([CFK])?\s*\}?", text)
        if angle is not None:
            return ReadAnswer("formula", angle[1].strip(), unit=unit_of(f"\u00b0{angle[2] or ''}"))
    with_unit = _split_unit(text)
    if with_unit is not None:
        return ReadAnswer("formula", with_unit[0], unit=unit_of(with_unit[1]))
    words = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    if words != text and not re.search(r"[\\=^]", words) and re.search(r"[a-zA-Z]", words):
        return ReadAnswer("words", _plain_words(words))
    if _WORDS.fullmatch(text) and not re.search(r"\d\s*[-+*/]\s*\d", text):
        return ReadAnswer("words", _plain_words(text))
    return ReadAnswer("formula", text)


def _split_unit(text: str) -> tuple[str, str] | None:
    """A value and the words of its unit: in \\text{}, or apart by a blank, or a known one behind the digits."""
    power = r"(?:\s*\^\s*\{?\s*(-?\d)\s*\}?)?"
    match = re.fullmatch(rf"(.*[\d\w)}}!])\s*((?:\\text\{{[^{{}}]*\}}{power}\s*(?:/|\\cdot)?\s*)+)", text)
    if match is not None and re.search(r"\d|\\pi|\\sqrt|^[a-zA-Z]$", match[1]):
        unit = re.sub(r"\\text\{([^{}]*)\}", r"\1", match[2])
        return match[1].strip(), re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", unit)
    match = re.fullmatch(rf"(.*[\d)}}!]|.*\\pi)\s+([a-zA-Z][a-zA-Z./ ]*?){power}", text)
    if match is not None and re.search(r"\d|\\pi", match[1]) and not re.search(r"[=<>]", match[1]):
        unit = match[2] + (f"^{match[3]}" if match[3] else "")
        long = re.search(rf"(?<![a-zA-Z])(?!(?:{_FUNCTIONS})\b)[a-zA-Z]{{3,}}", match[2]) is not None
        return (match[1].strip(), unit) if long or is_known(unit) else None
    match = re.fullmatch(rf"([-+]?[\d.]*\d)([a-zA-Z]{{2,}}(?:/[a-zA-Z]+)?){power}", text)
    if match is not None and is_known(match[2]):
        return match[1], match[2] + (f"^{match[3]}" if match[3] else "")
    return None


def _plain_words(text: str) -> str:
    """Words in lower case, without signs around them and articles before them."""
    text = re.sub(r"[\s~]+", " ", text).strip(" .,;:!?'\"*()[]").lower()
    return re.sub(r"^(?:the|an|a) (?=\w)", "", text)


def split_outside(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text at separators that stand in no brackets."""
    parts = []
    begin = position = depth = 0
    while position < len(text):
        match = separator.match(text, position)
        if match is not None and depth == 0:
            parts.append(text[begin:position])
            begin = position = max(match.end(), position + 1)
            continue
        sign = text[position : position + 2] if text[position] == "\\" else text[position]
        depth += 1 if sign in ("(", "[", "{", "\\{") else -1 if sign in (")", "]", "}", "\\}") else 0
        depth = max(depth, 0)
        position += max(len(sign), 1)
        if len(sign) == 2 and sign[1].isalpha():
            position -= 1  # a command, which may be the separator of the next place but one
            position += len(re.match(r"[a-zA-Z]*", text[position:])[0])  # type: ignore[index]
    parts.append(text[begin:])
    return parts


def _outside_brackets(text: str) -> str:
    """Join thousands at commas that stand in no brackets: in brackets a comma is between parts."""
    if "," not in text:
        return text
    depth = 0
    depths = []
    for place, letter in enumerate(text):
        escaped = place > 0 and text[place - 1] == "\\"
        depth += (letter in "([" or (letter == "{" and escaped)) - (letter in ")]" or (letter == "}" and escaped))
        depths.append(depth)
    return _COMMA_THOUSANDS.sub(lambda m: m[0] if depths[m.start()] else m[0].replace(",", ""), text)
