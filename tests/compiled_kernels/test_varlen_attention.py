"""Variable-length attention against its plain reference: all segment structures, and all ways to run it."""

import functools
import importlib.util
import logging
import os
import subprocess
import sys
import types

import pytest
import torch
from packed_rows import draw, offsets_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from funrl.compiled_kernels import varlen_attention as kernels
from funrl.compiled_kernels.attention import attention
from funrl.compiled_kernels.flash_kernel import (
    Kernel,
    _torch_backward,
    _torch_forward,
    faster_attention,
    flash_kernel,
)
from funrl.compiled_kernels.varlen_attention import (
    SegmentBounds,
    bound_segments,
    planned_segments,
    segment_offsets,
    varlen_attention,
    varlen_attention_reference,
)
from funrl.mesh.simulate import gather, per_rank, simulate

pytestmark = pytest.mark.versions

STRUCTURES = {  # tokens of each segment, and padding behind them
    "one": ([23], 0),
    "one token each": ([1, 1, 1], 0),
    "uneven": ([7, 1, 12, 3], 0),
    "equal neighbours": ([4, 4, 4, 2, 5, 5], 0),
    "empty segments": ([0, 5, 0, 0, 8, 0], 0),
    "padding": ([4, 9, 0], 6),
    "nothing but padding": ([0, 0], 5),
}


def gradients(out, inputs, d_out):
    return torch.autograd.grad(out, inputs, d_out)


def test_heads_of_more_than_256_numbers_are_not_for_the_kernel_of_a_gpu():
    wide_THN = torch.empty(2, 1, 512, dtype=torch.bfloat16, device="meta")
    assert kernels.is_for_flash(wide_THN[..., :256], 0.0) and not kernels.is_for_flash(wide_THN, 0.0)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (6, 2), (4, 1)])
def test_any_structure_equals_the_reference(structure, window, heads, kv_heads):
    lengths, padding = STRUCTURES[structure]
    q, k, v, d_out = draw(sum(lengths) + padding, heads, kv_heads)
    offsets = offsets_of(lengths)
    out = varlen_attention(q, k, v, offsets, window)
    expected = varlen_attention_reference(q, k, v, offsets, window)
    assert out.shape == q.shape and out.dtype == torch.float64
    assert (out - expected).abs().max() < 1e-12
    if sum(lengths):
        pairs = zip(gradients(out, (q, k, v), d_out), gradients(expected, (q, k, v), d_out), strict=True)
        assert all((got - want).abs().max() < 1e-12 for got, want in pairs)
    if padding:
        for x in (out, *gradients(varlen_attention(q, k, v, offsets, window), (q, k, v), d_out)):
            assert (x[:, sum(lengths) :] == 0).all()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("window,scale", [(None, None), (3, 0.2), (100, 0.9)])
@pytest.mark.parametrize("capped", [False, True])
def test_scales_and_caps_of_logits(structure, window, scale, capped):
    lengths, padding = STRUCTURES[structure]
    q, k, v, d_out = draw(sum(lengths) + padding, 6, 2)
    offsets, how = offsets_of(lengths), {"scale": scale, "cap": 0.8 if capped else None}
    out = varlen_attention(q, k, v, offsets, window, **how)
    expected = varlen_attention_reference(q, k, v, offsets, window, **how)
    assert (out - expected).abs().max() < 1e-12
    if capped and max(lengths) > 1:
        assert (out - varlen_attention(q, k, v, offsets, window, scale=scale)).abs().max() > 1e-3
    if sum(lengths):
        pairs = zip(gradients(out, (q, k, v), d_out), gradients(expected, (q, k, v), d_out), strict=True)
        assert all((got - want).abs().max() < 1e-12 for got, want in pairs)


@pytest.mark.parametrize("window", [None, 300])
def test_caps_over_several_blocks(window, monkeypatch):
    monkeypatch.setattr(kernels, "_MATRIX_TOKENS", 300)
    q, k, v, d_out = draw(1000)
    offsets = offsets_of([400, 100, 100, 100, 100, 190])
    out, expected = (f(q, k, v, offsets, window, cap=0.5) for f in (varlen_attention, varlen_attention_reference))
    assert (out - expected).abs().max() < 1e-12
    pairs = zip(gradients(out, (q, k, v), d_out), gradients(expected, (q, k, v), d_out), strict=True)
    assert all((got - want).abs().max() < 1e-12 for got, want in pairs)


