"""Process groups of a mesh: how many calls make them, and who makes them."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from funrl.mesh import launch as launching
from funrl.mesh.mesh import parse


@pytest.fixture
def a_rank_of_4096():
    """One rank of a run whose other ranks do not exist."""
    dist.init_process_group("fake", rank=777, world_size=4096, store=FakeStore())
    yield 777
    dist.destroy_process_group()


def test_a_group_has_no_communicator_before_its_first_collective(a_rank_of_4096, monkeypatch):
    everyone, device = dist.group.WORLD, torch.device("cuda:1")
    everyone.bound_device_id = device
    bound, make = [], dist.new_group

    def new_group(ranks, **keywords):
        bound.append(everyone.bound_device_id)  # with a device torch splits off a communicator at once
        return make(ranks, **keywords)

    monkeypatch.setattr(dist, "new_group", new_group)
    names = launching.groups(parse("dp512,tp8"))
    assert bound == [None] * (8 + 512)
    assert everyone.bound_device_id == device
    assert names["data", "tensor"] == everyone.group_name, "all processes have the communicator of the rendezvous"
    assert launching.groups(parse("dp512,tp8")) == names, "they are made once"


def test_groups_of_the_same_ranks_are_made_once(a_rank_of_4096, monkeypatch):
    calls = []
    made = dist.new_group

    def new_group(ranks, **keywords):
        calls.append(ranks)
        return made(ranks, **keywords)

    monkeypatch.setattr(dist, "new_group", new_group)
    names = launching.groups(parse("dp512,tp8"))
    assert launching.groups(parse("dp512,ep1,tp8")) == names
    assert calls == [
        *([*range(first, 4096, 8)] for first in range(8)),
        *([*range(k, k + 8)] for k in range(0, 4096, 8)),
    ]
    assert launching.groups(parse("ep512,tp8"))["tensor",] == names["tensor",]
    assert len(calls) == 8 + 512
