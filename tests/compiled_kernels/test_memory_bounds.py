"""Kernels read and write only their tensors, and assume no more than the alignment of an element.

Each tensor stands at an odd element offset or right beside an inaccessible page (`fenced_memory`). An access beyond it
ends the process with a segmentation fault, whose traceback names the kernel.
"""

import ctypes

import pytest
import torch
from fenced_memory import FencedMemory

from funrl.compiled_kernels import decode_step
from funrl.compiled_kernels.arguments import BITS, real_of
from funrl.compiled_kernels.decode_step import PAGE, PackedDecoder, packed_decoder
from funrl.compiled_kernels.kernel_library import library, library_problem
from funrl.compiled_kernels.packed import (
    pack_linear,
    packed_attention,
    packed_linear,
    panel_numbers,
    parts_of,
)
from funrl.compiled_kernels.paged_attention import paged_attention, paging_of
from funrl.models.decoder.compiled_step import step_sizes
from funrl.models.decoder.config import decoder_config
from funrl.models.decoder.decoder import decoder_model

NO_KERNEL = library_problem()
compiled = pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))
GAPS = [0, 1, 2, 3, 5, 7, None]  # elements before the fence; None: the tensor begins at a fence
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture(params=GAPS, ids=lambda gap: "begins at the fence" if gap is None else f"{gap} before the fence")
def memory(request):
    fenced = FencedMemory(request.param)
    yield fenced
    fenced.assert_untouched()


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pointers(*tensors):
    return [x.data_ptr() for x in tensors]


def test_placed_tensors_have_each_alignment_and_an_access_beyond_is_found():
    offsets = set()
    for gap in GAPS[:-1]:
        placed = FencedMemory(gap).place(torch.arange(64.0))
        offsets.add(placed.data_ptr() % 64 // placed.element_size())
        assert placed.tolist() == list(range(64))
    assert offsets == {(16 - gap) % 16 for gap in GAPS[:-1]}
    memory = FencedMemory(1)
    placed = memory.place(torch.arange(64.0))
    ctypes.memset(placed.data_ptr() + placed.nbytes, 0, 1)
    with pytest.raises(AssertionError):
        memory.assert_untouched()


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M,N,K", [(1, 1, 1), (7, 65, 77), (67, 130, 150), (67, 130, 160)])
@pytest.mark.parametrize("wide", [True, False])
def test_products(memory, M, N, K, dtype, wide):
    x_MK, w_NK, bias_N = draw(M, K, dtype=dtype), draw(N, K, dtype=dtype, seed=1), draw(N, dtype=dtype, seed=2)
    bias_N = None if wide else bias_N
    expected = packed_linear(x_MK, pack_linear(w_NK, parts_of(K)), bias_N=bias_N, wide=wide)
    panels = memory.empty(panel_numbers(N, K, parts_of(K), dtype), dtype=dtype)
    y_MN = memory.empty(M, N, dtype=expected.dtype)
    terms = (K // parts_of(K), parts_of(K))
    library().funrl_pack(BITS[dtype], memory.place(w_NK).data_ptr(), N, *terms, panels.data_ptr())
    bias = None if wide else memory.place(bias_N).data_ptr()
    call = (memory.place(x_MK).data_ptr(), panels.data_ptr(), bias, y_MN.data_ptr(), wide, M, N, *terms, 2)
    library().funrl_linear(BITS[dtype], *call)
    assert torch.equal(y_MN, expected)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,kv_heads,size,window", [(3, 3, 7, 5), (9, 1, 22, 0), (4, 2, 16, 0)])
def test_attention_over_sequences(memory, heads, kv_heads, size, window, dtype):
    offsets = torch.tensor([0, 1, 1, 18, 51])
    q, k, v = (draw(51, h, size, dtype=dtype, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads)))
    expected = packed_attention(q, k, v, offsets, window or None)
    inputs, out = [memory.place(x) for x in (q, k, v)], memory.empty(*q.shape, dtype=dtype)
    lse = memory.empty(heads, 51, dtype=real_of(dtype))
    sizes = (ctypes.c_int64 * 9)(51, len(offsets) - 1, heads, kv_heads, size, window)
    places = (sizes, memory.place(offsets).data_ptr(), None, None)
    library().funrl_attention(BITS[dtype], *pointers(*inputs, out, lse), *places, 0.0, 0.0, 2)
    assert torch.equal(out, expected)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 17, 257, 700])
