"""Every public piece of funrl.algos has the properties of `funrl.testing`. A new piece needs a row in a rows_*.py.

Terms and preference losses go through further properties in test_terms.py; test_completeness.py sees to it that no
piece is left out.
"""

import pytest
from tables import ROWS

from funrl.testing.check_pieces import assert_property


def cases():
    """Rows and their properties; to compile a piece takes half a second."""
    for row in ROWS:
        for name in row.properties:
            marks = pytest.mark.slow if name == "compilation" else ()
            yield pytest.param(row, name, id=f"{row.name}-{name}", marks=marks)


@pytest.mark.parametrize(("row", "name"), list(cases()))
def test_a_piece_has_a_property(row, name):
    assert_property(row.subject, name)
