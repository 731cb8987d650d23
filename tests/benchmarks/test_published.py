"""Published steps: rows and split, their table in benchmarks/README.md, and the errors that `funrl plan` prints."""

import re
import sys
from pathlib import Path

import pytest

from funrl.cost.verdict import PUBLISHED_ERRORS, errors_text

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import published  # noqa: E402  (which lies in the folder of benchmarks)

ROWS = published.read_rows()
EXPRESSED = [row for row in ROWS if not row.reason]


def written_rows():
    """Cells of the rows in the README's table, by name."""
    text = published.README.read_text()
    text = text[text.index(published.BEGIN) : text.index(published.END)]
    cells = (line.strip("| ").split(" | ") for line in text.splitlines())
    return {row[0]: row[1:] for row in cells if len(row) == 8 and row[1] in ("fitted", "tested")}


def errors(kind):
    """Errors of the tested rows by the README's table."""
    column = {"seconds": 1, "gib": 4}[kind]
    tested = [cells for cells in written_rows().values() if cells[0] == "tested" and cells[column] != "-"]
    return [float(cells[column + 1]) / float(cells[column]) - 1 for cells in tested]


def test_rows_have_a_source_and_numbers_or_a_reason():
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in EXPRESSED:
        assert row.seconds or row.gib, row.name
        assert row.program in published.PROGRAMS
    assert all(row.reason for row in ROWS if re.search("FP8|offload", row.name))


def test_the_split_is_that_of_the_names():
    tested = [row for row in EXPRESSED if not row.fitted and row.seconds]
    assert len(tested) >= 12
    names = {row.name: row.fitted for row in ROWS}
    assert names["prime-rl Qwen3-4B RL 65536 recompute FA3 8 h200"]
    assert not names["prime-rl Qwen3-4B RL 16384 recompute FA3 8 h100"]


def test_the_table_has_all_rows_and_plans_print_its_errors():
    assert {name: cells[0] == "fitted" for name, cells in written_rows().items()} == {
        row.name: row.fitted for row in EXPRESSED
    }
    for kind, tested in PUBLISHED_ERRORS.items():
        assert published.errors_of(errors(kind)) == pytest.approx(tested, abs=0.006)
    assert (
        f"{PUBLISHED_ERRORS['seconds'].median:.0%} in the median of {PUBLISHED_ERRORS['seconds'].count} published"
        in errors_text()
    )


def test_times_and_memory_of_judged_rows():
    assert published.errors_of(errors("seconds")).median < 0.15
    assert published.errors_of(errors("gib")).median < 0.1


@pytest.mark.parametrize("name", ("prime-rl Qwen3-0.6B SFT 16384 recompute FA3 1 h100",))
def test_a_row_is_predicted_as_the_table_has_it(name):
    row = next(row for row in ROWS if row.name == name)
    predicted = published.predict(row)
    cells = written_rows()[name]
    assert predicted.seconds == pytest.approx(float(cells[2]), rel=0.03)
    assert predicted.gib == pytest.approx(float(cells[5]), rel=0.03)
