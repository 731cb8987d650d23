"""Fully sharded weights on real ranks: the same losses and gradients, few gathers, and no whole weight longer than it
is needed."""

import dataclasses
import functools
import gc
import itertools
import weakref

import pytest
import torch
from own_messages import own_messages
from selection import quick

from funrl import trees
from funrl.batch import Batch
from funrl.mesh import collectives, message_sizes
from funrl.mesh.launch import launch
from funrl.mesh.mesh import Mesh, MeshError, parse, single
from funrl.mesh.reshard import unshard
from funrl.mesh.rules import COMPUTE, STORED, Layout, fully_sharded, layouts, shard
from funrl.mesh.sums import sum_rest
from funrl.models import (
    decoder_config,
    decoder_model,
    fsdp,
    gather_buffers,
    place,
    rematerialized,
    with_fields,
    with_value_head,
)
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.routing import Experts
from funrl.models.model import Inputs

pytestmark = [pytest.mark.versions, pytest.mark.gloo]

CONFIG = decoder_config(
    vocab=24,
    embed=16,
    layers=4,
    heads=4,
    kv_heads=2,
    head=4,
    mlp=16,
    family="qwen3",
    qk_norm=True,
    attention_bias=True,
    output_bias=True,
)
TIED = dataclasses.replace(CONFIG, tied=True)
NARROW = dataclasses.replace(TIED, embed=6)  # 4 ranks have 2, 2, 2 and 0 of it
NEXT = with_fields(
    CONFIG,
    layers=3,
    norm_offset=1.0,
    output_gate=True,
    rotary_part=2,
    mixers=(GatedDeltaNet(2, 4, 4, 3, width=3), GatedDeltaNet(2, 2, 4, 5), None),
    experts=Experts(4, 2, 8, shared=4, shared_weighted=True),
)
F64 = gather_buffers.GatherDtypes(torch.float64)
ALONE = single(), None, "none", torch.float64
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
    table = STORED if over is None else fully_sharded(STORED, over)
    model = decoder_model(config)
    layer = rematerialized(model.layer, remat)
    models = {"policy": model, "critic": with_value_head(model)}
    return {name: place(model, mesh, table, COMPUTE, dtype, layer) for name, model in models.items()}


