"""Products by group against one product a row: values, gradients, empty groups, rows of no group, compilation."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class OperatorNames(TorchDispatchMode):
    """Names of the operators that are no views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return out


def test_no_weight_is_copied_on_another_device_than_a_cpu():
    x, w = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((15, 16), (5, 24, 16)))
    ends = torch.empty(5, dtype=torch.int32, device="meta")
    halves = torch.empty(5, 48, 16, device="meta", requires_grad=True)
    for weight in (w, halves[:, 24:]):
        with OperatorNames() as watched:
            out = grouped_linear(x, weight, ends)
            torch.autograd.grad(out, (x, weight), torch.empty_like(out))
        assert watched.names == ["grouped_linear", "empty_like", "grouped_linear", "grouped_weight"]


def test_torchs_operator_takes_matrices_as_they_lie(monkeypatch):
    """Of a GPU, whose checks of strides a device without numbers makes too; rows at odd steps are copied."""
    monkeypatch.setattr(kernel, "_OWN_DTYPES", {"meta": (torch.bfloat16,)})
    monkeypatch.setattr(kernel, "_zero_tail_", lambda out, ends: None)
    shapes = (32, 16), (32, 24), (5, 24, 16), (5, 48, 16), (5, 24, 20)
    x, grad, w, both, wide = (torch.empty(*shape, device="meta", dtype=torch.bfloat16) for shape in shapes)
    ends = torch.empty(5, dtype=torch.int32, device="meta")
    for weight in (w, both[:, :24], both[:, 24:], wide[:, :, :16]):
        with OperatorNames() as watched:
            assert kernel._products.function(x, weight, ends).shape == grad.shape
            assert kernel._products.function(grad, weight.transpose(1, 2), ends).shape == x.shape
            assert kernel._weight_gradient.function(grad, x, ends).shape == weight.shape
        copies = ["clone"] * 2 * (weight.stride(1) == 20)
        assert sorted(watched.names) == ["_grouped_mm"] * 3 + copies


@pytest.mark.parametrize("runs", [True, False])
def test_only_rows_of_no_group_are_zeroed_on_a_gpu(monkeypatch, runs):
    """By the kernel where it runs; else by a pass over all rows."""
    zeroed = []
    module = SimpleNamespace(launch_zero_tail=lambda out, ends: zeroed.append((out.shape, ends)))
    monkeypatch.setitem(sys.modules, "funrl.compiled_kernels.gpu_kernels.tail_kernel", module)
    monkeypatch.setattr(kernel, "kernels_run", lambda trial: runs)
    out, ends = torch.empty(32, 16, device="meta"), torch.empty(5, dtype=torch.int32, device="meta")
    with OperatorNames() as watched:
        kernel._zero_tail_(out, ends)
    assert len(zeroed) == runs and watched.names == [] if runs else watched.names[-1] == "masked_fill_"