@pytest.mark.parametrize("window", [200, 300])
def test_windows_over_several_blocks(window):
    q, k, v, d_out = draw(700)
    offsets = offsets_of([600, 90])
    out, expected = (f(q, k, v, offsets, window) for f in (varlen_attention, varlen_attention_reference))
    assert (out - expected).abs().max() < 1e-12
    pairs = zip(gradients(out, (q, k, v), d_out), gradients(expected, (q, k, v), d_out), strict=True)
    assert all((got - want).abs().max() < 1e-12 for got, want in pairs)


def test_offsets_from_the_numbers_of_segments():
    assert segment_offsets(torch.tensor([[1, 1, 3, 0]]), 4).tolist() == [0, 2, 2, 3, 3]
    assert segment_offsets(torch.tensor([[0, 0]]), 1).tolist() == [0, 0]
    assert segment_offsets(torch.tensor([[1, 2, 2]]), 2).dtype == torch.int32


def test_a_packed_row_is_its_rows_one_at_a_time():
    q, k, v, _ = draw(30)
    out = varlen_attention(q, k, v, offsets_of([11, 7, 7, 5]))
    for part in (slice(0, 11), slice(11, 18), slice(18, 25), slice(25, 30)):
        alone = attention(q[:, part], k[:, part], v[:, part], causal=True)
        assert (out[:, part] - alone).abs().max() < 1e-12
        own = varlen_attention(q[:, part], k[:, part], v[:, part], offsets_of([part.stop - part.start]))
        assert torch.equal(out[:, part], own)  # not a bit depends on what else is in the row


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("window", [None, 4])
def test_narrow_dtypes(dtype, tolerance, window):
    q, k, v, d_out = draw(20, dtype=dtype)
    offsets = offsets_of([13, 5])
    out = varlen_attention(q, k, v, offsets, window)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = varlen_attention_reference(*wide, offsets, window)
    assert out.dtype == dtype and (out - expected).abs().max() < tolerance
    pairs = zip(gradients(out, (q, k, v), d_out), gradients(expected, wide, d_out.double()), strict=True)
    assert all((got - want).abs().max() < tolerance * (1 + want.abs().max()) for got, want in pairs)


def test_modes_see_the_operators_whose_functions_are_called_directly_without_one():
    names, (q, k, v, d_out), offsets = set(), draw(11, 4, 2), offsets_of([5, 6])

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    plain = varlen_attention(q, k, v, offsets)
    with Seen():
        out = varlen_attention(q, k, v, offsets)
        gradients(out, (q, k, v), d_out)
    assert {"varlen_attention", "varlen_attention_backward"} <= names and torch.equal(out, plain)


def test_torch_func_takes_it():
    q, k, v, d_out = (x.detach() for x in draw(12))
    offsets = offsets_of([5, 7])

    def loss(x):
        return (varlen_attention(*x, offsets) * d_out).sum()

    def loss_reference(x):
        return (varlen_attention_reference(*x, offsets) * d_out).sum()

    pairs = zip(torch.func.grad(loss)((q, k, v)), torch.func.grad(loss_reference)((q, k, v)), strict=True)
    assert all((got - want).abs().max() < 1e-12 for got, want in pairs)


@pytest.mark.slow
def test_one_graph_serves_all_structures_of_a_size():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *x: varlen_attention(*x).sin(), fullgraph=True, backend=counter)
    q, k, v, d_out = draw(16)
    for lengths in ([16, 0, 0], [1, 2, 13], [5, 5, 0]):
        offsets = offsets_of(lengths)
        expected = varlen_attention_reference(q, k, v, offsets).sin()
        got = compiled(q, k, v, offsets)
        assert (got - expected).abs().max() < 1e-12
        pairs = zip(gradients(got, (q, k, v), d_out), gradients(expected, (q, k, v), d_out), strict=True)
        assert all((a - b).abs().max() < 1e-12 for a, b in pairs)
    assert counter.frame_count == 1


def test_ranks_of_the_simulator_have_structures_of_their_own():
    q, k, v, _ = (x.detach() for x in draw(10))
    offsets = [offsets_of([10, 0]), offsets_of([3, 5])]
    with simulate("dp2"):
        inputs = [per_rank(2, lambda r, x=x: x.clone()).requires_grad_() for x in (q, k, v)]
        out = varlen_attention(*inputs, per_rank(2, lambda r: offsets[r]))
        grads = torch.autograd.grad(out.square().sum(), inputs)
    for rank in range(2):
        own = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = varlen_attention_reference(*own, offsets[rank])
        assert (gather(out, rank) - expected).abs().max() < 1e-12
        for got, want in zip(grads, torch.autograd.grad(expected.square().sum(), own), strict=True):
            assert (gather(got, rank) - want).abs().max() < 1e-12


