"""Records of 4,096 ranks, as the watch of a run reads them."""

from collections import Counter

import torch.distributed as dist

from funrl.processes import store as stores
from funrl.processes.heartbeat import Heartbeat, Link
from funrl.processes.watch import WaitLimits, Watch

WORLD = 4096


class CountingStore:
    """A store that counts the messages to it."""

    def __init__(self):
        self.store = dist.HashStore()
        self.messages = Counter()

    def __getattr__(self, name):
        def call(*arguments):
            self.messages[name] += 1
            return getattr(self.store, name)(*arguments)

        return call


def test_the_watch_reads_the_records_of_all_ranks_in_one_message():
    store = CountingStore()
    heart = Heartbeat(Link())
    for rank in range(WORLD):
        heart.facts["step"] = rank
        store.set(f"{stores.SIGNS}/{rank}", heart.record().decode())
    watch = Watch(store, WORLD, WaitLimits())
    assert watch.in_steps() and store.messages["check"] == WORLD, "once, to find out that a rank has begun"
    store.messages.clear()
    watch.poll()
    assert store.messages == {"check": 1, "multi_get": 1}
    assert [watch.signs[rank].step for rank in (0, 777, WORLD - 1)] == [0, 777, WORLD - 1]
    stores.report_first(store, 777, "rank 777 has failed")
    watch.next_poll = 0.0
    watch.poll()
    assert watch.failed_at is not None and len(watch.signs) == WORLD
