"""Rule tables: layouts, their boxes, shards, and the errors that say what to change."""

import math

import pytest
import torch

from funrl import trees
from funrl.mesh import rules
from funrl.mesh.mesh import Mesh, MeshError, parse
from funrl.mesh.rules import (
    COMPUTE,
    GENERATE,
    STORED,
    Layout,
    Outermost,
    Uneven,
    fully_sharded,
    gather_axes,
    layout,
    layouts,
    rest_axes,
    shard,
)

DP4_TP2 = parse("dp4,tp2")


def test_a_layout_has_the_axes_that_are_larger_than_one():
    assert layout("w", (8, 6), ("vocab", "embed"), STORED, DP4_TP2).spec == (("tensor",), ())
    assert layout("w", (8, 6), ("vocab", "embed"), STORED, parse("dp8")).spec == ((), ())
    assert layout("w", (8, 8), ("vocab", "embed"), fully_sharded(STORED), DP4_TP2).spec == (("tensor", "data"), ())
    both = layout("w", (16, 6), ("vocab", "embed"), {"vocab": ("data", "tensor"), "embed": None}, DP4_TP2)
    assert both.spec == (("data", "tensor"), ())
    assert both.axes == ("data", "tensor")


def test_boxes_by_hand():
    # dp4,tp2: rank 5 is data 2, tensor 1. Data 2 has rows 8 to 11 of 16, and tensor 1 the second half of these.
    both = Layout((16, 6), (("data", "tensor"), ()), (4, 1, 1, 2))
    assert both.box(5) == ((10, 12), (0, 6))
    assert both.local_shape(5) == (2, 6)
    # The other order: tensor 1 has 8 to 15, and data 2 the third quarter of these.
    other = Layout((16, 6), (("tensor", "data"), ()), (4, 1, 1, 2))
    assert other.box(5) == ((12, 14), (0, 6))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 8, 11])
def test_parts_are_the_chunks_of_torch(length):
    chunked = Layout((length,), (("data",),), (4, 1, 1, 2))
    chunks = torch.arange(length).chunk(4)
    for rank in range(8):
        (low, high), at = chunked.box(rank)[0], rank // 2
        expected = chunks[at].tolist() if at < len(chunks) else []
        assert list(range(low, high)) == expected