def _loss(placed, params):
    """Of this rank's rows: every log-probability and value has a weight of its own."""
    mesh = placed["policy"].mesh
    count, at = mesh.size(mesh.row_axes), mesh.index(mesh.row_axes)
    rows = slice(4 * at // count, 4 * (at + 1) // count)
    batch = Batch(tokens=TOKENS[rows])
    logp_BT = placed["policy"].token_scores(params["policy"], batch).logp
    values_BT = placed["critic"].values(params["critic"], batch)
    return (WEIGHTS[rows].to(logp_BT.dtype) * (logp_BT + values_BT.sin())).sum(), None


def _program(config, over, remat, dtype, params, mesh, reduce_dtype=None):
    """Loss and whole gradients, summed over all rows."""
    placed = _placed(config, mesh, over, remat, dtype)
    placed = {name: dataclasses.replace(item, reduce_dtype=reduce_dtype) for name, item in placed.items()}
    stored, compute = ({name: getattr(element, at) for name, element in placed.items()} for at in ("stored", "compute"))
    mine = shard(params, stored, mesh)
    (loss, _), grads = trees.value_and_grad(functools.partial(_loss, placed))(mine)
    for x, own in zip(trees.leaves(grads), trees.leaves(mine), strict=True):
        assert x.shape == own.shape and x.dtype == own.dtype
    grads, loss = sum_rest(grads, loss, stored, compute, mesh)
    return loss, unshard(grads, stored, mesh)


def _each_by_itself(program, mesh):
    """The program where every weight is a message of its own, as large ones are."""
    with own_messages(0):
        return program(mesh)


CASES = {
    "dp2 tied, layers computed again": ("dp2", "data", "full", TIED),
    "dp3, which does not divide": ("dp3", "data", "full", CONFIG),
    "dp2,ep2 over both, one with nothing": ("dp2,ep2", ("data", "expert"), "none", NARROW),
    "dp2,tp2 gated delta nets": ("dp2,tp2", "data", "selective", NEXT),
}
QUICK = ("dp2 tied, layers computed again", "dp3, which does not divide")


def _both_sizes(program, mesh):
    """Results with small messages, and where every weight is one."""
    return program(mesh), _each_by_itself(program, mesh)


@pytest.mark.parametrize("case", quick(CASES, QUICK))
def test_losses_and_gradients_are_those_of_one_device(case):
    """Compiled layers have a test of their own, tests/models/test_models_compile_mesh.py."""
    mesh, over, remat, config = CASES[case]
    params = _params(config, torch.float64)
    alone = _placed(config, single(), None, "none", torch.float64)
    (expected, _), whole = trees.value_and_grad(functools.partial(_loss, alone))(params)
    program = functools.partial(_program, config, over, remat, torch.float64, params)
    if config is NARROW:
        results = launch(functools.partial(_both_sizes, program), parse(mesh), "cpu")
    else:
        results = [launch(program, parse(mesh), "cpu")]
    for loss, grads in results:
        assert abs(loss - expected) < 1e-12 * abs(expected)
        for (name, x), y in zip(trees.named(grads), trees.leaves(whole), strict=True):
            assert (x - y).abs().max() < 1e-11, name
            assert y.abs().max() > 1e-3, f"{name}: the loss does not depend on it"


def test_bfloat16_is_sent_and_float32_is_summed():
    # Replicas are cast, compute, and sum in float32. Shards must do the same, and a sum of two has no order.
    params = _params(CONFIG, torch.float32)
    runs = launch(
        lambda mesh: [_program(CONFIG, over, "none", torch.bfloat16, params, mesh) for over in (None, "data")],
        parse("dp2"),
        "cpu",
    )
    assert runs[0][0] == runs[1][0]
    for (name, x), y in zip(trees.named(runs[0][1]), trees.leaves(runs[1][1]), strict=True):
        assert torch.equal(x, y), name
        assert y.dtype == torch.float32


@pytest.mark.slow
def test_the_size_of_messages_changes_no_bit():
    program = functools.partial(_program, TIED, "data", "full", torch.bfloat16, _params(TIED, torch.float32))
    both = functools.partial(_both_sizes, program)
    (loss, grads), (loss_by_itself, by_itself) = launch(both, parse("dp2"), "cpu")
    assert loss == loss_by_itself
    for (name, x), y in zip(trees.named(grads), trees.leaves(by_itself), strict=True):
        assert torch.equal(x, y), name


def test_gradients_may_be_summed_in_bfloat16():
    program = functools.partial(_program, CONFIG, "data", "none", torch.float64, _params(CONFIG, torch.float64))
    (loss, exact), (same, rounded) = launch(
        lambda mesh: [program(mesh, reduce_dtype=dtype) for dtype in (None, torch.bfloat16)], parse("dp2"), "cpu"
    )
    assert loss == same
    placed = _placed(CONFIG, Mesh(parse("dp2")), "data", "none", torch.float64)
    stored = {name: item.stored for name, item in placed.items()}
    whole = {name for name, layout in trees.named(stored) if not layout.axes}
    for (name, x), y in zip(trees.named(rounded), trees.leaves(exact), strict=True):
        assert x.dtype == torch.float64
        assert (x - y).norm() < 2**-7 * y.norm(), name
        assert name in whole or not torch.equal(x, y), name


def _watched(remat, mesh):
    """Counts gathers by dtype, and how many whole layers there are at most at the end of one."""
    policy = _placed(CONFIG, mesh, "data", remat, torch.bfloat16)["policy"]
    mine = shard(_params(CONFIG, torch.float32)["policy"], policy.stored, mesh)
    started, most, alive = [], [0], []
    start, spread = fsdp.start_gather, fsdp.land_gather

    def watch_start(group):
        if group.buffers.buckets:  # some of it is split
            started.append(group.dtypes.compute)
        return start(group)

    def watch_spread(group, arriving):
        whole = spread(group, arriving)
        if len(group.buffers.places) > 1:  # a layer, not the embedding
            alive.extend(weakref.ref(buffer.untyped_storage()) for buffer in whole)
        most[0] = max(most[0], sum(ref() is not None for ref in alive))
        return whole

    fsdp.start_gather, fsdp.land_gather = watch_start, watch_spread
    between = []

    def loss(params):
        scores = policy.token_scores(params, Batch(tokens=TOKENS))
        gc.collect()
        between.append(sum(ref() is not None for ref in alive))
        return scores.logp.sum(), None

    trees.value_and_grad(loss)(mine)
    fsdp.start_gather, fsdp.land_gather = start, spread
    return started, between[0], most[0]


@pytest.mark.slow
def test_whole_layers_come_and_go():
    watched = launch(lambda mesh: [_watched(remat, mesh) for remat in ("none", "full")], parse("dp2"), "cpu")
    for started, between, most in watched:
        # Forward: 4 layers, embedding and unembedding. Backward: 3 layers, for the last one is still there.
        assert started == [torch.bfloat16] * 9
        assert between == 1
        assert most <= 2


GROUPED = ("embed", "attn/o")  # a leaf of every group


def _events(config, mesh):
    """Beginnings and ends of gathers and scatters, in their order: ("gather", group), ("land", group) ..."""
    policy = _placed(config, mesh, "data", "none", torch.float64)["policy"]
    mine = shard(_params(config, torch.float64)["policy"], policy.stored, mesh)
    events = []
    start, spread, scatter, wait = (
        fsdp.start_gather,
        fsdp.land_gather,
        collectives.start_psum_scatters,
        collectives.wait,
    )
    names = {
        x.data_ptr(): name.split("/attn/o")[0] for name, x in trees.named(mine) if name.endswith(("embed", "attn/o"))
    }
    scattered = {}

    def name_of(group):
        return next(names[x.data_ptr()] for x in trees.leaves(group.shards) if x.data_ptr() in names)

    def watch_start(group):
        events.append(("gather", name_of(group)))
        return start(group)

    def watch_spread(group, arriving):
        events.append(("land", name_of(group)))
        return spread(group, arriving)

    def watch_scatter(xs, mesh, axes):
        (summed,) = scatter(xs, mesh, axes)
        scattered[id(summed)] = summed
        events.append(("scatter", len(scattered)))
        return [summed]

    def watch_wait(x):
        if id(x) in scattered:
            events.append(("wait", list(scattered).index(id(x)) + 1))
        return wait(x)

    fsdp.start_gather, fsdp.land_gather = watch_start, watch_spread
    collectives.start_psum_scatters, collectives.wait = watch_scatter, watch_wait

    def loss(params):
        scores = policy.token_scores(params, Batch(tokens=TOKENS))
        events.append("backward")
        return scores.logp.sum(), None

    trees.value_and_grad(loss)(mine)
    return events


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_gathers_and_scatters_are_one_group_ahead_of_what_computes(config):
    events = launch(functools.partial(_events, config), parse("dp2"), "cpu")
    forward, backward = events[: events.index("backward")], events[events.index("backward") + 1 :]
    groups = ["embed", *(f"layers/{i}" for i in range(4)), "embed" if config.tied else "unembed"]
    expected = [("gather", "embed")]
    for name, following in itertools.pairwise(groups):  # tied, the embedding comes again while the last layer computes
        expected += [("gather", following), ("land", name)]
    assert forward == [*expected, ("land", groups[-1])]
    # The last layer is still there. A scatter (1: unembed, 2: the last layer ...) is waited for when the next begins,
    # after the layer before has been gathered and has computed.
    turns = [[("wait", n), ("scatter", n + 1)] for n in range(1, 6)]
    expected = [("scatter", 1), ("gather", "layers/2"), *turns[0]]
    for i, turn in zip((2, 1, 0), turns[1:4], strict=True):
        expected += [("land", f"layers/{i}"), *([("gather", f"layers/{i - 1}")] if i else []), *turn]
    assert backward == [*expected, *turns[4], ("wait", 6)]
    assert _most(events, "gather", "land") == 2 and _most(events, "scatter", "wait") == 1


def _most(events, begins, ends):
    """The most of what has begun and not ended that there is at any time."""
    signs = [(event[0] == begins) - (event[0] == ends) for event in events if event != "backward"]
    return max(itertools.accumulate(signs))


def _scores(placed, params):
    return placed.token_scores(params, Batch(tokens=TOKENS)).logp.sum(), None


def _together(params, mesh):
    """Bytes of a layer's shards, and names and bytes of the messages of a step that joins layers as far as one and a
    half would fill a message; the whole gradient."""
    placed = _placed(CONFIG, mesh, "data", "full", torch.float64)["policy"]
    stored, compute = (trees.leaves(tree["layers"][0]) for tree in (placed.stored, placed.compute))
    trained = (True,) * len(stored)
    buffers = gather_buffers.buffers_of(("",) * len(stored), tuple(stored), tuple(compute), trained, 1 << 16)
    piece = 8 * buffers.buckets[0].elements
    message_sizes.RANKS_PER_NODE, message_sizes.PIECE_BYTES = 1, 3 * piece // 2
    sent, starts = [], {name: getattr(collectives, f"start_{name}") for name in ("all_gathers", "psum_scatters")}

    def watched(name, xs, mesh, axes):
        sent.append((name, sum(x.nbytes for x in xs)))
        return starts[name](xs, mesh, axes)

    for name in starts:
        setattr(collectives, f"start_{name}", functools.partial(watched, name))
    _, grads = trees.value_and_grad(functools.partial(_scores, placed))(shard(params, placed.stored, mesh))
    return piece, sent, unshard(grads, placed.stored, mesh)


def test_layers_join_where_a_message_of_one_is_small():
    params, alone = (made(CONFIG, *rest)["policy"] for made, rest in ((_params, (torch.float64,)), (_placed, ALONE)))
    piece, sent, grads = launch(functools.partial(_together, params), parse("dp2"), "cpu")
    assert sent.count(("all_gathers", 2 * piece)) == 3  # four layers: two messages there, and one back
    assert sent.count(("psum_scatters", 4 * piece)) == 2
    assert len(sent) == 3 + 2 + 2 * 2  # and those of the embedding and of the unembedding
    _, whole = trees.value_and_grad(functools.partial(_scores, alone))(params)
    stored = _placed(CONFIG, Mesh(parse("dp2")), "data", "none", torch.float64)["policy"].stored
    for (name, x), y, layout in zip(trees.named(grads), trees.leaves(whole), trees.leaves(stored), strict=True):
        assert (x - (2 if layout.axes else 1) * y).abs().max() < 1e-11, name  # both ranks see all tokens


def _passes_loss(placed, again, params):
    """Three passes over the same weights, which are gathered once and looked at again, or gathered `again`."""

    def gather():
        return fsdp.gathered(params, placed.stored, placed.compute, placed.mesh, F64)

    weights, total = gather(), torch.zeros((), dtype=torch.float64)
    for i in range(3):
        if again and i:
            weights = gather()
        hidden = placed.model.apply(weights, Inputs(TOKENS.roll(i, 1)), placed.mesh).hidden
        total = total + (WEIGHTS * (hidden @ placed.model.unembed(weights).T).logsumexp(-1)).sum()
    return total + sum(x.square().sum() for x in trees.leaves(params)), None


def _passes(params, mesh):
    placed = _placed(TIED, mesh, "data", "none", torch.float64)["policy"]
    mine = shard(params, placed.stored, mesh)
    losses = [functools.partial(_passes_loss, placed, again) for again in (False, True)]
    return [unshard(trees.value_and_grad(loss)(mine)[1], placed.stored, mesh) for loss in losses]


def test_gradients_of_several_passes_and_of_the_shards_themselves_add_up():
    params = _params(TIED, torch.float64)["policy"]
    alone = _placed(TIED, single(), None, "none", torch.float64)["policy"]
    _, whole = trees.value_and_grad(functools.partial(_passes_loss, alone, False))(params)
    stored = _placed(TIED, Mesh(parse("dp2")), "data", "none", torch.float64)["policy"].stored
    for grads in launch(functools.partial(_passes, params), parse("dp2"), "cpu"):
        leaves = map(trees.leaves, (whole, params, stored))
        for (name, x), y, w, layout in zip(trees.named(grads), *leaves, strict=True):
            # Both ranks see all tokens, so what a gather sums counts twice; the square of an own shard counts once.
            passes = y - 2 * w
            assert (x - (2 if layout.axes else 1) * passes - 2 * w).abs().max() < 1e-11, name
            assert passes.abs().max() > 1e-4, name


def test_a_tree_that_is_stored_as_it_computes_is_only_cast():
    params = _params(CONFIG, torch.float64)["policy"]
    table = layouts(params, decoder_model(CONFIG).axes, STORED, parse("dp2"))
    weights = fsdp.gathered(params, table, table, single(), F64)
    assert weights["layers"][0]["attn"]["q"] is params["layers"][0]["attn"]["q"]


def test_a_dim_that_is_computed_otherwise_than_stored_is_refused():
    stored = {"w": Layout((4, 4), (("data", "tensor"), ()), (2, 1, 1, 2))}
    compute = {"w": Layout((4, 4), (("tensor",), ()), (2, 1, 1, 2))}
    with pytest.raises(MeshError, match=r"w: dim 0 of \(4, 4\) is stored over \('data', 'tensor'\) and computed over"):
        fsdp.gathered({"w": torch.ones(1, 4)}, stored, compute, single(), F64)
