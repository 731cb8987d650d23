"""What every public transformation has in common: one table, the same properties for each row."""

import inspect

import pytest
import torch
from optim_rows import AXES, NAMES, ROWS, SHAPES, Where, draw
from torch.fx.experimental.proxy_tensor import make_fx

from funrl import optim, trees
from funrl.mesh import mesh as meshes
from funrl.mesh.rules import layouts
from funrl.mesh.simulate import gather, scatter, simulate

RULES = {
    "heads": "tensor",
    "vocab": "tensor",
    "mlp": "tensor",
    "embed": "data",
    "head": None,
    "norm": None,
}
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def run(step, params, grads, state=None):
    """The parameters and the state after a step for each gradient."""
    state = step.init(params) if state is None else state
    for g in grads:
        updates, state = step.update(trees.clone(g), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def draws(*seeds, dtype=torch.float64):
    return [draw(seed, dtype) for seed in seeds]


def assert_same(a, b, tolerance=1e-12):
    for (name, x), (other, y) in zip(trees.named(a), trees.named(b), strict=True):
        assert name == other
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def test_every_public_transformation_has_a_row():
    public = {
        name
        for name in optim.__all__
        if inspect.isfunction(getattr(optim, name))
        and inspect.signature(getattr(optim, name)).return_annotation == "Transformation"
    }
    assert public == {name.split(" ")[0] for name in ROWS}


@every_row
def test_every_leaf_of_the_state_has_a_name_that_stays(row):
    before = row.make(Where()).init(draw(0))
    _, after = run(row.make(Where()), draw(0), draws(1, 2))
    assert [name for name, _ in trees.named(before)] == [name for name, _ in trees.named(after)] == row.state
    assert all(x.shape == y.shape for x, y in zip(trees.leaves(before), trees.leaves(after), strict=True))


@every_row
def test_every_leaf_of_the_state_has_a_layout(row):
    lay = layouts(SHAPES, AXES, RULES, meshes.parse("dp2,tp2"))
    whole, local = (row.make(Where()).init(x) for x in (draw(0), _local(lay)))
    result = optim.layouts_of(local, lay)
    for (name, its), x, y in zip(trees.named(result), trees.leaves(whole), trees.leaves(local), strict=True):
        assert (its.shape, its.local_shape(3)) == (x.shape, y.shape), name
    assert [name for name, _ in trees.named(result)] == row.state


def _local(lay):
    return trees.map(lambda its: torch.empty(its.local_shape(), device="meta"), lay)


@every_row
def test_shards_make_the_steps_of_the_whole(row):
    start, grads = draw(0), draws(1, 2)
    lay = layouts(SHAPES, AXES, RULES, meshes.parse("dp2,tp2"))
    expected, expected_state = run(row.make(Where()), start, grads)
    with simulate("dp2,tp2") as m:
        got = run(row.make(Where(lay, m)), scatter(start, lay), [scatter(g, lay) for g in grads])
        ranks = [gather(got, rank) for rank in range(m.world)]
    state_lay = optim.layouts_of(expected_state, lay)
    for rank, (params, state) in enumerate(ranks):
        assert_same(params, _own(expected, lay, rank))
        assert_same(state, _own(expected_state, state_lay, rank))


def _own(tree, lay, rank):
    return trees.map(lambda x, its: x[tuple(slice(low, high) for low, high in its.box(rank))], tree, lay)


@every_row
def test_a_state_that_is_saved_by_name_continues(row):
    start, grads = draw(0), draws(1, 2, 3, 4)
    expected = run(row.make(Where()), start, grads)
    params, state = run(row.make(Where()), start, grads[:2])
    saved = {name: x.clone() for name, x in trees.named(state)}
    again = trees.from_named(row.make(Where()).init(draw(7)), saved.items())
    assert_same(run(row.make(Where()), params, grads[2:], again), expected, tolerance=0)


@every_row
def test_arguments_stay_as_they_are(row):
    step, params, grads = row.make(Where()), draw(0), draw(1)
    state = step.init(params)
    kept = (params,) if row.takes_over else (params, grads, state)
    before = trees.clone(kept)
    updates, _ = step.update(grads, state, params)
    assert_same(kept, before, tolerance=0)
    assert [name for name, _ in trees.named(updates)] == NAMES


@every_row
def test_a_lower_precision_is_near(row):
    """Parameters and gradients of bfloat16: updates are that or float32, and near those of float64."""
    params, grads = draws(0, 1, dtype=torch.bfloat16)
    low, expected = (
        row.make(Where()).update(trees.clone(g), row.make(Where()).init(p), p)[0]
        for p, g in ((params, grads), trees.cast((params, grads), torch.float64))
    )
    for (name, x), y in zip(trees.named(low), trees.leaves(expected), strict=True):
        assert x.dtype in (torch.bfloat16, torch.float32)
        assert (x - y).norm() <= 0.02 * y.norm(), name
    assert {x.dtype for x in trees.leaves(optim.apply_updates(params, low))} == {torch.bfloat16}


@every_row
def test_a_graph_of_it_makes_the_same_steps(row):
    """The update reads no number on the host: a graph that was traced with one gradient is right for another."""
    step, params, (first, second) = row.make(Where()), draw(0), draws(1, 2)
    state = step.init(params)
    graph = make_fx(lambda g, s, p: step.update(g, s, p))(trees.clone(first), trees.clone(state), params)
    assert_same(graph(trees.clone(second), trees.clone(state), params), step.update(second, state, params), tolerance=0)


DESCENDS = {name: row for name, row in ROWS.items() if row.descends}


@pytest.mark.parametrize("row", DESCENDS.values(), ids=DESCENDS)
def test_an_optimizer_goes_down(row):
    """On a parabola with its minimum at 1, where the gradient is the distance from it."""
    step, params = row.make(Where()), draw(0)
    distance = lambda p: trees.map(lambda x: x - 1, p)  # noqa: E731
    state, start = step.init(params), optim.global_norm(distance(params))
    for _ in range(150):
        updates, state = step.update(distance(params), state, params)
        params = optim.apply_updates(params, updates)
    assert optim.global_norm(distance(params)) < 0.2 * start
