"""Several files of prompts: shares, orders, and where a resumed run continues."""

from collections import Counter

import pytest

from funrl.data.json_lines import DataError
from funrl.data.order import Mixture, shares_of, weighted_files
from funrl.data.prompts import prompt_batch

PARTS = [[("a", n) for n in range(40)], [("b", n) for n in range(7)], [("c", 0)]]
MIXED = Mixture(PARTS, shares_of([0.6, 0.3, 0.1]))


def test_files_have_weights_or_none_has(tmp_path):
    assert weighted_files("a.jsonl@2, b.parquet@.5") == [("a.jsonl", 2.0), ("b.parquet", 0.5)]
    assert weighted_files("a.jsonl,b@c.jsonl") == [("a.jsonl", None), ("b@c.jsonl", None)]
    odd = tmp_path / "a,b@1"
    odd.touch()
    assert weighted_files(str(odd)) == [(str(odd), None)]
    for text, item in (
        ("a@1,b", "give each file a weight"),
        (",", "give each file a weight"),
        ("a@1,b@0", "the weight 0 is less than a thousandth"),
        ("a@1,b@0.0005", "the weight 0.0005 is less"),
    ):
        with pytest.raises(DataError, match=item):
            weighted_files(text)


def test_shares_add_up():
    assert shares_of([1, 1, 1]) == (334, 333, 333) and shares_of([0.7, 0.3]) == (700, 300)
    assert shares_of([2, 1]) == (667, 333) and shares_of([1, 2]) == (333, 667)  # the largest remainder first


def test_a_mixture_is_a_sequence_of_all_items():
    assert list(MIXED) == [item for part in PARTS for item in part] and len(MIXED) == 48
    assert MIXED[-1] == ("c", 0) and MIXED[39:42] == [("a", 39), ("b", 0), ("b", 1)]
    with pytest.raises(IndexError):
        MIXED[48]


def test_every_thousand_draws_have_the_shares_and_parts_come_in_epochs():
    drawn = prompt_batch(MIXED, 2000, 3, 0)
    for block in (drawn[:1000], drawn[1000:]):
        assert Counter(name for name, _ in block) == {"a": 600, "b": 300, "c": 100}
    for name, size in (("a", 40), ("b", 7)):
        own = [n for part, n in drawn if part == name]
        epochs = [own[at : at + size] for at in range(0, len(own) - size, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs) and epochs[0] != epochs[1]
    assert prompt_batch(MIXED, 2000, 4, 0) != drawn
    assert prompt_batch(MIXED, 0, 3, 5) == []


def test_the_order_depends_on_the_count_of_draws_alone():
    straight, position, resumed = prompt_batch(MIXED, 2300, 5, 0), 0, []
    for count in (1, 999, 128, 700, 472):
        resumed += prompt_batch(MIXED, count, 5, position)
        position += count
    assert resumed == straight
