"""Programs of functions, and the errors of functions that cannot be lowered."""

import pytest

pytest.importorskip("jax")
import torch
from single_device import program_of
from torch import Tensor

from funrl import trees
from funrl.xla.errors import XlaError
from funrl.xla.trace import operators_of, trace_program

pytestmark = pytest.mark.xla


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def step(params: trees.Tree, x: Tensor):
    """A loss with its gradient, a result that is written in place, and a part of an argument."""

    def loss(params):
        return torch.nn.functional.rms_norm(x @ params["z"] + params["a"], (4,)).exp().sum(), x[0]

    (value, first), grads = trees.value_and_grad(loss)(params)
    written = torch.zeros_like(x)
    written[:, 1:] = x[:, 1:]
    return {"written": written.add_(1), "grads": grads, "value": value, "first": first}


def test_a_program_is_its_function():
    params, x = {"z": draw(4, 4), "a": draw(4)}, draw(3, 4)  # dicts whose keys are not sorted
    program = program_of(step)
    for scale in (1.0, 0.5):
        want, made = step(params, x * scale), program(params, x * scale)
        assert [name for name, _ in trees.named(made)] == [name for name, _ in trees.named(want)]
        for got, expected in zip(trees.leaves(made), trees.leaves(want), strict=True):
            assert got.dtype == torch.float64 and (got - expected).abs().max() < 1e-14
    assert len(program.compiled) == 1  # numbers are no part of a program
    program(params, draw(5, 4))
    assert len(program.compiled) == 2


def test_arguments_are_not_written():
    def doubled(x):
        return x.mul_(2)

    x = draw(3)
    before = x.clone()
    assert torch.equal(program_of(lambda x: doubled(x.clone()))(x), before * 2) and torch.equal(x, before)


def noise(x):
    return x + torch.randn(3, 4)


def chosen(x):
    return x[x > 0]


def read(x):
    return x * float(x.sum())


@pytest.mark.parametrize(
    "fn,says",
    [
        (noise, r"noise: aten.randn.default has no row .*random numbers are arguments.*line \d+, in noise"),
        (chosen, r"chosen: a shape depends on numbers, by aten.nonzero.default.*line \d+, in chosen"),
        (read, r"read: the host reads a number .*_local_scalar_dense.default.*line \d+, in read"),
    ],
    ids=["no row", "shape", "host"],
)
def test_what_cannot_be_lowered_is_named(fn, says):
    with pytest.raises(XlaError, match=says):
        trace_program(fn, draw(3, 4))


def test_the_numbers_of_the_host_are_constant():
    program = trace_program(lambda x: x * len(x.shape), draw(3, 4))
    assert [name for _, name in operators_of(program.graph)] == ["aten.mul"]
