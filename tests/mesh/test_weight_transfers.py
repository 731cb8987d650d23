"""Weights that go from ranks to others while both sides go on."""

import functools
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from funrl.mesh.launch import WorkerError, launch, submesh
from funrl.mesh.pools import transfer
from funrl.mesh.pools.transfer import (
    SentWeights,
    WeightDelivery,
    WeightForm,
    WeightReceiver,
    WeightSender,
    transfer_group,
)
from funrl.mesh.reshard import plan
from funrl.mesh.rules import Layout

pytestmark = pytest.mark.gloo
WHOLE = {"w": Layout((4, 3), ((), ()), (1, 1, 1, 1))}
DTYPES = torch.float32


def awaited(look, what):
    """The first result that is not None, within a minute."""
    for _ in range(6000):
        if (result := look()) is not None:
            return result
        time.sleep(0.01)
    raise AssertionError(f"{what} has not come")


def exchange(fails, versions, mesh):
    """The transfers that arrive on rank 1 and the weights of each, from rank 0, which changes its own meanwhile."""
    training, generating = (submesh(mesh, {**mesh.sizes, "data": 1}, [rank]) for rank in (0, 1))
    to_engine = plan(WHOLE, WHOLE, DTYPES, 2, src_ranks=training.ranks, dst_ranks=generating.ranks)
    group = transfer_group(mesh)
    if training.here:
        sender = WeightSender(training, 1, group)
        weights = {"w": torch.zeros(4, 3, dtype=torch.float64)}
        for version in range(versions):
            others = {f"further {number}": version + 10 * number for number in range(version)}
            further = {n: SentWeights({"w": weights["w"] - version + x}, to_engine, x) for n, x in others.items()}
            sender.begin({"": SentWeights(weights, to_engine, version), **further})
            weights["w"] += 1  # the copy is what is sent
        sender.wait()
        assert sender.sent_s > 0 and 0 <= sender.hidden_share <= 1
        return None

    def prepare(tree):
        if fails:
            raise MemoryError("no room")
        return tree

    further = WeightForm(to_engine, lambda tree: tree["w"].mean())
    receiver = WeightReceiver(generating, WeightForm(to_engine, prepare), further, group)
    arrived = []
    with receiver.receiving():
        for version in range(versions):
            newest = awaited(receiver.arrived, f"version {version}")
            policy = newest.trees.pop("")["w"]
            number = newest.versions.pop("")
            assert len(newest.trees) == version and newest.trees == newest.versions
            arrived.append((number, float(policy.mean()), policy.dtype))
            receiver.release()
    return arrived


@functools.cache
def arrivals(fails, versions):
    return launch(functools.partial(both, fails, versions), {"data": 2, "expert": 1, "sequence": 1, "tensor": 1}, "cpu")


def both(fails, versions, mesh):
    from funrl.mesh.collectives import gather_objects

    return next(x for x in gather_objects(exchange(fails, versions, mesh), mesh) if x is not None)


def test_each_version_arrives_as_it_was_when_its_transfer_began():
    assert arrivals(False, 3) == [(n, float(n), torch.float32) for n in range(3)]


def test_weights_that_cannot_be_taken_end_the_run():
    with pytest.raises(WorkerError, match="MemoryError: no room"):
        arrivals(True, 1)


def test_weights_are_taken_once_all_ranks_have_received_them(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(transfer, "run_store", lambda: store)
    receiver = WeightReceiver(cast(Any, SimpleNamespace(world=2)), cast(Any, None), cast(Any, None))
    assert receiver.arrived() is None
    receiver._next = 1
    receiver._arrived = WeightDelivery({"": 5}, {})
    for ranks in range(2):
        assert receiver.arrived() is None and store.add(transfer.ended_key(0), 1) == ranks + 1
    newest = receiver.arrived()
    assert newest is not None and newest.versions == {"": 5}
    receiver.release()
    assert receiver.arrived() is None
