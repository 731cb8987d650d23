"""Matrices in 4 bits: the library's bits beside loops over the 16 levels, products, gradients, and what is kept."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from funrl.compiled_kernels import nf4
from funrl.compiled_kernels.nf4 import NF4_BLOCK, Nf4Weight, can_quantize_nf4, nf4_linear, nf4_problem, quantize_nf4

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs funrl[nf4]")

# Table 4 of Dettmers et al., 2023, which the library rounds to float32.
LEVELS = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def looped(weight):
    """Codes, scales and values of the numbers of a weight, end to end, in blocks of 64."""
    numbers = weight.double().flatten().tolist()
    codes, scales, values = [], [], []
    for begin in range(0, len(numbers), NF4_BLOCK):
        block = numbers[begin : begin + NF4_BLOCK]
        scale = max(map(abs, block))
        nearest = [min(range(16), key=lambda i, x=x: abs(LEVELS[i] * scale - x)) for x in block]
        codes += nearest
        scales.append(scale)
        values += [LEVELS[i] * scale for i in nearest]
    return codes, scales, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "out_dims"), [((4, 16, 64), 2), ((8, 4, 16), 1), ((3, 192), 1)], ids=str)
def test_codes_scales_and_values_are_those_of_a_loop(shape, out_dims, dtype):
    weight = draw(*shape).to(dtype)
    rounded = quantize_nf4(weight, out_dims)
    codes, scales, values = looped(weight)
    assert [x for byte in rounded.codes.flatten().tolist() for x in divmod(byte, 16)] == codes
    assert rounded.scales.flatten().tolist() == scales and rounded.scales.shape[:-1] == shape[:out_dims]
    assert rounded.shape == weight.shape and rounded.plain.dtype == dtype
    expected = torch.tensor(values, dtype=torch.float64).view(shape)
    assert torch.equal(rounded.plain, expected.float().to(dtype))
    again = quantize_nf4(rounded.plain, out_dims)
    assert torch.equal(again.codes, rounded.codes) and torch.equal(again.scales, rounded.scales)
    assert torch.equal(rounded.rows(torch.tensor([2, 0])).plain, rounded.plain[[2, 0]])


def test_which_shapes_have_blocks():
    assert can_quantize_nf4((4, 16, 64), 2) and can_quantize_nf4((8, 4, 16), 1)
    assert not can_quantize_nf4((4, 16, 32), 2) and not can_quantize_nf4((64,), 0) and not can_quantize_nf4((64,), 1)
    assert not can_quantize_nf4((2, 64, 1), 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_products_and_gradients_are_those_of_the_values(dtype):
    weight = quantize_nf4(draw(6, 8, 128, dtype=dtype), 2)
    x, bias, grad = draw(5, 3, 128, seed=1), draw(48, seed=2), draw(5, 3, 48, seed=3)
    inputs = [y.to(dtype).requires_grad_() for y in (x, bias)]
    out = nf4_linear(inputs[0], weight, inputs[1])
    plain = torch.nn.functional.linear(inputs[0], weight.plain.flatten(0, 1), inputs[1])
    bound = {torch.float64: 1e-13, torch.float32: 1e-4, torch.bfloat16: 0.25}[dtype]
    torch.testing.assert_close(out, plain, rtol=0, atol=bound)
    for own, expected in zip(*(torch.autograd.grad(y, inputs, grad.to(dtype)) for y in (out, plain)), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=bound)
    with torch.no_grad():
        assert torch.equal(nf4_linear(*(y.detach() for y in inputs[:1]), weight, inputs[1]), out)
        alone = [nf4_linear(row.view(1, -1), weight, inputs[1]) for row in inputs[0].flatten(0, 1)]
        assert torch.equal(torch.cat(alone).view(out.shape), out)  # as a pass that decodes one token
        assert nf4_linear(out.new_zeros(1, 0, 128), weight).shape == (1, 0, 48)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_whole_matrix_waits_for_the_backward_pass(compiled, monkeypatch):
    monkeypatch.setattr("funrl.compiled_kernels.exact.dispatch.has_kernels", lambda: True)
    rounded = quantize_nf4(draw(256, 256), 1)

    def compute(x, codes, scales):
        return nf4_linear(x.sin(), Nf4Weight(codes, scales, x.dtype)).cos()

    x = draw(2, 256, seed=1).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        out = (torch.compile(compute, fullgraph=True) if compiled else compute)(x, rounded.codes, rounded.scales)
    assert max(y.nbytes for y in kept) == rounded.codes.nbytes < rounded.plain.nbytes / 7
    whole = torch.autograd.grad((x.sin() @ rounded.plain.T).cos().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], whole, rtol=0, atol=1e-4)


def test_a_device_without_code_of_the_library_has_a_reason():
    assert nf4_problem("cpu") is None
    assert nf4_problem("meta").startswith("bitsandbytes has no NF4 on meta: ")


def test_the_library_downloads_no_kernels(monkeypatch):
    hub, seen = ModuleType("kernels"), []
    monkeypatch.setattr(nf4.importlib, "import_module", lambda name: seen.append((name, sys.modules["kernels"])))
    monkeypatch.setitem(sys.modules, "kernels", hub)
    nf4._library.__wrapped__()
    assert seen == [("bitsandbytes", None)] and sys.modules["kernels"] is hub
    del sys.modules["kernels"]
    nf4._library.__wrapped__()
    assert "kernels" not in sys.modules


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_rounds_and_multiplies(dtype):
    assert nf4_problem("cuda") is None
    weight = quantize_nf4(draw(48, 128, dtype=dtype).cuda(), 1)
    codes, scales, _ = quantize_nf4(draw(48, 128, dtype=dtype), 1)
    assert torch.equal(weight.codes.cpu(), codes) and torch.equal(weight.scales.cpu(), scales)
    on_cpu = Nf4Weight(weight.codes.cpu(), weight.scales.cpu(), dtype)
    torch.testing.assert_close(weight.plain.cpu(), on_cpu.plain, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    x = draw(5, 128, dtype=dtype, seed=1).cuda().requires_grad_()
    outs = [nf4_linear(x, weight), torch.nn.functional.linear(x, weight.plain)]
    grads = [torch.autograd.grad(out.sum(), x)[0] for out in outs]
    for own, expected in (outs, grads):
        torch.testing.assert_close(own, expected, rtol=0, atol=0.25 if dtype == torch.bfloat16 else 0.05)
