"""Some ranks of a run as all processes there are: groups that only they make, beside those of the run."""

import pytest
import torch
import torch.distributed as dist

from funrl.mesh.launch import launch, submesh, unbound
from funrl.mesh.mesh import parse, single
from funrl.mesh.own_world import as_whole_world


def summed(number, group=None):
    x = torch.tensor([number])
    dist.all_reduce(x, group=group)
    return x.item()


def apart(mesh):
    """What a rank sees: in its pool, of a group that was made there, and of the run's groups after it."""
    pools = [submesh(mesh, parse("dp1"), [0]), submesh(mesh, parse("tp2"), [1, 2])]
    own = next(pool for pool in pools if pool.here)
    before = dist.group.WORLD
    with as_whole_world(own):
        seen = dist.get_world_size(), dist.get_rank()
        inner = [dist.new_group(list(range(own.world))) for _ in range(own.world)]  # other ranks make other numbers
        within = summed(10 + mesh.rank)
    assert dist.group.WORLD is before
    after = dist.new_group([0, 2])  # as every rank of the run makes it
    return seen, within, summed(mesh.rank, inner[0]), summed(mesh.rank), None if mesh.rank == 1 else summed(5, after)


@pytest.mark.gloo
def test_ranks_of_a_pool_make_groups_alone_and_the_runs_groups_stay():
    def program(mesh):
        seen = apart(mesh)
        everyone = [None] * 3
        dist.all_gather_object(everyone, seen)
        return everyone

    assert launch(program, parse("dp3"), "cpu") == [
        ((1, 0), 10, 0, 3, 10),
        ((2, 0), 23, 3, 3, None),
        ((2, 1), 23, 3, 3, 10),
    ]


@pytest.mark.gloo
def test_a_pool_of_one_rank_makes_its_group_while_the_run_is_bound_to_no_device():
    """NCCL would split the run's communicator, which all of its ranks have to call."""
    new_group, bound = dist.new_group, []

    def watched(*args, **options):
        bound.append(dist.group.WORLD.bound_device_id)
        with unbound(dist.group.WORLD):
            return new_group(*args, **options)

    def program(mesh):
        pools = [submesh(mesh, parse("dp1"), [0]), submesh(mesh, parse("dp1"), [1])]
        own = next(pool for pool in pools if pool.here)
        world, dist.new_group = dist.group.WORLD, watched
        world.bound_device_id = device = torch.device("cuda", mesh.rank)
        with as_whole_world(own):
            pass
        after, world.bound_device_id = world.bound_device_id, None
        return bound, after == device

    assert launch(program, parse("dp2"), "cpu") == ([None], True)


@pytest.mark.gloo
def test_all_ranks_of_a_run_are_its_world():
    def program(mesh):
        world = dist.group.WORLD
        with as_whole_world(mesh):
            return dist.group.WORLD is world

    assert launch(program, parse("dp2"), "cpu")


def test_a_process_alone_has_no_groups():
    with as_whole_world(single()):
        assert not dist.is_initialized()
