"""Products and attention with a fixed order of sums: numbers against float64, bits against themselves."""

import pytest
import torch

from funrl.compiled_kernels.arguments import real_of
from funrl.compiled_kernels.decode_step import packed_decoder
from funrl.compiled_kernels.exact.router import softmax
from funrl.compiled_kernels.kernel_library import KernelError, library_problem
from funrl.compiled_kernels.norm import rms_norm
from funrl.compiled_kernels.packed import pack_linear, packed_attention, packed_linear, unpack_panels
from funrl.compiled_kernels.rotary import frequencies, rotary, rotate
from funrl.compiled_kernels.varlen_attention import varlen_attention_reference
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder.compiled_step import step_sizes

NO_KERNEL = library_problem()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M,N,K", [(1, 1, 1), (3, 64, 16), (7, 65, 77), (130, 200, 301), (0, 5, 9)])
def test_products_of_any_size(M, N, K, dtype):
    x_MK, w_NK = draw(M, K, dtype=dtype), draw(N, K, dtype=dtype)
    y_MN = packed_linear(x_MK, pack_linear(w_NK))
    assert y_MN.shape == (M, N) and y_MN.dtype == real_of(dtype)
    expected = x_MK.double() @ w_NK.double().T
    scale = x_MK.double().abs() @ w_NK.double().abs().T
    assert ((y_MN - expected).abs() <= (1e-15 if dtype == torch.float64 else 3e-7) * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N,K", [(31, 33), (97, 130)])
def test_products_of_few_rows(N, K, dtype):
    """Tiles of every number of rows, of which a panel has several where registers are few."""
    x_MK, w_NK = draw(13, K, dtype=dtype), draw(N, K, dtype=dtype)
    packed = pack_linear(w_NK)
    rows = torch.cat([packed_linear(row[None], packed) for row in x_MK])
    expected = x_MK.double() @ w_NK.double().T
    scale = x_MK.double().abs() @ w_NK.double().abs().T
    assert ((rows - expected).abs() <= (1e-15 if dtype == torch.float64 else 3e-7) * scale).all()
    for M in range(2, 14):
        assert torch.equal(packed_linear(x_MK[:M], packed), rows[:M])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [8, 24, 200, 1048])
