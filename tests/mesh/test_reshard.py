"""Resharding against slicing the whole tensor: random layouts executed in one process, and real ranks."""

import math
import random

import pytest
import torch

from funrl import trees
from funrl.mesh import buckets, reshard, rules
from funrl.mesh.buckets import Message, program
from funrl.mesh.mesh import AXES, Mesh, MeshError, parse, ranks_of
from funrl.mesh.plan import lower_bound_bytes, plan, received_bytes, sent_bytes
from funrl.mesh.rules import Layout

MESHES = ["dp8", "tp8", "dp4,tp2", "dp2,tp4", "dp2,ep2,tp2", "sp2,tp4", "ep4,sp2", "dp2,sp2,tp2"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]


def sizes_of(text):
    return tuple(parse(text)[axis] for axis in AXES)


def random_layout(rng, shape, text):
    """Any axes of the mesh on any dims, in any order, whether or not they divide."""
    axes = [a for a in AXES if parse(text)[a] > 1]
    rng.shuffle(axes)
    if shape and rng.random() < 0.3:  # some split several dims together
        over = tuple(axes[: rng.randint(0, len(axes))])
        return rules.layout(
            "leaf",
            shape,
            ("head",) * (len(shape) - 1) + ("embed",),
            rules.fully_sharded(rules.STORED, over),
            parse(text),
        )
    spec = [[] for _ in shape]
    for axis in axes:
        if rng.random() < 0.7 and shape:
            rng.choice(spec).append(axis)
    return Layout(shape, tuple(map(tuple, spec)), sizes_of(text))


def random_trees(rng, leaves=4, first=None, second=None):
    """Whole tensors and two trees of layouts, of eight devices each unless the meshes are given."""
    first, second = first or rng.choice(MESHES), second or rng.choice(MESHES)
    whole, src, dst = {}, {}, {}
    for i in range(leaves):
        shape = tuple(rng.choice([1, 2, 3, 5, 8, 16]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4])))
        values = torch.randperm(max(1, math.prod(shape)))[: math.prod(shape)].reshape(shape)
        whole[f"leaf{i}"] = values.to(rng.choice(DTYPES))
        src[f"leaf{i}"] = random_layout(rng, shape, first)
        dst[f"leaf{i}"] = random_layout(rng, shape, second)
    return whole, src, dst


def part(x, layout, rank):
    return x[tuple(slice(low, high) for low, high in layout.box(rank))].clone()


def execute(trees_by_rank, made, bucket_bytes, native=False, donate=False):
    """All ranks of a reshard in this process, in step: what `reshard` does, with its own packing and unpacking."""
    ranks = sorted({*made.src_ranks, *made.dst_ranks})
    meshes = [Mesh(sizes={**parse(""), "data": made.world}, rank=rank) for rank in ranks]
    works = [reshard.begin_reshard(trees_by_rank[mesh.rank], made, mesh, donate) for mesh in meshes]
    programs = [program(made, rank, bucket_bytes, native=native, donates=donate) for rank in ranks]
    assert len({len(steps) for steps in programs}) == 1
    staged = 0
    for steps in zip(*programs, strict=True):
        sent, filled = {}, [0] * made.world
        for rank, work, step in zip(ranks, works, steps, strict=True):
            for message in step.sends:
                sent[rank, message.peer, message.tag] = reshard.pack_message(work, step, message).clone()
            if step.gather:
                sent[rank] = reshard.pack_message(work, step, Message(rank, 0, step.gather)).clone()
            filled[rank] += sum(volume_bytes(step, m) for m in step.sends)
        for rank, work, step in zip(ranks, works, steps, strict=True):
            reshard.settle(work, step.finished)
            for message in step.receives:
                arriving = reshard.room(work, step, message)
                arriving.view(-1).copy_(sent.pop((message.peer, rank, message.tag)).view(-1))
                reshard.unpack(work, message, arriving)
            if step.gather:
                rows = torch.stack([sent[peer].view(-1) for peer in step.ranks])
                reshard.unpack_gather(work, step, rows)
                filled[rank] += rows.nbytes + sent[rank].nbytes
            filled[rank] += sum(volume_bytes(step, m) for m in step.receives)
        assert not [key for key in sent if isinstance(key, tuple)], "a message that nobody received"
        staged = max(staged, *filled)
    results = {mesh.rank: reshard.finish_reshard(work, mesh) for work, mesh in zip(works, meshes, strict=True)}
    return [results.get(rank) for rank in range(made.world)], staged


