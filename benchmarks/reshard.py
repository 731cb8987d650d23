"""Resharding a decoder's weights between layouts on eight CPU ranks, against all-gathers and DTensor.

    python benchmarks/reshard.py                       # 89 MB of float32
    python benchmarks/reshard.py --tree=1gb --rounds=4

| method | what it does |
|---|---|
| plan | `funrl.mesh.reshard.reshard` |
| per tensor | an all-gather of each tensor, then its slice |
| flat | one all-gather of all tensors in one buffer, then their slices |
| DTensor | `redistribute` where the mesh stays, `full_tensor` and a slice where it changes |

The all-gathers go over no more axes than they must: axes that split the source and, where the mesh stays, do not split
the target. Methods take turns, in another order in every round, with a barrier before and after each; the
results of the first round, which is not counted, are checked. Printed are medians over the other rounds; a dash stands
for a flat all-gather that this machine's memory cannot hold (gloo makes a second copy of what it gathers).
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from absl import app, flags
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from funrl import trees
from funrl.mesh import rules
from funrl.mesh.launch import launch, view
from funrl.mesh.mesh import AXES, Mesh, members, parse
from funrl.mesh.plan import lower_bound_bytes, plan, received_bytes, slices
from funrl.mesh.reshard import reshard
from funrl.mesh.rules import Layout, Rules
from funrl.models import decoder_model
from funrl.models.decoder.config import decoder_config

SIZES = {  # vocabulary, width, layers, mlp
    "1mb": (1024, 128, 1, 256),
    "89mb": (10240, 512, 5, 1536),
    "1gb": (16384, 1536, 8, 4096),
}
ROUNDS = flags.DEFINE_integer("rounds", 7, "rounds; the first is not counted", lower_bound=2)
TREE = flags.DEFINE_enum("tree", "89mb", list(SIZES), "size of the tree of weights")
LINES = flags.DEFINE_integer("lines", 9, "of the table, from its first", lower_bound=1, upper_bound=9)
BUCKET = flags.DEFINE_integer("bucket_mb", 64, "megabytes that a bucket stages at most", lower_bound=1)

STORED, FULLY, GENERATE = rules.STORED, rules.fully_sharded(rules.STORED), rules.GENERATE
ROWS = [
    ("FSDP dp4,tp2 -> dp4,tp2", (FULLY, "dp4,tp2"), (GENERATE, "dp4,tp2")),
    ("FSDP dp4,tp2 -> dp2,tp4", (FULLY, "dp4,tp2"), (GENERATE, "dp2,tp4")),
    ("FSDP dp4,tp2 -> replicated", (FULLY, "dp4,tp2"), (GENERATE, "dp8")),
    ("dp4,tp2 -> dp2,tp4", (STORED, "dp4,tp2"), (GENERATE, "dp2,tp4")),
    ("dp4,tp2 -> replicated", (STORED, "dp4,tp2"), (GENERATE, "dp8")),
    ("dp4,tp2 -> FSDP dp4,tp2", (GENERATE, "dp4,tp2"), (FULLY, "dp4,tp2")),
    ("dp2,tp4 -> FSDP dp4,tp2", (GENERATE, "dp2,tp4"), (FULLY, "dp4,tp2")),
    ("dp2,tp4 -> dp4,tp2", (GENERATE, "dp2,tp4"), (STORED, "dp4,tp2")),
    ("replicated -> FSDP dp4,tp2", (GENERATE, "dp8"), (FULLY, "dp4,tp2")),
]
METHODS = ("plan", "per tensor", "flat", "DTensor")
Method = Callable[[list[Tensor]], list[Tensor]]


class Pair(NamedTuple):
    """One tensor's layouts and the mesh axes over which an all-gather must go before the target can be sliced."""

    src: Layout
    dst: Layout
    axes: tuple[str, ...]


