"""Every public piece of funrl.algos has the properties of `funrl.testing`. A new piece needs a row in a rows_*.py.

Terms and preference losses go through further properties in test_terms.py; test_completeness.py sees to it that no
piece is left out.
"""

import pytest
from tables import ROWS

from funrl.testing.check_pieces import subject_text
from funrl.testing.subjects import assert_one

FIRST = {row.name.split()[0]: row for row in reversed(ROWS)}  # one of each piece
ONCE = {"in_place", "determinism", "float32", "gradient", "ranks"}  # they follow from a piece's code, not its arguments
COMPILED = {row.name.split()[0]: row for row in reversed(ROWS) if "compilation" in row.properties}  # one of each piece
COMPILED = list(COMPILED.values())[3::27]  # some: a compilation takes a second


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_piece_has_its_properties(row):
    """One test a row, as the properties take milliseconds; all that it lacks are listed."""
    others = {"compilation"} | (ONCE if row is not FIRST[row.name.split()[0]] else set())
    lacking = [error for name in row.properties if name not in others and (error := error_of(row, name))]
    assert not lacking, "\n".join(lacking)


@pytest.mark.slow
@pytest.mark.parametrize("row", COMPILED, ids=lambda row: row.name)
def test_a_piece_compiles(row):
    assert not error_of(row, "compilation")


def error_of(row, name):
    try:
        assert_one(name, row.properties[name], row.subject, subject_text(row.subject))
    except AssertionError as error:
        return str(error)
    return ""
