"""Shards on disk: each chunk is written once, by ranks that take turns, and is read in any layout."""

import functools
import json
import os
import signal
import subprocess
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from funrl import trees
from funrl.mesh import reading
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import Mesh, parse
from funrl.mesh.rules import STORED, Leading, Uneven, fully_sharded, layout, layouts
from funrl.mesh.sums import own_range
from funrl.models import decoder_config
from funrl.models.decoder import weights
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.decoder.routing import Experts
from funrl.trainer.storage import shards
from funrl.trainer.storage.row_shards import HeldRows, copy_rows, own_row_shards, read_held_rows
from funrl.trainer.storage.shard_server import Array, Commit, ReadShards, WriteShards
from funrl.trainer.storage.shards import (
    Database,
    Memory,
    ShardError,
    ShardServer,
    chunk_shape,
    chunks,
    copy_to_memory,
    joined_shards,
    own_shards,
    read_tensors,
)

pytestmark = pytest.mark.versions

RULES = {
    "rows": ("data", "tensor"),
    "columns": "tensor",
    "whole": None,
    "both": "data",
    "uneven": Uneven("data"),
    "leading": Leading("data"),
}
AXES = {
    "roles/a": ((8, 12), ("both", "columns"), torch.float32),
    "roles/b": ((16, 4), ("rows", "whole"), torch.bfloat16),
    "roles/c": ((5,), ("whole",), torch.float64),
    "roles/d": ((2, 8, 3), ("whole", "columns", "leading"), torch.float32),  # dp4 splits two dims together
    "count": ((), (), torch.int64),
    "flags": ((3, 4), ("whole", "columns"), torch.bool),
    "empty": ((0, 4), ("whole", "whole"), torch.float32),
    "odd": ((3, 5), ("whole", "uneven"), torch.float32),  # four ranks of data have 2, 2, 1 and 0
}
LARGE = {"roles/large": ((512, 2048), ("both", "columns"), torch.float32)}  # 1 MiB on each of four ranks
MESHES = ["dp1", "dp2,tp2", "dp4", "tp4"]
READER = Path(__file__).with_name("orbax_reader.py")


def whole_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.rand(shape, generator=generator) * 100).to(dtype) - (0 if dtype == torch.bool else 7)
        if dtype != torch.bool
        else torch.rand(shape, generator=generator) > 0.5
        for name, (shape, _, dtype) in AXES.items()
    }


def ranks_of(mesh):
    """Of each rank its mesh, its tensors and their layouts."""
    sizes, whole = parse(mesh), whole_tensors()
    results = {n: layout(n, shape, logical, RULES, sizes) for n, (shape, logical, _) in AXES.items()}
    for rank in range(Mesh(sizes).world):
        boxes = {n: tuple(slice(*ends) for ends in item.box(rank)) for n, item in results.items()}
        yield Mesh(sizes, rank), {n: x[boxes[n]] for n, x in whole.items()}, results


@pytest.mark.parametrize("mesh", MESHES)
def test_every_element_is_written_once(mesh, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 32)
    written = {name: torch.zeros(shape, dtype=torch.int) for name, (shape, _, _) in AXES.items()}
    created, nbytes = [], []
    for item, tensors, element in ranks_of(mesh):
        own = own_shards(tensors, element, item)
        created += own.created
        nbytes.append(own.nbytes)
        for part in own.parts:
            written[part.name][tuple(slice(low, high) for low, high in part.box)] += 1
            whole = own.arrays[part.name]
            assert all(low % step == 0 for (low, _), step in zip(part.box, whole.chunk, strict=True))
    assert all((x == 1).all() for x in written.values())
    assert sorted(created) == sorted(AXES)
    assert max(nbytes) <= 1.5 * sum(nbytes) / len(nbytes) + 64, "ranks take turns"


