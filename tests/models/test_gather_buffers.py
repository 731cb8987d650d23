"""Buffers of gathers and scatters: what is copied and held, and the same bits on every simulated mesh."""

import pytest
import torch
from own_messages import own_messages
from torch.utils._python_dispatch import TorchDispatchMode

from funrl import trees
from funrl.cost.tracing.estimate import pretended
from funrl.cost.tracing.hardware import HARDWARE
from funrl.cost.tracing.tracer import Tracer
from funrl.mesh.mesh import AXES, coordinates, parse
from funrl.mesh.rules import COMPUTE, STORED, Layout, fully_sharded, layouts
from funrl.mesh.simulate import gather, per_rank, scatter, simulate
from funrl.models import decoder_config, decoder_model, fsdp, gather_buffers
from funrl.models.decoder.routing import Experts
from funrl.models.gather_buffers import (
    GatherDtypes,
    buffers_of,
    land_gather,
    land_scatters,
    start_gather,
    start_scatter,
)

SIZES = (4, 2, 1, 1)  # of the axes data, expert, sequence and tensor


@pytest.mark.parametrize(
    ("shape", "spec", "in_place"),
    [
        ((8, 6), (("data",), ()), True),
        ((1, 8, 6), ((), ("data",), ()), True),
        ((6, 3), (("data",), ()), True),  # 2, 2, 2 and 0 rows
        ((1, 6), (("data",), ()), True),  # one row on the first rank
        ((16, 6), (("data", "expert"), ()), True),
        ((16, 6), (("expert", "data"), ()), False),  # ranks are in another order
        ((6, 8), ((), ("data",)), False),
        ((2, 8, 6), ((), ("data",), ()), False),
        ((8, 2), (("data",), ("expert",)), False),
        ((4, 2), (("data",), ("expert",)), True),  # a number on every rank
        ((4, 3), (("data",), ("expert",)), False),  # of 2 + 2 numbers of a row one is padding
        ((1, 2), ((), ("expert",)), True),
        ((2, 8, 6), (("data",), ("data",), ()), True),  # 2 heads on 4 ranks
        ((4, 4, 6), (("data",), ("expert",), ()), True),
        ((2, 8, 6), (("data",), ("data", "expert"), ()), True),
        ((2, 8, 6), (("data",), ("expert", "data"), ()), False),
    ],
)
def test_a_leaf_arrives_in_place_where_its_outermost_dim_is_split(shape, spec, in_place):
    stored, compute = Layout(shape, spec, SIZES), Layout(shape, ((),) * len(shape), SIZES)
    (bucket,) = buffers_of(("w",), (stored,), (compute,), (True,), 0).buckets
    assert bucket.in_place == in_place
    (bucket,) = buffers_of(("w",), (stored,), (compute,), (True,), 1 << 10).buckets
    assert not bucket.in_place, "a part of a message of several leaves is never in place"


# Weights of a dense layer with the proportions of Llama 70B. All have messages of their own but k and v.
LAYER = {
    "q": (("heads", "head", "embed"), (8, 64, 512)),
    "k": (("kv_heads", "head", "embed"), (2, 64, 512)),
    "v": (("kv_heads", "head", "embed"), (2, 64, 512)),
    "o": (("embed", "heads", "head"), (512, 8, 64)),
    "gate": (("mlp", "embed"), (1792, 512)),
    "up": (("mlp", "embed"), (1792, 512)),
    "down": (("embed", "mlp"), (512, 1792)),
}
RANKS = 4
NUMBERS = sum(torch.Size(shape).numel() for _, shape in LAYER.values())
COPIED = sum(torch.Size(LAYER[name][1]).numel() for name in ("k", "v"))  # which share a message
IN_PLACE = NUMBERS - COPIED


LLAMA_70B = {"embed": 8192, "heads": 64, "kv_heads": 8, "head": 128, "mlp": 28672}
QWEN3_8B = {"embed": 4096, "heads": 32, "kv_heads": 8, "head": 128, "mlp": 12288}
QWEN3_1_7B = {"embed": 2048, "heads": 16, "kv_heads": 8, "head": 128, "mlp": 6144}
QWEN3_30B = {"embed": 2048, "heads": 32, "kv_heads": 4, "head": 128, "mlp": 6144, "experts": Experts(128, 8, 768)}
QWEN3_235B = {"embed": 4096, "heads": 64, "kv_heads": 4, "head": 128, "mlp": 12288, "experts": Experts(128, 8, 1536)}


