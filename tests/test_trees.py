"""Names of leaves, and trees that are filled by name."""

from typing import NamedTuple

import pytest
import torch

from funrl import trees


class Moments(NamedTuple):
    count: object
    mu: object


def nested():
    weights = {"layers": ({"q": torch.ones(2), "norm": None}, {"q": torch.ones(3)})}
    return {"adam": Moments(torch.zeros(()), weights), "clip": ()}


NAMES = ["adam/count", "adam/mu/layers/0/q", "adam/mu/layers/1/q"]


def test_names_are_keys_fields_and_positions():
    assert [name for name, _ in trees.named(nested())] == NAMES
    assert [x.shape for _, x in trees.named(nested())] == [x.shape for x in trees.leaves(nested())]
    assert trees.named(torch.ones(1)) == [("", torch.ones(1))]


def test_a_function_of_names_and_of_subtrees_of_deeper_trees():
    axes = {"w": ("heads", "embed"), "norm": ("norm",)}
    got = trees.map_named(lambda name, x, axis: (name, x, axis), {"w": 1, "norm": 2}, axes)
    assert got == {"w": ("w", 1, ("heads", "embed")), "norm": ("norm", 2, ("norm",))}
    with pytest.raises(ValueError, match="norm"):
        trees.map_named(lambda name, x, axis: x, {"w": 1, "norm": 2}, {"w": ("heads",)})


@pytest.mark.slow
def test_names_in_a_compiled_function():
    def double_of_one(tree):
        return trees.map_named(lambda name, x: 2 * x if name == NAMES[2] else x, tree)

    got = torch.compile(double_of_one, fullgraph=True, backend="eager")(nested())
    assert [x.sum().item() for x in trees.leaves(got)] == [0, 2, 6]


def test_filled_by_name():
    values = [(name, i) for i, name in reversed(list(enumerate(NAMES)))]
    assert trees.named(trees.from_named(nested(), values)) == list(zip(NAMES, range(3), strict=True))
    with pytest.raises(KeyError, match=r"missing \['adam/count'\], unknown \['x'\], given twice \['x'\]"):
        trees.from_named(nested(), [*values[:2], ("x", 1), ("x", 2)])


class HalfUsed(torch.autograd.Function):
    """The product of two tensors, without a gradient for the second: as of a compiled graph that detaches it."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return (x * scale).sum()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.saved_tensors[0], None


def test_leaves_without_a_gradient_are_not_watched_and_get_zeros():
    seen = {}
    params = {"a": torch.ones(2), "scale": torch.full((2,), 3.0), "unused": torch.ones(1)}
    derivative = trees.value_and_grad(lambda tree: (HalfUsed.apply(tree["a"], tree["scale"]), ()), seen.__setitem__)
    (value, _), grads = derivative(params)
    assert value == 6 and [x.tolist() for x in trees.leaves(grads)] == [[3, 3], [0, 0], [0]]
    assert {i: x.tolist() for i, x in seen.items()} == {0: [3, 3]}
