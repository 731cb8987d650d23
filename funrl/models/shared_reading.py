"""Weights of a Hugging Face directory, each byte of which one rank reads, whoever needs it.

Files are read in contiguous parts, as many as there are ranks, whatever the layout: a shard of columns, or a copy for
every rank, is made of them by the ranks themselves. Some tensors go at a time, so that no more of them is held twice,
in one exchange of all ranks. As every number is read by one rank, each knows by itself what it sends and receives.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.collectives import ragged_all_to_all
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.plan import Box, slices, volume
from funrl.mesh.rules import Layout
from funrl.models.hf import weight_reader
from funrl.models.model import Model
from funrl.models.weight_dtypes import weight_dtype
from funrl.models.weight_files import weight_tables

TOGETHER_BYTES = 512 << 20  # of a rank's parts that are made at once
FILE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Slices = tuple[slice, ...]


def load_shared(path: str | Path, model: Model, dtype: torch.dtype, mesh: Mesh, layouts: trees.Tree) -> trees.Tree:
    """This rank's shards of a directory's weights. Collective: the ranks of the mesh read it together, each byte once.

    Args:
      path: a Hugging Face directory that all ranks see.
      model: by `check_directory`; `with_vocabulary` may have given it more token ids.
      dtype: of the weights.
      layouts: of the weights on the mesh.
    """
    sent, targets, made = sent_dtype(path, dtype), dict(trees.named(layouts)), dict[str, Tensor]()
    read = weight_reader(path, model, sent)
    kinds = {name: weight_dtype(name, sent) for name in targets}
    for kind in dict.fromkeys(kinds.values()):  # an exchange is of numbers of one dtype
        for names in _windows({name: targets[name] for name in targets if kinds[name] == kind}, kind.itemsize):
            wanted = {name: targets[name] for name in names}
            source = {name: reading_layout(layout) for name, layout in wanted.items()}
            local = {name: _part(read, name, layout, mesh, kind) for name, layout in source.items()}
            found = _exchanged(local, source, wanted, mesh)
            made |= {name: x.to(weight_dtype(name, dtype)) for name, x in found.items()}
    return trees.map_named(lambda name, _: made.pop(name), model.shapes)


def sent_dtype(path: str | Path, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ranks exchange weights: that of the files where it is narrower than the one that is wanted."""
    kinds = {entry["dtype"] for table in weight_tables(Path(path)).values() for entry in table.values()}
    stored = FILE_DTYPES.get(next(iter(kinds)), dtype) if len(kinds) == 1 else dtype
    return stored if stored.itemsize < dtype.itemsize else dtype


def reading_layout(layout: Layout) -> Layout:
    """The layout in which a tensor is read: over all ranks, in contiguous parts of its file.

    Outer dims are split first, by the axes that split them in `layout` before the others, so that a rank reads of its
    own part what it can.
    """
    sizes = {axis: size for axis, size in zip(AXES, layout.sizes, strict=True) if size > 1}
    spec: list[tuple[str, ...]] = []
    for dim, (length, axes) in enumerate(zip(layout.shape, layout.spec, strict=True)):
        own, parts, last = [], 1, dim == len(layout.shape) - 1
        for axis in (*axes, *sizes):
            if axis in sizes and (parts < length or last):  # where there are more ranks than numbers some read nothing
                own.append(axis)
                parts *= sizes.pop(axis)
        spec.append(tuple(own))
    return Layout(layout.shape, tuple(spec), layout.sizes)


def _part(read: Any, name: str, layout: Layout, mesh: Mesh, dtype: torch.dtype) -> Tensor:
    box = layout.box(mesh.rank)
    if not volume(box):
        return torch.empty([high - low for low, high in box], dtype=dtype, device=mesh.device)
    return read(name, box if any(layout.spec) else None).to(mesh.device)


def _exchanged(
    local: Mapping[str, Tensor], source: Mapping[str, Layout], wanted: Mapping[str, Layout], mesh: Mesh
) -> dict[str, Tensor]:
    """This rank's shards of tensors of which every rank has read a part."""
    made = {name: x for name, x in local.items() if source[name] == wanted[name]}
    moved = {name: _shares(source[name], wanted[name], mesh.rank) for name in local if name not in made}
    if not moved:
        return made
    x = next(iter(local.values()))
    made |= {name: x.new_empty(wanted[name].local_shape(mesh.rank)) for name in moved}
    sends, rooms = [], []
    for rank in range(mesh.world):
        sends.append([local[name][where] for name, (own, _) in moved.items() if (where := own[rank]) is not None])
        rooms.append([made[name][where] for name, (_, new) in moved.items() if (where := new[rank]) is not None])
    send, receive = ([sum(part.numel() for part in parts) for parts in of_ranks] for of_ranks in (sends, rooms))
    flat = torch.cat([x.new_empty(0), *(part.reshape(-1) for parts in sends for part in parts)])
    arrived = ragged_all_to_all(flat, send, receive, mesh, AXES)
    places = [room for parts in rooms for room in parts]
    for place, part in zip(places, arrived.split([place.numel() for place in places]), strict=True):
        place.copy_(part.view(place.shape))
    return made


@functools.lru_cache(maxsize=64)
def _shares(source: Layout, wanted: Layout, rank: int) -> tuple[list[Slices | None], list[Slices | None]]:
    """Parts of what a rank has read that go to each rank, and parts of its shard that come from each; None: nothing."""
    read, shard = source.box(rank), wanted.box(rank)

    def part(inside: Box, other: Box) -> Slices | None:
        both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(inside, other, strict=True))
        return slices(both, inside) if all(high > low for low, high in both) else None

    ranks = range(source.world)
    return [part(read, wanted.box(other)) for other in ranks], [part(shard, source.box(other)) for other in ranks]


def _windows(targets: dict[str, Layout], itemsize: int) -> Iterator[list[str]]:
    """The names in groups of some bytes, the same on every rank."""
    window: list[str] = []
    nbytes = 0
    for name, layout in targets.items():
        size = volume(layout.box(0)) * itemsize
        if window and nbytes + size > TOGETHER_BYTES:
            yield window
            window, nbytes = [], 0
        window.append(name)
        nbytes += size
    if window:
        yield window
