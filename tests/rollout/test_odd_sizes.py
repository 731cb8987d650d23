"""Heads, inner dims, experts and vocabularies that the ranks do not divide: the numbers of one device."""

import functools

import pytest
import torch
from lockstep_ranks import run_ranks
from selection import quick

from funrl import trees
from funrl.batch import Batch
from funrl.mesh.mesh import SINGLE, MeshError, parse
from funrl.mesh.rules import COMPUTE, STORED, fully_sharded, layouts, shard
from funrl.mesh.sums import sum_rest
from funrl.models import decoder_config, decoder_model, place, with_value_head
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.decoder.routing import ClampedGate, Experts
from funrl.models.lora import is_trained, with_lora
from funrl.models.model import Lora
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import native_engine
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling

DENSE = {"vocab": 23, "embed": 10, "layers": 2, "heads": 3, "kv_heads": 1, "head": 4, "mlp": 7}
FAMILIES = {
    "dense": DENSE | {"qk_norm": True, "attention_bias": True, "mlp_bias": True},
    "nine heads of three": DENSE | {"heads": 9, "kv_heads": 3, "tied": True},
    "as many keys": DENSE | {"kv_heads": 3, "qk_norm": True, "qk_norm_over": "projection", "output_gate": True},
    "latent": DENSE | {"kv_heads": 3, "head": 6, "latent": LatentSizes(5, None, 4, 2, 3)},
    "experts": DENSE | {"experts": Experts(3, 2, 5, shared=3, shared_weighted=True)},
    "clamped experts": DENSE | {"experts": Experts(3, 2, 5, clamped=ClampedGate()), "attention_sinks": True},
}
TOKENS = torch.randint(0, 23, (4, 6), generator=torch.Generator().manual_seed(2))
WEIGHTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
CASES = [
    ("dense", "tp2", None),
    ("dense", "dp2,tp2", "data"),
    ("nine heads of three", "tp4", None),
    ("as many keys", "tp2", None),
    ("latent", "tp2", None),
    ("experts", "ep2,tp2", "data"),
    ("clamped experts", "ep2", None),
    ("adapters", "tp2", None),
]


def _model(family):
    if family == "adapters":
        return with_lora(_model("dense"), Lora(2, 4.0, ("q", "k", "v", "o", "gate", "up", "down")))
    return decoder_model(decoder_config(**FAMILIES[family]))


def _params(model):
    params = model.init(torch.Generator().manual_seed(0), torch.float64)
    noise = torch.Generator().manual_seed(1)
    return trees.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=noise, dtype=x.dtype), params)