def pairs_of(src: trees.Tree, dst: trees.Tree) -> list[Pair]:
    pairs = []
    for a, b in zip(trees.leaves(src), trees.leaves(dst), strict=True):
        stays = b.axes if a.sizes == b.sizes else ()
        pairs.append(Pair(a, b, tuple(axis for axis in AXES if axis in a.axes and axis not in stays)))
    return pairs


def cut(pair: Pair, rows: Tensor, mesh: Mesh) -> Tensor:
    """The target's part from the gathered shards, one a row."""
    spec = tuple(tuple(axis for axis in dims if axis not in pair.axes) for dims in pair.src.spec)
    held = Layout(pair.src.shape, spec, pair.src.sizes)
    whole = rows.new_empty(held.local_shape(mesh.rank))
    group = next(ranks for ranks in members(mesh.sizes, pair.axes) if mesh.rank in ranks)
    for row, peer in zip(rows, group, strict=True):
        whole[slices(pair.src.box(peer), held.box(mesh.rank))] = row.view(pair.src.local_shape(peer))
    return whole[slices(pair.dst.box(mesh.rank), held.box(mesh.rank))].contiguous()


def keep(pair: Pair, x: Tensor, mesh: Mesh) -> Tensor:
    """The target's part where the rank holds it already."""
    if pair.src == pair.dst:
        return x
    return x[slices(pair.dst.box(mesh.rank), pair.src.box(mesh.rank))].clone()


