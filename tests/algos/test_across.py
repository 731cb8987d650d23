"""The batch of a rank that holds some of the rows; test_pieces.py runs all pieces on such ranks."""

from pieces import example

from funrl.across import ALONE
from funrl.batch import as_dict, map_fields, with_across


def test_the_batch_of_a_rank_keeps_how_it_reaches_the_others():
    across = ALONE._replace(by_row=ALONE)
    batch = with_across(example(), across)
    assert batch._replace(score=None).across is across
    assert map_fields(lambda name, x: x, batch).across is across
    assert set(as_dict(batch)) == set(as_dict(example()))