@pytest.mark.parametrize(
    ("sizes", "mesh", "percent"),
    [  # in the comment with one dim split and larger messages
        (LLAMA_70B, "dp8", 0),
        (LLAMA_70B, "dp16", 0),  # 2
        (LLAMA_70B, "dp512", 0),  # 10
        (QWEN3_8B, "dp8", 0),
        (QWEN3_8B, "dp16", 0),  # 4
        (QWEN3_8B, "dp8,tp4", 0),  # 4
        (QWEN3_8B, "dp64,tp8", 0),  # 22
        (QWEN3_8B, "dp512", 0),  # 22
        (QWEN3_8B, "dp6", 13),  # which divides neither heads nor their sizes
        (QWEN3_1_7B, "dp64", 0),  # 17
        (QWEN3_30B, "dp4,ep8,tp2", 0),  # 12
        (QWEN3_235B, "dp256", 0),  # 99: more ranks than experts
        (QWEN3_235B, "dp64,ep4", 0),  # 95
    ],
)
def test_few_bytes_of_published_layers_are_rearranged(sizes, mesh, percent):
    model = decoder_model(decoder_config(vocab=8, layers=4, **sizes))
    tables = fully_sharded(STORED, ("data", "expert")), COMPUTE
    trees_of = [layouts(model.shapes["layers"], model.axes["layers"], table, parse(mesh)) for table in tables]
    together = fsdp.layers_of_group(*trees_of, itemsize=2)
    stored, compute = (tuple(trees.leaves(tree[:together])) for tree in trees_of)
    buffers = buffers_of(("w",) * len(stored), stored, compute, (True,) * len(stored), gather_buffers.GROUPED_MESSAGE)
    gathered = copied = 0
    for bucket in buffers.buckets:
        gathered += bucket.ranks * bucket.elements
        copied += 0 if bucket.in_place else bucket.ranks * bucket.elements
    assert round(100 * copied / gathered) == percent


class Copies(TorchDispatchMode):
    """Counts the bytes that are written by copies, and those of new tensors that are no results of collectives."""

    def __init__(self):
        super().__init__()
        self.copied, self.made = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::copy_", "aten::_foreach_copy_"):
            self.copied += sum(x.nbytes for x in (args[0] if isinstance(args[0], (list, tuple)) else [args[0]]))
        elif name.startswith("aten::") and isinstance(out, torch.Tensor) and not func.is_view:
            self.made += out.nbytes
        return out


def _layer(mesh, dtypes):
    """A layer's group on rank 0, and its whole gradients in the dtype to compute in."""
    logical, shapes = ({name: row[i] for name, row in LAYER.items()} for i in (0, 1))
    empty = {name: torch.empty(shape) for name, shape in shapes.items()}
    stored, compute = (layouts(empty, logical, table, mesh.sizes) for table in (fully_sharded(STORED), COMPUTE))
    shards = trees.map(lambda layout: torch.ones(layout.local_shape()), stored)
    args = (trees.leaves(stored), trees.leaves(compute), [True] * len(LAYER))
    buffers = buffers_of(tuple(sorted(LAYER)), *map(tuple, args), 1 << 16)
    grads = tuple(x.to(dtypes.compute) for x in trees.leaves(empty))
    return gather_buffers.Group(shards, buffers, mesh, dtypes), grads


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_gather_copies_only_what_is_not_in_place(compute):
    item = compute.itemsize
    with pretended(parse(f"dp{RANKS}")) as mesh:
        group, _ = _layer(mesh, GatherDtypes(compute))
        with Copies() as copies:
            landed = land_gather(group, start_gather(group))
    small = 2 * torch.Size(LAYER["k"][1]).numel() // RANKS  # shards that share a message
    cast = NUMBERS // RANKS if item == 2 else small
    # With one buffer for a layer it was NUMBERS // RANKS + NUMBERS in both dtypes; with `embed` split two thirds of it.
    assert copies.copied == copies.made == item * (cast + COPIED)
    assert COPIED < NUMBERS / 10
    assert sum(x.nbytes for x in landed) == item * NUMBERS