def test_shapes_without_numbers():
    q, k = (torch.empty(1, 9, n, 8, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in (4, 2))
    out = varlen_attention(q, k, k, torch.empty(3, dtype=torch.int32, device="meta"))
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k))] == [q.shape, k.shape]
    assert out.shape == q.shape and out.dtype == torch.bfloat16
    with FakeTensorMode():
        q, k = (torch.empty(9, n, 8, device="cuda", dtype=torch.bfloat16) for n in (4, 2))
        offsets = torch.empty(3, dtype=torch.int32, device="cuda")
        out, lse, generator = kernels._forward(q, k, k, offsets, 0, 9)
        assert out.shape == q.shape and lse.shape == (4, 9) and out.is_cuda and lse.dtype == torch.float32
        grads = kernels._backward(q, q, k, k, out, lse, offsets, 0, 9, generator)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


MEMORY = """
import torch
from packed_rows import draw, offsets_of
from funrl.compiled_kernels.varlen_attention import varlen_attention

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

q, k, v, _ = draw(32768, 2, 1, 8, torch.float32)
before = peak()
for window in (None, 128):
    torch.autograd.grad(varlen_attention(q, k, v, offsets_of([512] * 64), window).sum(), (q, k, v))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc to measure memory")
def test_memory_is_linear_in_the_row():
    """32,768 tokens: a bool matrix of who sees whom would be 1 GiB; the row's own tensors are 10 MB."""
    paths = os.pathsep.join(map(os.path.abspath, [os.path.dirname(__file__), *sys.path]))
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", MEMORY], env=environment, check=True, capture_output=True)
    assert float(done.stdout) < 200  # MiB


def test_a_gpu_takes_wide_dtypes_segment_by_segment():
    """What is registered for CUDA, called here on the CPU."""
    q, k, v, d_out = (x.detach()[0] for x in draw(20))
    offsets = offsets_of([0, 13, 5])
    for window, scale, cap in ((0, 0.0, 0.0), (3, 0.2, 0.0), (3, 0.2, 0.5)):
        ours = kernels._forward_cuda(q, k, v, offsets, window, 20, scale, cap)
        theirs = kernels._forward(q, k, v, offsets, window, 20, scale, cap)
        assert (ours[0] - theirs[0]).abs().max() < 1e-12
        grads = [
            f(d_out, q, k, v, *x[:2], offsets, window, 20, x[2], scale, cap)
            for f, x in ((kernels._backward_cuda, ours), (kernels._backward, theirs))
        ]
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(*grads, strict=True))


def test_the_host_reads_where_segments_begin_once(monkeypatch):
    """Not in each layer and direction; and again where they have changed."""
    (q, k, v, _), offsets, reads = draw(20), offsets_of([9, 11]), []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: (reads.append(x), cpu(x))[1])
    for _ in range(3):
        out = varlen_attention(q, k, v, offsets)
        torch.autograd.grad(out.sum(), (q, k, v))
    assert len(reads) == 1
    offsets.copy_(offsets_of([4, 16]))
    others = [varlen_attention(q, k, v, x) for x in (offsets, offsets_of([4, 16]))]
    assert torch.equal(*others) and not torch.equal(others[0], out)
    grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in others]
    assert all(map(torch.equal, *grads)) and len(reads) == 3