@pytest.mark.parametrize("table", [STORED, GENERATE, fully_sharded(STORED)])
def test_shards_of_all_ranks_cover_every_element_as_often_as_it_is_replicated(table):
    tree = {"embed": torch.arange(8 * 12).view(8, 12), "layers": ({"o": torch.arange(12 * 4 * 3).view(12, 4, 3)},)}
    axes = {"embed": ("vocab", "embed"), "layers": ({"o": ("embed", "heads", "head")},)}
    places = layouts(tree, axes, table, DP4_TP2)
    seen = trees.map(torch.zeros_like, tree)
    for rank in range(8):
        parts = shard(tree, places, Mesh(DP4_TP2, rank))
        for count, x, part, place in zip(*map(trees.leaves, (seen, tree, parts, places)), strict=True):
            where = tuple(slice(low, high) for low, high in place.box(rank))
            assert torch.equal(part, x[where]) and part.is_contiguous()
            count[where] += 1
    for count, place in zip(trees.leaves(seen), trees.leaves(places), strict=True):
        assert (count == 8 // Mesh(DP4_TP2).size(place.axes)).all()


def test_a_shard_owns_its_memory_and_a_whole_leaf_is_shared():
    tree = {"w": torch.zeros(8, 2), "norm": torch.zeros(2)}
    places = layouts(tree, {"w": ("vocab", "embed"), "norm": ("norm",)}, STORED, DP4_TP2)
    parts = shard(tree, places, Mesh(DP4_TP2, 0))
    parts["w"] += 1
    assert tree["w"].sum() == 0
    assert parts["norm"] is tree["norm"]


def test_key_value_heads_are_replicated_where_they_are_too_few():
    assert layout("k", (2, 4, 8), ("kv_heads", "head", "embed"), STORED, parse("tp4")).spec == ((), (), ())
    assert layout("k", (4, 4, 8), ("kv_heads", "head", "embed"), STORED, parse("tp4")).spec == (("tensor",), (), ())


def test_fully_sharded_over_one_of_two_axes_is_hybrid():
    table = fully_sharded(STORED, "expert")
    hybrid = layout("up", (12, 8), ("mlp", "embed"), table, parse("dp2,ep2,tp2"))
    assert hybrid.spec == (("tensor", "expert"), ())
    assert hybrid.box(0) == hybrid.box(4), "ranks that differ only in their data index hold the same part"
    assert STORED["embed"] is None, "the table that it is made from stays as it is"


@pytest.mark.parametrize(
    "shape,logical,mesh,spec",
    [
        ((16, 4, 8), ("heads", "head", "embed"), "dp4", ("data", "", "")),
        ((16, 4, 8), ("heads", "head", "embed"), "dp4,tp4", ("tensor data", "", "")),
        ((2, 4, 8), ("kv_heads", "head", "embed"), "dp4", ("data", "data", "")),
        ((2, 4, 8), ("kv_heads", "head", "embed"), "dp8", ("data", "data", "")),
        ((2, 2, 8), ("kv_heads", "head", "embed"), "dp16", ("data", "data", "data")),
        ((4, 4, 8), ("heads", "head", "embed"), "dp4,tp2", ("tensor data", "data", "")),
        ((4, 4, 8), ("heads", "head", "embed"), "dp2,ep4", ("data expert", "expert", "")),
        ((4, 4, 8), ("heads", "head", "embed"), "dp4,ep4", ("data", "expert", "")),
        ((6, 4, 8), ("heads", "head", "embed"), "dp4", ("", "data", "")),  # 6 heads are no part of 4 ranks
        ((4, 3, 8), ("heads", "head", "embed"), "dp8", ("", "", "data")),
        ((2, 4, 8), ("kv_heads", "head", "embed"), "dp2,tp4", ("data", "", "")),  # too few heads for tensor ranks
        ((6, 3, 8), ("heads", "head", "embed"), "dp4", ("", "", "data")),
        ((8, 6, 4), ("embed", "heads", "head"), "dp4,tp2", ("data", "tensor", "")),
        ((8, 6, 4), ("experts", "mlp", "expert_embed"), "dp2,ep4", ("expert data", "", "")),
        ((4, 6, 4), ("experts", "mlp", "expert_embed"), "dp2,ep4", ("expert", "data", "")),
        ((16,), ("norm",), "dp4", ("",)),
    ],
)
def test_fully_sharded_splits_the_outermost_dim_that_divides(shape, logical, mesh, spec):
    table = fully_sharded(STORED, ("data", "expert"))
    assert layout("w", shape, logical, table, parse(mesh)).spec == tuple(tuple(axes.split()) for axes in spec)
    own = layout("w", shape, logical, fully_sharded(STORED, ("data", "expert"), Uneven), parse(mesh))
    assert own.axes == () or "data" in own.spec[next(i for i, axis in enumerate(logical) if axis.endswith("embed"))]


def test_outermost_splits_one_dim():
    table = fully_sharded(STORED, "data", Outermost)
    one = layout("k", (2, 4, 8), ("kv_heads", "head", "embed"), table, parse("dp4"))
    assert one.spec == ((), ("data",), ())


@pytest.mark.parametrize(
    ("shape", "mesh", "over"),
    [
        ((4, 4, 8), "dp8", "data"),
        ((2, 2, 8), "dp16", "data"),
        ((4, 4, 8), "dp2,ep4", ("data", "expert")),
        ((2, 4, 8), "dp2,ep4", ("expert", "data")),
        ((4, 4, 4), "dp2,ep2,sp8", ("data", "expert", "sequence")),
    ],
)
def test_ranks_that_split_dims_together_have_consecutive_parts(shape, mesh, over):
    sizes = parse(mesh)
    split = layout("q", shape, ("heads", "head", "embed"), fully_sharded(STORED, over), sizes)
    assert len(split.axes) < sum(map(len, split.spec)), "an axis splits several dims"
    numbers = torch.arange(math.prod(shape)).view(shape)
    parts = [numbers[tuple(slice(*ends) for ends in split.box(rank))].flatten() for rank in range(split.world)]
    index = [Mesh(sizes, rank).index(over) for rank in range(split.world)]
    in_order = [part for _, part in sorted(zip(index, parts, strict=True), key=lambda pair: pair[0])]
    assert torch.equal(torch.cat(in_order), numbers.flatten())
    assert {len(part) for part in parts} == {math.prod(shape) // split.world}


def test_an_axis_of_several_dims_splits_all_but_the_last_into_rows():
    by_hand = Layout((2, 4), (("data",), ("data",)), (4, 1, 1, 1))
    assert [by_hand.box(rank) for rank in range(4)] == [
        ((0, 1), (0, 2)),
        ((0, 1), (2, 4)),
        ((1, 2), (0, 2)),
        ((1, 2), (2, 4)),
    ]
    with pytest.raises(MeshError, match="data splits several dims"):
        Layout((3, 4), (("data",), ("data",)), (4, 1, 1, 1)).box(0)


def test_what_is_fully_sharded_need_not_divide():
    odd = layout("up", (6, 10), ("mlp", "embed"), fully_sharded(STORED, ("data", "expert")), parse("dp2,ep2"))
    assert [odd.box(rank)[1] for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    none = layout("up", (12, 10), ("mlp", "embed"), fully_sharded(STORED), parse("dp8"))
    assert [none.box(rank)[1] for rank in (0, 4, 5, 7)] == [(0, 2), (8, 10), (10, 10), (10, 10)]
    with pytest.raises(MeshError, match="state_heads has size 12, which does not divide over tp8"):
        layout("out", (12, 10), ("state_heads", "embed"), fully_sharded(STORED), parse("tp8"))
    split = Layout((10,), (("data",),), (2, 2, 1, 1))
    with pytest.raises(MeshError, match=r"w: dim 0 of \(10,\) does not divide over \('data', 'expert'\)"):
        gather_axes("w", Layout((10,), (("data", "expert"),), (2, 2, 1, 1)), split)


EVERY = ("data", "expert", "sequence")
OVER_EVERY = fully_sharded(STORED, EVERY)
BY_TENSOR = {"experts": ("expert", "tensor"), "mlp": None}
EXPERTS, MATRIX, NORM = ("experts", "mlp", "expert_embed"), ("mlp", "embed"), ("norm",)


@pytest.mark.parametrize(
    "logical,stored,compute,gathers,rest",
    [  # each weight on dp2,ep2,sp2,tp2: what is gathered per dim before it computes, what is left to sum once a step
        (MATRIX, OVER_EVERY, COMPUTE, [EVERY, ()], ()),
        (NORM, OVER_EVERY, COMPUTE, [()], EVERY),
        (MATRIX, STORED, COMPUTE, [(), ()], EVERY),
        (MATRIX, fully_sharded(STORED, "expert"), COMPUTE, [("expert",), ()], ("data", "sequence")),
        (EXPERTS, OVER_EVERY, COMPUTE, [("data", "sequence"), (), ()], ()),
        (
            EXPERTS,
            fully_sharded(STORED | BY_TENSOR, "data"),
            COMPUTE | BY_TENSOR,
            [("data",), (), ()],
            ("sequence",),
        ),
        (EXPERTS, STORED, COMPUTE | {"experts": None}, [("expert",), (), ()], ("data", "sequence")),
        (EXPERTS, STORED | {"experts": ("expert", "data")}, COMPUTE, [("data",), (), ()], ("sequence",)),
    ],
)
def test_what_is_gathered_and_what_is_left_to_sum(logical, stored, compute, gathers, rest):
    sizes = parse("dp2,ep2,sp2,tp2")
    have, want = (layout("w", (16,) * len(logical), logical, table, sizes) for table in (stored, compute))
    assert list(gather_axes("w", have, want)) == gathers
    assert rest_axes({"w": have}, {"w": want}, Mesh(sizes)) == [rest]


@pytest.mark.parametrize(
    "shape,logical,table,message",
    [
        ((8, 6), ("vocab", "colour"), STORED, "layers/0/w: logical axis 'colour' has no rule; the table knows"),
        ((8, 6), ("vocab",), STORED, r"layers/0/w: shape \(8, 6\) has 2 dims but its logical axes are \('vocab',\)"),
        (
            (8, 6),
            ("mlp", "embed"),
            {**STORED, "embed": "model"},
            "the rule for 'embed' names mesh axis 'model'; there are",
        ),
        (
            (7, 6),
            ("state_heads", "embed"),
            STORED,
            r"state_heads has size 7, which does not divide over tp2 \(2 parts\); choose a size",
        ),
        ((8, 6), ("mlp", "embed"), {**STORED, "embed": "tensor"}, "mesh axis 'tensor' would split two dims"),
    ],
)
def test_errors_name_the_tensor_the_sizes_and_the_way_out(shape, logical, table, message):
    with pytest.raises(MeshError, match=message):
        rules.layout("layers/0/w", shape, logical, table, DP4_TP2)
