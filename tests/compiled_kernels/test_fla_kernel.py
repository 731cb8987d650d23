"""The gated delta rule by flash-linear-attention: what it is given, what is compiled, and when it is used.

On a CPU a package of its name is in its place, which computes by torch what its function does.
"""

import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F

from funrl.compiled_kernels.delta_rule import fla_kernel as kernel
from funrl.compiled_kernels.delta_rule.gated_delta import gated_delta_rule_reference

PACKAGE = """
import threading
import torch
from funrl.compiled_kernels.delta_rule.gated_delta import gated_delta_rule

class Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return gated_delta_rule(*inputs)

    @staticmethod
    def backward(ctx, grad):  # in a thread, where autograd records operators: kernels of the package need none
        *inputs, segments = ctx.saved_tensors
        grads = []
        def run():
            leaves = [x.detach().requires_grad_() for x in inputs]
            grads.extend(torch.autograd.grad(gated_delta_rule(*leaves, segments), leaves, grad))
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return (*grads, None)

def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, cu_seqlens=None):
    tokens = v.shape[1]
    assert q.shape[0] == 1 and q.dtype == k.dtype == v.dtype and scale == 1.0
    assert cu_seqlens.dtype == torch.int64 and cu_seqlens[0] == 0 and cu_seqlens[-1] == tokens
    assert (cu_seqlens.diff() > 0).all()
    segments = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())[None]
    return FACTOR * Rule.apply(q, k, v, g, beta, segments), None
"""
OFFSETS = torch.tensor([0, 70, 70, 71, 90, 90], dtype=torch.int32)
T = 100  # the last ten are padding


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write the package, whose results have a factor, and look for it anew."""
    folder = tmp_path / "fla" / "ops"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        (place / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kernel, "_TRIED", "cpu")
    yield lambda factor: (folder / "gated_delta_rule.py").write_text(PACKAGE.replace("FACTOR * ", factor))
    kernel.fla_works.cache_clear()
    for name in [name for name in sys.modules if name == "fla" or name.startswith("fla.")]:
        del sys.modules[name]


def _inputs(dtype=torch.float64, device="cpu", head=8):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(1, T, *shape, generator=generator)

    unit = [F.normalize(normal(2, head), dim=-1) for _ in range(2)]
    inputs = *unit, normal(4, head), -F.softplus(normal(4)), normal(4).sigmoid()
    return [x.to(device, torch.float32 if i == 3 and dtype.itemsize == 2 else dtype) for i, x in enumerate(inputs)]


def _with_grads(rule, inputs, *rest):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = rule(*leaves, *rest)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out)
    return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, weight))]


def _expected(inputs):
    wide = [x.cpu().double() for x in inputs]
    return _with_grads(gated_delta_rule_reference, wide, kernel.packed_segments(OFFSETS, T))


@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_given_borders_of_sequences_that_have_tokens(compiled, package):
    package("")
    inputs = _inputs()
    rule = (
        torch.compile(kernel.fla_delta_rule, fullgraph=True, backend="aot_eager") if compiled else kernel.fla_delta_rule
    )
    for got, want in zip(_with_grads(rule, inputs, OFFSETS), _expected(inputs), strict=True):
        assert (got - want).abs().max() < 1e-10


@pytest.mark.parametrize("factor, works", [("", True), ("1.2 * ", False), ("missing * ", False)])
def test_it_is_used_where_a_trial_is_right(factor, works, package, caplog):
    package(factor)
    with torch.no_grad(), caplog.at_level("INFO"):
        assert kernel.fla_works() is works
    assert "flash-linear-attention" in caplog.text and ("is by" in caplog.text) is works


def test_a_cpu_does_not_import_it(package):
    package("")
    inputs = [x.bfloat16() for x in _inputs()]
    kernel.packed_delta_rule(*inputs, OFFSETS)
    assert "fla" not in sys.modules and kernel.fla_works.cache_info().currsize == 0


@pytest.mark.parametrize(
    "capability, triton, tilelang, refused",
    [
        ((9, 0), "3.6.0", False, True),
        ((9, 0), "3.7.0+git1", False, True),
        ((9, 0), "3.6.0", True, False),
        ((9, 0), "3.7.1", False, False),
        ((9, 0), "3.3.1", False, False),
        ((10, 0), "3.6.0", False, False),
    ],
)
def test_a_known_fault_needs_no_trial(capability, triton, tilelang, refused):
    assert (kernel.known_fault(capability, triton, tilelang) is not None) is refused


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("head", [64, 128])
def test_a_gpu_equals_the_loop_over_tokens(head):
    if (fault := kernel._fault_here()) is not None:
        pytest.skip(fault)
    assert kernel.fla_works()
    inputs = _inputs(torch.bfloat16, "cuda", head)
    got = _with_grads(kernel.packed_delta_rule, inputs, OFFSETS.cuda())
    for x, want in zip(got, _expected(inputs), strict=True):
        assert (x - want).abs().max() < 3e-2 * (1 + want.abs().max())