def test_kernels_of_a_gpu_are_not_waited_for(monkeypatch):
    """On "meta", where the host reads no number: bounds of lengths are known from packing."""
    q, k, v, d_out = (x.detach()[0].to("meta", torch.bfloat16) for x in draw(20))
    offsets, seed = offsets_of([9, 8]).to("meta"), torch.empty(2, device="meta")
    forward, backward = (lambda q, *_: (q, q[..., 0].T, seed)), (lambda d, q, k, v, *_: (q, k, v))
    monkeypatch.setattr(kernels, "flash_kernel", lambda capped, head: Kernel("none", True, forward, backward))
    out, lse, generator = kernels._forward_cuda(q, k, v, offsets, 0, 16)
    grads = kernels._backward_cuda(d_out, q, k, v, out, lse, offsets, 0, 16, generator)
    assert out.shape == q.shape and [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def planning_kernel(plans):
    """A kernel that computes as the CPU does and notes what it is to plan for: the tokens, segments and longest one."""

    def forward(q, k, v, offsets, longest, window, scale, cap):
        plans.append((len(q), len(offsets) - 1, longest))
        return kernels._forward(q, k, v, offsets, window, longest, scale, cap)

    def backward(d_out, q, k, v, out, lse, offsets, longest, window, generator, scale, cap):
        plans.append((len(q), len(offsets) - 1, longest))
        return kernels._backward(d_out, q, k, v, out, lse, offsets, window, longest, generator, scale, cap)

    return Kernel("planning", False, forward, backward)


def workspace_bytes(tokens, segments, heads, head):
    """Bytes of flash-attn's `dq_accum`, float32 [tokens + 128 segments, heads, head] (flash_api.cpp)."""
    return 4 * (tokens + 128 * segments) * heads * head


@pytest.mark.slow
def test_a_gpu_plans_for_the_used_segments_and_the_longest(monkeypatch):
    """16,384 tokens in 10 rows, with room for 2,056 rows."""
    plans = []
    monkeypatch.setattr(kernels, "flash_kernel", lambda capped, head: planning_kernel(plans))
    lengths = [1500] * 9 + [2000]
    room = 16384 // 8 + 8
    q, k, v, d_out = (x.detach()[0] for x in draw(16384, 2, 1, 8, torch.bfloat16))
    offsets = offsets_of(lengths + [0] * (room - len(lengths)))
    unplanned = kernels._forward_cuda(q, k, v, offsets, 0, len(q))
    bound_segments(offsets, SegmentBounds(2048, len(lengths), sum(lengths)))
    out, lse, generator = kernels._forward_cuda(q, k, v, offsets, 0, len(q))
    kernels._backward_cuda(d_out, q, k, v, out, lse, offsets, 0, len(q), generator)
    assert torch.equal(out, unplanned[0])
    assert plans == [(16384, 2056, 16384), (16384, 16, 2048), (16384, 16, 2048)]
    before, _, after = (workspace_bytes(tokens, segments, 32, 128) for tokens, segments, _ in plans)
    assert (round(before / 1e9, 1), round(after / 1e9, 1)) == (4.6, 0.3)


@pytest.mark.parametrize("recomputed", [False, True])
def test_bounds_reach_the_operator_from_a_compiled_function(recomputed, monkeypatch):
    """A graph, autograd and a recomputed layer pass on the very tensor that has the bounds."""
    plans = []
    for name, number in (("_blocks", 0), ("sequence_attention", 3)):
        watched = functools.partial(lambda fn, n, *x: (plans.append(planned_segments(x[n], 99)), fn(*x))[1])
        monkeypatch.setattr(kernels, name, functools.partial(watched, getattr(kernels, name), number))
    q, k, v, d_out = draw(40)
    offsets = bound_segments(offsets_of([10, 20, 0, 0, 0]), SegmentBounds(32, 2))
    compiled = torch.compile(lambda *x: varlen_attention(*x).sin(), fullgraph=True, backend="aot_eager")
    run = functools.partial(checkpoint, compiled, use_reentrant=False) if recomputed else compiled
    torch.autograd.grad(run(q, k, v, offsets), (q, k, v), d_out)
    assert [(len(x), longest) for x, longest in plans] == [(3, 32)] * (3 if recomputed else 2)


def fake_flash_attn():
    """flash-attn's two functions with their published signatures, computed by our CPU operators."""

    def forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
        block_table=None,
        leftpad_k=None,
        seqused_k=None,
        zero_tensors=False,
    ):
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k and dropout_p == 0
        assert softmax_scale == q.shape[-1] ** -0.5 and window_size_right == 0 and causal == (window_size_left < 0)
        out, lse, _ = kernels._forward(q, k, v, cu_seqlens_q, window_size_left + 1, max_seqlen_q)
        out[int(cu_seqlens_q[-1]) :] = torch.nan
        return out, lse, None, None

    def backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
        zero_tensors=False,
    ):
        assert causal == (window_size_left < 0) and window_size_right == 0 and softmax_scale == q.shape[-1] ** -0.5
        seed = torch.empty(0)
        grads = kernels._backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, window_size_left + 1, max_seqlen_q, seed
        )
        for to, grad in zip((dq, dk, dv), grads, strict=True):
            to.copy_(grad)
            to[int(cu_seqlens_q[-1]) :] = torch.nan
        return softmax_lse

    return types.SimpleNamespace(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)


