"""Resharding between real gloo ranks: exact, within its memory, and clear when a rank dies."""

import ctypes
import functools
import math
import mmap
import os
import random
import re
import signal

import pytest
import torch
import torch.distributed as dist
from test_reshard import FULLY, layouts_of, part, random_trees

from funrl import trees
from funrl.mesh import buckets, collectives, rules
from funrl.mesh import reshard as resharding
from funrl.mesh.launch import WorkerError, launch, submesh
from funrl.mesh.mesh import Mesh, parse
from funrl.mesh.plan import lower_bound_bytes, plan, received_bytes, sent_bytes
from funrl.mesh.reshard import export_weights, reshard, unshard
from funrl.mesh.rules import Layout
from funrl.models import decoder_config, decoder_model
from funrl.models.huggingface.names import names_of

pytestmark = [pytest.mark.versions, pytest.mark.gloo]


def exact(whole, src, dst, mesh, bucket_bytes):
    """Reshards and compares with slices of the whole; the plan is the same on all ranks."""
    local = trees.map(lambda x, layout: part(x, layout, mesh.rank), whole, src)
    made = plan(src, dst, trees.map(lambda x: x.dtype, whole))
    digests = [None] * mesh.world
    dist.all_gather_object(digests, made.digest)
    assert len(set(digests)) == 1
    result = reshard(local, made, mesh, bucket_bytes)
    expected = trees.map(lambda x, layout: part(x, layout, mesh.rank), whole, dst)
    for (name, x), y in zip(trees.named(result), trees.leaves(expected), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), (name, mesh.rank)


@pytest.mark.slow
def test_random_and_decoder_trees_on_eight_ranks():
    def program(mesh):
        for seed in range(4):
            rng = random.Random(seed)
            torch.manual_seed(seed)
            whole, src, dst = random_trees(rng)
            exact(whole, src, dst, mesh, rng.choice([400, 1 << 20]))
        shapes = trees.map(lambda layout: torch.empty(layout.shape, device="meta"), layouts_of("dp8"))
        whole = trees.map(lambda x: torch.rand(x.shape), shapes)
        for a, b in [
            (layouts_of("dp4,tp2", FULLY), layouts_of("dp2,tp4")),
            (layouts_of("tp8"), layouts_of("dp8")),
        ]:
            exact(whole, a, b, mesh, 1 << 12)
            exact(whole, b, a, mesh, 1 << 20)
        return True

    assert launch(program, parse("dp4,tp2"), "cpu")


@pytest.mark.slow
def test_native_gathers_are_exact(monkeypatch):
    monkeypatch.setattr(resharding, "_gathers_natively", lambda plan, mesh: True)

    def program(mesh):
        shapes = trees.map(lambda layout: torch.empty(layout.shape, device="meta"), layouts_of("dp8"))
        whole = trees.map(lambda x: torch.rand(x.shape), shapes)
        exact(whole, layouts_of("dp2,tp2", FULLY), layouts_of("dp2,tp2"), mesh, 1 << 12)
        exact(whole, layouts_of("dp2,tp2", FULLY), layouts_of("dp4"), mesh, 1 << 12)
        exact(whole, layouts_of("dp2,tp2"), layouts_of("dp4"), mesh, 1 << 20)
        return True

    assert launch(program, parse("dp2,tp2"), "cpu")


def test_unshard_is_the_inverse_of_shard():
    def program(mesh):
        layouts = layouts_of("dp2,tp2", FULLY)
        whole = trees.map(lambda layout: torch.rand(layout.shape, generator=torch.Generator().manual_seed(0)), layouts)
        back = unshard(rules.shard(whole, layouts, mesh), layouts, mesh)
        return all(torch.equal(a, b) for a, b in zip(trees.leaves(back), trees.leaves(whole), strict=True))

    assert launch(program, parse("dp2,tp2"), "cpu")


CONFIG = decoder_config(
    vocab=32, embed=16, layers=2, heads=4, kv_heads=2, head=4, mlp=24, attention_bias=True, family="qwen2"
)


