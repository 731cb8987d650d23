"""Attention over pages against its plain reference and against whole sequences, and all ways to run it."""

import functools
import importlib.util
import inspect
import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from funrl.compiled_kernels import paged_attention as kernels
from funrl.compiled_kernels.paged_attention import (
    paged_attention,
    paged_attention_reference,
    paged_bytes,
    paged_flops,
    paging_of,
    read_pages,
)
from funrl.compiled_kernels.varlen_attention import varlen_attention
from funrl.mesh.simulate import gather, per_rank, simulate

PASSES = {  # (new tokens, tokens in all) of each sequence
    "one token": [(1, 1)],
    "prompts": [(5, 5), (16, 16), (1, 1)],
    "decode": [(1, 2), (1, 7), (1, 8), (1, 9), (1, 70)],
    "chunks": [(8, 8), (8, 24), (3, 35), (3, 36)],
    "all together": [(1, 5), (1, 8), (1, 8), (1, 30), (6, 20), (3, 3), (3, 4), (40, 61)],
}
SIZES = {"heads": 4, "kv_heads": 2, "page": 4, "size": 8}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def table_of(ends, page, spare=3):
    """Pages of each sequence, in no order and none twice; behind its last one, pages of others."""
    width = max(read_pages(end, page) for end in ends)
    needed = [-(-end // page) for end in ends]
    pages = torch.randperm(sum(needed) + spare, generator=torch.Generator().manual_seed(1))
    table = torch.randint(0, len(pages), (len(ends), width), generator=torch.Generator().manual_seed(2))
    for row, own in zip(table, pages[: sum(needed)].split(needed), strict=True):
        row[: len(own)] = own
    return table.int(), len(pages)


def scene(sequences, heads=4, kv_heads=2, page=4, size=8, dtype=torch.float64):
    """Tensors of a pass; what the cache holds at random is what the sequences had before."""
    counts, ends = zip(*sequences, strict=True)
    table, pages = table_of(ends, page)
    q, k, v = (draw(sum(counts), n, size, seed=i, dtype=dtype) for i, n in enumerate((heads, kv_heads, kv_heads)))
    cache = tuple(draw(pages, page, kv_heads, size, seed=i, dtype=dtype) for i in (5, 6))
    return q, k, v, cache, paging_of(counts, ends, table, page)


def both(q, k, v, cache, paging, window=None, to=lambda x: x, **how):
    """Outputs and caches behind a pass, and those of the reference."""
    results = []
    for f in (paged_attention, paged_attention_reference):
        own = tuple(x.clone() if f is paged_attention else to(x.clone()) for x in cache)
        new = (q, k, v) if f is paged_attention else (to(q), to(k), to(v))
        results.append((f(*new, own, paging, window, **how), *own))
    return results


@pytest.mark.parametrize("sequences", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (6, 2), (4, 1)])
def test_any_pass_equals_the_reference(sequences, window, heads, kv_heads):
    q, *rest = scene(sequences, heads, kv_heads)
    (out, *caches), (expected, *expected_caches) = both(q, *rest, window)
    assert out.shape == q.shape and out.dtype == torch.float64 and out.is_contiguous()
    assert (out - expected).abs().max() < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(caches, expected_caches, strict=True))
    before = rest[2]
    assert all(not torch.equal(a, b) for a, b in zip(caches, before, strict=True))