def written_together(mesh, most):
    """What a rank writes of `whole_tensors`, with parts joined: (name, box, content) of each part, and its arrays."""
    _, tensors, element = list(ranks_of(str(mesh)))[mesh.rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "CHUNK_BYTES", most)
        patch.setattr(shards, "EXCHANGE_BYTES", most)
        own = own_shards(tensors, element, mesh, join=True)
        memory = Memory(own.nbytes)
        copy_to_memory(own, tensors, element, mesh, memory)
    dtypes = {name: x.dtype for name, x in tensors.items()}
    parts = [
        (
            part.name,
            part.box,
            memory.tensor(part.offset, dtypes[part.name], [high - low for low, high in part.box]).clone(),
        )
        for part in own.parts
    ]
    return gather_objects((parts, own.created, own.arrays, sorted(own.joined)), mesh)


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "most"), [("dp2,tp2", 1024), ("dp4", 2048), ("dp2,tp2", 8192), ("dp2,ep2", 2048)])
def test_ranks_join_small_parts_before_they_write(mesh, most):
    whole = whole_tensors()
    written = {name: torch.zeros_like(x) for name, x in whole.items()}
    times = {name: torch.zeros(x.shape, dtype=torch.int) for name, x in whole.items()}
    ranks = launch(functools.partial(written_together, most=most), parse(mesh), "cpu")
    assert sorted(name for _, created, _, _ in ranks for name in created) == sorted(whole)
    assert ranks[0][3] and all(joined == ranks[0][3] for *_, joined in ranks)
    for parts, _, arrays, _ in ranks:
        assert arrays == ranks[0][2]
        for name, box, content in parts:
            place = tuple(slice(*ends) for ends in box)
            written[name][place] = content
            times[name][place] += 1
    assert all((x == 1).all() for x in times.values())
    assert all(torch.equal(written[name], x) for name, x in whole.items())
    for name, array in ranks[0][2].items():
        least = min(most // shards.LEAST_SHARE, whole[name].nbytes)
        assert np.prod(array.chunk) * whole[name].element_size() >= least, name


LLAMA_70B = decoder_config(
    vocab=128256, embed=8192, layers=80, heads=64, kv_heads=8, head=128, mlp=28672, max_positions=512, eos=(1,), pad=0
)
DEEPSEEK_V3 = decoder_config(
    vocab=129280,
    embed=7168,
    layers=61,
    heads=128,
    kv_heads=128,
    head=192,
    mlp=18432,
    max_positions=512,
    eos=(1,),
    pad=0,
    family="deepseek_v3",
    latent=LatentSizes(1536, 512, 128, 64, 128),
    experts=Experts(256, 8, 2048, True, (0, 1, 2), "sigmoid", True, 8, 4, scale=2.5, shared=2048, wide=True),
)


@pytest.mark.parametrize(
    ("config", "mesh", "over", "before", "after"),
    [
        (LLAMA_70B, "dp512", "data", 287_905, 126_945),
        (LLAMA_70B, "dp64,tp8", "data", 287_905, 131_745),
        (DEEPSEEK_V3, "dp64,ep64", ("data", "expert"), 2_859_823, 717_794),
    ],
)
def test_no_chunk_of_large_models_on_many_ranks_is_a_sliver(config, mesh, over, before, after):
    table = fully_sharded(STORED, over)
    results = trees.leaves(layouts(weights.shapes(config), weights.axes(config), table, parse(mesh)))
    counts = {False: 0, True: 0}
    for stored in results:
        for join in counts:
            item = shards.without_axes(stored, shards.joined_axes(stored, 4)) if join else stored
            chunk = chunk_shape(item.local_shape(), 4)
            counts[join] += int(np.prod([-(-a // b) for a, b in zip(stored.shape, chunk, strict=True)]))
            assert not join or np.prod(chunk) * 4 >= min(1 << 20, np.prod(stored.shape) * 4)
    assert counts == {False: before, True: after}


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((4, 4), 4, (4, 4)),
        ((1024, 8192), 4, (512, 8192)),
        ((3, 1 << 24), 4, (1, 1 << 22)),
        ((), 8, ()),
        ((7 * 1024, 4096), 4, (1024, 4096)),
        ((0, 5), 4, (0, 5)),
        ((10007, 4096), 4, (10007, 256)),  # a prime
    ],
)
def test_chunks_divide_the_tensor_and_are_at_most_16_mebibytes(shape, itemsize, expected):
    chunk = chunk_shape(shape, itemsize)
    assert chunk == expected
    assert len(list(chunks(shape, chunk))) == int(np.prod([a // max(b, 1) for a, b in zip(shape, chunk, strict=True)]))


def write_checkpoint(folder, mesh, server):
    """A checkpoint of `whole_tensors`, as the ranks of a mesh write it."""
    beside, numbers = str(folder / ".step-1"), {"step": 3, "coefficient": 0.1}
    scalars = {"step": Array((), "int64", (), True), "coefficient": Array((), "float64", (), True)}
    memories, arrays = [], {}
    for item, tensors, element in ranks_of(mesh):
        own = own_shards(tensors, element, item)
        memory = Memory(own.nbytes)
        copy_to_memory(own, tensors, element, item, memory)
        mine, created = own.arrays, own.created
        if item.rank == 0:
            mine, created = own.arrays | scalars, own.created | set(scalars)
        names = {part.name for part in own.parts} | created
        server.send(
            WriteShards(
                beside,
                item.rank,
                memory.path,
                {n: x for n, x in mine.items() if n in names},
                own.parts,
                frozenset(created),
                numbers if item.rank == 0 else {},
            )
        )
        arrays, memories = arrays | mine, [*memories, memory]
    server.send(Commit(beside, str(folder / "step-1"), len(memories), arrays, {"step": 1}, 10.0))
    assert server.answers(wait=True) == []
    return arrays


def read_on(mesh, folder, arrays, server, monkeypatch):
    """What each rank of a mesh reads of a checkpoint of `whole_tensors`, by itself, beside what it is to be."""
    monkeypatch.setattr(reading, "gather_objects", lambda value, mesh: [value])
    monkeypatch.setattr(shards, "_finer", lambda layout: layout)
    database = Database(str(folder / "step-1"), arrays, server)
    for item, tensors, element in ranks_of(mesh):
        got = dict(read_tensors(database, {name: x.dtype for name, x in tensors.items()}, element, mesh=item))
        assert got.keys() == tensors.keys()
        yield from ((got[name], x) for name, x in tensors.items())


def test_what_one_mesh_writes_another_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 32)
    monkeypatch.setattr(shards, "WINDOW_BYTES", 200)  # several windows
    server = ShardServer()
    for mesh in ("dp2,tp2", "dp1", "dp4"):
        arrays = write_checkpoint(tmp_path, mesh, server)
        for reader in ("dp1", "tp4", "dp4") if mesh != "dp1" else ("dp1", "tp4"):
            for got, expected in read_on(reader, tmp_path, arrays, server, monkeypatch):
                assert torch.equal(got, expected) and got.dtype == expected.dtype, (mesh, reader)
    server.close()


def flip(file, place):
    """Change a bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


def test_a_changed_bit_anywhere_gives_an_error_or_the_same_numbers(tmp_path, monkeypatch):
    """In chunks, in zarr's metadata and in the databases' nodes; in bytes that nothing reads it may pass."""
    server = ShardServer()
    arrays = write_checkpoint(tmp_path, "dp2,tp2", server)
    files = [file for file in sorted((tmp_path / "step-1").rglob("*")) if file.is_file() and file.stat().st_size]
    rng = np.random.default_rng(0)
    errors = 0
    for number in range(50):
        file = files[number % len(files)]
        place = int(rng.integers(file.stat().st_size))
        flip(file, place)
        try:
            assert all(torch.equal(*pair) for pair in read_on("dp1", tmp_path, arrays, server, monkeypatch)), file
        except ShardError:
            errors += 1
        flip(file, place)
    server.close()
    assert errors


def test_a_chunk_grid_that_is_not_the_record_s_is_refused(tmp_path, monkeypatch):
    server = ShardServer()
    arrays = write_checkpoint(tmp_path, "dp1", server)
    assert arrays["roles/a"].chunk == (8, 12)
    other = arrays | {"roles/a": arrays["roles/a"]._replace(chunk=(12, 8))}
    with pytest.raises(ShardError, match=r"roles/a: .*chunk"):
        list(read_on("dp1", tmp_path, other, server, monkeypatch))
    server.close()


@pytest.mark.slow
def test_orbax_reads_what_ranks_write(tmp_path, monkeypatch):
    monkeypatch.setitem(AXES, "roles/large", LARGE["roles/large"])
    if find_spec("orbax") is None:  # to import it here would start threads in a process that is forked later
        pytest.skip("orbax is not installed")
    server = ShardServer()
    write_checkpoint(tmp_path, "dp2,tp2", server)
    server.close()
    done = subprocess.run(
        [sys.executable, str(READER), str(tmp_path / "step-1")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    whole = whole_tensors()
    assert json.loads(done.stdout.splitlines()[-1]) == [
        "bfloat16",
        whole["roles/a"].tolist(),
        whole["roles/b"].float().tolist(),
        3,
        0.1,
        whole["flags"].tolist(),
        [0, 4],
        zlib.crc32(whole["roles/large"].numpy().tobytes()),
    ]


@pytest.mark.parametrize("mesh", ["dp2,tp2", "dp3"])
def test_rows_are_written_by_those_who_have_them_and_read_in_equal_shares(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "gather_objects", lambda value, mesh: [value])
    sizes, whole = parse(mesh), {"a/x": torch.rand(7, 3, 2), "a/y": torch.rand(7, 5) > 0.5, "a/none": torch.rand(0, 3)}
    server, memories, arrays, written = ShardServer(), [], {}, 0
    owner = {"a/x": np.array([1, 0, 1, 1, 0, 0, 1]), "a/none": np.zeros(0, np.int64)}
    for rank in range(Mesh(sizes).world):
        first, parts = Mesh(sizes, rank), []
        for names in (("a/x", "a/y"), ("a/none",)):
            held = HeldRows(frozenset(names), owner[names[0]], first)
            mine = {name: whole[name][held.own] for name in names}
            parts.append((held, mine, own_row_shards(mine, held)))
        shards = joined_shards(parts[0][2], parts[1][2])
        memory = Memory(shards.nbytes)
        for held, mine, _ in parts:
            copy_rows(shards, mine, held, memory)
        written += shards.nbytes
        names = {part.name for part in shards.parts} | shards.created
        mine = {name: shards.arrays[name] for name in names}
        server.send(WriteShards(str(tmp_path / "b"), rank, memory.path, mine, shards.parts, shards.created, {}))
        arrays, memories = shards.arrays, [*memories, memory]
    server.send(Commit(str(tmp_path / "b"), str(tmp_path / "step-1"), len(memories), arrays, {"step": 1}, 10.0))
    assert server.answers(wait=True) == [] and written == 7 * 64 * 2, "each row once"
    for ranks in ("dp1", "dp4,tp2"):
        for rank in range(Mesh(parse(ranks)).world):
            first = Mesh(parse(ranks), rank)
            held = HeldRows(frozenset(whole), np.zeros(7, np.int64), first)
            held_rows = read_held_rows(Database(str(tmp_path / "step-1"), arrays, server), held, first)
            for name, x in whole.items():
                share = own_range(len(x), first, first.row_axes)
                assert torch.equal(held_rows[name], x[share.start : share.stop]) and held_rows[name].dtype == x.dtype
    server.close()


def test_a_rank_that_does_not_write_is_named(tmp_path):
    server = ShardServer()
    server.send(Commit(str(tmp_path / ".step-1"), str(tmp_path / "step-1"), 2, {}, {}, 0.1))
    assert server.answers(wait=True) == ["rank 0 has not written its part within 0 s"]
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_is_an_answer():
    server = ShardServer()
    server.send(Commit("/nowhere", "/nowhere", 1, {}, {}, 60.0))
    assert server.process is not None
    assert os.getpgid(server.process.pid) == server.process.pid  # which the Ctrl-C of a terminal does not reach
    server.process.kill()
    assert server.answers(wait=True) == ["the process that writes shards ended with status -9"]
    server.close()


def test_a_process_that_is_stopped_takes_a_long_request_without_blocking():
    """More than a pipe holds."""
    server = ShardServer()
    server.send(ReadShards("/nowhere", "/nowhere", {}, ()))
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    arrays = {f"array {number}": Array((number,), "float32", (number,)) for number in range(10_000)}
    server.send(WriteShards("/nowhere/there", 0, "/nowhere", arrays, (), frozenset(), {}))
    assert server.waiting == 2
    server.close(0.1)
    assert server.process is None and server._sender is None
    server.send(ReadShards("/nowhere", "/nowhere", {}, ()))  # to another process
    assert ["No such file" in problem for problem in server.answers(wait=True)] == [True]
    server.close()