@pytest.mark.slow
@pytest.mark.parametrize("table", [rules.STORED, FULLY], ids=["stored", "fully sharded"])
def test_a_plan_between_disjoint_ranks_moves_the_least(table):
    """From dp2,tp2 on ranks 0 to 3 to tp2 on ranks 4 and 5 and back; rank 6 has no part in it."""

    def program(world):
        train, generate = submesh(world, parse("dp2,tp2"), range(4)), submesh(world, parse("tp2"), range(4, 6))
        src, dst = layouts_of("dp2,tp2", table), layouts_of("tp2", rules.GENERATE)
        whole = trees.map(
            lambda layout: torch.rand(layout.shape, generator=torch.Generator().manual_seed(len(layout.shape))), src
        )
        there = plan(src, dst, torch.float32, src_ranks=train.ranks, dst_ranks=generate.ranks)
        back = plan(dst, src, torch.float32, src_ranks=generate.ranks, dst_ranks=train.ranks)
        assert len(set(collectives.gather_objects((there.digest, back.digest), world))) == 1
        mesh = train if train.here else generate
        if world.rank == 6:  # the others have not begun
            assert reshard(None, there, mesh) is None and reshard(None, back, mesh) is None
        dist.barrier()
        if world.rank < 6:
            arrived = reshard(rules.shard(whole, src, train) if train.here else None, there, mesh, 1 << 12)
            assert (arrived is None) == train.here
            returned = reshard(arrived, back, mesh, 1 << 20)
            assert (returned is None) == generate.here
            result, layouts = (returned, src) if train.here else (arrived, dst)
            for x, y, layout in zip(*map(trees.leaves, (result, whole, layouts)), strict=True):
                assert torch.equal(x, part(y, layout, mesh.rank))
        nbytes = sum(math.prod(layout.local_shape()) * 4 for layout in trees.leaves(dst))
        assert received_bytes(there) == lower_bound_bytes(there) == [0] * 4 + [nbytes] * 2
        assert received_bytes(back) == lower_bound_bytes(back)
        return sent_bytes(there), nbytes

    sent, nbytes = launch(program, parse("dp7"), "cpu")
    assert sum(sent) == 2 * nbytes
    assert max(sent) <= 0.6 * nbytes, "the four ranks share the sending"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["", "dp2,tp2"])
def test_export_yields_other_names_and_shapes_a_bucket_at_a_time(engine):
    def program(mesh):
        model = decoder_model(CONFIG)
        params = model.init(torch.Generator().manual_seed(0))
        table = rules.layouts(params, model.axes, FULLY, mesh.sizes)
        target = resharding.replicated(table)
        to = rules.layouts(params, model.axes, rules.GENERATE, parse(engine)) if engine else None
        names = names_of(model)
        given = dict(export_weights(rules.shard(params, table, mesh), table, mesh, names, to, bucket_bytes=2000))
        assert set(given) == {theirs for theirs, _ in names.values()}
        for (name, x), layout in zip(trees.named(params), trees.leaves(to or target), strict=True):
            theirs, shape = names[name]
            mine = part(x, layout, mesh.rank)
            assert torch.equal(given[theirs].reshape(-1), mine.reshape(-1)), name
            assert to is not None or tuple(given[theirs].shape) == shape
        with pytest.raises(KeyError, match="embed"):
            next(export_weights(params, resharding.replicated(table), mesh, {}))
        return tuple(given["model.layers.0.self_attn.q_proj.weight"].shape)

    assert launch(program, parse("dp2,tp2"), "cpu") == ((8, 16) if engine else (16, 16))


def peak_beyond(run):
    """(bytes that `run` had resident at most, beyond the start; its result), from the kernel's high-water mark."""

    def status(key):
        with open("/proc/self/status") as file:
            match = re.search(rf"{key}:\s+(\d+) kB", file.read())
        assert match is not None
        return int(match[1]) << 10

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    result = run()
    return status("VmHWM") - before, result


