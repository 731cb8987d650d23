"""Charts of the pages: axes, thinned curves and the values under the pointer. templates/parts.html.j2 draws them.

Outlines are in a square of 1000 by 1000 units, with y downwards; places along an axis are 0 to 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from funrl.track.report.figures import Chart

MOST_POINTS = 300  # of a curve; a longer one is drawn by its extremes
SMOOTHED_POINTS = 30  # from which a curve is drawn with a mean over a fifteenth of its points
ROUNDING = 1e-9  # relative difference of equal values
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))

Points = Sequence[tuple[int, float]]


class Series(NamedTuple):
    """Finite values at increasing steps, and the index of one of the page's colours."""

    name: str
    points: Points
    colour: int = 0


class Axis(NamedTuple):
    """The range of an axis and its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Place of a value on the axis; values outside are put on the edge."""
        scale = math.log10 if self.log else float
        low, high = map(scale, (self.low, self.high))
        return min(1.0, (scale(max(value, self.low)) - low) / (high - low))

    def labels(self) -> list[tuple[float, str]]:
        """Place and text of each tick."""
        return [(self.place(tick), f"{tick:.6g}") for tick in self.ticks]


class Figure(NamedTuple):
    """A chart, ready to be drawn.

    Attributes:
      paths: CSS classes and SVG commands of each path.
      legend: name, colour and last value of each curve.
      pointer: steps that can be pointed at, their places, and the text of each curve's value there.
    """

    chart: Chart
    x: Axis
    y: Axis
    paths: list[tuple[str, str]]
    pointer: dict[str, object]
    legend: list[tuple[str, int, str]]
    note: str


def number(value: float) -> str:
    """A number with three digits: 0.831, 12.4k, 3.2e-07."""
    if not math.isfinite(value):
        return "not finite"
    size, unit = next(((size, unit) for size, unit in UNITS if abs(value) >= 0.9995 * size), (1.0, ""))
    return f"{value / size:.3g}{unit}"


def linear_axis(low: float, high: float) -> Axis:
    """An axis with about five round ticks. Zero is on it when the values come near it.

    Values that differ by rounding alone count as equal: no two ticks would fit between them.
    """
    if 0 < low < 0.5 * high:
        low = 0.0
    if high - low <= ROUNDING * max(abs(low), abs(high)):
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def log_axis(values: Sequence[float]) -> Axis:
    """An axis of decades. Values of zero lie on its lower edge."""
    positive = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(positive)) + 1e-9)
    high = max(low + 1, math.ceil(math.log10(max(positive)) - 1e-9))
    ticks = range(low, high + 1, math.ceil((high - low) / 4))
    return Axis(10.0**low, 10.0**high, tuple(10.0**exponent for exponent in ticks), log=True)


def line_figure(chart: Chart, series: Sequence[Series], steps: tuple[int, int], note: str = "") -> Figure | None:
    """Curves over the steps from the first to the last; None where no curve has a point.

    Args:
      note: a line below the chart.
    """
    curves = [curve for curve in series if curve.points]
    if not curves:
        return None
    values = [value for curve in curves for _, value in curve.points]
    first, last = steps
    last = max(last, first + 1)
    ticks = linear_axis(first, last).ticks
    x = Axis(first, last, tuple(tick for tick in ticks if first <= tick <= last and tick == round(tick)))
    y = log_axis(values) if chart.log else linear_axis(*((0.0, 1.0) if chart.share else (min(values), max(values))))
    shown = [dict(thinned(curve.points)) for curve in curves]
    measured = sorted(set().union(*shown))
    pointer = {
        "steps": measured,
        "places": [round(x.place(step), 4) for step in measured],
        "names": [curve.name for curve in curves],
        "values": [[number(points[step]) if step in points else None for step in measured] for points in shown],
    }
    paths = [path for curve in curves for path in _paths(curve, x, y)]
    legend = [(curve.name, curve.colour, number(curve.points[-1][1])) for curve in curves]
    return Figure(chart, x, y, paths=paths, pointer=pointer, legend=legend, note=note)


def _paths(curve: Series, x: Axis, y: Axis) -> list[tuple[str, str]]:
    """A line; with dots where there are few values, or with a mean where there are many."""

    def line(points: Points) -> str:
        places = [f"{1000 * x.place(step):.0f} {1000 - 1000 * y.place(value):.0f}" for step, value in points]
        return "M" + "L".join(places)

    points = thinned(curve.points)
    colour = f"c{curve.colour}"
    if len(curve.points) < SMOOTHED_POINTS or y.log:
        dots = [(f"dot {colour}", "".join(line([dot]) + "h0" for dot in points))]
        return [(f"line {colour}", line(points)), *dots * (curve.name.startswith("eval/") or len(points) == 1)]
    reach = len(curve.points) // SMOOTHED_POINTS
    values = (value for _, value in curve.points)
    sums = list(itertools.accumulate(values, initial=0.0))
    windows = [(max(0, i - reach), min(len(sums) - 1, i + reach + 1)) for i in range(len(sums) - 1)]
    means = [(step, (sums[b] - sums[a]) / (b - a)) for (step, _), (a, b) in zip(curve.points, windows, strict=True)]
    return [(f"raw {colour}", line(points)), (f"line {colour}", line(thinned(means)))]


def thinned(points: Points) -> Points:
    """At most `MOST_POINTS` points: the first, the last, and the lowest and highest of each stretch between."""
    if len(points) <= MOST_POINTS:
        return points
    kept = {points[0], points[-1]}
    count = MOST_POINTS // 2 - 1
    edges = [len(points) * number // count for number in range(count + 1)]
    for first, end in itertools.pairwise(edges):
        kept |= {extreme(points[first:end], key=lambda point: point[1]) for extreme in (min, max)}
    return sorted(kept)
