"""Products by group against one product a row: values, gradients, empty groups, rows of no group, compilation."""

import pytest
import torch

import funrl.models.compiling.compiled_layer  # noqa: F401  # tells torch.compile what is constant
from funrl.compiled_kernels import grouped_linear as kernel
from funrl.compiled_kernels.grouped_linear import grouped_linear

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.1}


def problem(dtype, counts=(2, 0, 7, 1, 2), rows=15, shape=(24, 16)):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, shape[1], generator=generator).to(dtype).requires_grad_()
    w = torch.randn(len(counts), *shape, generator=generator).to(dtype).requires_grad_()
    g = torch.randn(rows, shape[0], generator=generator).to(dtype)
    counts = torch.tensor(counts)
    group = torch.arange(len(counts)).repeat_interleave(counts)
    tail = torch.zeros(rows - len(group), shape[0], dtype=dtype)
    expected = torch.cat([torch.einsum("rk,rnk->rn", x[: len(group)], w[group]), tail])
    return x, w, counts.cumsum(0).int(), g, expected


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(24, 16), (7, 5)], ids=["aligned", "odd"])
def test_values_and_gradients(dtype, shape):
    x, w, ends, g, expected = problem(dtype, shape=shape)
    wanted = torch.autograd.grad(expected, (x, w), g)
    for function in (grouped_linear, torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)):
        got = function(x, w, ends)
        grads = torch.autograd.grad(got, (x, w), g)
        for a, b in zip((got, *grads), (expected, *wanted), strict=True):
            assert (a - b).abs().max() < TOLERANCE[dtype]
        assert not got[12:].any() and not grads[0][12:].any() and not grads[1][1].any()


@pytest.mark.parametrize("counts,rows", [((0, 0), 3), ((0, 0), 0), ((4, 0), 4)])
def test_no_rows_are_fine(counts, rows):
    x, w, ends, g, expected = problem(torch.float32, counts, rows)
    assert torch.allclose(grouped_linear(x, w, ends), expected, atol=1e-5)
    assert all(not x.isnan().any() for x in torch.autograd.grad(grouped_linear(x, w, ends), (x, w), g))


def test_torchs_operator_and_the_loop_agree(monkeypatch):
    x, w, ends, _, _ = problem(torch.float32)
    first = grouped_linear(x, w, ends)
    monkeypatch.setattr(kernel, "_OWN_DTYPES", {})
    assert (grouped_linear(x, w, ends) - first).abs().max() < 1e-5
