"""Products in 8 bits: rounding of rows and sums of products, beside a reference in float64."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from funrl.compiled_kernels.float8 import FLOAT8, can_quantize, float8_linear, float8_problem, quantize_rows

# All numbers at least 0 that 1 bit of sign, 4 of exponent and 3 of mantissa have: subnormal ones, then powers of two
# times 1, 1 1/8, ... 1 7/8, without the last, which is no number.
GRID = np.concatenate([np.arange(8) * 2.0**-9, *(2.0**e * (1 + np.arange(8) / 8) for e in range(-6, 9))])[:-1]
SHAPES = [(m, n, k) for m, n in ((1, 1), (2, 3), (5, 7), (3, 16), (17, 33)) for k in (1, 2, 3, 16, 31, 130)]


def rounded(x):
    """Rows of x with their scales taken out, each number the nearest of the grid, to even; and the scales."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(448), np.finfo(np.float32).tiny)
    y = (x.astype(np.float32) / scale).astype(np.float64)
    high = np.searchsorted(GRID, np.abs(y)).clip(1, len(GRID) - 1)
    below, above = np.abs(y) - GRID[high - 1], GRID[high] - np.abs(y)
    index = np.where((below < above) | ((below == above) & (high % 2 == 1)), high - 1, high)
    return np.sign(y) * GRID[index], scale.astype(np.float64)


def draw(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape[:-1], generator=generator)[..., None].exp()


@pytest.mark.parametrize(("rows", "out", "columns"), SHAPES)
def test_a_product_is_the_sum_of_rounded_numbers(rows, out, columns):
    x, weight, bias = draw(0, rows, columns), draw(1, out, columns), draw(2, 1, out)[0]
    (x_values, x_scales), (values, scales) = rounded(x.numpy()), rounded(weight.numpy())
    exact = x_values @ values.T * x_scales * scales.T + bias.numpy()
    most = np.abs(x_values) @ np.abs(values).T * x_scales * scales.T + np.abs(bias.numpy())
    quantized = quantize_rows(weight, 1)
    assert np.array_equal(quantized.values.numpy(), values) and np.array_equal(quantized.scales.numpy(), scales[:, 0])
    error = np.abs(float8_linear(x, quantized, bias).double().numpy() - exact)
    assert (error <= 2e-7 * most).all()
    relative = np.linalg.norm(exact - (x.double() @ weight.double().T + bias).numpy()) / np.linalg.norm(most)
    assert relative < 2**-4 * 2, "each number is rounded to 4 bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_has_the_bits_of_itself_alone(dtype):
    x, weight = draw(3, 21, 48).to(dtype), quantize_rows(draw(4, 64, 48).to(dtype), 1)
    whole = float8_linear(x, weight)
    assert whole.dtype == dtype
    assert all(torch.equal(whole[i : i + 1], float8_linear(x[i : i + 1], weight)) for i in range(len(x)))


def test_dims_of_a_weight_count_as_its_rows_and_columns():
    heads, out = draw(5, 4, 8, 32), draw(6, 32, 4, 8)
    x = draw(7, 2, 3, 32)
    assert torch.equal(
        float8_linear(x, quantize_rows(heads, 2)), float8_linear(x, quantize_rows(heads.flatten(0, 1), 1))
    )
    assert torch.equal(float8_linear(x, quantize_rows(out, 1)), float8_linear(x, quantize_rows(out.flatten(1), 1)))
    some = quantize_rows(heads, 2).rows(torch.tensor([2, 0]))
    assert torch.equal(some.plain, quantize_rows(heads[[2, 0]], 2).plain)


def test_rows_of_zeros_and_of_what_is_no_number():
    weight = quantize_rows(torch.eye(16), 1)
    x = torch.zeros(3, 16)
    x[1, 2] = torch.inf
    x[2, 3] = torch.nan
    out = float8_linear(x, weight)
    assert (out[0] == 0).all() and not out[1].isfinite().any() and out[2].isnan().all()


@pytest.mark.parametrize("form", [FLOAT8, torch.float8_e4m3fnuz])
@pytest.mark.parametrize(("rows", "out", "columns"), [(1, 32, 48), (7, 16, 16), (512, 64, 128)])
def test_the_call_for_a_gpu_is_one_that_torch_takes(rows, out, columns, form):
    """torch's shape function of the product checks dtypes, strides, multiples and scales as its kernel does."""
    with FakeTensorMode():
        weight = quantize_rows(torch.empty(out // 8, 8, columns, dtype=torch.bfloat16, device="cuda"), 2, form)
        assert weight.values.dtype == form and weight.scales.dtype == torch.float32
        result = float8_linear(torch.empty(1, rows, columns, dtype=torch.bfloat16, device="cuda"), weight)
    assert result.shape == (1, rows, out) and result.dtype == torch.bfloat16


def test_sizes_that_a_gpu_multiplies():
    assert can_quantize((4, 8, 48), 2) and can_quantize((48, 4, 8), 1)
    assert not can_quantize((4, 6, 48), 2) and not can_quantize((32, 40), 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_products_on_a_gpu():
    if float8_problem(torch.device("cuda", 0), torch.bfloat16) is not None:
        pytest.skip("this GPU has no products in 8 bits")
    for rows, out, columns in ((1, 2048, 2048), (64, 6144, 2048), (513, 2048, 6144)):
        x, weight = draw(8, rows, columns).bfloat16(), draw(9, out, columns).bfloat16()
        here = float8_linear(x.cuda(), quantize_rows(weight.cuda(), 1)).cpu().float()
        there = float8_linear(x.float(), quantize_rows(weight, 1))
        assert (here - there).norm() < 0.01 * there.norm()
