"""Weights that go from ranks to others while both sides go on."""

import functools
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from funrl.mesh import patches, rules
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import WorkerError, launch, submesh
from funrl.mesh.mesh import parse
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
        assert receiver.arrived() is None and store.add(transfer._key(0, "ended"), 1) == ranks + 1
    newest = receiver.arrived()
    assert newest is not None and newest.versions == {"": 5}
    receiver.release()
    assert receiver.arrived() is None


SPLIT = {"w": Layout((64, 24), (("data",), ()), (2, 1, 1, 1)), "norm": Layout((24,), ((),), (2, 1, 1, 1))}
ENGINE = {"w": Layout((64, 24), ((), ("tensor",)), (2, 1, 1, 2)), "norm": Layout((24,), ((),), (2, 1, 1, 2))}
KINDS = {"w": torch.bfloat16, "norm": torch.float32}


def weights_of(version):
    """Whole weights, of which each version changes a few numbers; the seventh changes all of them."""
    generator = torch.Generator().manual_seed(0)
    whole = {"w": torch.randn(64, 24, generator=generator).bfloat16(), "norm": torch.randn(24, generator=generator)}
    for number in range(1, version + 1):
        places = torch.randint(64 * 24, (20,), generator=generator)
        whole["w"].view(-1)[places] *= 1.5
        whole["norm"][number % 24] += 1
        if number == 7:
            whole["w"] *= 2
    return whole


def damaged(encode, new, old):
    """A patch whose last number has a wrong bit."""
    patch = encode(new, old)
    patch[-1] ^= 1
    return patch


def patched(versions, fault, version_of_fault, world):
    """What arrives of some versions, and what the trainer ranks counted of each.

    Args:
      fault: "lost": the patch from rank 0 has a wrong bit, "always": and each later one; "stale": rank 2 has older
        weights; "": none.
      version_of_fault: version that comes with it.
    """
    training = submesh(world, parse("dp2"), range(2))
    generating = submesh(world, parse("dp2,tp2"), range(2, 6))
    to_engine = plan(SPLIT, ENGINE, KINDS, 2, src_ranks=training.ranks, dst_ranks=generating.ranks)
    group = transfer_group(world)
    if training.here:
        sender = WeightSender(training, 4, group, patches=True)
        counts = []
        for version in range(versions):
            own = rules.shard(weights_of(version), SPLIT, training)
            with pytest.MonkeyPatch.context() as patch:
                faulty = {"lost": [version_of_fault], "always": range(version_of_fault, versions)}
                if version in faulty.get(fault, ()) and world.rank == 0:
                    patch.setattr(patches, "encode_patch", functools.partial(damaged, patches.encode_patch))
                sender.begin({"": SentWeights(own, to_engine, version)})
                sender.wait()
            counts.append((sender.policy, sender._resent, sender.remark))
            sender.remark = ""
        return counts
    held = {}
    form = WeightForm(to_engine, lambda tree: tree, lambda: held.get("tree"))
    receiver = WeightReceiver(generating, form, form, group)
    with receiver.receiving():
        for version in range(versions):
            newest = awaited(receiver.arrived, f"version {version}")
            assert newest.versions == {"": version}
            if (fault, version, world.rank) != ("stale", version_of_fault - 1, 2):
                held["tree"] = newest.trees[""]
            expected = rules.shard(weights_of(version), ENGINE, generating)
            for name, x in newest.trees[""].items():
                assert x.dtype == KINDS[name] and torch.equal(x, expected[name]), (version, name)
            receiver.release()
    return None


@pytest.mark.parametrize("fault", ["", "lost", "stale"])
def test_ten_versions_arrive_by_patches_with_the_bits_of_whole_weights(fault):
    def program(world):
        return gather_objects(patched(10, fault, 4, world), world)

    counts, same, *_ = launch(program, parse("dp6"), "cpu")
    assert counts == same
    whole = 2 * (64 * 24 * 2 + 24 * 4)  # by two replicas; half of it is relayed between them
    assert counts[0] == ({}, 0, "")
    assert not any(remark for _, _, remark in counts)
    for version, (policy, resent, _) in enumerate(counts[1:], 1):
        assert resent == (fault != "" and version >= 4)
        if version == 7:
            assert policy["sync/changed_share"] > 0.9 and policy["sync/sent_bytes"] >= whole / 2
        elif fault and version == 4:
            assert policy["sync/sent_bytes"] > whole / 2
        else:
            assert 0 < policy["sync/changed_share"] < 0.02 and policy["sync/sent_bytes"] < whole / 4


def test_after_two_lost_patches_in_a_row_none_are_sent():
    counts = launch(functools.partial(patched, 10, "always", 4), parse("dp6"), "cpu")
    assert [resent for _, resent, _ in counts] == [0] * 4 + [1] + [2] * 5
    assert [not policy for policy, _, _ in counts] == [True] + [False] * 5 + [True] * 4
    (said,) = (version for version, (_, _, remark) in enumerate(counts) if remark)
    assert said == 5 and "2 patches of weights in a row" in counts[5][2]


def test_a_tensor_too_long_for_indices_is_sent_whole(monkeypatch):
    old = torch.zeros(100, dtype=torch.bfloat16)
    new = old.clone()
    new[99] = 1
    short = patches.encode_patch(new, old)
    monkeypatch.setattr(patches, "INDEXED", 100)
    whole = patches.encode_patch(new, old)
    assert len(short) < len(whole) and len(whole) == patches.HEADER + new.nbytes
    for patch in (short, whole):
        patched, intact = patches.apply_patch(old, patch)
        assert intact and torch.equal(patched, new)
