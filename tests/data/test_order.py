"""The order of training with weights: which items are passed over, and where a resumed run continues."""

from collections import Counter

import numpy as np
import pytest

from funrl.data.order import Mixture, order_digest, places_in_order, shares_of, take_next

ITEMS = list(range(50))
MIXED = Mixture([list(range(30)), list(range(10))], shares_of([0.5, 0.5]))
JOINED = Mixture([list(range(30)), list(range(20))], None)


@pytest.mark.parametrize("items", [ITEMS, MIXED, JOINED], ids=["list", "mixture", "joined"])
def test_equal_weights_change_nothing(items):
    plain = take_next(items, 120, 3, 17)
    assert plain.end == 137 and plain.positions.tolist() == list(range(17, 137))
    assert plain.places.tolist() == places_in_order(items, 120, 3, 17).tolist()
    weighted = take_next(items, 120, 3, 17, np.full(len(items), 0.25))
    assert all(np.array_equal(a, b) for a, b in zip(plain, weighted, strict=True))


@pytest.mark.parametrize("items", [ITEMS, MIXED, JOINED], ids=["list", "mixture", "joined"])
def test_the_order_with_weights_depends_on_the_position_alone(items):
    weights = np.linspace(0, 1, len(items))
    straight, position, resumed = take_next(items, 300, 5, 0, weights), 0, []
    for count in (1, 100, 7, 192):
        taken = take_next(items, count, 5, position, weights)
        resumed += taken.places.tolist()
        position = taken.end
    assert resumed == straight.places.tolist() and position == straight.end
    assert straight.places.tolist() == places_in_order(items, straight.end, 5, 0)[straight.positions].tolist()


def test_items_are_taken_in_proportion_to_their_weights():
    weights = np.repeat([0.0, 1.0, 4.0], [10, 20, 20])
    taken = take_next(ITEMS, 4000, 1, 0, weights)
    counts = Counter(taken.places.tolist())
    assert not any(counts[item] for item in range(10))
    whole = taken.end / 50  # of the largest weight each is taken in every epoch, of a quarter in one of four
    assert all(abs(counts[item] - whole) <= 1 for item in range(30, 50))
    assert sum(counts[item] for item in range(10, 30)) / 20 == pytest.approx(whole / 4, rel=0.1)


def test_one_item_alone_may_be_left():
    taken = take_next(ITEMS, 5, 0, 0, np.eye(50)[7])
    assert taken.places.tolist() == [7] * 5 and len(set(taken.positions // 50)) == 5  # once in each epoch


def test_a_joined_sequence_is_drawn_as_one():
    assert places_in_order(JOINED, 100, 2, 0).tolist() == places_in_order(ITEMS, 100, 2, 0).tolist()


def test_orders_are_told_apart():
    result = {order_digest(items, seed) for items in (ITEMS, ITEMS[1:], MIXED, JOINED) for seed in (0, 1)}
    assert len(result) == 8 and all(0 <= item < 2**63 for item in result)
    assert order_digest(ITEMS, 0, [3, 4]) != order_digest(ITEMS, 0, [4, 3])