def _loss(placed, params):
    """Of this rank's rows: every log-probability, entropy and value has a weight of its own."""
    mesh = placed.mesh
    count, at = mesh.size(mesh.row_axes), mesh.index(mesh.row_axes)
    rows = slice(4 * at // count, 4 * (at + 1) // count)
    batch = Batch(tokens=TOKENS[rows])
    if placed.model.value is not None:
        return (WEIGHTS[rows] * placed.values(params, batch).sin()).sum(), None
    scores = placed.token_scores(params, batch, ("logp", "entropy"))
    return (WEIGHTS[rows] * (scores.logp + scores.entropy)).sum(), placed.topk(params, batch, 20)[0]


def _learned(model, over, mesh=SINGLE):
    """Loss, gradients as they are stored, and the most probable tokens, on one rank."""
    placed = place(model, mesh, fully_sharded(STORED, over) if over else STORED, COMPUTE, torch.float64)
    mine = shard(_params(model), placed.stored, mesh)
    (loss, best), grads = trees.value_and_grad(functools.partial(_loss, placed))(mine)
    for x, own in zip(trees.leaves(grads), trees.leaves(mine), strict=True):
        assert x.shape == own.shape
    grads, loss = sum_rest(grads, loss, placed.stored, placed.compute, mesh)
    return loss, grads, best


def _whole(parts, layout):
    """A tensor of the ranks' parts."""
    out = torch.full(layout.shape, torch.nan, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        out[tuple(slice(low, high) for low, high in layout.box(rank))] = part
    return out


@pytest.mark.parametrize("case", quick(CASES, [CASES[0], CASES[1], CASES[2], CASES[5], CASES[7]]), ids=str)
def test_ranks_that_do_not_divide_a_dim_have_the_numbers_of_one_device(case):
    family, mesh, over = case
    model = _model(family)
    table = fully_sharded(STORED, over) if over else STORED
    for item in (model, with_value_head(model)) if family == "dense" else (model,):
        alone, expected, best = _learned(item, None)
        ranks = run_ranks(functools.partial(_learned, item, over), parse(mesh))
        grads = [dict(trees.named(grads)) for _, grads, _ in ranks]
        for loss, _, own_best in ranks:
            assert abs(loss - alone) < 1e-10
            assert best is None or over is not None or len(own_best) < 4 or torch.equal(own_best, best)
        stored = dict(trees.named(layouts(item.shapes, item.axes, table, parse(mesh))))
        assert any(
            layout.local_shape(rank) != layout.local_shape() for layout in stored.values() for rank in range(len(grads))
        )
        for name, x in trees.named(expected):
            if family == "adapters" and not is_trained(name):
                continue
            assert (_whole([own[name] for own in grads], stored[name]) - x).abs().max() < 1e-9, name


def _written(model, mesh=SINGLE):
    """Completions by an engine, with an adapter and without; and whether it holds what it was given."""
    engine = native_engine(model, mesh, torch.float64)
    own = shard(_params(model), engine.weights.layouts, mesh)
    engine.load(engine.weights.named(own), version=0)
    held = dict(engine.held_weights())
    for name, x in trees.named(own):
        assert torch.equal(x, held[name].view_as(x)), name
    lora = Lora(2, 4.0, ("q", "o", "down"))
    adapted = with_lora(model, lora)
    spec = engine.adapter_weights(lora)
    named = dict(trees.named(_params(adapted)))
    factors = {name: named[name] for name in dict(trees.named(spec.layouts))}
    tree = trees.from_named(spec.layouts, factors.items())
    factors = shard(tree, spec.layouts, mesh)
    engine.load_adapter("poet", lora, spec.named(factors), 1)
    held = dict(engine.held_adapter("poet"))
    for name, x in trees.named(factors):
        assert torch.equal(x, held[name].view_as(x)), name
    sampling = Sampling(max_new_tokens=6, temperature=1.5)
    prompts = [[1, 2, 3, 4], [22, 21], [5], [6, 7, 8]]
    requests = [Request(i, ids, sampling, seed=i, adapter=(None, "poet")[i % 2]) for i, ids in enumerate(prompts)]
    return complete(engine, requests)


@pytest.mark.parametrize(
    "case",
    quick([*((name, "tp2") for name in FAMILIES), ("dense", "tp3")], [("dense", "tp2"), ("experts", "tp2")]),
    ids=str,
)
def test_an_engine_samples_the_tokens_of_one_device(case):
    family, mesh = case
    model = _model(family)
    alone = _written(model)
    for rank in run_ranks(functools.partial(_written, model), parse(mesh)):
        for completion, other in zip(alone, rank, strict=True):
            assert torch.equal(completion.tokens, other.tokens)
            assert (completion.raw_logp - other.raw_logp).abs().max() < 1e-9


def test_less_than_one_for_each_rank_is_refused():
    model = _model("dense")
    for ranks, name in ((4, "heads has size 3"), (6, "vocab has size 23")):
        sizes = parse(f"tp{ranks}")
        if ranks == 6:
            sizes = parse("tp16")
        with pytest.raises(MeshError, match=f"{name}, which does not divide over tp"):
            layouts(model.shapes, model.axes, STORED, sizes)
    states = decoder_model(decoder_config(**DENSE, mixers=(GatedDeltaNet(3, 3, 4, 4),)))
    with pytest.raises(MeshError, match="state_heads has size 3, which does not divide over tp2"):
        layouts(states.shapes, states.axes, STORED, parse("tp2"))