@pytest.mark.parametrize("window", [0, 3])
def test_flash_attn_is_called_as_it_wants_and_leaves_nothing_in_the_padding(window, monkeypatch, caplog):
    package = types.ModuleType("flash_attn")
    package.flash_attn_interface = fake_flash_attn()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    flash_kernel.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            q, k, v, d_out = (x.detach()[0] for x in draw(20, dtype=torch.bfloat16))
            offsets = offsets_of([13, 5])
            ours, theirs = (f(q, k, v, offsets, window, 20) for f in (kernels._forward_cuda, kernels._forward))
            assert torch.equal(ours[0], theirs[0])
            grads = [
                f(d_out, q, k, v, *x[:2], offsets, window, 20, x[2])
                for f, x in ((kernels._backward_cuda, ours), (kernels._backward, theirs))
            ]
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert [r.message for r in caplog.records] == ["variable-length attention on the GPU is by flash-attn"]
    finally:
        flash_kernel.cache_clear()


@pytest.mark.parametrize(
    "major,hip,installed,expected",
    [
        (9, None, True, "FA3"),
        (10, None, True, "FA4"),
        (9, None, False, None),
        (8, None, True, None),
        (9, "7", True, None),
    ],
)
def test_torch_calls_the_faster_attention_of_the_device(major, hip, installed, expected, monkeypatch):
    """By capability; a missing one and ROCm leave torch as it is, and capped logits go to flash-attn all the same."""
    activated = []

    def activate(name):
        if not installed:
            raise ModuleNotFoundError("No module named 'flash_attn_interface'")
        activated.append(name)

    package = types.ModuleType("flash_attn")
    package.flash_attn_interface = fake_flash_attn()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    faster_attention.cache_clear()
    try:
        name = f"torch {torch.__version__} with {expected}" if expected else "flash-attn"
        assert flash_kernel.__wrapped__().name == name and flash_kernel.__wrapped__(True).name == "flash-attn"
        assert activated == ([expected] if expected else [])
    finally:
        faster_attention.cache_clear()


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_without_flash_attn_it_is_torch():
    flash_kernel.cache_clear()
    assert flash_kernel().name == f"torch {torch.__version__}"
    with FakeTensorMode():  # its operators take what they are given
        q, k = (torch.empty(9, n, 8, device="cuda", dtype=torch.bfloat16) for n in (4, 2))
        offsets = torch.empty(3, device="cuda", dtype=torch.int32)
        for window in (0, 3):
            out, lse, generator = _torch_forward(q, k, k, offsets, 9, window)
            assert out.shape == q.shape and lse.shape == (4, 9)
            grads = _torch_backward(q, q, k, k, out, lse, offsets, 9, window, generator)
            assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    flash_kernel.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 3e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("window", [None, 5])
def test_a_gpu_equals_the_reference(dtype, tolerance, window):
    q, k, v, d_out = (x.detach().cuda().requires_grad_() for x in draw(200, 8, 2, 64, dtype))
    offsets = offsets_of([130, 0, 1, 50]).cuda()
    out = varlen_attention(q, k, v, offsets, window, 130)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = varlen_attention_reference(*wide, offsets, window)
    assert (out - expected).abs().max() < tolerance
    close = functools.partial(zip, strict=True)
    for got, want in close(gradients(out, (q, k, v), d_out.detach()), gradients(expected, wide, d_out.double())):
        assert (got - want).abs().max() < tolerance * (1 + want.abs().max())


@pytest.mark.parametrize("ends", [[6], [3, 6], [2, 5], [6, 6]], ids=str)
def test_gradients_have_the_strides_of_what_they_are_of(ends):
    """Compiled code relies on it; with one block of equal segments nothing is copied that need not be."""
    q, d_out = (torch.randn(3, 6, 4, dtype=torch.float64).transpose(0, 1) for _ in range(2))
    k, v = (torch.randn(6, 1, 4, dtype=torch.float64) for _ in range(2))
    offsets = torch.tensor([0, *ends], dtype=torch.int32)
    numbers = (offsets, 0, 6, 0.0, 0.0)
    out, lse, seed = kernels._forward(q, k, v, *numbers)
    grads = kernels._backward(d_out, q, k, v, out, lse, offsets, 0, 6, seed, 0.0, 0.0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    reference = varlen_attention_reference(*(x.unsqueeze(0) for x in leaves), offsets)
    expected = torch.autograd.grad(reference, leaves, d_out.unsqueeze(0))
    for got, x, want in zip(grads, (q, k, v), expected, strict=True):
        assert got.stride() == x.stride() and (got - want).abs().max() < 1e-12