def test_parts_of_a_sum_may_be_added_by_several_ranks(K, dtype):
    """Each of n ranks adds its neighbouring parts, a binary tree the ranks' sums: the bits are those of one rank."""
    x_MK, w_NK = draw(70, K, dtype=dtype), draw(67, K, dtype=dtype)
    whole_MN = packed_linear(x_MK, pack_linear(w_NK, 8))
    scale = x_MK.double().abs() @ w_NK.double().abs().T
    bound = (1e-15 if dtype == torch.float64 else 3e-7) * scale
    assert ((whole_MN - x_MK.double() @ w_NK.double().T).abs() <= bound).all()
    assert torch.equal(unpack_panels(pack_linear(w_NK, 8).panels, 67, K, 8), w_NK)
    for ranks in (2, 4, 8):
        shares = zip(x_MK.chunk(ranks, 1), w_NK.chunk(ranks, 1), strict=True)
        sums = [packed_linear(x, pack_linear(w, 8 // ranks), threads) for threads, (x, w) in enumerate(shares, 1)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        assert torch.equal(sums[0], whole_MN)
    rows = [packed_linear(row[None], pack_linear(w_NK, 8), 1) for row in x_MK[:7]]
    assert torch.equal(torch.cat(rows), whole_MN[:7])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_before_the_only_rounding(dtype):
    x_MK, w_NK, bias_N = draw(9, 40, dtype=dtype), draw(33, 40, dtype=dtype), draw(33, dtype=dtype)
    packed = pack_linear(w_NK)
    wide_MN = packed_linear(x_MK, packed)
    assert torch.equal(packed_linear(x_MK, packed, wide=False), wide_MN.to(dtype))
    assert torch.equal(packed_linear(x_MK, packed, bias_N=bias_N, wide=False), (wide_MN + bias_N).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_depends_on_no_other_row(dtype):
    x_MK, packed = draw(150, 200, dtype=dtype), pack_linear(draw(190, 200, dtype=dtype))
    y_MN = packed_linear(x_MK, packed, threads=1)
    for first, end in ((0, 1), (3, 5), (5, 9), (10, 27), (20, 53), (20, 90), (149, 150)):
        for threads in (1, 2, 3):
            assert torch.equal(packed_linear(x_MK[first:end], packed, threads), y_MN[first:end])


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 3e-2), (torch.float64, 1e-14)])
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


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.float64, 2e-15)])
@pytest.mark.parametrize("N", [1, 7, 16, 64, 77])
def test_softmax_of_rows(N, dtype, tolerance):
    """Also of numbers whose exponentials are tiny or 0, and of one that is NaN."""
    x_MN = draw(9, N, dtype=dtype) * 20
    x_MN[1, N // 2] += 40
    x_MN[2, 0] = -1e4
    x_MN[3, N - 1] = -torch.inf if N > 1 else 0
    expected = x_MN.double().softmax(-1)
    assert ((softmax(x_MN) - expected).abs() <= tolerance * expected * 20 + 1e-37).all()
    x_MN[4, N // 2] = torch.nan
    assert softmax(x_MN)[4].isnan().all()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_forward_pass_of_these_is_that_of_the_engine(name):
    """The trainer's pass with these products and attention, beside one call of the decoding step over the same texts:
    what is left between them is the rounding of norms, rotations and the gate."""
    more = {"family": "qwen3", "qk_norm": True} if name == "qwen3" else {}
    config = decoder_config(vocab=70, embed=48, layers=3, heads=6, kv_heads=2, head=16, mlp=80, **more)
    params = decoder_model(config).init(torch.Generator().manual_seed(0))
    lengths = [5, 21, 40]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths])
    tokens = torch.randint(0, 70, (len(positions),), generator=torch.Generator().manual_seed(1))
    rope, x = (
        rotary(positions, frequencies(config.attention.head, config.rope.theta, None), torch.float32),
        params["embed"][tokens],
    )

    def linear(h, weight):
        return packed_linear(h, pack_linear(weight))

    for layer in params["layers"]:
        attn, mlp, h = layer["attn"], layer["mlp"], rms_norm(x, layer["attn_norm"], config.norm.eps)
        q, k, v = (linear(h, attn[item].flatten(0, 1)).unflatten(1, attn[item].shape[:2]) for item in "qkv")
        if config.attention.qk_norm:
            q, k = (rms_norm(y, attn[f"{element}_norm"], config.norm.eps) for y, element in ((q, "q"), (k, "k")))
        out = packed_attention(*(rotate(y[None], rope)[0] for y in (q, k)), v, offsets)
        x = x + linear(out.flatten(1), attn["o"].flatten(1))
        h = rms_norm(x, layer["mlp_norm"], config.norm.eps)
        x = x + linear(torch.nn.functional.silu(linear(h, mlp["gate"])) * linear(h, mlp["up"]), mlp["down"])
    logits = linear(rms_norm(x, params["norm"], config.norm.eps), params["unembed"])
    decoder = packed_decoder(step_sizes(config), params, torch.float32)
    tables = torch.arange(9, dtype=torch.int32).view(3, 3)
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    engine = decoder.forward(decoder.init_cache(9), tokens, positions, sequence, tables, torch.arange(len(tokens)))
    assert (logits - engine).abs().max() < 2e-6 * engine.abs().max()


def test_bad_input_is_named():
    packed = pack_linear(draw(5, 9))
    with pytest.raises(ValueError, match="8 columns"):
        packed_linear(draw(2, 8), packed)
    with pytest.raises(ValueError, match="bfloat16"):
        packed_linear(draw(2, 9, dtype=torch.bfloat16), packed)
    with pytest.raises(KernelError, match="float16"):
        pack_linear(draw(5, 9).half())
    q, k = draw(10, 4, 8), draw(10, 3, 8)
    with pytest.raises(ValueError, match="a multiple of the 3 key-value heads"):
        packed_attention(q, k, k, torch.tensor([0, 10]))
    with pytest.raises(ValueError, match="do not ascend"):
        packed_attention(q, q, q, torch.tensor([0, 11]))
