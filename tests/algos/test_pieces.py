"""Every public piece of funrl.algos has the properties of `funrl.testing`. A new piece needs a row in a rows_*.py.

Terms and preference losses go through further properties in test_terms.py; test_completeness.py sees to it that no
piece is left out.
"""

import pytest
from tables import ROWS

from funrl.testing.check_pieces import assert_property

CASES = [(row, name) for row in ROWS for name in row.properties]


@pytest.mark.parametrize("row,name", CASES, ids=[f"{row.name}-{name}" for row, name in CASES])
def test_a_piece_has_a_property(row, name):
    assert_property(row.subject, name)
