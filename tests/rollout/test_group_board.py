"""Groups of a run in its store, seen from both sides."""

import pytest
import torch.distributed as dist

from funrl.mesh.pools import channel
from funrl.rollout import group_board
from funrl.rollout.group_board import GroupBegin, GroupBoard
from funrl.rollout.ledger import Ledger, LedgerRule


@pytest.fixture(autouse=True)
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(channel, "run_store", lambda: store)
    monkeypatch.setattr(group_board, "run_store", lambda: store)
    return store


def test_groups_come_in_the_order_of_their_delivery_and_once():
    writer, reader = GroupBoard(2), GroupBoard(2)
    assert writer.opened() is None and reader.next_event() is None
    ledger = Ledger.restored(LedgerRule(places=4), until=20, version=2)
    reader.open(ledger)
    assert writer.opened() == ledger
    assert [writer.take_ticket() for _ in range(3)] == [0, 1, 2]
    for number in (2, 0):
        writer.deliver(number, {"rows": number})
    assert [reader.next_event() for _ in range(3)] == [2, 0, None]
    assert reader.collect(2) == {"rows": 2}


def test_what_begins_is_reported_before_it_is_delivered():
    writer, reader = GroupBoard(1), GroupBoard(1)
    begun = [GroupBegin(0, 4, 1, 2), GroupBegin(0, 5, 2, 2)]
    writer.begin(begun)
    writer.deliver(5, "rows")
    assert [reader.next_event() for _ in range(3)] == [begun, 5, None]


def test_what_the_trainer_asks_for_is_taken_once():
    trainer = GroupBoard(2)
    replicas = GroupBoard(2), GroupBoard(2)
    assert [replica.take_asked() for replica in replicas] == [None, None]
    trainer.ask(["first", "second"])
    trainer.ask(["third"])
    assert [replica.take_asked() for replica in (*replicas, replicas[0])] == ["first", "second", "third"]
    assert [replica.take_asked() for replica in replicas] == [None, None]
    trainer.ask(["of the second"], replica=1)
    assert [replica.take_asked(place) for place, replica in enumerate(replicas)] == [None, "of the second"]


def test_a_replica_that_another_was_faster_than_takes_the_next_one(store):
    trainer, slow, fast = (GroupBoard(2) for _ in range(3))
    trainer.ask(["first"])
    add = store.add

    class Overtaken:
        """A store in which another replica takes the group after this one has seen it."""

        def __getattr__(self, name):
            return getattr(store, name)

        def add(self, key, amount):
            if amount and key.endswith("taken"):
                assert fast.take_asked() == "first"
            return add(key, amount)

    with pytest.MonkeyPatch.context() as patch:
        overtaken = Overtaken()
        boards = iter([overtaken])
        patch.setattr(group_board, "run_store", lambda: next(boards, store))
        assert slow.take_asked() is None
    trainer.ask(["second"])
    assert (fast.take_asked(), slow.take_asked()) == (None, "second")


def test_what_was_read_leaves_the_store(store):
    writer, reader = GroupBoard(1), GroupBoard(1)
    before = store.num_keys()
    for number in range(5):
        writer.deliver(number, "rows")
        assert reader.next_event() == number
        reader.collect(number)
    assert store.num_keys() == before + 1  # the count of all groups


def test_a_batch_counts_once_every_replica_holds_its_weights():
    board = GroupBoard(2)
    assert board.batch_of_weights(4) is None
    board.train(0, 4)
    board.hold(4)
    assert board.batch_of_weights(4) is None
    board.hold(4)
    assert (board.batch_of_weights(4), board.everywhere) == (0, 4)
    board.train(1, 4)  # the first batch had no update
    assert board.batch_of_weights(4) == 1
    board.hold(5)
    board.hold(5)
    assert board.batch_of_weights(4) == 1
    assert (board.batch_of_weights(5), board.everywhere) == (1, 5)  # which batch they are for is not said yet
    board.train(2, 5)
    assert board.batch_of_weights(5) == 2


def test_versions_that_nobody_asks_for_leave_the_store(store, monkeypatch):
    monkeypatch.setattr(group_board, "KEPT_VERSIONS", 2)
    board = GroupBoard(1)
    counts = []
    for version in range(4, 14):
        board.train(version - 4, version)
        board.hold(version)
        assert board.take_replacement(version - 4) == 0
        assert board.batch_of_weights(version) == version - 4
        counts.append(store.num_keys())
    assert counts[3:] == [counts[3]] * 7