def test_a_gather_holds_a_layer_and_one_message_that_is_copied():
    with pretended(parse(f"dp{RANKS}")) as mesh:
        group, _ = _layer(mesh, GatherDtypes(torch.float32))
        tracer = Tracer(HARDWARE["cpu"], real=True)
        tracer.hold_tree(group.shards, "weights")
        with tracer, tracer.phase("gather"):
            land_gather(group, start_gather(group))
    # With one buffer for a layer it was a shard of it and twice the layer.
    held = tracer.phases["gather"]
    assert held.total - held.peak["weights"] == 4 * (NUMBERS + COPIED)


@pytest.mark.parametrize("reduce", [None, torch.bfloat16])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_scatter_writes_no_zeros_and_copies_only_what_is_not_in_place(compute, reduce):
    item = (reduce or torch.float32).itemsize
    with pretended(parse(f"dp{RANKS}")) as mesh:
        group, grads = _layer(mesh, GatherDtypes(compute, reduce))
        shapes = [tuple(x.shape) for x in trees.leaves(group.shards)]
        leaving = []
        with Copies() as copies:
            shards = start_scatter(group, grads, shapes, torch.float32, leaving)
            land_scatters(leaving)
    whole = COPIED if compute == (reduce or torch.float32) else NUMBERS
    widened = 0 if reduce is None else 4 * NUMBERS // RANKS
    # It was 4 * NUMBERS of zeros and as many copied.
    assert copies.copied == copies.made == item * whole + widened
    assert [x.dtype for x in shards] == [torch.float32] * len(LAYER)


TREE = {
    "layers": {
        "o": ("embed", "heads", "head"),
        "q": ("heads", "head", "embed"),
        "down": ("embed", "mlp"),
        "norm": ("norm",),
        "up": ("experts", "mlp", "expert_embed"),
        "back": ("experts", "expert_embed", "mlp"),
        "a": ("rank", "embed"),
        "b": ("embed", "rank"),
    },
    "table": {"w": ("vocab", "embed")},
}
LENGTHS = {
    "embed": 8,
    "heads": 4,
    "head": 2,
    "mlp": 4,
    "norm": 3,
    "experts": 4,
    "expert_embed": 8,
    "rank": 2,
    "vocab": 8,
}
SIMULATED = {  # mesh, and the axes that weights are sharded over
    "dp2,tp2": ("dp2,tp2", ("data",)),
    "dp2,ep2 in the other order": ("dp2,ep2", ("expert", "data")),
    "dp8, more than heads": ("dp8", ("data",)),
    "dp2,ep4 in the other order": ("dp2,ep4", ("expert", "data")),
}


def _sharded(text, over):
    """Whole weights, and their layouts stored and computed with, of a model of two layers and a table."""
    generator = torch.Generator().manual_seed(0)

    def weight(logical):
        return torch.randint(-8, 9, [LENGTHS[axis] for axis in logical], generator=generator).double()

    axes = {"layers": (TREE["layers"],) * 2, "table": TREE["table"]}
    made = [{name: weight(logical) for name, logical in TREE["layers"].items()} for _ in range(2)]
    params = {"layers": tuple(made), "table": {"w": weight(TREE["table"]["w"])}}
    tables = fully_sharded(STORED, over), COMPUTE
    return params, *(layouts(params, axes, table, parse(text)) for table in tables)


def _coefficients(compute, draw):
    """For each rank a whole gradient of what it computes with, of its own."""
    world = trees.leaves(compute)[0].world
    generators = [torch.Generator().manual_seed(100 + rank) for rank in range(world)]
    return [
        [draw(layout.local_shape(rank), generator) for layout in trees.leaves(compute)]
        for rank, generator in enumerate(generators)
    ]


