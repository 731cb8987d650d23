"""Groups of a run in its store, seen from both sides."""

import pytest
import torch.distributed as dist

from funrl.mesh.pools import channel
from funrl.trainer.placement import board
from funrl.trainer.placement.board import AGAIN, HELDOUT, GroupBoard
from funrl.trainer.placement.messages import GroupPrompt, GroupWork, WrittenGroup


@pytest.fixture(autouse=True)
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(channel, "run_store", lambda: store)
    monkeypatch.setattr(board, "run_store", lambda: store)
    return store


def works(*numbers, weights=-1):
    return [GroupWork(number, number, GroupPrompt(number, 5, 0), weights) for number in numbers]


def written(work):
    return WrittenGroup(0, work, None, {}, (), 0.0)


def test_groups_come_in_the_order_of_their_delivery_and_once():
    writer, reader = GroupBoard(2), GroupBoard(2)
    assert reader.next_delivery() is None
    for work in works(2, 0):
        writer.deliver(written(work))
    assert [reader.next_delivery() for _ in range(3)] == [*map(written, works(2, 0)), None]


def test_what_the_trainer_asks_for_is_taken_once():
    trainer = GroupBoard(2)
    replicas = GroupBoard(2, 0), GroupBoard(2, 1)
    first, second, third, again, own = works(*range(5))
    assert [replica.next_group() for replica in replicas] == [None, None]
    trainer.ask([first, second])
    trainer.ask([third])
    assert [replica.next_group() for replica in (*replicas, replicas[0])] == [first, second, third]
    assert [replica.next_group() for replica in replicas] == [None, None]
    trainer.ask([own], queue="1")
    assert [replica.next_group() for replica in replicas] == [None, own]
    trainer.ask([first])
    trainer.ask([again], AGAIN)
    assert [replicas[0].next_group() for _ in range(3)] == [again, first, None]


def test_a_replica_that_another_was_faster_than_takes_the_next_one(store):
    trainer, slow, fast = (GroupBoard(2) for _ in range(3))
    first, second = works(0, 1)
    trainer.ask([first])
    add = store.add

    class Overtaken:
        """A store in which another replica takes the group after this one has seen it."""

        def __getattr__(self, name):
            return getattr(store, name)

        def add(self, key, amount):
            if amount and key.endswith("taken"):
                assert fast._take("any") == first
            return add(key, amount)

    with pytest.MonkeyPatch.context() as patch:
        overtaken = Overtaken()
        boards = iter([overtaken])
        patch.setattr(board, "run_store", lambda: next(boards, store))
        assert slow._take("any") is None
    trainer.ask([second])
    assert (fast.next_group(), slow.next_group()) == (None, second)


def test_what_was_read_leaves_the_store(store):
    trainer, replica = GroupBoard(1), GroupBoard(1)
    counts = []
    for work in works(*range(5)):
        trainer.ask([work])
        assert replica.next_group() == work
        replica.deliver(written(work))
        assert trainer.next_delivery() == written(work)
        counts.append(store.num_keys())
    assert counts == [counts[0]] * 5


def test_a_group_begins_once_every_replica_holds_its_weights():
    trainer, replica = GroupBoard(2), GroupBoard(2)
    first, second, newer = *works(0, 1, weights=4), *works(2, weights=5)
    trainer.ask([first, second, newer])
    assert replica.next_group() is None
    replica.hold(4)
    assert replica.next_group() is None and not trainer.holds(4)
    GroupBoard(2, 1).hold(4)
    assert trainer.holds(4) and not trainer.holds(5)
    assert [replica.next_group() for _ in range(3)] == [first, second, None]
    for number in range(2):
        GroupBoard(2, number).hold(5)
    assert replica.next_group() == newer and replica.holds(4)


def test_versions_that_nobody_asks_for_leave_the_store(store, monkeypatch):
    monkeypatch.setattr(board, "KEPT_VERSIONS", 2)
    replica = GroupBoard(1)
    counts = []
    for version in range(4, 14):
        replica.hold(version)
        assert replica.holds(version)
        counts.append(store.num_keys())
    assert counts[3:] == [counts[3]] * 7


def test_held_out_prompts_come_first_and_say_which_weights_they_need():
    trainer, replicas = GroupBoard(2), [GroupBoard(2, owner) for owner in range(2)]
    prompt = GroupPrompt(0, 0, 0)
    trainer.ask([GroupWork(0, 0, prompt, weights=1)])
    assert [replica.evaluated() for replica in replicas] == [None, None]
    for replica in replicas:
        replica.hold(1)
    trainer.ask([GroupWork(number, None, prompt, weights=2, heldout=True) for number in (1, 2, 3)], HELDOUT)
    assert [replica.evaluated() for replica in replicas] == [2, 2]
    assert replicas[0].next_group().number == 0, "its weights are not everywhere"
    for replica in replicas:
        replica.hold(2)
    assert [replica.next_group().number for replica in replicas] == [1, 2]
    assert replicas[1].evaluated() == 2 and replicas[0].evaluated() is None, "another one begins the last one"
    assert replicas[1].next_group().number == 3 and replicas[1].evaluated() is None
