"""Charts of the pages: axes, thinned curves and the values under the pointer. templates/parts.html.j2 draws them.

Outlines are in a square of 1000 by 1000 units, with y downwards; places along an axis are 0 to 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from funrl.track.report.figures import Chart

MOST_POINTS = 300  # of a curve; a longer one is drawn by its extremes

Points = Sequence[tuple[int, float]]


class Series(NamedTuple):
    """Finite values at increasing steps.

    Attributes:
      colour: index of one of the page's colours.
      dots: each value is a measurement worth seeing, and the curve is not smoothed.
    """

    name: str
    points: Points
    colour: int = 0
    dots: bool = False


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
        texts = [number(tick) for tick in self.ticks]
        if len(set(texts)) < len(texts):
            texts = [f"{tick:.8g}" for tick in self.ticks]
        return [(self.place(tick), text) for tick, text in zip(self.ticks, texts, strict=True)]


class Figure(NamedTuple):
    """A chart, ready to be drawn.

    Attributes:
      paths: CSS classes and SVG commands of each path.
      last: the last value of a single curve without a legend.
      label: the chart in words, for readers who do not see it.
      legend: name, colour and last value of each curve.
      pointer: steps that can be pointed at, their places, and the text of each curve's value there.
    """

    title: str
    unit: str
    x: Axis
    y: Axis
    paths: list[tuple[str, str]]
    pointer: dict[str, Any]
    label: str
    legend: Sequence[tuple[str, int, str]] = ()
    last: str = ""
    note: str = ""


def number(value: float) -> str:
    """A number with three digits, as short as it reads well: 0.831, 12.4k, 3.2e-7."""
    size = abs(value)
    if not math.isfinite(value):
        return "not finite"
    if size >= 1e12 or 0 < size < 9.995e-4:
        mantissa, exponent = f"{value:.1e}".split("e")
        return _minus(f"{mantissa.removesuffix('.0')}e{int(exponent)}")
    units = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
    unit, name = next(((unit, name) for least, unit, name in units if size >= least), (1.0, ""))
    digits = max(0, 2 - math.floor(math.log10(size / unit))) if size else 0
    text = f"{value / unit:.{digits}f}"
    return _minus(text.rstrip("0").rstrip(".") if "." in text else text) + name


def _minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text


def linear_axis(values: Sequence[float], bounds: tuple[float, float] | None = None) -> Axis:
    """An axis with about five round ticks. Zero is on it when the values come near it."""
    low, high = bounds or (min(values), max(values))
    if bounds is None and 0 < low < 0.5 * high:
        low = 0.0
    if high == low:
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
    positive = [value for value in values if value > 0]
    if not positive:
        return linear_axis(values)
    low = math.floor(math.log10(min(positive)) + 1e-9)
    high = max(low + 1, math.ceil(math.log10(max(positive)) - 1e-9))
    ticks = range(low, high + 1, math.ceil((high - low) / 4))
    return Axis(10.0**low, 10.0**high, tuple(10.0**exponent for exponent in ticks), log=True)


def step_axis(first: int, last: int) -> Axis:
    """The axis of steps: whole numbers, ending where the run ends."""
    if first == last:
        return Axis(first - 0.5, last + 0.5, (float(first),))
    margin = 0.09 * (last - first)
    inner = linear_axis((), (first, last)).ticks
    ticks = [tick for tick in inner if first + margin < tick < last - margin and tick == round(tick)]
    return Axis(first, last, (float(first), *ticks, float(last)))


def line_figure(
    chart: Chart, series: Sequence[Series], steps: tuple[int, int], *, note: str = "", named: bool = False
) -> Figure | None:
    """Curves over the steps from the first to the last; None where no curve has a point.

    Args:
      chart: title, unit and kind of axis.
      series: the curves; those without a point are left out.
      steps: the first and the last.
      note: a line below the chart.
      named: a single curve has a legend too, as several always have.
    """
    curves = [curve for curve in series if curve.points]
    if not curves:
        return None
    values = [value for curve in curves for _, value in curve.points]
    x = step_axis(*steps)
    y = log_axis(values) if chart.log else linear_axis(values, chart.bounds)
    ends = [f"{curve.name} {number(curve.points[0][1])} to {number(curve.points[-1][1])}" for curve in curves]
    legend = [(curve.name, curve.colour, number(curve.points[-1][1])) for curve in curves]
    named = named or len(curves) > 1
    return Figure(
        title=chart.title,
        unit=chart.unit,
        x=x,
        y=y,
        paths=[path for curve in curves for path in _curve(curve, x, y)],
        pointer=_pointer(curves, x, named),
        label=f"{chart.title}: {', '.join(ends)}",
        legend=legend if named else (),
        last="" if named else legend[0][-1],
        note=note,
    )


def _pointer(curves: Sequence[Series], x: Axis, named: bool) -> dict[str, Any]:
    values = [dict(thinned(curve.points)) for curve in curves]
    steps = sorted(set().union(*values))
    return {
        "steps": steps,
        "places": [round(x.place(step), 4) for step in steps],
        "names": [curve.name if named else "" for curve in curves],
        "values": [[number(points[step]) if step in points else None for step in steps] for points in values],
    }


def _curve(curve: Series, x: Axis, y: Axis) -> list[tuple[str, str]]:
    def line(points: Points) -> str:
        return _line([(x.place(step), y.place(value)) for step, value in points])

    points = thinned(curve.points)
    colour = f"c{curve.colour}"
    if curve.dots or len(points) == 1:
        return [(f"line {colour}", line(points)), (f"dot {colour}", "".join(line([dot]) + "h0" for dot in points))]
    if not smoothing(len(curve.points)):
        return [(f"line {colour}", line(points))]
    means = smooth_curve(curve.points, y.low if y.log else None)
    return [(f"raw {colour}", line(points)), (f"line {colour}", line(thinned(means)))]


def smoothing(length: int) -> int:
    """Steps on either side of a step that a smoothed curve of this many points averages; 0: it is not smoothed."""
    return length // 30 if length >= 30 else 0


def smooth_curve(points: Points, least: float | None = None) -> list[tuple[int, float]]:
    """The mean of the points around each point; at the ends, of the points that exist.

    Args:
      points: of the curve.
      least: the lower end of a logarithmic axis, on which the mean is taken; None: the axis is linear.
    """
    reach = smoothing(len(points))
    values = [value if least is None else math.log(max(value, least)) for _, value in points]
    sums = list(itertools.accumulate(values, initial=0.0))
    windows = [(max(0, i - reach), min(len(points), i + reach + 1)) for i in range(len(points))]
    means = [(sums[end] - sums[first]) / (end - first) for first, end in windows]
    return [(step, mean if least is None else math.exp(mean)) for (step, _), mean in zip(points, means, strict=True)]


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


def _line(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{1000 * left:.0f} {1000 - 1000 * height:.0f}" for left, height in places)