def test_decoding_step(memory, vocab, dtype, monkeypatch):
    config = decoder_config(
        vocab=vocab,
        embed=26,
        layers=2,
        heads=6,
        kv_heads=2,
        head=10,
        mlp=37,
        family="qwen3",
        qk_norm=True,
        attention_bias=True,
        output_bias=True,
        windows=(9, None),
    )
    params = decoder_model(config).init(torch.Generator().manual_seed(0))
    counts, P = [21, 1, 7], 2
    numbers_N = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    positions_N = torch.cat([torch.arange(count) for count in counts])
    tokens_N = torch.randint(vocab, (sum(counts),), generator=torch.Generator().manual_seed(1))
    tables_SP = torch.tensor([[4, 1], [0, 5], [3, 2]], dtype=torch.int32)
    draw_M = torch.tensor([20, 0, 28])
    step = (tokens_N, positions_N, numbers_N, tables_SP, draw_M)

    ordinary = packed_decoder(step_sizes(config), params, dtype, threads=2)
    ordinary_cache = ordinary.init_cache(len(counts) * P)
    expected = ordinary.forward(ordinary_cache, tokens_N, positions_N, numbers_N, tables_SP, draw_M)

    own = PackedDecoder._own
    monkeypatch.setattr(decode_step, "zeroed", lambda count, of: memory.place(torch.zeros(count, dtype=of)))
    monkeypatch.setattr(PackedDecoder, "_own", lambda self, x: own(self, memory.place(x)))
    decoder = packed_decoder(step_sizes(config), params, dtype, threads=2)
    decoder._grow_rope(2 * PAGE)
    decoder._rope = memory.place(decoder._rope)
    decoder._model.rope = decoder._rope.data_ptr()
    cache, logits_MV = decoder.init_cache(len(counts) * P), memory.empty(3, vocab, dtype=real_of(dtype))
    tokens_N, positions_N, numbers_N, tables_SP, draw_M = (memory.place(x) for x in step)
    decoder.forward(cache, tokens_N, positions_N, numbers_N, tables_SP, draw_M, logits_MV)
    assert torch.equal(logits_MV, expected)
    assert all(torch.equal(a, b) for a, b in zip(cache, ordinary_cache, strict=True))


@compiled
@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("greedy", [False, True])
def test_draws(memory, vocab, greedy):
    logits_MV, source_R = draw(3, vocab), torch.tensor([2, 0, 1, 1, 2])
    noise_R = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    temperature_R = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7], dtype=torch.float64)

    def sampled(place, empty):
        inputs = [place(x) for x in (logits_MV, source_R, noise_R, temperature_R)]
        outputs = empty(5, dtype=torch.int64), empty(5), empty(5)
        logits, source, noise, temperature = pointers(*inputs)
        noise = None if greedy else noise
        call = (logits, 3, vocab, parts_of(vocab), source, 5, noise, 1.0, temperature, *pointers(*outputs), 2)
        assert library().funrl_sample(32, *call) == 0
        return outputs

    result, expected = sampled(memory.place, memory.empty), sampled(torch.clone, torch.zeros)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("window", [None, 6])
def test_attention_over_pages(memory, window, dtype, tolerance):
    """Torch's own functions, whose last bits may depend on alignment."""
    table_SP = torch.tensor([[4, 1], [0, 5], [3, 2]])
    paging = paging_of([9, 1, 1], [9, 17, 17], table_SP, PAGE)
    q, k, v = (draw(11, h, 9, dtype=dtype, seed=i) for i, h in enumerate((6, 2, 2)))
    keys, values = (draw(6, PAGE, 2, 9, dtype=dtype, seed=i) for i in (3, 4))

    def attended(place):
        return paged_attention(place(q), place(k), place(v), (place(keys), place(values)), paging, window)

    assert (attended(memory.place) - attended(torch.clone)).abs().max() <= tolerance
