"""FlashAttention-4 of the package flash-attn-4, called with its own arguments."""

import importlib
import importlib.util
import inspect
import logging
import sys
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode

from funrl.compiled_kernels import flash_kernel as flash
from funrl.compiled_kernels import paged_attention
from funrl.compiled_kernels import varlen_attention as kernels
from funrl.compiled_kernels.flash_kernel import Kernel, attention_by, faster_attention, flash_kernel

INSTALLED = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")


def fake_interface(wrong=0.0):
    """The two functions of `flash_attn.cute.interface`, by our CPU operators; `wrong` is added to results."""

    def window_of(left, right, causal):
        assert (left is None) == causal and right == (None if causal else 0)
        return 0 if left is None else left + 1

    def forward(
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        softcap,
        window_size_left,
        window_size_right,
        return_lse,
    ):
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k and return_lse
        window = window_of(window_size_left, window_size_right, causal)
        out, lse, _ = kernels._forward(q, k, v, cu_seqlens_q, window, max_seqlen_q, softmax_scale, softcap)
        out[int(cu_seqlens_q[-1]) :] = torch.nan
        return out + wrong, lse, None, None, None

    def backward(
        q,
        k,
        v,
        out,
        dout,
        lse,
        *,
        softmax_scale,
        causal,
        softcap,
        window_size_left,
        window_size_right,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
    ):
        window = window_of(window_size_left, window_size_right, causal)
        sizes = (cu_seqlens_q, window, max_seqlen_q, torch.empty(0))
        grads = kernels._backward(dout, q, k, v, out.nan_to_num(), lse, *sizes, softmax_scale, softcap)
        for grad in grads:
            grad[int(cu_seqlens_q[-1]) :] = torch.nan
        return grads

    return types.SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)


@pytest.fixture
def on_hopper(monkeypatch):
    """A machine with flash-attn-4 and a GPU of capability 9.0, whose small call is computed on the CPU."""
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.ModuleType("flash_attn.cute"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", fake_interface())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: None)
    monkeypatch.setattr(flash, "_PROBED", "cpu")
    for function in (flash_kernel, faster_attention, flash._logged):
        function.cache_clear()
    yield monkeypatch
    for function in (flash_kernel, faster_attention, flash._logged):
        function.cache_clear()


def draw(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2, 4)]


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("window,cap", [(0, 0.0), (3, 0.0), (0, 5.0)])
def test_it_computes_what_the_cpu_does_and_leaves_zeros_in_the_padding(window, cap, bounded, on_hopper, caplog):
    q, k, v, d_out = draw(20)
    offsets = torch.tensor([0, 13, 18, 18], dtype=torch.int32)
    if bounded:
        kernels.bound_segments(offsets, kernels.SegmentBounds(16, 2, 18))
    with caplog.at_level(logging.INFO):
        results = [f(q, k, v, offsets, window, 20, 0.0, cap) for f in (kernels._forward_cuda, kernels._forward)]
    grads = [
        f(d_out, q, k, v, *result[:2], offsets, window, 20, result[2], 0.0, cap)
        for f, result in zip((kernels._backward_cuda, kernels._backward), results, strict=True)
    ]
    assert torch.equal(results[0][0], results[1][0]) and not results[0][0][18:].any()
    assert all(map(torch.equal, *grads)) and not any(x[18:].any() for x in grads[0])
    which = " where logits are capped" if cap else ""
    assert [r.message for r in caplog.records] == [
        f"variable-length attention on the GPU is by flash-attn-4{which}",
    ]


def test_it_is_chosen_before_fa3_and_without_the_functions_of_flash_attn(on_hopper):
    assert flash_kernel().name == "flash-attn-4" and attention_by(torch.bfloat16) == "flash-attn-4"
    assert flash._flash_attn() is None  # the package brings a namespace alone
    on_hopper.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    flash_kernel.cache_clear()
    assert flash_kernel().name == f"torch {torch.__version__}"