def volume_bytes(step, message):
    return sum(math.prod(high - low for low, high in box) for _, box in message.parts) * step.dtype.itemsize


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_layouts_arrive_exactly_within_the_bound(seed, native):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    whole, src, dst = random_trees(rng)
    made = plan(src, dst, trees.map(lambda x: x.dtype, whole), ranks_per_node=rng.choice([2, 8]))
    locals_ = [trees.map(lambda x, layout, r=rank: part(x, layout, r), whole, src) for rank in range(8)]
    for bucket_bytes in (1 << 20, rng.choice([600, 2000])):
        results, staged = execute(locals_, made, bucket_bytes, native)
        assert staged <= bucket_bytes
        for rank, result in enumerate(results):
            for name, x in result.items():
                assert x.dtype == whole[name].dtype
                assert torch.equal(x, part(whole[name], dst[name], rank)), (name, rank, made.route(0))
                if src[name].box(rank) == dst[name].box(rank):
                    assert x is locals_[rank][name]


@pytest.mark.parametrize("seed", range(30))
def test_meshes_over_different_ranks_exchange_exactly_what_is_lacking(seed):
    rng = random.Random(2000 + seed)
    torch.manual_seed(seed)
    meshes = [*MESHES, "dp2,tp2", "tp4", "ep2,sp2", "tp2", "dp3", "dp1"]
    texts = [rng.choice(meshes) for _ in range(2)]
    worlds = [math.prod(sizes_of(text)) for text in texts]
    start = rng.randrange(16 - worlds[0])
    pools = [(range(8), range(8, 16)), (range(start, start + worlds[0]), range(16)), (range(16), range(16))][seed % 3]
    ranks = [ranks_of(sorted(rng.sample(pool, n))) for pool, n in zip(pools, worlds, strict=True)]
    whole, src, dst = random_trees(rng, 4, *texts)
    dtypes = trees.map(lambda x: x.dtype, whole)
    made = plan(src, dst, dtypes, rng.choice([2, 8]), *ranks)
    locals_ = [None] * made.world
    for position, rank in enumerate(ranks[0]):
        locals_[rank] = trees.map(lambda x, layout, p=position: part(x, layout, p), whole, src)
    results, staged = execute(locals_, made, 2000)
    assert staged <= 2000
    lacking = [0] * made.world
    for rank, result in enumerate(results):
        if rank not in ranks[1]:
            assert result is None
            continue
        for name, x in result.items():
            assert x.dtype == whole[name].dtype
            assert torch.equal(x, part(whole[name], dst[name], ranks[1].index(rank))), (name, rank)
            has, needs = (torch.zeros(whole[name].shape, dtype=torch.bool) for _ in range(2))
            needs[tuple(slice(*interval) for interval in dst[name].box(ranks[1].index(rank)))] = True
            if rank in ranks[0]:
                has[tuple(slice(*interval) for interval in src[name].box(ranks[0].index(rank)))] = True
            lacking[rank] += int((needs & ~has).sum()) * x.element_size()
    assert received_bytes(made) == lower_bound_bytes(made) == lacking
    assert sum(sent_bytes(made)) == sum(lacking)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_the_elements_that_a_rank_lacks_counted_one_by_one(seed):
    rng = random.Random(1000 + seed)
    whole, src, dst = random_trees(rng)
    made = plan(src, dst, trees.map(lambda x: x.dtype, whole))
    counted = [0] * 8
    for name, x in whole.items():
        for rank in range(8):
            has, needs = torch.zeros(x.shape, dtype=torch.bool), torch.zeros(x.shape, dtype=torch.bool)
            has[tuple(slice(*interval) for interval in src[name].box(rank))] = True
            needs[tuple(slice(*interval) for interval in dst[name].box(rank))] = True
            counted[rank] += int((needs & ~has).sum()) * x.dtype.itemsize
    assert received_bytes(made) == counted
    assert lower_bound_bytes(made) == counted
    assert sum(sent_bytes(made)) == sum(counted)
    arriving = [
        sum(volume_bytes(step, message) for step in program(made, rank, 4096) for message in step.receives)
        for rank in range(8)
    ]
    assert arriving == counted


