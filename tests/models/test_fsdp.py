"""Fully sharded weights on real ranks: the same losses and gradients, few gathers, and no whole weight longer than it
is needed."""

import dataclasses
import functools
import gc
import weakref

import pytest
import torch
import torch._dynamo  # checkpointing imports it: here once, and not in every rank

from funrl import trees
from funrl.batch import Batch
from funrl.mesh import rules
from funrl.mesh.launch import launch
from funrl.mesh.mesh import MeshError, parse, single
from funrl.mesh.reshard import unshard
from funrl.mesh.rules import ROWS, Layout
from funrl.models import Config, decoder_model, fsdp, place, rematerialized, with_value_head
from funrl.models.decoder import decoder_layer
from funrl.trainer.spmd import psum_tree

pytestmark = pytest.mark.gloo

CONFIG = Config(
    vocab=24, embed=16, layers=4, heads=4, kv_heads=2, head=4, mlp=16, family="qwen3", qk_norm=True,
    attention_bias=True, output_bias=True,
)  # fmt: skip
TIED = dataclasses.replace(CONFIG, tied=True)
COMPILED = torch.compile(decoder_layer, backend="aot_eager", fullgraph=True)
TOKENS = torch.randint(0, 24, (4, 7), generator=torch.Generator().manual_seed(2))
WEIGHTS = torch.randn(4, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _params(config, dtype):
    placed = _placed(config, single(), None, "none", dtype)
    policy = placed["policy"].model.init(torch.Generator().manual_seed(0), dtype)
    generator = torch.Generator().manual_seed(1)
    policy = trees.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=generator).to(dtype), policy)
    critic = placed["critic"].copy_from(placed["policy"], policy)
    return {"policy": policy, "critic": critic | {"value": critic["value"] + 0.5}}


def _placed(config, mesh, over, remat, dtype):
    """A policy and a critic, fully sharded over some axes; None: over none."""
    table = rules.TRAIN if over is None else rules.fully_sharded(rules.TRAIN, over)
    model = decoder_model(config)
    layer = COMPILED if remat == "compiled" else rematerialized(model.layer, remat)
    models = {"policy": model, "critic": with_value_head(model)}
    return {name: place(model, mesh, table, rules.TRAIN, dtype, layer) for name, model in models.items()}


