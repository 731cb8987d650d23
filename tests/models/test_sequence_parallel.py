"""A packed row that is split over ranks, and its residual stream over tensor ranks, give the numbers of one device, in
float64; a wrong collective is found."""

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from selection import quick

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.flash_kernel import Kernel
from funrl.compiled_kernels.varlen_attention import varlen_attention_reference
from funrl.cost.tracing.estimate import pretended
from funrl.mesh import collectives, rules
from funrl.mesh.collectives import all_gather
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.mesh.rules import shard
from funrl.mesh.simulate import gather, scatter, simulate
from funrl.mesh.sums import sum_rest
from funrl.models import ModelError, decoder_config, decoder_model, place, placed, rematerialized, with_value_head
from funrl.models import split_residual as residual
from funrl.models.decoder import ring_attention
from funrl.models.decoder import sequence_parallel as sequence
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.huggingface.peft_files import targets_of
from funrl.models.lora import with_lora
from funrl.models.model import Lora

OFFSETS = torch.tensor([0, 5, 5, 24, 25, 34, 34], dtype=torch.int32)  # borders of all ranks but one are within segments
T = 36  # the last two are padding


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- attention


class Case(dict):
    """Key-value heads, window and cap of logits; there are 4 query heads."""


CASES = [
    Case(kv_heads=2, window=None, cap=None),
    Case(kv_heads=1, window=None, cap=0.7),
    Case(kv_heads=4, window=7, cap=None),
    Case(kv_heads=2, window=7, cap=0.7),
]


def _segments(offsets, keys):
    """Of each segment its queries, its keys and whether they are the queries' own."""
    ends = [x.tolist() for x in (offsets, offsets if keys is None else keys)]
    return [[slice(*pair) for pair in pairs] for pairs in zip(*map(itertools.pairwise, ends), strict=True)]


def _seen(q, k, keys, window):
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    seen = seen.tril() if keys is None else seen
    return seen.triu(1 - window) if window else seen


def kernel_forward(q, k, v, offsets, longest, window, scale, cap, keys=None):
    """As flash kernels on a GPU: what sees no key has a log-sum-exp of inf, and what is in no segment is undefined."""
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[1::-1], torch.nan, dtype=q.dtype)
    for rows, cols in _segments(offsets, keys):
        assert rows.stop - rows.start <= longest and cols.stop - cols.start <= longest
        out[rows], lse[:, rows] = 0, torch.inf
        if cols.stop > cols.start:
            block = ring_attention._Block(rows, cols, _seen(q[rows], k[cols], keys, window))
            how = ring_attention._How(window, scale, cap)
            out[rows], sums = ring_attention._forward(q[rows], k[cols], v[cols], block, how)
            lse[:, rows] = sums.T
    return out, lse, None


def kernel_backward(d_out, q, k, v, out, lse, offsets, longest, window, seed, scale, cap, keys=None):
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    for rows, cols in _segments(offsets, keys):
        block = ring_attention._Block(rows, cols, _seen(q[rows], k[cols], keys, window))
        how = ring_attention._How(window, scale, cap)
        parts = (d_out[rows], q[rows], k[cols], v[cols], out[rows], lse.T[rows])
        grads[0][rows], grads[1][cols], grads[2][cols] = ring_attention._backward(*parts, block, how)
    return grads


def attend_by_kernel(*heads, window, **how):
    """Ring attention as on a GPU, with a kernel for 16 bits that computes in these tensors' dtype."""
    ring_attention._on_cpu = lambda q, how: False
    ring_attention._by_flash = lambda q, place, how: place.queries == place.keys or not how.window
    ring_attention.flash_kernel = lambda capped, head: Kernel("reference", True, kernel_forward, kernel_backward)
    return ring_attention.ring_attention(*heads, window=window, **how)


ATTEND = {
    "ulysses": sequence.ulysses_attention,
    "ring": ring_attention.ring_attention,
    "ring by kernels": attend_by_kernel,  # the last, since it changes the module of its process
}


def heads_of(case):
    shapes = [(1, T, heads, 8) for heads in (4, case["kv_heads"], case["kv_heads"], 4)]
    return [draw(*shape, seed=i) for i, shape in enumerate(shapes)]