@pytest.mark.parametrize("capability,head,taken", [(9, 192, True), (9, 36, False), (10, 192, False), (10, 256, True)])
def test_it_takes_the_heads_that_the_package_takes(capability, head, taken, on_hopper):
    on_hopper.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    assert (flash._flash_attn_4(head) is not None) == taken


def test_a_wrong_result_is_not_used(on_hopper, caplog):
    on_hopper.setitem(sys.modules, "flash_attn.cute.interface", fake_interface(wrong=0.2))
    with caplog.at_level(logging.WARNING):
        assert flash_kernel().name == f"torch {torch.__version__} with FA3"
    assert "its results differ by" in caplog.text


def test_it_is_tried_while_a_graph_is_traced(on_hopper):
    with FakeTensorMode(), torch.inference_mode():
        assert flash_kernel(True).name == "flash-attn-4"


def test_what_to_install_is_said_on_such_a_gpu_only(on_hopper):
    on_hopper.setitem(sys.modules, "flash_attn.cute.interface", None)
    on_hopper.setattr(flash, "faster_attention", lambda: None)
    assert attention_by(torch.bfloat16).endswith(flash.FLASH_4)
    on_hopper.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    flash_kernel.cache_clear()
    assert attention_by(torch.bfloat16) == f"torch {torch.__version__}"


def test_pages_do_not_need_the_functions_of_flash_attn(monkeypatch):
    """flash-attn-4 alone brings a namespace `flash_attn` without `flash_attn_varlen_func`."""
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    importlib.import_module("torch.nn.attention.varlen")
    monkeypatch.setattr(inspect, "signature", lambda _: types.SimpleNamespace(parameters={}))
    monkeypatch.setattr(paged_attention, "triton_takes_pages", lambda: False)
    assert paged_attention.paged_kernel.__wrapped__() is None


@pytest.mark.skipif(not INSTALLED, reason="flash-attn-4 is not installed")
@pytest.mark.parametrize("window,cap,head", [(0, 0.0, 128), (16, 0.0, 64), (0, 30.0, 128)])
def test_the_package_compiles_the_calls_for_hopper(window, cap, head, monkeypatch):
    """On a CPU: fake tensors, and the compiler's target by variables of the environment."""
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    for name, value in target.items():
        monkeypatch.setenv(name, value)
    interface = importlib.import_module("flash_attn.cute.interface")
    kernel = Kernel("flash-attn-4", True, flash._flash_4_forward, flash._flash_4_backward)
    with FakeTensorMode():
        q, k = (torch.empty(1024, heads, head, device="cuda", dtype=torch.bfloat16) for heads in (16, 8))
        offsets = torch.empty(5, device="cuda", dtype=torch.int32)
        out, lse, seed = kernel.forward(interface, q, k, k, offsets, 512, window, 0.0, cap)
        grads = kernel.backward(interface, out, q, k, k, out, lse, offsets, 512, window, seed, 0.0, cap)
    assert out.shape == q.shape and lse.shape == (16, 1024)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


def test_a_cap_with_the_largest_heads_is_not_its_on_blackwell(on_hopper):
    """Its backward pass there refuses both together."""
    on_hopper.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert flash._flash_attn_4(256) is not None and flash._flash_attn_4(256, True) is None
    assert flash._flash_attn_4(128, True) is not None


@pytest.mark.parametrize("part", [0, 2])
def test_gradients_that_are_no_numbers_are_not_used(part, on_hopper):
    right = fake_interface()

    def backward(*given, **named):
        grads = list(right._flash_attn_bwd(*given, **named))
        grads[part] = grads[part] * torch.nan
        return grads

    faulty = types.SimpleNamespace(_flash_attn_fwd=right._flash_attn_fwd, _flash_attn_bwd=backward)
    on_hopper.setitem(sys.modules, "flash_attn.cute.interface", faulty)
    assert flash._flash_attn_4(64) is None
