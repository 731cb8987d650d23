"""Attention, rotary positions and norm, each against its plain reference."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from funrl.compiled_kernels.attention import attention, attention_reference
from funrl.compiled_kernels.norm import rms_norm, rms_norm_reference
from funrl.compiled_kernels.rotary import frequencies, rotary, rotate, rotate_reference
from funrl.models.decoder.layers import RopeScaling


def _draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["causal", "all", "mask", "one token", "one token, mask"])
def test_attention_equals_reference(heads, kv_heads, kind):
    B, T, S, N = 3, (1 if "one" in kind else 7), 7, 8
    q, k, v = _draw(B, T, heads, N), _draw(B, S, kv_heads, N, seed=1), _draw(B, S, kv_heads, N, seed=2)
    mask = None
    if "mask" in kind:
        mask = torch.rand(B, T, S, generator=torch.Generator().manual_seed(3)) < 0.5
        mask[..., 0] = True
    out = attention(q, k, v, mask, kind == "causal")
    expected = attention_reference(q, k, v, mask, kind == "causal")
    assert out.shape == (B, T, heads, N) and out.dtype == torch.float64
    assert (out - expected).abs().max() < 1e-12
    cotangent = _draw(*out.shape, seed=4).detach()
    grads = zip(*(torch.autograd.grad(o, (q, k, v), cotangent) for o in (out, expected)), strict=True)
    assert all((g - e).abs().max() < 1e-12 for g, e in grads)


def test_models_with_other_counts_of_heads_go_through_one_compiled_function():
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    for heads, kv_heads in ((4, 2), (8, 4), (6, 2), (4, 4)):
        q, k, v = _draw(2, 5, heads, 8), _draw(2, 5, kv_heads, 8, seed=1), _draw(2, 5, kv_heads, 8, seed=2)
        assert (compiled(q, k, v, None, True) - attention_reference(q, k, v, None, True)).abs().max() < 1e-12
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["causal", "all", "mask", "one token"])
@pytest.mark.parametrize("scale,cap", [(0.3, None), (None, 0.7), (0.3, 0.7)])
def test_scales_and_caps_of_logits(kind, scale, cap):
    T = 1 if kind == "one token" else 7
    q, k, v = _draw(3, T, 6, 8), _draw(3, 7, 2, 8, seed=1), _draw(3, 7, 2, 8, seed=2)
    mask = torch.ones(1, T, 7, dtype=torch.bool).tril().triu(-2) if kind == "mask" else None
    out, expected = (f(q, k, v, mask, kind == "causal", scale, cap) for f in (attention, attention_reference))
    assert (out - expected).abs().max() < 1e-12
    grads = zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, expected)), strict=True)
    assert all((g - e).abs().max() < 1e-12 for g, e in grads)
    low = attention(*(x.bfloat16() for x in (q, k, v)), mask, kind == "causal", scale, cap)
    assert low.dtype == torch.bfloat16 and (low - expected).abs().max() < 3e-2


def test_a_cap_by_hand():
    # Logits 0 and 10 are 0 and 2 tanh(5) = 1.99982 under a cap of 2: the second weight is 1 / (1 + e^-1.99982).
    q, k = torch.tensor([1.0, 0]).view(1, 1, 1, 2), torch.tensor([[0.0, 0], [10.0, 0]]).view(1, 2, 1, 2)
    v = torch.tensor([[0.0, 0], [1.0, 0]]).view(1, 2, 1, 2)
    assert attention(q, k, v, scale=1.0, cap=2.0)[0, 0, 0, 0].item() == pytest.approx(0.8807780, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_on_a_gpu_compiles_and_takes_a_kernel_without_a_matrix_of_weights(dtype, masked, monkeypatch):
    """Without a GPU: on tensors that only say that they are on one."""
    importlib.import_module("funrl.models.compiling.compiled_layer")
    heads = []
    kernel = F.scaled_dot_product_attention

    def seen(q, k, v, *args, **kwargs):
        heads.append((q.shape[1], k.shape[1], v.shape[1]))
        return kernel(q, k, v, *args, **kwargs)

    with FakeTensorMode():
        q, k = (torch.empty(2, 8, n, 16, device="cuda", dtype=dtype) for n in (4, 2))
        mask = torch.ones(1, 8, 8, dtype=torch.bool, device="cuda") if masked else None
        compiled = torch.compile(attention, fullgraph=True, backend="eager")
        assert compiled(q, k, k, mask, not masked).shape == q.shape
        monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
        attention(q, k, k, mask, not masked)
    assert heads == [(4, 2, 2) if dtype == torch.bfloat16 and not masked else (4, 4, 4)]


def test_attention_of_one_mask_for_all_rows():
    q, k, v = _draw(3, 5, 4, 8), _draw(3, 5, 2, 8, seed=1), _draw(3, 5, 2, 8, seed=2)
    band = torch.ones(1, 5, 5, dtype=torch.bool).tril().triu(-1)
    assert (attention(q, k, v, band) - attention_reference(q, k, v, band)).abs().max() < 1e-12


def test_attention_by_hand():
    # One query, two keys with logits 0 and log 3 after the scale sqrt(4) = 2: weights 1/4 and 3/4.
    q = torch.tensor([2.0, 0, 0, 0]).view(1, 1, 1, 4)
    k = torch.tensor([[0.0, 0, 0, 0], [torch.log(torch.tensor(3.0)), 0, 0, 0]]).view(1, 2, 1, 4)
    v = torch.tensor([[4.0, 0, 0, 0], [8.0, 0, 0, 0]]).view(1, 2, 1, 4)
    assert attention(q, k, v)[0, 0, 0, 0].item() == pytest.approx(7.0)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rms_norm(dtype, tolerance):
    x, weight = (_draw(*shape).detach().to(dtype) for shape in ((3, 5, 8), (8,)))
    got, expected = rms_norm(x, weight, 1e-5), rms_norm_reference(x.double(), weight.double(), 1e-5)
    assert got.dtype == dtype
    assert (got.double() - expected).abs().max() < tolerance * (1 + expected.abs().max())


@pytest.mark.parametrize("batched", [False, True])
def test_rotation(batched):
    x = _draw(2, 6, 3, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 900]]) if batched else torch.arange(6)
    frequency = frequencies(8, 10000.0, dtype=torch.float64)
    got = rotate(x, rotary(positions, frequency, torch.float64))
    assert (got - rotate_reference(x, positions, frequency)).abs().max() < 1e-12
    assert torch.equal(got[:, 0], x[:, 0])  # position 0 is not turned
    assert torch.allclose(got.norm(dim=-1), x.norm(dim=-1))


def test_rotation_of_the_first_numbers_of_a_head():
    x = _draw(2, 6, 3, 8)
    rope = rotary(torch.arange(6), frequencies(4, 10000.0, dtype=torch.float64), torch.float64)
    got = rotate(x, rope)
    assert torch.equal(got[..., :4], rotate(x[..., :4], rope))
    assert torch.equal(got[..., 4:], x[..., 4:])


def test_frequency_scaling():
    plain = frequencies(8, 10000.0, dtype=torch.float64)
    assert torch.allclose(plain, torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64), atol=1e-15)
    linear = frequencies(8, 10000.0, RopeScaling("linear", 4.0), torch.float64)
    assert torch.allclose(linear, plain / 4)
    # Over 1000 tokens the four turn 159, 15.9, 1.59 and 0.159 times: kept, kept, between, divided by 8.
    # Between: weight (1.5915 - 1) / (4 - 1) = 0.19718 of the kept one; 0.01 (0.80282 / 8 + 0.19718) = 0.0029753.
    scaled = frequencies(8, 10000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 1000), torch.float64)
    expected = torch.tensor([1.0, 0.1, 0.0029753, 0.000125], dtype=torch.float64)
    assert torch.allclose(scaled, expected, rtol=1e-4)
