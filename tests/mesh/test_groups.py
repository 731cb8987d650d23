"""Process groups of a mesh: how many calls make them, and who makes them."""

import itertools
from types import SimpleNamespace

import pytest
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


def test_one_call_splits_all_groups_over_an_axis(a_rank_of_4096, monkeypatch):
    calls = []

    def split_group(split_ranks, timeout):
        calls.append(split_ranks)
        return SimpleNamespace(group_name=f"group {len(calls)}")

    monkeypatch.setattr(launching, "_splits", lambda everyone: True)
    monkeypatch.setattr(dist, "split_group", split_group)
    names = launching.groups(parse("dp512,tp8"))
    assert names == launching.groups(parse("dp512,tp8")), "they are made once"
    assert [len(call) for call in calls] == [8, 512]
    assert all(sorted(itertools.chain(*call)) == list(range(4096)) for call in calls)
    assert list(names.values()) == ["group 1", "group 2", dist.group.WORLD.group_name]


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
