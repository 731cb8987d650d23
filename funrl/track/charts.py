"""Charts as HTML: inline SVG for what is drawn, positioned text for what is read.

The drawing is stretched to whatever width there is; the text is not, so a chart reads the same on a phone and on a
wide screen. No script: the value under the pointer is shown by CSS. All coordinates inside a drawing are 0 to 1000.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

SIZE = 1000  # of a drawing, in its own units
MOST_POINTS = 300  # drawn points of a curve; a longer one is drawn as its extremes
MOST_BANDS = 100  # places along a chart that show their value under the pointer

Points = Sequence[tuple[int, float]]


class Series(NamedTuple):
    """One curve: finite values at increasing steps."""

    name: str
    points: Points
    colour: int = 0  # which of the page's colours
    dots: bool = False  # a few measurements, each worth seeing, and no smoothing


class Band(NamedTuple):
    """One layer of a stack: a value of each step, none negative."""

    name: str
    values: Sequence[float]
    colour: int


class Scale(NamedTuple):
    """Scale of an axis."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Place of a value between the ends of the axis, 0 to 1; values outside are put on the edge."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def number(value: float) -> str:
    """A number with three digits, as short as it reads well: 0.831, 12.4k, 3.2e-7."""
    size = abs(value)
    if not math.isfinite(value):
        return "not finite"
    if size >= 1e12 or 0 < size < 9.995e-4:
        mantissa, exponent = f"{size:.1e}".split("e")
        text = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    else:
        units = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
        unit, name = next(((unit, name) for above, unit, name in units if size >= above), (1.0, ""))
        digits = max(0, 2 - math.floor(math.log10(size / unit))) if size else 0
        text = f"{size / unit:.{digits}f}"
        text = (text.rstrip("0").rstrip(".") if "." in text else text) + name
    return "&minus;" + text if value < 0 else text


def linear_scale(values: Sequence[float], bounds: tuple[float, float] | None = None, count: int = 5) -> Scale:
    """An axis with about `count` round ticks. Zero is on it when the values come near it."""
    low, high = bounds or (min(values), max(values))
    if bounds is None:
        if 0 < low < 0.5 * high:
            low = 0.0
        if high == low:
            low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], False, ticks)


def log_scale(values: Sequence[float]) -> Scale:
    """An axis of decades. Values of zero lie on its lower edge."""
    positive = [v for v in values if v > 0]
    if not positive:
        return linear_scale(values)
    low, high = math.floor(math.log10(min(positive)) + 1e-9), math.ceil(math.log10(max(positive)) - 1e-9)
    high = max(high, low + 1)
    every = max(1, math.ceil((high - low) / 4))
    return Scale(10.0**low, 10.0**high, True, tuple(10.0**i for i in range(low, high + 1, every)))


def step_scale(low: int, high: int) -> Scale:
    """The axis of steps: whole numbers, ending where the run ends."""
    if low == high:
        return Scale(low - 0.5, high + 0.5, False, (float(low),))
    inner = linear_scale((low, high), (float(low), float(high))).ticks
    apart = 0.09 * (high - low)
    ticks = [t for t in inner if low + apart < t < high - apart and t == round(t)]
    return Scale(low, high, False, (float(low), *ticks, float(high)))


def line_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    steps: tuple[int, int],
    log: bool = False,
    bounds: tuple[float, float] | None = None,
    footnote: str = "",
    named: bool = False,
) -> str:
    """A figure of curves over the steps from the first to the last; "" where no curve has a point.

    Args:
      named: one curve has a legend too, as several always have.
    """
    series = [one for one in series if one.points]
    if not series:
        return ""
    values = [value for one in series for _, value in one.points]
    x, y = step_scale(*steps), log_scale(values) if log else linear_scale(values, bounds)
    drawing = "".join(_curve(one, x, y) for one in series)
    named = named or len(series) > 1
    last = "" if named else number(series[0].points[-1][1])  # in a legend every curve has its own
    ends = ", ".join(f"{one.name} {number(one.points[0][1])} to {number(one.points[-1][1])}" for one in series)
    legend = _legend(series) if named else ""
    return (
        f'<figure class="card"><figcaption><b>{html.escape(title)}</b><output>{last}</output>'
        f"<small>{html.escape(unit)}</small>{legend}</figcaption>"
        + _frame(_grid(y) + drawing, x, y, f"{title}: {ends}", _bands(series, x))
        + (f"<p class=note>{html.escape(footnote)}</p>" if footnote else "")
        + "</figure>"
    )


