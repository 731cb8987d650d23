"""Every collective on simulated ranks (a shift on real ones) against plain tensor arithmetic, forward and backward."""

import pytest
import torch

from funrl.mesh import collectives as c
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse, single
from funrl.mesh.simulate import gather, per_rank, simulate

WORLD = 8


def inputs(shape=(4, 6)):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(WORLD, *shape, dtype=torch.float64, generator=generator)


def run(fn, x, cotangent):
    """Forward values and gradients of all ranks of dp4,tp2 for fn over the axis named."""
    with simulate("dp4,tp2") as mesh:
        local = per_rank(WORLD, lambda r: x[r]).requires_grad_()
        y = fn(local, mesh)
        seed = per_rank(WORLD, lambda r: cotangent(r))
        (grad,) = torch.autograd.grad(y, local, seed)
        return [gather(y, r).detach() for r in range(WORLD)], [gather(grad, r) for r in range(WORLD)]


def group(rank, axis):
    """Ranks of the group of `rank` over `axis` on dp4,tp2, in order."""
    return [rank % 2 + 2 * d for d in range(4)] if axis == "data" else [rank // 2 * 2, rank // 2 * 2 + 1]


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_psum_and_pbroadcast_are_duals(axis):
    x, ct = inputs(), inputs().flip(0)
    y, g = run(lambda v, m: c.psum(v, m, axis), x, lambda r: ct[r])
    z, h = run(lambda v, m: c.pbroadcast(v, m, axis), x, lambda r: ct[r])
    for r in range(WORLD):
        torch.testing.assert_close(y[r], x[group(r, axis)].sum(0))
        torch.testing.assert_close(g[r], ct[r])
        torch.testing.assert_close(z[r], x[r])
        torch.testing.assert_close(h[r], ct[group(r, axis)].sum(0))


@pytest.mark.parametrize("axis,dim", [("data", 0), ("tensor", 1)])
def test_all_gather_and_psum_scatter_are_duals(axis, dim):
    x = inputs()
    n = len(group(0, axis))
    whole = torch.randn(WORLD, *[s * (n if d == dim else 1) for d, s in enumerate((4, 6))], dtype=torch.float64)
    y, g = run(lambda v, m: c.all_gather(v, m, axis, dim), x, lambda r: whole[r])
    z, h = run(lambda v, m: c.psum_scatter(v, m, axis, dim), whole, lambda r: x[r])
    for r in range(WORLD):
        ranks, at = group(r, axis), group(r, axis).index(r)
        gathered, scattered = torch.cat(list(x[ranks]), dim), whole[ranks].sum(0).chunk(n, dim)[at]
        torch.testing.assert_close(y[r], gathered)
        torch.testing.assert_close(g[r], scattered)
        torch.testing.assert_close(z[r], scattered)
        torch.testing.assert_close(h[r], gathered)


@pytest.mark.parametrize("axis,dim", [("data", 0), ("tensor", 1)])
def test_own_shard_and_gather_replicated_are_duals(axis, dim):
    x, n = inputs(), len(group(0, axis))
    part = torch.randn(WORLD, *[s // (n if d == dim else 1) for d, s in enumerate((4, 6))], dtype=torch.float64)
    y, g = run(lambda v, m: c.own_shard(v, m, axis, dim), x, lambda r: part[r])
    z, h = run(lambda v, m: c.gather_replicated(v, m, axis, dim), part, lambda r: x[r])
    for r in range(WORLD):
        ranks, at = group(r, axis), group(r, axis).index(r)
        torch.testing.assert_close(y[r], x[r].chunk(n, dim)[at])
        torch.testing.assert_close(g[r], torch.cat(list(part[ranks]), dim))
        torch.testing.assert_close(z[r], torch.cat(list(part[ranks]), dim))
        torch.testing.assert_close(h[r], x[r].chunk(n, dim)[at])


def test_all_to_all_moves_the_split_and_its_gradient_moves_back():
    x = inputs((4, 8))
    y, g = run(lambda v, m: c.all_to_all(v, m, "data", 0, 1), x, lambda r: torch.cat(list(inputs((1, 32))[r].chunk(1))))
    for r in range(WORLD):
        ranks, at = group(r, "data"), group(r, "data").index(r)
        torch.testing.assert_close(y[r], torch.cat([x[q].chunk(4, 0)[at] for q in ranks], 1))
        ct = inputs((1, 32))
        torch.testing.assert_close(g[r], torch.cat([ct[q].chunk(4, 1)[at] for q in ranks], 0))


def test_pmax_over_both_axes():
    x = inputs()
    with simulate("dp4,tp2") as mesh:
        y = c.pmax(per_rank(WORLD, lambda r: x[r]), mesh, ("data", "tensor"))
        values = [gather(y, r) for r in range(WORLD)]
    assert all(torch.equal(v, x.amax(0)) for v in values)


ODD_NUMBERS = [torch.nan, torch.inf, -torch.inf, -0.0, 1e-30, -3.5, 65504.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_maximum_of_ranks_is_that_of_one_tensor_and_keeps_each_nan(dtype):
    x = torch.tensor(ODD_NUMBERS, dtype=dtype)
    both = torch.cartesian_prod(x, x).T  # every number on the one rank beside every number on the other
    with simulate("dp2") as mesh:
        y = c.pmax(per_rank(2, lambda r: both[r]), mesh, "data")
        values = [gather(y, r) for r in range(2)]
    for value in values:
        torch.testing.assert_close(value, both.amax(0), rtol=0, atol=0, equal_nan=True)


def test_the_maximum_of_whole_numbers_is_theirs():
    x = torch.tensor([[3, -7], [-(2**62) - 1, 2**62 + 1]])
    with simulate("dp2") as mesh:
        y = c.pmax(per_rank(2, lambda r: x[r]), mesh, "data")
        assert gather(y, 0).tolist() == [3, 2**62 + 1]


@pytest.mark.gloo
def test_real_ranks_keep_a_nan_that_is_on_any_of_them():
    """Gloo's own maximum has it or not by the order of the ranks."""

    def program(mesh):
        x = torch.arange(3.0) + 10 * mesh.rank
        x[mesh.rank] = torch.nan
        return c.gather_objects(str(c.pmax(torch.cat([x, x.new_tensor([mesh.rank])]), mesh, "data").tolist()), mesh)

    assert launch(program, parse("dp3"), "cpu") == ["[nan, nan, nan, 2.0]"] * 3


def test_size_one_is_the_identity():
    x, mesh = torch.randn(3, 2), single()
    for fn in (c.psum, c.pbroadcast, c.pmax, c.all_gather, c.psum_scatter, c.own_shard, c.gather_replicated):
        assert fn(x, mesh, "tensor") is x
    assert c.all_to_all(x, mesh, "data", 0, 1) is x


def test_an_operator_in_the_simulator_is_that_of_each_rank():
    """In place, on views, with several results; and ranks draw the same numbers."""

    def compute(x):
        top, bottom = x.mul_(2).view(2, 3).unbind()
        return [*torch.where(top > 12, top, -bottom).sort(descending=True), x]

    with simulate("dp2"):
        result = compute(per_rank(2, lambda r: torch.arange(6.0) + 5 * r))
        drawn = torch.rand(3)
        ranks = [[gather(y, r) for y in (*result, drawn)] for r in range(2)]
    for r, (*got, _) in enumerate(ranks):
        assert all(map(torch.equal, got, compute(torch.arange(6.0) + 5 * r)))
    assert torch.equal(ranks[0][-1], ranks[1][-1])


@pytest.mark.gloo
def test_a_shift_comes_from_the_rank_before():
    """On three ranks, where the rank before is not the one behind."""

    def program(mesh):
        shifted = c.wait(c.start_shift(torch.full((2, 3), float(mesh.rank)), mesh, "sequence"))
        return c.gather_objects(shifted.tolist(), mesh)

    assert launch(program, parse("sp3"), "cpu") == [[float(before)] * 6 for before in (2, 0, 1)]


def test_simulated_ranks_have_sizes_of_their_own():
    with simulate("tp2"):
        x = per_rank(2, lambda rank: torch.arange(3.0 + rank))
        row = (2 * x).view(1, x.shape[0])
        gathers = [gather(row, rank) for rank in range(2)]
    assert [out.tolist() for out in gathers] == [[[0, 2, 4]], [[0, 2, 4, 6]]]
