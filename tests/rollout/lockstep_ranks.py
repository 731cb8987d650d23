"""All ranks of a mesh as threads of this process. One runs at a time: they take turns at collectives.

Unlike the simulator's tensors those of a rank are plain, so the C++ functions compute with them; and eight ranks need
no eight processes. Sums over ranks are taken from the last one to the first, an order that no tree has.
"""

import contextlib
import functools
import threading
from unittest import mock

import torch

from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh, combinations, members

_own = threading.local()  # `.rank` of this thread, `.turns` of its ranks


class _Turns:
    """Who runs, and what ranks have given to the collectives that are not complete."""

    def __init__(self, world):
        self.ready = [threading.Semaphore(0) for _ in range(world)]
        self.alive = set(range(world))
        self.error = None
        self.given = {}
        self.done = {}  # group and rank -> its collectives so far
        self.idle = 0  # turns since something has happened

    def next_turn(self, rank):
        """Hand over to the next rank, and wait for this one's turn."""
        self.idle += 1
        if self.idle > 2 * len(self.ready) + 2:
            self.error = self.error or RuntimeError(f"ranks wait for one another: {list(self.given)}")
        after = min(self.alive - {rank}, key=lambda r: (r - rank) % len(self.ready), default=None)
        if after is None:
            return
        self.ready[after].release()
        if rank in self.alive:
            self.ready[rank].acquire()
        if self.error is not None:
            raise _Ended

    def exchange(self, group, rank, value):
        """The values of all ranks of a group, by their order in it."""
        ranks = [int(x) for x in group.split("-")]
        number = self.done[group, rank] = self.done.get((group, rank), 0) + 1
        given = self.given.setdefault((group, number), {})
        given[rank] = value
        self.idle = 0
        while len(given) < len(ranks):
            self.next_turn(rank)
        self.idle = 0
        self.given.pop((group, number), None)
        return [given[r] for r in ranks], ranks.index(rank)


class _Ended(Exception):
    """Another rank has failed."""


class _Collectives:
    """The functional collectives of torch, as far as funrl uses them."""

    @staticmethod
    def _of(x, group):
        x = x.clone() if isinstance(x, torch.Tensor) else [part.clone() for part in x]  # it may be written to later
        return _own.turns.exchange(group, _own.rank, x)

    def wait_tensor(self, x):
        return x

    def all_reduce(self, x, op, group):
        values, _ = self._of(x, group)
        return functools.reduce(torch.maximum if op == "max" else torch.add, values[::-1]).clone()

    def all_gather_into_tensor(self, x, size, group):
        return torch.cat(self._of(x, group)[0])

    def reduce_scatter_tensor(self, x, op, size, group):
        values, place = self._of(x, group)
        return functools.reduce(torch.add, [value.chunk(size)[place] for value in values][::-1])

    def all_to_all_single(self, x, receive, send, group):
        values, place = self._of(x.split(send), group)
        return torch.cat([parts[place] for parts in values])


def run_ranks(program, sizes):
    """Results of `program(mesh)` on every rank of a mesh, by rank."""
    world = Mesh(dict(sizes)).world
    if world == 1:
        return [program(Mesh(dict(sizes)))]
    turns = _Turns(world)
    results = [None] * world
    groups = [{} for _ in range(world)]
    for axes in combinations(sizes):
        for ranks in members(sizes, axes):
            for rank in ranks:
                groups[rank][axes] = "-".join(map(str, ranks))

    threads = torch.get_num_threads()

    def run(rank):
        turns.ready[rank].acquire()
        torch.set_num_threads(threads)
        _own.rank, _own.turns = rank, turns
        try:
            if turns.error is None:
                results[rank] = program(Mesh(dict(sizes), rank, groups=groups[rank]))
        except _Ended:
            pass
        except BaseException as error:
            turns.error = turns.error or error
        turns.alive.discard(rank)
        turns.idle = 0
        with contextlib.suppress(_Ended):
            turns.next_turn(rank)

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    with (
        mock.patch.object(collectives, "_c10d", _Collectives()),
        mock.patch.object(collectives, "groups_messages", lambda: False),
    ):
        for thread in ranks:
            thread.start()
        turns.ready[0].release()
        for thread in ranks:
            thread.join()
    if turns.error is not None:
        raise turns.error
    return results
