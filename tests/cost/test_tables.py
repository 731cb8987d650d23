"""Text of sizes and durations."""

from funrl.cost.verdict import duration_text, size


def test_sizes_have_three_figures():
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 1234567: "1.23 MB", 999_600: "1 MB", 5.789e12: "5.79 TB"}
    assert {nbytes: size(nbytes) for nbytes in sizes} == sizes


def test_durations_are_in_the_unit_that_people_use():
    seconds = {0: "0 s", 7e-5: "70 us", 0.00152: "1.5 ms", 0.9996: "1 s", 1.23: "1.2 s", 95: "95 s", 1690: "28 min"}
    seconds |= {5999: "1.7 h", 3.63e6: "42 days"}
    assert {second: duration_text(second) for second in seconds} == seconds
    assert duration_text(310, 3) == "5.17 min" and duration_text(1.234, 3) == "1.23 s"