def with_gradients(attend, q, k, v, d_out):
    """The output, and the gradients of queries, keys and values."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def split_attention(mesh, form, case, fault=False):
    ranks, at = mesh.size("sequence"), mesh.index("sequence")
    own = [x.chunk(ranks, 1)[at] for x in heads_of(case)]
    how = {"window": case["window"], "scale": 0.3, "cap": case["cap"]}
    wait = ring_attention.wait
    if fault:
        ring_attention.wait = lambda x: 2 * wait(x)
    result = with_gradients(lambda *heads: ATTEND[form](*heads, OFFSETS, mesh, **how), *own)
    ring_attention.wait = wait
    return [all_gather(x, mesh, "sequence", 1) for x in result]


@pytest.mark.slow
@pytest.mark.gloo
def test_attention_over_a_split_row_is_that_over_the_whole(monkeypatch):
    monkeypatch.setattr(ring_attention, "_BLOCK", 4)
    made = [("ring", CASES[0], True), *((form, case, False) for form in ATTEND for case in CASES)]
    result = launch(lambda mesh: [split_attention(mesh, *item) for item in made], parse("sp4"), "cpu")
    for (form, case, fault), outs in zip(made, result, strict=True):
        how = {"window": case["window"], "scale": 0.3, "cap": case["cap"]}
        whole = with_gradients(lambda *x, how=how: varlen_attention_reference(*x, OFFSETS, **how), *heads_of(case))
        gap = max((a - b).abs().max().item() for a, b in zip(outs, whole, strict=True))
        assert gap > 1e-2 if fault else gap < 1e-12, (form, case, fault)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [16, 17])
def test_ranks_of_a_ring_have_the_same_work(ranks, tokens):
    """One sequence fills the row. With contiguous parts the last rank had (2n - 1) / n of the mean, 1.875 of 8."""
    offsets = torch.tensor([0, ranks * tokens], dtype=torch.int32)
    every = [ring_attention.ring_halves(rank, ranks, tokens) for rank in range(ranks)]
    assert sorted(half.first for halves in every for half in halves) == sorted({h.first for hs in every for h in hs})
    assert all(sum(half.count for half in halves) == tokens for halves in every)

    def step(rank, other):
        pairs = ring_attention.half_pairs(every[rank], every[other], 0)
        return sum(ring_attention.seen_pairs(offsets, every[rank][i], every[other][j], 0) for i, j in pairs)

    for shift in range(ranks):
        work = [step(rank, (rank - shift) % ranks) for rank in range(ranks)]
        assert max(work) <= min(work) + 2 * tokens * (tokens % 2), "of an odd number one half has a token more"
    whole = sum(step(rank, other) for rank in range(ranks) for other in range(ranks))
    assert whole == ranks * tokens * (ranks * tokens + 1) // 2


def test_a_window_leaves_out_halves_that_are_too_far():
    queries, keys = (ring_attention.ring_halves(rank, 4, 16) for rank in (0, 3))  # 0 to 7 and 56 to 63; 24 to 39
    assert ring_attention.half_pairs(queries, keys, 0) == [(1, 0), (1, 1)]
    assert ring_attention.half_pairs(queries, keys, 18) == [(1, 1)]  # 56 sees 39
    assert ring_attention.half_pairs(queries, keys, 17) == []


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (0, 0.7), (7, 0.0)])
def test_the_host_reads_no_offsets_on_a_gpu(window, cap, monkeypatch):
    """Tensors on "meta" have no values that could be read."""
    how, heads = ring_attention._How(window, 0.3, cap), [torch.empty(9, n, 8, device="meta") for n in (4, 2, 2)]
    monkeypatch.setattr(ring_attention, "flash_kernel", lambda *_: Kernel("none", True, planned, planned_back))

    def planned(q, k, v, offsets, *rest, keys=None):
        return torch.empty_like(q), q.new_empty(q.shape[1::-1]), None

    def planned_back(d_out, q, k, v, *rest, keys=None):
        return q, k, v

    own, before = ring_attention.Half(18, 9), ring_attention.Half(4, 9)
    for keys in (own, before):
        place = ring_attention._Place(OFFSETS.to("meta"), own, keys)
        blocks = list(ring_attention._blocks(place, heads[0], how))
        assert blocks and all(block.seen is not None for block in blocks)
        out, lse = ring_attention._flash_forward(*heads, place, how)
        assert out.shape == heads[0].shape and lse.shape == heads[0].shape[:2]
        d_q, d_kv = ring_attention._flash_backward(out, *heads, out, lse, place, how)
        assert d_q.shape == out.shape and d_kv.shape == (2, *heads[1].shape)


# ---- the model


def config(heads, kv_heads, **more):
    sizes: dict[str, Any] = {"vocab": 24, "embed": 12, "layers": 2, "head": 4, "mlp": 16, "family": "qwen3"}
    sizes |= {"qk_norm": True, "attention_bias": True, "output_bias": True}
    return decoder_config(heads=heads, kv_heads=kv_heads, **sizes | more)


def packed():
    """One packed row; all of its tokens are asked for."""
    lengths = OFFSETS.diff()
    segments = torch.cat([torch.arange(1, 7).repeat_interleave(lengths), torch.zeros(2, dtype=torch.int64)])
    starts = torch.cat([OFFSETS[:-1].repeat_interleave(lengths), torch.tensor([34, 35])])
    tokens = torch.randint(0, 24, (1, T), generator=torch.Generator().manual_seed(2))
    fields = {"tokens": tokens, "positions": (torch.arange(T) - starts)[None], "segments": segments[None]}
    return Batch(**fields, offsets=OFFSETS)


def outputs(places, params, batch):
    """A number that depends on every output of the models, and the outputs."""
    scores = places["policy"].token_scores(params["policy"], batch, ("logp", "entropy"), 0.7)
    values = places["critic"].values(params["critic"], batch)
    tensor = torch.stack([scores.logp, scores.entropy, values])
    in_segments = torch.zeros(3, 8, dtype=tensor.dtype).index_add(1, batch.segments[0], tensor[:, 0])
    return (WEIGHTS * tensor).sum() + in_segments.square().sum(), tensor


WEIGHTS = draw(3, 1, T, seed=3)


def places_on(mesh, sizes, adapted=False, splits=False):
    model = decoder_model(sizes)
    adapters = Lora(2, 3.0, targets_of("all-linear", model)) if adapted else None
    models = {"policy": model if adapters is None else with_lora(model, adapters)}
    models["critic"] = with_value_head(model, 2, bias=True)
    return {name: place(item, mesh, dtype=torch.float64, splits=splits) for name, item in models.items()}


@functools.cache
def alone(sizes, adapted):
    """Weights of both models, and what one device gives."""
    places = places_on(SINGLE, sizes, adapted)
    params = {name: item.model.init(torch.Generator().manual_seed(0), torch.float64) for name, item in places.items()}
    params = trees.map(lambda x: x + 0.3 * draw(*x.shape, seed=x.numel()), params)
    result = trees.value_and_grad(lambda p: outputs(places, p, packed()))(params)
    return params, result


def gaps(text, sizes, splits=False, adapted=False):
    """How far outputs and gradients of any rank are from those of one device."""
    params, ((_, whole), grads) = alone(sizes, adapted)
    batch = packed()  # not inside: every simulated rank would draw tokens of its own
    with simulate(text) as mesh:
        places = places_on(mesh, sizes, adapted, splits)
        stored, partial = ({name: getattr(x, tree) for name, x in places.items()} for tree in ("stored", "partial"))
        local = scatter(params, stored)
        (_, result), made = trees.value_and_grad(lambda p: outputs(places, p, batch))(local)
        summed, _ = sum_rest(made, (), stored, stored, mesh, partial)
        ranks = [gather((result, summed), rank) for rank in range(mesh.world)]

    def own(x, layout, rank):
        return x[tuple(slice(low, high) for low, high in layout.box(rank))]

    return [
        max(
            (x - y).abs().max().item()
            for x, y in zip(
                (got, *trees.leaves(grad)),
                (whole, *trees.leaves(trees.map(lambda x, la, r=rank: own(x, la, r), grads, stored))),
                strict=True,
            )
        )
        for rank, (got, grad) in enumerate(ranks)
    ]


GEMMA = {
    "norms": "sandwich",
    "norm_offset": 1.0,
    "activation": "gelu",
    "attention_cap": 0.8,
    "logit_cap": 1.5,
    "embed_scale": 12**0.5,
    "attention_scale": 0.4,
    "windows": (None, 3),
    "local_rope_theta": 100.0,
    "tied": True,
}
NEXT = {
    "family": "qwen3_next",
    "norm_offset": 1.0,
    "output_gate": True,
    "rotary_part": 2,
    "mixers": (GatedDeltaNet(2, 4, 4, 3, width=3), None),
}
SPLITS = {
    "sp3": ("sp3", config(6, 2), False),
    "sp2,tp2, its residual, gemma": ("sp2,tp2", config(4, 1, **GEMMA), True),
    "sp4, gated delta nets": ("sp4", config(4, 2, **NEXT), False),
    "tp4, its residual, norms over shared heads": (
        "tp4",
        config(8, 2, qk_norm_over="projection", norms="post", residual_scale=0.4, logit_divisor=2.0),
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", quick(SPLITS, ["sp2,tp2, its residual, gemma"]))
def test_scores_values_and_gradients_are_those_of_one_device(case):
    assert max(gaps(*SPLITS[case])) < 1e-9


LATENT = {"family": "deepseek_v3", "qk_norm": False, "attention_bias": False, "output_bias": False, "head": 6}


@pytest.mark.parametrize(
    "sizes",
    [
        config(4, 2),
        pytest.param(config(2, 2, layers=1, **LATENT, latent=LatentSizes(8, 6, 4, 2, 5)), marks=pytest.mark.slow),
    ],
)
def test_so_are_those_of_adapters(sizes):
    assert max(gaps("tp2", sizes, splits=True, adapted=True)) < 1e-9


def unchanged(x, mesh, axes, split, concat):
    """An exchange that sends nothing: every rank keeps its own heads, as often as there are ranks."""
    return torch.cat([collectives.own_shard(x, mesh, axes, split)] * mesh.size(axes), concat)


FAULTS = {
    "nothing is exchanged": (sequence, "all_to_all", unchanged),
    "gradients are not summed": (collectives, "start_psum", lambda x, mesh, axes: x),
}
OF_THE_RESIDUAL = {
    "a half has no sum of gradients": (residual, "all_gather", collectives.gather_replicated),
    "a half has no sum": (residual, "psum_scatter", collectives.own_shard),
    "norms' gradients are not summed": (placed, "SPLIT_RESIDUAL", {"value": "tensor"}),
    "those of norms of heads are summed twice": (placed, "SPLIT_RESIDUAL", {**rules.SPLIT_RESIDUAL, "head": "tensor"}),
}


@pytest.mark.parametrize("fault", quick(FAULTS | OF_THE_RESIDUAL, ["nothing is exchanged", "a half has no sum"]))
def test_a_wrong_collective_is_found(fault, monkeypatch):
    where, name, wrong = (FAULTS | OF_THE_RESIDUAL)[fault]
    monkeypatch.setattr(where, name, wrong)
    mesh, splits = ("tp2", True) if fault in OF_THE_RESIDUAL else ("sp2", False)
    assert min(gaps(mesh, config(4, 2, layers=1), splits)) > 1e-2


def test_rows_that_are_not_packed_or_do_not_divide_are_refused():
    unpacked, uneven = (Batch(tokens=torch.zeros(1, length, dtype=torch.int64)) for length in (8, 7))
    for text, sizes, batch, item in (
        ("sp2", config(4, 2), unpacked, "mesh sp2 a row's tokens are split: rows are packed"),
        ("sp2", config(4, 2), uneven, "7 tokens does not divide over the mesh sp2: pad it to a multiple of 2"),
        (
            "tp8",
            config(8, 4, layers=1),
            packed(),
            "36 tokens does not divide over the mesh tp8: pad it to a multiple of 8",
        ),
    ):
        whole = decoder_model(sizes).init(torch.Generator().manual_seed(0), torch.float64)
        with simulate(text) as mesh:
            placed = places_on(mesh, sizes, splits=text == "tp8")["policy"]
            with pytest.raises(ModelError, match=item):
                placed.token_scores(scatter(whole, placed.stored), batch)


# ---- what is kept


def kept_streams(splits, mode):
    """For each number of tokens, how many hidden states of as many autograd keeps, on one rank of tp4."""
    sizes, kept = config(8, 4, tied=True), {}

    def note(x):
        if x.shape[-1] == sizes.embed:
            kept[x.untyped_storage().data_ptr()] = x.numel() // sizes.embed
        return x

    with pretended(parse("tp4")) as mesh:
        model = decoder_model(sizes)
        first = place(model, mesh, dtype=torch.float64, layer=rematerialized(model.layer, mode), splits=splits)
        params = shard(model.init(torch.Generator().manual_seed(0), torch.float64), first.stored, mesh)
        params = trees.map(lambda x: x.requires_grad_(), params)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            token_scores = first.token_scores(params, packed())  # held until autograd's notes are counted
    assert token_scores.logp is not None and token_scores.logp.requires_grad
    counts = Counter(kept.values())
    return counts[T], counts[T // 4]


@pytest.mark.parametrize("mode, entering", [("none", 2 * 2), ("full", 0)])
def test_norms_and_residuals_keep_a_share_of_the_tokens(mode, entering):
    """What enters each half of two layers, where it is kept, and the unembedding is whole; all else is a quarter."""
    (whole, none), (entered, split) = (kept_streams(splits, mode) for splits in (False, True))
    assert none == 0 and entered == entering + 1 and split == whole - entered >= 3
