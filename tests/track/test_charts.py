"""Charts: short numbers, round ticks, thinned curves, and zeros on a logarithmic axis."""

import math

import pytest

from funrl.track.report import charts
from funrl.track.report.figures import Chart


def test_numbers_are_short():
    cases = {
        0: "0",
        1: "1",
        0.8312: "0.831",
        0.5: "0.5",
        12.345: "12.3",
        123.4: "123",
        999.9: "1k",
        1234.5: "1.23k",
        12345: "12.3k",
        2.5e6: "2.5M",
        3e9: "3G",
        3.21e-7: "3.21e-07",
        100: "100",
        -0.25: "-0.25",
        math.nan: "not finite",
    }
    assert {value: charts.number(value) for value in cases} == cases


@pytest.mark.parametrize(
    "values", [(0.0, 1.0), (0.98, 1.02), (-3.0, 8.0), (5.0, 5.0), (-2.0, -2.0), (0.0, 0.0), (1e-9, 3e-9)]
)
def test_linear_ticks_are_round_even_and_enclose(values):
    axis = charts.linear_axis(min(values), max(values))
    assert axis.low <= min(values) and max(values) <= axis.high * (1 + 1e-12) and 2 <= len(axis.ticks) <= 8
    steps = [b - a for a, b in zip(axis.ticks, axis.ticks[1:], strict=False)]
    assert max(steps) == pytest.approx(min(steps))
    mantissa = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert min(abs(mantissa - mantissa_of_tick) for mantissa_of_tick in (1, 2, 2.5, 5)) < 1e-6
    labels = [label for _, label in axis.labels()]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("values", [(math.nextafter(1.0, 0.0), 1.0), (-1.0, math.nextafter(-1.0, 0.0)), (0.0, 0.0)])
@pytest.mark.parametrize("log", [False, True])
def test_values_that_differ_by_rounding_alone_are_drawn(values, log):
    """An effective share of 1 - 1e-16 beside one of 1."""
    chart = Chart("a", "", (), log=log)
    figure = charts.line_figure(chart, [charts.Series("a", list(enumerate(values)))], (0, 1))
    assert figure is not None and figure.y.high > figure.y.low
    assert all(0 <= figure.y.place(value) <= 1 for value in values)


def test_log_axis_puts_zero_on_the_edge():
    axis = charts.log_axis([0.0, 2e-7, 5e-4])
    assert (axis.low, axis.high) == pytest.approx((1e-7, 1e-3)) and axis.place(0.0) == 0.0
    assert axis.place(1e-5) == pytest.approx(0.5)


def test_drawing_keeps_spikes_and_means_keep_constants():
    points = [(i, 1.0) for i in range(5000)]
    points[1234] = (1234, 99.0)
    kept = charts.thinned(points)
    assert len(kept) <= charts.MOST_POINTS and {points[0], points[-1], (1234, 99.0)} <= set(kept)
    steady = charts.line_figure(Chart("a", "", ()), [charts.Series("a", [(i, 3.0) for i in range(100)])], (0, 99))
    assert steady is not None
    (raw, _), (mean, drawn) = steady.paths
    assert (raw, mean) == ("raw c0", "line c0") and len({place.split()[1] for place in drawn[1:].split("L")}) == 1


def test_zeros_lie_on_the_lower_edge_of_a_logarithmic_axis():
    chart = Chart("gap", "nats", (), log=True)
    measured = charts.Series("measured", [(i, 1e-5) for i in range(60)])
    zeros = charts.Series("zeros", [(i, 0.0) for i in range(60)], colour=1)
    figure = charts.line_figure(chart, [measured, zeros], (0, 59))
    assert figure is not None
    for style, commands in figure.paths:
        if style.endswith("c1"):
            assert {place.split()[1] for place in commands[1:].split("L")} == {"1000"}
    assert charts.line_figure(chart, [charts.Series("none", [])], (0, 1)) is None
