"""Products and attention with a fixed order of sums: numbers against float64, bits against themselves."""

import pytest
import torch

from funrl.compiled_kernels.kernel_library import KernelError, library_problem
from funrl.compiled_kernels.packed import pack_linear, packed_attention, packed_linear
from funrl.compiled_kernels.varlen_attention import varlen_attention_reference

NO_KERNEL = library_problem()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))

DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M,N,K", [(1, 1, 1), (3, 64, 16), (7, 65, 77), (130, 200, 301), (0, 5, 9)])
def test_products_of_any_size(M, N, K, dtype):
    x_MK, w_NK = draw(M, K, dtype=dtype), draw(N, K, dtype=dtype)
    y_MN = packed_linear(x_MK, pack_linear(w_NK))
    assert y_MN.shape == (M, N) and y_MN.dtype == torch.float32
    expected = x_MK.double() @ w_NK.double().T
    scale = x_MK.double().abs() @ w_NK.double().abs().T
    assert ((y_MN - expected).abs() <= 3e-7 * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_depends_on_no_other_row(dtype):
    x_MK, packed = draw(150, 200, dtype=dtype), pack_linear(draw(190, 200, dtype=dtype))
    y_MN = packed_linear(x_MK, packed, threads=1)
    for first, end in ((0, 1), (3, 5), (5, 9), (10, 17), (20, 90), (149, 150)):
        for threads in (1, 2, 3):
            assert torch.equal(packed_linear(x_MK[first:end], packed, threads), y_MN[first:end])


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("heads,kv_heads,N", [(4, 4, 16), (6, 2, 8), (14, 2, 64), (9, 1, 22), (10, 2, 96)])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
def test_attention_over_sequences(heads, kv_heads, N, window, dtype, tolerance):
    offsets = torch.tensor([0, 1, 1, 40, 57, 140])
    q, k, v = (draw(140, h, N, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    out = packed_attention(q, k, v, offsets, window)
    wide = (x.double()[None] for x in (q, k, v))
    expected = varlen_attention_reference(*wide, offsets, window)[0]
    assert out.dtype == dtype and (out - expected).abs().max() < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 7])
def test_a_sequence_depends_on_no_other_one(dtype, window):
    q, k, v = (draw(140, h, 24, dtype=dtype) for h in (6, 2, 2))
    out = packed_attention(q, k, v, torch.tensor([0, 3, 40, 57, 140]), window, threads=1)
    for first, end in ((0, 3), (3, 40), (40, 57), (57, 140)):
        part = slice(first, end)
        for threads in (1, 2):
            alone = packed_attention(q[part], k[part], v[part], torch.tensor([0, end - first]), window, threads)
            assert torch.equal(alone, out[part])
    prefix = slice(57, 100)  # a token depends on none behind it
    assert torch.equal(packed_attention(q[prefix], k[prefix], v[prefix], torch.tensor([0, 43]), window), out[prefix])


def test_bad_input_is_named():
    packed = pack_linear(draw(5, 9))
    with pytest.raises(ValueError, match="8 columns"):
        packed_linear(draw(2, 8), packed)
    with pytest.raises(ValueError, match="bfloat16"):
        packed_linear(draw(2, 9, dtype=torch.bfloat16), packed)
    with pytest.raises(KernelError, match="float64"):
        pack_linear(draw(5, 9).double())
    q, k = draw(10, 4, 8), draw(10, 3, 8)
    with pytest.raises(ValueError, match="do not fit"):
        packed_attention(q, k, k, torch.tensor([0, 10]))
    with pytest.raises(ValueError, match="do not ascend"):
        packed_attention(q, q, q, torch.tensor([0, 11]))