def stacked_chart(title: str, unit: str, steps: Sequence[int], layers: Sequence[Band]) -> str:
    """A figure of layers on top of each other over steps, the first lowest."""
    stretches = _stretches(len(steps), MOST_BANDS)
    x, drawing = step_scale(steps[0], steps[-1]), ""
    means = [[sum(layer.values[i] for i in s) / len(s) for s in stretches] for layer in layers]
    tops = [0.0] * len(stretches)
    y = linear_scale([0.0, max(map(sum, zip(*means, strict=True)))])
    for layer, mean in zip(layers, means, strict=True):
        below, tops = tops, [top + value for top, value in zip(tops, mean, strict=True)]
        outline = _stairs(tops, y) + _stairs(below, y)[::-1]
        drawing += f'<path class="fill c{layer.colour}" d="M{_path(outline)}Z"/>'
    bands = ""
    for column, stretch in enumerate(stretches):
        said = [f"{layer.name} {number(m[column])}" for layer, m in zip(layers, means, strict=True) if m[column] > 0]
        tip = f"step {steps[stretch[0]]}: " + ", ".join(said)
        bands += f'<i data-t="{_quoted(tip)}"></i>'
    return (
        f'<figure class="card"><figcaption><b>{html.escape(title)}</b><small>{html.escape(unit)}</small>'
        f"</figcaption>" + _frame(_grid(y) + drawing, x, y, title, bands) + "</figure>"
    )


def _legend(series: Sequence[Series]) -> str:
    """The curves' colours and names, with the last value of each."""
    keys = "".join(
        f'<span><i class="key c{one.colour}"></i>{html.escape(one.name)}<b>{number(one.points[-1][1])}</b></span>'
        for one in series
    )
    return f'<div class="legend">{keys}</div>'


def _frame(drawing: str, x: Scale, y: Scale, label: str, bands: str) -> str:
    labels = [_tick(t, y) for t in y.ticks]
    room = max(36, 10 + 7 * max(len(label.replace("&minus;", "-")) for label in labels))  # pixels
    rows = "".join(
        f'<span style="bottom:{100 * y.at(t):.1f}%">{label}</span>' for t, label in zip(y.ticks, labels, strict=True)
    )
    columns = "".join(f'<span style="left:{100 * x.at(t):.1f}%">{_tick(t, x)}</span>' for t in x.ticks)
    svg = f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" aria-label="{_quoted(label)}">'
    return (
        f'<div class="plot"><div class="y" style="width:{room}px">{rows}</div><div class="area">{svg}{drawing}</svg>'
        f'<div class="bands">{bands}</div></div><div class="x">{columns}</div></div>'
    )


def _quoted(text: str) -> str:
    return html.escape(text.replace("&minus;", "-"), quote=True)


def _tick(value: float, scale: Scale) -> str:
    if scale.log or len(scale.ticks) < 2:
        return number(value)
    step = scale.ticks[1] - scale.ticks[0]
    largest = max(abs(scale.low), abs(scale.high))
    if (largest >= 1e4 and step >= 100) or largest < 2e-3:
        return number(value) if abs(value) > step / 2 else "0"
    exponent = math.floor(math.log10(step) + 1e-9)
    mantissa = step / 10.0**exponent
    digits = max(0, -exponent + (abs(mantissa - round(mantissa)) > 1e-6))
    text = f"{abs(value):.{digits}f}"
    return "&minus;" + text if value < -step / 2 else text


def _grid(y: Scale) -> str:
    return "".join(f'<path class="grid" d="M0 {SIZE - SIZE * y.at(t):.0f}H{SIZE}"/>' for t in y.ticks)


