"""A counter that several ranks share."""

import itertools

import pytest

from funrl.mesh.collectives import gather_objects
from funrl.mesh.counter import shared_counter
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse, single


@pytest.mark.gloo
def test_every_number_from_zero_is_taken_once():
    def program(mesh):
        first, second = shared_counter(mesh), shared_counter(mesh)
        taken = [(first(count), count) for count in (1, 3, 2)]
        return gather_objects((taken, second(5)), mesh)

    ranks = launch(program, parse("dp2"), "cpu")
    numbers = [range(begin, begin + count) for taken, _ in ranks for begin, count in taken]
    assert sorted(itertools.chain(*numbers)) == list(range(12))
    assert sorted(begin for _, begin in ranks) == [0, 5]  # of a counter of its own


def test_one_process_counts_by_itself():
    take = shared_counter(single())
    assert [take(2), take(1), take(4), take(1)] == [0, 2, 3, 7]