def _gradients(mesh, whole_trees, own, reduce=None, frozen=None):
    """Simulated weights that are computed with, and gradients of a loss; each rank has coefficients of its own."""
    params, stored, compute = whole_trees
    factors = [per_rank(mesh.world, lambda rank, i=i: own[rank][i]) for i in range(len(own[0]))]
    shards = scatter(params, stored)
    learns = [x for name, x in trees.named(shards) if name != frozen]
    for x in learns:
        x.requires_grad_()
    weights = fsdp.gathered(shards, stored, compute, mesh, GatherDtypes(torch.float64, reduce))
    whole = {"layers": tuple(weights["layers"]), "table": weights["table"]}
    loss = sum((x * y).sum() for x, y in zip(trees.leaves(whole), factors, strict=True))
    grads = dict(zip([id(x) for x in learns], torch.autograd.grad(loss, learns), strict=True))
    return [x.detach() for x in trees.leaves(whole)], [grads.get(id(x)) for x in trees.leaves(shards)]


def _summed(stored, compute, rank, parts):
    """The shard of the sum of whole gradients over the ranks that gather with this one, and of their absolutes."""
    gathered = {axis for have, want in zip(stored.spec, compute.spec, strict=True) for axis in have[len(want) :]}
    sizes = dict(zip(AXES, stored.sizes, strict=True))
    position = coordinates(sizes, rank)
    group = [
        part
        for other, part in enumerate(parts)
        if all(coordinates(sizes, other)[axis] == position[axis] for axis in AXES if axis not in gathered)
    ]
    where = tuple(
        slice(low - origin, high - origin)
        for (low, high), (origin, _) in zip(stored.box(rank), compute.box(rank), strict=True)
    )
    return sum(group)[where], sum(x.abs() for x in group)[where], len(group)


def _normal(shape, generator):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _whole_numbers(shape, generator):
    return torch.randint(-8, 9, shape, generator=generator).double()


ELEMENTS = pytest.mark.parametrize("elements", [0, 1 << 20], ids=["each leaf by itself", "in one message"])


@ELEMENTS
@pytest.mark.parametrize("case", SIMULATED)
def test_weights_and_gradients_have_the_same_bits_on_every_mesh(case, elements):
    text, over = SIMULATED[case]
    params, stored, compute = whole_trees = _sharded(text, over)
    own = _coefficients(compute, _whole_numbers)
    with own_messages(elements), simulate(text) as mesh:
        weights, grads = _gradients(mesh, whole_trees, own)
    for rank in range(mesh.world):
        for i, (have, want) in enumerate(zip(trees.leaves(stored), trees.leaves(compute), strict=True)):
            box = tuple(slice(low, high) for low, high in want.box(rank))
            assert torch.equal(gather(weights[i], rank), trees.leaves(params)[i][box])
            assert torch.equal(gather(grads[i], rank), _summed(have, want, rank, [parts[i] for parts in own])[0])


def test_leaves_that_are_not_trained_have_no_gradient():
    _, stored, compute = whole_trees = _sharded("dp2", ("data",))
    own = _coefficients(compute, _whole_numbers)
    with own_messages(0), simulate("dp2") as mesh:
        _, grads = _gradients(mesh, whole_trees, own, frozen="layers/0/o")
    for i, ((name, have), want) in enumerate(zip(trees.named(stored), trees.leaves(compute), strict=True)):
        if name == "layers/0/o":
            assert grads[i] is None
        else:
            assert torch.equal(gather(grads[i], 1), _summed(have, want, 1, [parts[i] for parts in own])[0]), name


@ELEMENTS
def test_sums_in_bfloat16_are_those_of_float64_within_their_rounding(elements):
    text, over = SIMULATED["dp2,tp2"]
    _, stored, compute = whole_trees = _sharded(text, over)
    own = _coefficients(compute, _normal)
    with own_messages(elements), simulate(text) as mesh:
        _, grads = _gradients(mesh, whole_trees, own, torch.bfloat16)
    rounded = 0
    for rank in range(mesh.world):
        for i, (have, want) in enumerate(zip(trees.leaves(stored), trees.leaves(compute), strict=True)):
            exact, sizes, ranks = _summed(have, want, rank, [parts[i] for parts in own])
            tensor = gather(grads[i], rank)
            assert tensor.dtype == torch.float64
            # Each term and each partial sum is rounded to 8 bits once: a term at most as often as there are ranks.
            bound = (1 + 2**-8) ** ranks - 1 if have != want else 0.0
            assert ((tensor - exact).abs() <= bound * sizes).all()
            rounded += int((tensor != exact).sum())
    assert rounded > 0