def _loss(placed, params):
    """Of this rank's rows: every log-probability and value has a weight of its own."""
    mesh = placed["policy"].mesh
    count, at = mesh.size(ROWS), mesh.index(ROWS)
    rows = slice(4 * at // count, 4 * (at + 1) // count)
    batch = Batch(tokens=TOKENS[rows], mask=None)
    logp_BT = placed["policy"].token_scores(params["policy"], batch).logp
    values_BT = placed["critic"].values(params["critic"], batch)
    return (WEIGHTS[rows].to(logp_BT.dtype) * (logp_BT + values_BT.sin())).sum(), None


def _program(config, over, remat, dtype, params, mesh):
    """Loss and whole gradients, summed over all rows."""
    placed = _placed(config, mesh, over, remat, dtype)
    layouts = {name: one.stored for name, one in placed.items()}
    mine = rules.shard(params, layouts, mesh)
    (loss, _), grads = trees.value_and_grad(functools.partial(_loss, placed))(mine)
    for x, shard in zip(trees.leaves(grads), trees.leaves(mine), strict=True):
        assert x.shape == shard.shape and x.dtype == shard.dtype

    def total(x, lay):
        return psum_tree([x], mesh, tuple(a for a in ROWS if a not in lay.axes))[0]

    return psum_tree([loss], mesh, ROWS)[0], unshard(trees.map(total, grads, layouts), layouts, mesh)


CASES = {
    "dp2": ("dp2", "data", "none", CONFIG),
    "dp2 tied, layers computed again": ("dp2", "data", "full", TIED),
    "dp2,tp2": ("dp2,tp2", "data", "none", CONFIG),
    "dp2,tp2 computed again": ("dp2,tp2", "data", "full", CONFIG),
    "dp2,tp2 computed again, but for matmuls": ("dp2,tp2", "data", "selective", CONFIG),
    "dp2,ep2 in groups of 2, twice": ("dp2,ep2", "expert", "none", CONFIG),
    "dp2,ep2 over both": ("dp2,ep2", ("data", "expert"), "none", CONFIG),
    "tp2 whole, computed again": ("tp2", None, "selective", CONFIG),
}


@pytest.mark.parametrize("case", [*CASES, pytest.param("dp2, a compiled layer", marks=pytest.mark.slow)])
def test_losses_and_gradients_are_those_of_one_device(case):
    mesh, over, remat, config = CASES.get(case, ("dp2", "data", "compiled", CONFIG))
    params = _params(config, torch.float64)
    alone = _placed(config, single(), None, "none", torch.float64)
    (expected, _), whole = trees.value_and_grad(functools.partial(_loss, alone))(params)
    program = functools.partial(_program, config, over, remat, torch.float64, params)
    loss, grads = launch(program, parse(mesh), "cpu")
    assert abs(loss - expected) < 1e-12 * abs(expected)
    for (name, x), y in zip(trees.named(grads), trees.leaves(whole), strict=True):
        assert (x - y).abs().max() < 1e-11, name
        assert y.abs().max() > 1e-3, f"{name}: the loss does not depend on it"


def test_bfloat16_is_sent_and_float32_is_summed():
    # Replicas are cast, compute, and sum in float32. Shards must do the same, and a sum of two has no order.
    params = _params(CONFIG, torch.float32)
    runs = [
        launch(functools.partial(_program, CONFIG, over, "none", torch.bfloat16, params), parse("dp2"), "cpu")
        for over in (None, "data")
    ]
    assert runs[0][0] == runs[1][0]
    for (name, x), y in zip(trees.named(runs[0][1]), trees.leaves(runs[1][1]), strict=True):
        assert torch.equal(x, y), name
        assert y.dtype == torch.float32


def _watched(remat, mesh):
    """Counts gathers by dtype, and how many whole layers there are at most at the end of one."""
    policy = _placed(CONFIG, mesh, "data", remat, torch.bfloat16)["policy"]
    mine = rules.shard(_params(CONFIG, torch.float32)["policy"], policy.stored, mesh)
    started, most, alive = [], [0], []
    start, spread = fsdp.start, fsdp._spread

    def watch_start(group):
        if group.packing.over:  # some of it is split
            started.append(group.dtype)
        return start(group)

    def watch_spread(group, gathering):
        whole = spread(group, gathering)
        if isinstance(group.shards, dict) or len(group.packing.places) > 1:  # a layer, not the embedding
            alive.append(weakref.ref(whole.untyped_storage()))
        most[0] = max(most[0], sum(ref() is not None for ref in alive))
        return whole

    fsdp.start, fsdp._spread = watch_start, watch_spread
    between = []

    def loss(params):
        scores = policy.token_scores(params, Batch(tokens=TOKENS, mask=None))
        gc.collect()
        between.append(sum(ref() is not None for ref in alive))
        return scores.logp.sum(), None

    trees.value_and_grad(loss)(mine)
    return started, between[0], most[0]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_whole_layers_come_and_go(remat):
    started, between, most = launch(functools.partial(_watched, remat), parse("dp2"), "cpu")
    # Forward: 4 layers, embedding and unembedding. Backward: 3 layers, for the last one is still there.
    assert started == [torch.bfloat16] * 9
    assert between == 1
    assert most <= 2


def test_a_tree_that_no_data_axis_splits_is_only_cast():
    params = _params(CONFIG, torch.float64)["policy"]
    layouts = rules.layouts(params, decoder_model(CONFIG).axes, rules.TRAIN, parse("dp2"))
    assert (
        fsdp.gathered(params, layouts, single(), torch.float64)["layers"][0]["attn"]["q"]
        is (params["layers"][0]["attn"]["q"])
    )


def test_layers_that_are_split_in_two_ways_are_refused():
    sizes = (2, 2, 1, 1)
    ways = Layout((4, 4), (("data",), ()), sizes), Layout((4, 4), ((), ("expert",)), sizes)
    with pytest.raises(MeshError, match=r"split over \[\('data',\), \('expert',\)\]"):
        fsdp._packing(ways)
    with pytest.raises(MeshError, match=r"dim 0 of \(4, 4\) is split over \('data', 'tensor'\); \('data',\) must come"):
        fsdp._packing((Layout((4, 4), (("data", "tensor"), ()), (2, 1, 1, 2)),))