def _curve(series: Series, x: Scale, y: Scale) -> str:
    colour, points = f"c{series.colour}", series.points
    if series.dots or len(points) == 1:
        dots = "".join(f"M{_path([_place(point, x, y)])}h0" for point in points)
        line = f'<path class="line {colour}" d="M{_path([_place(p, x, y) for p in points])}"/>'
        return line + f'<path class="dot {colour}" d="{dots}"/>'
    drawn = [_place(point, x, y) for point in _extremes(points)]
    if not smoothing(len(points)):
        return f'<path class="line {colour}" d="M{_path(drawn)}"/>'
    smooth = [_place(point, x, y) for point in _thinned(smooth_curve(points, y.log))]
    raw = f'<path class="raw {colour}" d="M{_path(drawn)}"/>'
    return raw + f'<path class="line {colour}" d="M{_path(smooth)}"/>'


def smoothing(length: int) -> int:
    """Steps on either side of a step that a smoothed curve of this many points takes in; 0: it is not smoothed."""
    return length // 30 if length >= 30 else 0


def smooth_curve(points: Points, log: bool = False) -> list[tuple[int, float]]:
    """The mean of the points around each point, or of their logarithms; at the ends, of those that there are."""
    reach = smoothing(len(points))
    floor = min((v for _, v in points if v > 0), default=1.0)
    sums = list(itertools.accumulate((math.log(max(v, floor)) if log else v for _, v in points), initial=0.0))
    means = []
    for i, (step, _) in enumerate(points):
        first, end = max(0, i - reach), min(len(points), i + reach + 1)
        mean = (sums[end] - sums[first]) / (end - first)
        means.append((step, math.exp(mean) if log else mean))
    return means


def _extremes(points: Points) -> Points:
    """At most `MOST_POINTS` points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return points
    kept = []
    for stretch in _stretches(len(points), MOST_POINTS // 2):
        part = [points[i] for i in stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def _thinned(points: Points) -> list[tuple[int, float]]:
    """At most `MOST_POINTS` of the points of a curve that is smooth, with its ends."""
    return [points[stretch[-1] if i else 0] for i, stretch in enumerate(_stretches(len(points), MOST_POINTS))]


def _stretches(length: int, most: int) -> list[range]:
    """0 to length, cut into at most `most` stretches of about the same length."""
    count = min(length, most)
    return [range(length * i // count, length * (i + 1) // count) for i in range(count)]


def _bands(series: Sequence[Series], x: Scale) -> str:
    """Invisible columns side by side; each knows what to say of the step in its middle."""
    known = [dict(one.points) for one in series]
    steps = sorted(set().union(*known))
    chosen = [steps[s[len(s) // 2]] for s in _stretches(len(steps), MOST_BANDS)]
    edges = [x.low] + [(a + b) / 2 for a, b in itertools.pairwise(chosen)] + [x.high]
    bands = ""
    for i, step in enumerate(chosen):
        said = [(one.name, values[step]) for one, values in zip(series, known, strict=True) if step in values]
        tip = ", ".join(number(v) if len(series) == 1 else f"{html.escape(name)} {number(v)}" for name, v in said)
        bands += f'<i style="flex:{max(edges[i + 1] - edges[i], 1e-3):.4g}" data-t="step {step}: {tip}"></i>'
    return bands


def _stairs(values: Sequence[float], y: Scale) -> list[tuple[float, float]]:
    """Each value as a level stretch, all of the same width: the time of a step is a bar."""
    corners, count = [], len(values)
    for i, value in enumerate(values):
        height = SIZE - SIZE * y.at(value)
        corners += [(SIZE * i / count, height), (SIZE * (i + 1) / count, height)]
    return corners


def _place(point: tuple[int, float], x: Scale, y: Scale) -> tuple[float, float]:
    return SIZE * x.at(point[0]), SIZE - SIZE * y.at(point[1])


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{left:.0f} {top:.0f}" for left, top in places)
