"""Every public piece of funrl.algos has the properties of `funrl.testing`. A new piece needs a row in a rows_*.py.

Terms and preference losses go through further properties in test_terms.py; test_completeness.py sees to it that no
piece is left out.
"""

import pytest
from tables import ROWS

from funrl.testing.check_pieces import assert_property

FIRST = {row.name.split()[0]: row.name for row in reversed(ROWS)}  # piece: its first row


def cases():
    """Rows and their properties; compiling a piece again with other arguments is left to the slow tests."""
    for row in ROWS:
        for name in row.properties:
            again = name == "compilation" and FIRST[row.name.split()[0]] != row.name
            yield pytest.param(row, name, id=f"{row.name}-{name}", marks=pytest.mark.slow if again else ())


@pytest.mark.parametrize(("row", "name"), cases())
def test_a_piece_has_a_property(row, name):
    assert_property(row.subject, name)
