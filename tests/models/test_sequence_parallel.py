"""A packed row that is split over ranks gives the numbers of one device, in float64; a wrong collective is found."""

import functools

import pytest
import torch

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.varlen_attention import varlen_attention_reference
from funrl.mesh import collectives
from funrl.mesh.collectives import all_gather
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.mesh.simulate import gather, scatter, simulate
from funrl.mesh.sums import sum_rest
from funrl.models import Config, ModelError, decoder_model, place, placed, ring_attention, with_value_head
from funrl.models import sequence_parallel as sequence

OFFSETS = torch.tensor([0, 5, 5, 24, 25, 34, 34], dtype=torch.int32)  # borders of all ranks but one are within segments
T = 36  # of which two are padding


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
ATTEND = {"ulysses": sequence.ulysses_attention, "ring": ring_attention.ring_attention}


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
    found = with_gradients(lambda *heads: ATTEND[form](*heads, OFFSETS, mesh, **how), *own)
    ring_attention.wait = wait
    return [all_gather(x, mesh, "sequence", 1) for x in found]


@pytest.mark.gloo
def test_attention_over_a_split_row_is_that_over_the_whole(monkeypatch):
    monkeypatch.setattr(ring_attention, "_BLOCK", 4)
    made = [(form, case, False) for form in ATTEND for case in CASES] + [("ring", CASES[0], True)]
    found = launch(lambda mesh: [split_attention(mesh, *one) for one in made], parse("sp4"), "cpu")
    for (form, case, fault), outs in zip(made, found, strict=True):
        how = {"window": case["window"], "scale": 0.3, "cap": case["cap"]}
        whole = with_gradients(lambda *x, how=how: varlen_attention_reference(*x, OFFSETS, **how), *heads_of(case))
        gap = max((a - b).abs().max().item() for a, b in zip(outs, whole, strict=True))
        assert gap > 1e-2 if fault else gap < 1e-12, (form, case, fault)


# ---- the model


def config(heads, kv_heads, **more):
    sizes = {"vocab": 24, "embed": 12, "layers": 2, "head": 4, "mlp": 16, "family": "qwen3", "qk_norm": True}
    return Config(heads=heads, kv_heads=kv_heads, **sizes, **more)


def packed():
    """One packed row, of which all tokens are asked for."""
    lengths = OFFSETS.diff()
    segments = torch.cat([torch.arange(1, 7).repeat_interleave(lengths), torch.zeros(2, dtype=torch.int64)])
    starts = torch.cat([OFFSETS[:-1].repeat_interleave(lengths), torch.tensor([34, 35])])
    tokens = torch.randint(0, 24, (1, T), generator=torch.Generator().manual_seed(2))
    fields = {"tokens": tokens, "positions": (torch.arange(T) - starts)[None], "segments": segments[None]}
    return Batch(**fields, offsets=OFFSETS)


def outputs(places, params, batch):
    """A number of which every output of the models has a part, and the outputs."""
    scores = places["policy"].token_scores(params["policy"], batch, ("logp", "entropy"), 0.7)
    values = places["critic"].values(params["critic"], batch)
    found = torch.stack([scores.logp, scores.entropy, values])
    in_segments = torch.zeros(3, 8, dtype=found.dtype).index_add(1, batch.segments[0], found[:, 0])
    return (WEIGHTS * found).sum() + in_segments.square().sum(), found


WEIGHTS = draw(3, 1, T, seed=3)


def places_on(mesh, sizes):
    model = decoder_model(sizes)
    return {
        name: place(one, mesh, dtype=torch.float64)
        for name, one in {"policy": model, "critic": with_value_head(model)}.items()
    }


@functools.cache
def alone(heads, kv_heads):
    """Weights of both models, and what one device gives."""
    places = places_on(SINGLE, config(heads, kv_heads))
    params = {name: one.model.init(torch.Generator().manual_seed(0), torch.float64) for name, one in places.items()}
    params = trees.map(lambda x: x + 0.3 * draw(*x.shape, seed=x.numel()), params)
    found = trees.value_and_grad(lambda p: outputs(places, p, packed()))(params)
    return params, found


def gaps(text, heads, kv_heads):
    """How far outputs and gradients of any rank are from those of one device."""
    params, ((_, whole), grads) = alone(heads, kv_heads)
    batch = packed()  # not inside: every simulated rank would draw tokens of its own
    with simulate(text) as mesh:
        places = places_on(mesh, config(heads, kv_heads))
        stored = {name: one.stored for name, one in places.items()}
        local = scatter(params, stored)
        (_, found), made = trees.value_and_grad(lambda p: outputs(places, p, batch))(local)
        summed, _ = sum_rest(made, (), stored, stored, mesh)
        ranks = [gather((found, summed), rank) for rank in range(mesh.world)]

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


SPLITS = [("sp4", 4, 2), ("sp6", 12, 4), ("sp2,tp2", 4, 1)]


@pytest.mark.parametrize("text, heads, kv_heads", SPLITS)
def test_scores_values_and_gradients_are_those_of_one_device(text, heads, kv_heads):
    assert max(gaps(text, heads, kv_heads)) < 1e-9


def unchanged(x, mesh, axes, split, concat):
    """An exchange that sends nothing: every rank keeps its own heads, as often as there are ranks."""
    return torch.cat([collectives.own_shard(x, mesh, axes, split)] * mesh.size(axes), concat)


FAULTS = {
    "nothing is exchanged": (sequence, "all_to_all", unchanged),
    "gathered as if ranks differed": (placed, "gather_replicated", all_gather),
    "an exchange is counted twice": (sequence, "all_to_all", lambda *x: 2 * collectives.all_to_all(*x)),
    "all ranks take the first part": (placed, "own_shard", lambda x, mesh, axis, dim: x.chunk(mesh.size(axis), dim)[0]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_collective_is_found(fault, monkeypatch):
    where, name, wrong = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    assert min(gaps("sp2", 4, 2)) > 1e-2


def test_gradients_that_are_not_summed_are_found(monkeypatch):
    monkeypatch.setattr(collectives, "psum", lambda x, mesh, axes: x)
    assert min(gaps("sp2", 4, 2)) > 1e-2


def test_rows_that_are_not_packed_or_do_not_divide_are_refused():
    sizes = config(4, 2)
    with simulate("sp2") as mesh:
        model = places_on(mesh, sizes)["policy"]
        params = scatter(model.model.init(torch.Generator().manual_seed(0), torch.float64), model.stored)
        with pytest.raises(ModelError, match="mesh sp2 a row's tokens are split: rows are packed"):
            model.token_scores(params, Batch(tokens=torch.zeros(1, 8, dtype=torch.int64)))
        with pytest.raises(ModelError, match="7 tokens does not divide over the mesh sp2: pad it to a multiple of 2"):
            model.token_scores(params, Batch(tokens=torch.zeros(1, 7, dtype=torch.int64)))