@pytest.mark.parametrize(
    ("shape", "before"),
    [
        ((16, 8), [("tensor", "data"), ()]),
        ((16, 8), [("data", "tensor"), ()]),
        ((16, 8), [("tensor",), ("data",)]),
        ((4, 8), [("tensor", "data"), ("data",)]),  # an axis of two dims
    ],
)
@pytest.mark.parametrize("after", [[(), ()], [("tensor",), ()]])
def test_native_gathers_put_blocks_where_they_belong(shape, before, after):
    src, dst = (Layout(shape, tuple(spec), sizes_of("dp4,tp2")) for spec in (before, after))
    whole = torch.arange(math.prod(shape)).float().view(shape)
    made = plan({"w": src}, {"w": dst}, torch.float32)
    expected = "pieces" if before[0] == ("data", "tensor") and after[0] else "gather"
    assert made.route(0).way == expected
    results, _ = execute([{"w": part(whole, src, rank)} for rank in range(8)], made, 300, native=True)
    assert all(torch.equal(result["w"], part(whole, dst, rank)) for rank, result in enumerate(results))


def llama(layers=2, vocab=64, embed=32, heads=8, kv_heads=8, head=4, mlp=48):
    """Shapes (tensors on the meta device) and logical axes of a small decoder."""

    def like(*shape):
        return torch.empty(shape, device="meta")

    attention = {"q": like(heads, head, embed), "k": like(kv_heads, head, embed), "o": like(embed, heads, head)}
    attention_axes = {
        "q": ("heads", "head", "embed"),
        "k": ("kv_heads", "head", "embed"),
        "o": ("embed", "heads", "head"),
    }
    layer = {"norm": like(embed), "attn": attention, "mlp": {"gate": like(mlp, embed), "down": like(embed, mlp)}}
    layer_axes = {
        "norm": ("norm",),
        "attn": attention_axes,
        "mlp": {"gate": ("mlp", "embed"), "down": ("embed", "mlp")},
    }
    shapes = {"embed": like(vocab, embed), "layers": (layer,) * layers}
    return shapes, {"embed": ("vocab", "embed"), "layers": (layer_axes,) * layers}


def layouts_of(mesh, table=rules.STORED, **model):
    return rules.layouts(*llama(**model), table, parse(mesh))


FULLY = rules.fully_sharded(rules.STORED)


def ways(made):
    return {name.split("/")[-1]: made.route(i).way for i, name in enumerate(made.names)}