@pytest.mark.parametrize("sequences", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scale,cap", [(0.2, None), (None, 0.7), (0.2, 0.7)])
def test_scales_and_caps_of_logits(sequences, window, scale, cap, monkeypatch):
    monkeypatch.setattr(kernels, "CAPPED_QUERIES", 16)
    (out, *_), (expected, *_) = both(*scene(sequences, 6, 2), window, scale=scale, cap=cap)
    assert (out - expected).abs().max() < 1e-12


@pytest.mark.parametrize("window", [None, 9])
def test_passes_over_pages_are_whole_sequences(window):
    """Three sequences, in chunks of any size; two share a prefix: the second one uses the pages of the first,
    which are written in the same pass that it begins in."""
    page, lengths, prefix = 4, [23, 31, 6], 12
    texts = [draw(n, 4 + 2 + 2, 8, seed=n) for n in lengths]
    texts[1][:prefix] = texts[0][:prefix]
    q, k, v = torch.cat(texts).split((4, 2, 2), 1)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    expected = varlen_attention(*(x[None] for x in (q, k, v)), offsets, window)[0].split(lengths)
    table, pages = table_of(lengths, page, spare=0)
    table[1, : prefix // page] = table[0, : prefix // page]
    cache = (torch.full((pages, page, 2, 8), 9.0, dtype=torch.float64), draw(pages, page, 2, 8))
    at = [0, prefix, 0]  # nobody computes the common beginning twice
    passes = [{0: 14, 1: 5}, {0: 1, 1: 7, 2: 5}, {0: 1, 1: 1, 2: 1}, {0: 7, 1: 6}]
    for some in passes:
        begins = {s: at[s] for s in some}
        at = [at[s] + some.get(s, 0) for s in range(3)]
        paging = paging_of(list(some.values()), [at[s] for s in some], table[list(some)], page)
        new = torch.cat([texts[s][begins[s] : at[s]] for s in some]).split((4, 2, 2), 1)
        out = paged_attention(*new, cache, paging, window).split(list(some.values()))
        for s, x in zip(some, out, strict=True):
            assert (x - expected[s][begins[s] : at[s]]).abs().max() < 1e-12
    assert at == lengths


def test_what_is_in_other_slots_changes_nothing():
    """Other slots of a sequence's last page, and pages behind it in its row of the table."""
    counts, ends, page = [1, 1, 3], [5, 30, 6], 4
    table, pages = table_of(ends, page)
    new = [draw(sum(counts), n, 8, seed=n) for n in (4, 2, 2)]
    outs = []
    for other in (0.0, 1e30, -3.0):
        cache = tuple(torch.full((pages, page, 2, 8), other, dtype=torch.float64) for _ in range(2))
        for x, seed in zip(cache, (5, 6), strict=True):
            for row, end in zip(table, ends, strict=True):
                x[row[: -(-end // page)].long()] = draw(-(-end // page), page, 2, 8, seed=seed)
                x[int(row[(end - 1) // page]), (end - 1) % page + 1 :] = other
        outs.append(paged_attention(*new, cache, paging_of(counts, ends, table, page)))
        table = table.clone()
        for row, end in zip(table, ends, strict=True):
            row[-(-end // page) :] = pages - 1 - len(outs)
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("window", [None, 4])
def test_narrow_dtypes(dtype, tolerance, window):
    made = scene(PASSES["all together"], dtype=dtype)
    (out, *_), (expected, *_) = both(*made, window, to=torch.Tensor.double)
    assert out.dtype == dtype and (out - expected).abs().max() < tolerance


def test_places_and_groups_by_hand():
    """Pages of four tokens; a sequence alone in its group, groups of two, and one that reads more pages than it has."""
    counts, ends = [1, 1, 1, 3, 3, 2], [3, 4, 9, 7, 8, 17]
    table = torch.tensor([[7, 0, 0], [2, 0, 0], [1, 3, 5], [4, 6, 0], [8, 9, 0], [10, 11, 12]], dtype=torch.int32)
    table = torch.cat((table, torch.tensor([[0, 0, 0]] * 5 + [[13, 14, 0]], dtype=torch.int32)), 1)
    paging = paging_of(counts, ends, table, 4)
    assert paging.positions_N.tolist() == [2, 3, 8, 4, 5, 6, 5, 6, 7, 15, 16]
    assert paging.places_N.tolist() == [30, 11, 20, 24, 25, 26, 37, 38, 39, 55, 56]  # page * 4 + position % 4
    assert paging.offsets_S1.tolist() == [0, 1, 2, 3, 6, 9, 11] and paging.ends_S.tolist() == ends
    # first token, first sequence, sequences, new tokens of each, pages
    assert paging.groups_G5.tolist() == [[0, 0, 2, 1, 1], [2, 2, 1, 1, 3], [3, 3, 2, 3, 2], [9, 5, 1, 2, 5]]
    assert [x.dtype for x in paging] == [*[torch.int64] * 3, torch.int32, torch.int32, torch.int64]


def test_pages_that_are_read():
    assert [read_pages(tokens, 16) for tokens in (1, 16, 17, 80, 128, 129, 160, 161)] == [1, 1, 2, 5, 8, 10, 10, 12]
    numbers = [read_pages(tokens, 4) for tokens in range(1, 20001)]
    assert all(-(-n // 4) <= number <= 1.25 * -(-n // 4) for n, number in enumerate(numbers, 1))
    assert numbers == sorted(numbers) and len(set(numbers)) < 50  # four for each power of two
    assert [read_pages(item * 4, 4) for item in set(numbers)] == list(set(numbers))


def test_no_more_pages_are_read_than_the_table_has():
    counts, ends = [1, 1], [33 * 4, 3]  # 33 pages; 40 would be read
    table = torch.arange(66, dtype=torch.int32).view(2, 33)
    assert paging_of(counts, ends, table, 4).groups_G5[:, 4].tolist() == [33, 1]


def test_costs_have_closed_forms():
    q, _, _, (keys, _), paging = scene([(1, 3), (1, 4), (1, 9), (3, 7), (3, 8)], heads=4, kv_heads=2, page=4, size=8)
    # Pages read: 1, 1, 3, 2, 2; token-page pairs: 1 + 1 + 3 + 3 * 2 + 3 * 2 = 17, of 4 tokens each.
    assert paged_flops(q, paging.groups_G5, 4) == 2 * 2 * (17 * 4) * 4 * 8  # two products, pairs, heads, their size
    # Nine new tokens of 4 heads, 8 numbers of 8 bytes, for q, k, v and the output; 9 pages of 4 tokens and 2 heads.
    assert paged_bytes(q, keys, paging.groups_G5) == 4 * (9 * 4 * 8 * 8) + 2 * 9 * (4 * 2 * 8 * 8)


def test_the_operator_is_what_it_says_it_is():
    q, k, v, cache, paging = scene(PASSES["all together"])
    torch.library.opcheck(kernels._paged_attention.definition, (q, k, v, *cache, *paging, 3))


@pytest.mark.slow
def test_one_graph_serves_all_passes():
    from torch._dynamo.decorators import mark_unbacked
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *x: paged_attention(*x, 3).sin(), fullgraph=True, dynamic=True, backend=counter)
    for name in ("all together", "decode", "chunks"):
        q, k, v, cache, paging = scene(PASSES[name])
        for x in (*cache, *paging):
            mark_unbacked(x, 0)
        mark_unbacked(paging.table_SP, 1)
        own = tuple(x.clone() for x in cache)
        expected = paged_attention_reference(q, k, v, own, paging, 3).sin()
        assert (compiled(q, k, v, cache, paging) - expected).abs().max() < 1e-12
        assert all(torch.equal(a, b) for a, b in zip(cache, own, strict=True))
    assert counter.frame_count == 1


def test_ranks_of_the_simulator_have_heads_of_their_own():
    q, k, v, cache, paging = scene(PASSES["all together"], heads=8, kv_heads=4)

    def part(x, rank):
        n = x.shape[-2] // 2
        return x[..., rank * n : (rank + 1) * n, :].clone()

    (expected, *caches), _ = both(q, k, v, cache, paging)
    with simulate("tp2"):
        local = [per_rank(2, functools.partial(part, x)) for x in (q, k, v, *cache)]
        out = paged_attention(*local[:3], tuple(local[3:]), paging)
    for rank in range(2):
        assert (gather(out, rank) - part(expected, rank)).abs().max() < 1e-12
        for got, whole in zip(local[3:], caches, strict=True):
            assert torch.equal(gather(got, rank), part(whole, rank))


def test_shapes_without_numbers():
    q, k, v, cache, paging = scene(PASSES["decode"], dtype=torch.bfloat16)
    made = [x.to("meta") for x in (q, k, v, *cache)]
    out = paged_attention(*made[:3], tuple(made[3:]), kernels.Paging(*(x.to("meta") for x in paging)))
    assert out.shape == q.shape and out.dtype == torch.bfloat16 and out.device.type == "meta"


def published(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """torch's kernel with its published signature, one sequence and one token at a time."""
    assert cu_seq_k is None and return_aux is None and enable_gqa and num_splits == 1
    alone = max_q == 1 and window_size[0] < 0  # then keys are read once for all heads that share them
    assert (
        window_size[1] == (-1 if alone else 0) and block_table.dtype == seqused_k.dtype == cu_seq_q.dtype == torch.int32
    )
    assert max_q == max(cu_seq_q.diff()) and max_k >= max(seqused_k)
    out = torch.empty_like(query)
    for s, end in enumerate(seqused_k.tolist()):
        begin, stop = cu_seq_q[s : s + 2].tolist()
        keys, values = (x[block_table[s].long()].flatten(0, 1)[:end] for x in (key, value))
        group = query.shape[1] // key.shape[2]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        for i in range(begin, stop):
            last = end - (stop - i)
            first = 0 if window_size[0] < 0 else max(0, last - window_size[0])
            part = slice(first, last + 1)
            weights = ((keys[part] * query[i]).sum(-1) * (scale or query.shape[-1] ** -0.5)).softmax(0)
            out[i] = (weights[..., None] * values[part]).sum(0)
    return out


def published_flash(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    block_table=None,
):
    """flash-attn's function with its published signature."""
    assert causal == (window_size[1] == 0) and dropout_p == softcap == 0.0 and cu_seqlens_k.dtype == torch.int32
    how = {"scale": softmax_scale, "window_size": window_size, "block_table": block_table, "enable_gqa": True}
    ends = cu_seqlens_k.diff().int()
    return published(q, k, v, cu_seqlens_q, None, max_seqlen_q, max_seqlen_k, **how, seqused_k=ends, num_splits=1)


@pytest.mark.parametrize("window,scale", [(None, None), (1, None), (7, 0.2)])
@pytest.mark.parametrize("passes", [PASSES["all together"], [(1, 3), (1, 20), (1, 7)]], ids=["mixed", "decoding"])
def test_kernels_are_called_as_they_want(window, scale, passes):
    q, k, v, cache, paging = scene(passes)
    (expected, *caches), _ = both(q, k, v, cache, paging, window, scale=scale)
    _, _, *rest = paging
    for call, kernel in ((kernels.by_torch, published), (kernels.by_flash_attn, published_flash)):
        out = call(kernel, q, *caches, *rest, window or 0, scale or 0.0)
        assert (out - expected).abs().max() < 1e-12


def test_the_kernel_is_that_which_is_there_and_is_told_once(monkeypatch, caplog):
    """torch's where it knows pages, else flash-attn's, else Triton's, else none."""
    flash = types.SimpleNamespace(flash_attn_varlen_func=published_flash)

    def len_of(query):
        return len(query)

    for triton in (True, False):
        by_triton = kernels.by_triton if triton else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, triton=triton: triton or None)
        for torchs, package, expected in (
            (published, flash, kernels.by_torch),
            (len_of, flash, kernels.by_flash_attn),
            (len_of, None, by_triton),
        ):
            monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", torchs)
            monkeypatch.setitem(sys.modules, "flash_attn", package)
            caplog.clear()
            kernels.triton_takes_pages.cache_clear()
            with caplog.at_level("INFO", kernels.__name__):
                kernel = kernels.paged_kernel.__wrapped__()
            assert len(caplog.messages) == 1 and "over pages on the GPU" in caplog.messages[0]
            assert getattr(kernel, "func", kernel) is expected


def test_which_pages_and_heads_go_to_a_kernel(monkeypatch):
    bf16 = torch.bfloat16
    monkeypatch.setattr(kernels, "paged_kernel", lambda: "plain")
    monkeypatch.setattr(kernels, "triton_takes_pages", lambda: True)
    assert kernels.kernel_for("cuda", bf16, 64, 256) == kernels.kernel_for("cuda", bf16, 128, 512) == "plain"
    for given in ((64, 16), (12, 256), (64, 256, False)):
        assert kernels.kernel_for("cuda", bf16, *given) is kernels.by_triton
    for given in (("cpu", bf16, 64, 256), ("cuda", torch.float32, 64, 256), ("cuda", bf16, 260, 256)):
        assert kernels.kernel_for(*given) is None
    monkeypatch.setattr(kernels, "triton_takes_pages", lambda: False)
    assert kernels.kernel_for("cuda", bf16, 64, 256, plain=False) is None


def test_a_kernel_that_refuses_pages_or_is_wrong_is_passed_over(monkeypatch, caplog):
    """The machine seems to have a GPU, and the kernel is tried on the CPU."""

    def refusing(*given, block_table=None, **named):
        raise RuntimeError("throws if reached\nC++ stack")

    def wrong(*given, **named):
        return published(*given, **named) + 1

    wrong.__signature__ = inspect.signature(published)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "faster_attention", lambda: None)
    monkeypatch.setattr(kernels, "_PROBED", "cpu")
    flash = types.SimpleNamespace(flash_attn_varlen_func=published_flash)
    cases = [(published, None, kernels.by_torch, "is by torch"), (refusing, flash, kernels.by_flash_attn, "throws if")]
    cases += [(wrong, flash, kernels.by_flash_attn, "differ by 1 "), (refusing, None, None, "gathers them")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for torchs, package, expected, text in cases:
        kernels.triton_takes_pages.cache_clear()
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", torchs)
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        caplog.clear()
        with caplog.at_level("INFO", kernels.__name__):
            wrapped = kernels.paged_kernel.__wrapped__()
        assert (wrapped and wrapped.func) is expected and text in caplog.text and "C++" not in caplog.text


def test_torchs_kernel_takes_pages():
    """Without a GPU: on tensors that only say that they are on one."""
    kernel = varlen_attn
    if "block_table" not in inspect.signature(kernel).parameters:
        pytest.skip(f"torch {torch.__version__} has no kernel over pages")

    def on_a_gpu(*given, **named):
        def moved(x):
            return torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x

        with FakeTensorMode():
            return kernel(*map(moved, given), **{name: moved(x) for name, x in named.items()})

    q, _, _, cache, (_, _, *rest) = scene([(1, 300), (5, 800)], page=256, size=64, dtype=torch.bfloat16)
    for window in (0, 100):
        out = kernels.by_torch(on_a_gpu, q, *cache, *rest, window, 0.2)
        assert out.shape == q.shape and out.is_cuda and out.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 3e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("window", [None, 5])
def test_a_gpu_equals_the_reference(dtype, tolerance, window):
    sequences = [(1, 300), (1, 700), (40, 40), (100, 500)]
    made = scene(sequences, heads=8, kv_heads=2, page=256, size=64, dtype=dtype)
    q, k, v, cache, paging = made
    _, (expected, *_) = both(*made, window, to=torch.Tensor.double)
    counts, ends = zip(*sequences, strict=True)
    on_gpu = paging_of(counts, ends, paging.table_SP.int(), 256, "cuda")
    cache = tuple(x.cuda() for x in cache)
    out = paged_attention(q.cuda(), k.cuda(), v.cuda(), cache, on_gpu, window)
    assert (out.cpu() - expected).abs().max() < tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("heads,kv_heads,size", [(8, 2, 64), (7, 1, 72), (8, 8, 256)])
@pytest.mark.parametrize("how", [{}, {"cap": 3.0}, {"sinks_H": True}, {"window": 70}], ids=str)
def test_a_gpu_takes_caps_sinks_and_any_heads(heads, kv_heads, size, how):
    sequences = [(1, 300), (1, 1), (1, 513), (40, 40), (33, 165), (1, 512)]
    made = scene(sequences, heads, kv_heads, page=256, size=size, dtype=torch.bfloat16)
    q, k, v, cache, paging = made
    how = how | {"sinks_H": draw(heads)} if "sinks_H" in how else how
    _, (expected, *_) = both(*made, to=torch.Tensor.double, **how)
    how = how | {"sinks_H": how["sinks_H"].float().cuda()} if "sinks_H" in how else how
    on_gpu = paging_of(*zip(*sequences, strict=True), paging.table_SP.int(), 256, "cuda")
    caches = tuple(x.cuda() for x in cache)
    out = kernels.by_triton(
        q.cuda(),
        *written(k.cuda(), v.cuda(), caches, on_gpu),
        *on_gpu[2:],
        how.get("window", 0),
        0.0,
        cap=how.get("cap", 0.0),
        sinks=how.get("sinks_H"),
    )
    assert (out.cpu() - expected).abs().max() < 3e-2


def written(k, v, caches, paging):
    """The caches with new keys and values in them."""
    from funrl.compiled_kernels.gpu_kernels.page_kernels import write_pages

    write_pages(k, v, caches, paging.places_N)
    return caches