def map_blocks_from(nbytes):
    """Have malloc map every block of so many bytes or more by itself, so that one that is freed leaves at once.

    It would still take a block from what is free in the heap, and a block of the heap that is freed stays resident. So
    what is free there, as earlier tests of this process have left it, is taken here for good, mostly untouched.
    """
    m_mmap_threshold, is_mapped, head = -3, 2, 16  # of glibc: a block by itself begins with a head and has that bit
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.mallopt(m_mmap_threshold, nbytes)
    for _ in range(1 << 15):  # with another allocator there is no end
        block = libc.malloc(ctypes.c_size_t(nbytes))
        if block % mmap.PAGESIZE == head and ctypes.c_size_t.from_address(block - head // 2).value & is_mapped:
            libc.free(ctypes.c_void_p(block))
            return


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc to measure memory")
def test_peak_memory_is_the_result_and_two_buckets():
    """64 tensors of 1 MB, split along their last dim so that all of them must be staged."""
    bucket_bytes, slack = 2 << 20, 2 << 20

    def program(mesh):
        map_blocks_from(1 << 16)  # reshard is measured, not malloc
        src = {f"w{i:02}": Layout((512, 512), ((), ("data",)), (2, 1, 1, 1)) for i in range(64)}
        made = plan(src, resharding.replicated(src), torch.float32)

        def given():
            return {name: torch.ones(layout.local_shape(mesh.rank)) for name, layout in src.items()}

        reshard(given(), made, mesh, bucket_bytes)  # the first time imports and connections cost memory too
        peaks = {False: [], True: []}
        for donate in [False, True] * 4:
            tree = given()
            peak, result = peak_beyond(functools.partial(reshard, tree, made, mesh, bucket_bytes, donate))
            assert all(x.shape == (512, 512) for x in result.values())
            peaks[donate].append(peak)
        return peaks, sum(x.nbytes for x in result.values())

    peaks, nbytes = launch(program, parse("dp2"), "cpu")
    # The kernel counts pages in batches for each core, so on a busy machine a peak is wrong by some MB, to either side.
    # Memory that is needed is needed each time: the least peak is within the bound, and the largest is no less than it.
    for donate, emptied in ((False, 0), (True, nbytes // 2)):
        assert min(peaks[donate]) <= nbytes - emptied + 2 * bucket_bytes + slack
        assert max(peaks[donate]) >= nbytes - emptied - slack


def test_a_rank_that_dies_in_the_middle_is_named():
    def program(mesh):
        src = {f"w{i}": Layout((512, 512), ((), ("data",)), (4, 1, 1, 1)) for i in range(8)}
        tree = {name: torch.ones(layout.local_shape(mesh.rank)) for name, layout in src.items()}
        if mesh.rank == 2:
            begun = []
            pack = resharding.pack_message

            def dying(*args):
                begun.append(args)
                if len(begun) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                return pack(*args)

            resharding.pack_message = dying
        reshard(tree, plan(src, resharding.replicated(src), torch.float32), mesh, 1 << 18)

    with pytest.raises(WorkerError, match=r"rank 2 was killed by SIGKILL|rank 2, which has failed"):
        launch(program, parse("dp4"), "cpu")


@pytest.mark.slow
def test_large_messages_arrive_in_place_on_real_ranks(monkeypatch):
    monkeypatch.setattr(buckets, "DIRECT_BYTES", 64)

    def program(mesh: Mesh):
        whole = {"a": torch.rand(64, 8), "b": torch.rand(16, 8, 8), "c": torch.rand(3)}
        whole = {name: torch.arange(x.numel(), dtype=x.dtype).view(x.shape) for name, x in whole.items()}
        src = {
            name: Layout(tuple(x.shape), (("data",), *((),) * (x.dim() - 1)), (4, 1, 1, 1)) for name, x in whole.items()
        }
        exact(whole, src, resharding.replicated(src), mesh, 1 << 20)
        exact(whole, src, resharding.replicated(src), mesh, 512)
        return True

    assert launch(program, parse("dp4"), "cpu")