def test_the_way_of_each_tensor():
    same = plan(layouts_of("dp4,tp2"), layouts_of("dp4,tp2"), torch.float32)
    assert set(ways(same).values()) == {"alias"}
    assert not program(same, 0, 1 << 20)
    changed = plan(layouts_of("dp4,tp2"), layouts_of("dp2,tp4"), torch.float32)
    assert ways(changed) == {name: "alias" if name == "norm" else "pieces" for name in ways(changed)}
    gathered = plan(layouts_of("dp4,tp2", FULLY), layouts_of("dp4,tp2"), torch.float32)
    assert ways(gathered) == {name: "alias" if name == "norm" else "gather" for name in ways(gathered)}
    assert gathered.route(0).axes == ("data",)
    whole = plan(layouts_of("dp4,tp2", FULLY), layouts_of("dp8"), torch.float32)
    assert whole.route(0).axes == ("data", "tensor")
    back = plan(layouts_of("dp8"), layouts_of("dp4,tp2", FULLY), torch.float32)
    assert ways(back) == {name: "alias" if name == "norm" else "local" for name in ways(back)}
    assert received_bytes(back) == [0] * 8


def test_replicas_share_the_sending():
    made = plan(layouts_of("dp4,tp2", layers=8), layouts_of("dp2,tp4", layers=8), torch.float32)
    sent = sent_bytes(made)
    assert max(sent) <= 1.15 * sum(sent) / 8
    # The whole model in one node and again in the other: nothing has to cross.
    within = plan(layouts_of("dp4,tp2"), layouts_of("dp2,tp4"), torch.float32, ranks_per_node=2)
    transfers = [route.transfers for route in within.routes if route.transfers is not None]
    assert all((x.sources // 2 == x.targets // 2).all() for x in transfers)


def test_plans_and_programs_come_from_the_cache():
    first = plan(layouts_of("dp4,tp2"), layouts_of("dp2,tp4"), torch.float32)
    assert plan(layouts_of("dp4,tp2"), layouts_of("dp2,tp4"), torch.float32) is first
    assert program(first, 3, 1 << 20) is program(first, 3, 1 << 20)
    assert plan(layouts_of("dp4,tp2"), layouts_of("dp2,tp4"), torch.bfloat16) is not first


def test_a_cast_on_the_way():
    shapes, _ = llama()
    whole = trees.map(lambda x: torch.randn(x.shape), shapes)
    src, dst = layouts_of("dp4,tp2", FULLY), layouts_of("dp2,tp4")
    made = plan(src, dst, torch.bfloat16)
    locals_ = [trees.map(lambda x, layout, r=rank: part(x, layout, r), whole, src) for rank in range(8)]
    results, _ = execute(locals_, made, 1 << 16)
    for rank, result in enumerate(results):
        expected = trees.map(lambda x, layout, r=rank: part(x, layout, r).bfloat16(), whole, dst)
        assert all(torch.equal(a, b) for a, b in zip(trees.leaves(result), trees.leaves(expected), strict=True))


def test_donated_leaves_are_emptied_and_shared_ones_are_not():
    src, dst = layouts_of("dp4,tp2"), layouts_of("dp2,tp4")
    locals_ = [trees.map(lambda layout, r=rank: torch.ones(layout.local_shape(r)), src) for rank in range(8)]
    results, _ = execute(locals_, plan(src, dst, torch.float32), 4096, donate=True)
    assert trees.count(results[0]) == sum(math.prod(layout.local_shape(0)) for layout in trees.leaves(dst))
    for rank in range(8):
        for (name, x), y in zip(trees.named(locals_[rank]), trees.leaves(results[rank]), strict=True):
            assert (x is y) if name.endswith("norm") or name == "norm" else x.numel() == 0, name


def test_the_same_tensor_in_two_leaves_can_be_donated():
    split = Layout((8, 4), (("data",), ()), sizes_of("dp8"))
    to = Layout((8, 4), ((), ()), sizes_of("dp8"))
    x = torch.arange(32.0).view(8, 4)
    locals_ = []
    for rank in range(8):
        tied = part(x, split, rank)
        locals_.append({"a": tied, "b": tied})
    results, _ = execute(locals_, plan({"a": split, "b": split}, {"a": to, "b": to}, torch.float32), 64, donate=True)
    assert all(torch.equal(result[k], x) for result in results for k in "ab")


def test_large_parts_go_without_staging(monkeypatch):
    monkeypatch.setattr(buckets, "DIRECT_BYTES", 16)
    program.cache_clear()
    src, dst = Layout((8, 4), (("data",), ()), sizes_of("dp8")), Layout((8, 4), ((), ()), sizes_of("dp8"))
    made = plan({"a": src}, {"a": dst}, torch.float32)
    work = reshard.begin_reshard({"a": torch.ones(1, 4)}, made, Mesh(parse("dp8")), False)
    (step,) = program(made, 0, 1 << 20)
    arriving = [reshard.room(work, step, message) for message in step.receives]
    result = work.leaves[0].result
    assert all(x.untyped_storage().data_ptr() == result.untyped_storage().data_ptr() for x in arriving)
    program.cache_clear()


def test_groups_of_messages_are_small_and_the_same_on_both_ends(monkeypatch):
    """What NCCL starts at once: both ranks of a message have it in groups of one number, in the same order."""
    monkeypatch.setattr(buckets, "NEAR", 8)
    shapes = {f"w{i}": torch.empty(512, 256, device="meta") for i in range(6)}
    src = {name: Layout((512, 256), (("data",), ()), sizes_of("dp8,tp8")) for name in shapes}
    dst = {name: Layout((512, 256), ((), ("tensor",)), sizes_of("dp16,tp4")) for name in shapes}
    made = plan(src, dst, torch.float32)
    bucket_bytes = 1 << 18
    programs = [
        program(made, rank, bucket_bytes, native=True, direct_bytes=bucket_bytes // 8) for rank in range(made.world)
    ]
    most = 0
    for steps in zip(*programs, strict=True):
        sent, received = {}, {}
        for rank, step in enumerate(steps):
            numbers = []
            for receives, sends in buckets.starts_together(step, rank):
                most = max(most, len(receives) + len(sends))
                peers = [step.receives[i].peer for i in receives] + [step.sends[i].peer for i in sends]
                (number,) = {(abs(peer - rank) - 1) // 8 for peer in peers}
                numbers.append(number)
                for i in sends:
                    sent.setdefault((rank, step.sends[i].peer), []).append((number, step.sends[i].parts))
                for i in receives:
                    received.setdefault((step.receives[i].peer, rank), []).append((number, step.receives[i].parts))
            assert numbers == sorted(set(numbers))
            assert sum(len(g[0]) + len(g[1]) for g in buckets.starts_together(step, rank)) == len(step.sends) + len(
                step.receives
            )
        assert sent == received
    assert 0 < most <= 4 * 8 + 8


def test_gathers_are_native_where_the_backend_is_quick_and_the_mesh_has_the_groups():
    made = plan(layouts_of("dp4,tp2", FULLY), layouts_of("dp4,tp2"), torch.float32)
    gpu = torch.device("cuda")
    assert reshard._gathers_natively(made, Mesh(parse("dp4,tp2"), 0, gpu))
    assert not reshard._gathers_natively(made, Mesh(parse("dp4,tp2"), 0))
    assert not reshard._gathers_natively(made, Mesh(parse("dp2,tp4"), 0, gpu)), "it has no group of ranks 0, 2, 4, 6"


def test_errors_name_the_tensor_and_the_sizes():
    with pytest.raises(MeshError, match=r"embed: the meshes dp4,tp2 \(8 devices\) and dp2 \(2 devices\)"):
        plan(layouts_of("dp4,tp2"), layouts_of("dp2"), torch.float32)
    with pytest.raises(MeshError, match=r"layers/0/attn/k: its shape is \(8, 4, 32\) in one layout and \(4, 4, 32\)"):
        plan(layouts_of("dp4,tp2"), layouts_of("dp4,tp2", kv_heads=4), torch.float32)
    with pytest.raises(MeshError, match=r"only the first has \['layers/1/attn/k'"):
        plan(layouts_of("dp4,tp2"), layouts_of("dp4,tp2", layers=1), torch.float32)
    made = plan(layouts_of("dp8"), layouts_of("tp8"), torch.float32)
    with pytest.raises(MeshError, match=r"embed: rank 0 has shape \(3, 32\), its layout says \(64, 32\)"):
        tree = trees.map(lambda layout: torch.ones(layout.local_shape(0)), layouts_of("dp8"))
        reshard.reshard({**tree, "embed": torch.ones(3, 32)}, made, Mesh(parse("dp8")))
    with pytest.raises(MeshError, match=r"from ranks range\(0, 8\) to range\(0, 8\), the mesh dp2 is over "):
        reshard.reshard(tree, made, Mesh(parse("dp2")))
    with pytest.raises(MeshError, match="lacks"):
        reshard.reshard({"embed": tree["embed"]}, made, Mesh(parse("dp8")))


@pytest.mark.parametrize(("ranks", "expected"), [(512, [1]), (8, range(9, 20))])
def test_a_gather_of_many_ranks_has_larger_buckets(ranks, expected):
    """500 MB: 512 ranks have one megabyte each to give, which goes at once; 8 give theirs in buckets of 64 MB."""
    stored = {"w": Layout((1 << 19, 500), (("data",), ()), (ranks, 1, 1, 1))}
    made = plan(stored, {"w": Layout((1 << 19, 500), ((), ()), (ranks, 1, 1, 1))}, torch.bfloat16)
    assert made.routes[0].way == "gather"
    assert len(program(made, 0, 64 << 20, native=True)) in expected


EXPERTS = {"w": ((64, 32, 16), ("experts", "expert_embed", "mlp")), "norm": ((16,), ("norm",))}


def experts_plan(train, generate, layers=6):
    """The plan of experts from ranks that train to others that generate, in bfloat16."""
    shapes = {f"{name}{i}": torch.empty(EXPERTS[name][0], device="meta") for name in EXPERTS for i in range(layers)}
    axes = {name: EXPERTS[name.rstrip("0123456789")][1] for name in shapes}
    sizes, to = parse(train), parse(generate)
    world, more = math.prod(sizes.values()), math.prod(to.values())
    return plan(
        rules.layouts(shapes, axes, FULLY, sizes),
        rules.layouts(shapes, axes, rules.GENERATE, to),
        torch.bfloat16,
        src_ranks=ranks_of(range(world)),
        dst_ranks=ranks_of(range(world, world + more)),
    )


def test_generators_relay_what_they_have_received():
    """Each of 16 trainer ranks sends its bytes once, whether there are 1, 4 or 8 replicas; beyond, once to every 8."""
    sent = {}
    for replicas in (1, 4, 8, 16):
        made = experts_plan("dp2,ep8", f"dp{replicas},tp2")
        assert received_bytes(made) == lower_bound_bytes(made)
        assert sum(sent_bytes(made)) == sum(received_bytes(made))
        experts = [leaf for leaf, name in enumerate(made.names) if name.startswith("w")]
        sent[replicas] = max(sent_bytes(made, experts)[:16])
    assert sent[1] == sent[4] == sent[8] and sent[16] == 2 * sent[8]


def test_messages_are_few_and_large_and_programs_agree():
    made = experts_plan("dp2,ep8", "dp4,tp4")
    bucket_bytes = 1 << 18
    programs = [program(made, rank, bucket_bytes) for rank in range(made.world)]
    sends = sorted(
        (rank, x.peer, x.tag, x.parts) for rank, steps in enumerate(programs) for s in steps for x in s.sends
    )
    receives = sorted(
        (x.peer, rank, x.tag, x.parts) for rank, steps in enumerate(programs) for s in steps for x in s.receives
    )
    assert sends == receives
    nbytes = received_bytes(made)[-1]
    assert len([x for x in receives if x[1] == made.world - 1]) <= nbytes // (4 << 10)