def gather(x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    rows = x.new_empty(mesh.size(axes), x.numel())
    mesh.group(axes)._allgather_base(rows.view(-1), x.reshape(-1)).wait()
    return rows


def per_tensor(pairs: list[Pair], mesh: Mesh) -> Method:
    def run(leaves: list[Tensor]) -> list[Tensor]:
        return [
            cut(pair, gather(x, mesh, pair.axes), mesh) if pair.axes else keep(pair, x, mesh)
            for pair, x in zip(pairs, leaves, strict=True)
        ]

    return run


def flat(pairs: list[Pair], mesh: Mesh) -> Method:
    def run(leaves: list[Tensor]) -> list[Tensor]:
        out: list[Any] = [None if pair.axes else keep(pair, x, mesh) for pair, x in zip(pairs, leaves, strict=True)]
        for axes in dict.fromkeys(pair.axes for pair in pairs if pair.axes):
            its = [i for i, pair in enumerate(pairs) if pair.axes == axes]
            rows = gather(torch.cat([leaves[i].view(-1) for i in its]), mesh, axes)
            parts = rows.split([leaves[i].numel() for i in its], 1)
            for i, part in zip(its, parts, strict=True):
                out[i] = cut(pairs[i], part, mesh)
        return out

    return run


def dtensor(pairs: list[Pair], mesh: Mesh, devices: DeviceMesh) -> Method:
    def placements(layout: Layout) -> list:
        split = [[d for d, axes in enumerate(layout.spec) if axis in axes] for axis in ("tensor", "data")]
        return [Shard(dims[0]) if dims else Replicate() for dims in split]

    def run(leaves: list[Tensor]) -> list[Tensor]:
        out = []
        for pair, x in zip(pairs, leaves, strict=True):
            stride = torch.empty(pair.src.shape, device="meta").stride()
            y = DTensor.from_local(
                x, devices, placements(pair.src), run_check=False, shape=torch.Size(pair.src.shape), stride=stride
            )
            if pair.src.sizes == pair.dst.sizes:
                out.append(y.redistribute(placements=placements(pair.dst)).to_local())
            else:
                everything = tuple((0, length) for length in pair.dst.shape)
                out.append(y.full_tensor()[slices(pair.dst.box(mesh.rank), everything)].contiguous())
        return out

    return run


def tree_of_weights() -> tuple[trees.Tree, trees.Tree]:
    vocab, embed, layers, mlp = SIZES[TREE.value]
    config = decoder_config(
        vocab=vocab, embed=embed, layers=layers, heads=8, kv_heads=8, head=embed // 8, mlp=mlp, tied=True
    )
    model = decoder_model(config)
    return model.shapes, model.axes


def part(layout: Layout, rank: int) -> Tensor:
    """A rank's part of the tensor whose elements are their own numbers; the whole is never made."""
    numbers, stride = torch.zeros((), dtype=torch.int64), 1
    for dim in reversed(range(len(layout.shape))):
        low, high = layout.box(rank)[dim]
        numbers = numbers + stride * torch.arange(low, high).view(-1, *(1,) * (len(layout.shape) - 1 - dim))
        stride *= layout.shape[dim]
    return numbers.float()


def measure(title: str, source: tuple[Rules, str], target: tuple[Rules, str], first: Mesh) -> str:
    """A line for a pair of layouts: its bytes (moved, least, all-gathered) and each method's median time."""
    shapes, axes = tree_of_weights()
    mesh = view(first, parse(source[1]))
    # DTensor splits a dim by the mesh's dims in their order: first by tensor, and these parts by data, as `fsdp` does.
    ranks = torch.arange(8).view(mesh.sizes["data"], -1).T
    devices = DeviceMesh("cpu", ranks, mesh_dim_names=("tensor", "data"))
    src, dst = (rules.layouts(shapes, axes, table, parse(text)) for table, text in (source, target))
    made, pairs = plan(src, dst, torch.float32), pairs_of(src, dst)
    tree = trees.map(lambda layout: part(layout, first.rank), src)
    methods: dict[str, Method] = {
        "plan": lambda _: trees.leaves(reshard(tree, made, first, BUCKET.value << 20)),
        "per tensor": per_tensor(pairs, mesh),
        "flat": flat(pairs, mesh),
        "DTensor": dtensor(pairs, mesh, devices),
    }
    if first.world * flat_bytes(pairs, mesh) > 0.75 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        del methods["flat"]
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(ROUNDS.value):
        names = [*methods]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            result = methods[name](trees.leaves(tree))
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            if turn == 0:
                exact = [torch.equal(x, part(pair.dst, first.rank)) for x, pair in zip(result, pairs, strict=True)]
                assert all(exact), (title, name)
            del result
    gathered = sum(4 * math.prod(a.local_shape()) * (mesh.size(axes) - 1) * 8 for a, _, axes in pairs)
    moved = sum(received_bytes(made)), sum(lower_bound_bytes(made)), gathered
    times = {name: statistics.median(of[1:]) for name, of in seconds.items()}
    best = min(time_s for name, time_s in times.items() if name != "plan")
    cells = [f"{nbytes / 1e6:.0f}" for nbytes in moved]
    cells += [f"{times[name] * 1e3:.0f}" if name in times else "-" for name in METHODS]
    return f"| {title} | {' | '.join(cells)} | {best / times['plan']:.1f} |"


def flat_bytes(pairs: list[Pair], mesh: Mesh) -> int:
    """The most bytes that a rank holds during `flat`."""
    held = sum(math.prod(pair.src.local_shape()) + math.prod(pair.dst.local_shape()) for pair in pairs)
    return 4 * (held + 2 * sum(math.prod(a.local_shape()) * mesh.size(axes) for a, _, axes in pairs if axes))


def main(_: list[str]) -> None:
    shapes, _ = tree_of_weights()
    print(f"{trees.nbytes(shapes) / 1e6:.0f} MB of weights, 8 ranks, medians of {ROUNDS.value - 1} rounds in ms\n")
    print(f"| layouts | MB moved | least | all-gather MB | {' | '.join(METHODS)} | best peer / plan |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for row in ROWS[: LINES.value]:  # in processes of its own, which have all of the machine's memory
        print(launch(functools.partial(measure, *row), parse("dp4,tp2"), "cpu"), flush=True)


if __name__ == "__main__":
    app.run(main)
