"""Tensors read from files onto a mesh: each byte by one rank, whichever ranks need it.

Each tensor is read in a layout that suits its files, and a reshard brings it to the layout in which it is wanted. Some
tensors go at a time, so that no more of them is in memory twice; while they are exchanged, the next ones are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.plan import plan, volume
from funrl.mesh.reshard import reshard
from funrl.mesh.rules import Layout

PendingRead = Callable[[], dict[str, Tensor]]


class TensorFiles(NamedTuple):
    """Files from which any part of some tensors can be read.

    Attributes:
      layout: gives the layout to read a tensor in, of the layout in which it is wanted.
      begin: begins to read this rank's parts of tensors, given the layout to read each in. The function it returns
        waits for them and gives them on the device of the mesh.
      window_bytes: of a rank's results, at most, that are read and exchanged together.
    """

    layout: Callable[[Layout], Layout]
    begin: Callable[[Mapping[str, Layout]], PendingRead]
    window_bytes: int


def read_onto_mesh(
    wanted: Mapping[str, Layout], dtypes: Mapping[str, torch.dtype], files: TensorFiles, mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """Read tensors, each in this rank's part of its layout, in the order of `wanted`. Collective.

    Args:
      wanted: layouts on the mesh, by the name of the tensor.
      dtypes: in which `files` gives each of them, and in which ranks exchange them.
      files: to read from.
      mesh: whose ranks read together.

    Raises:
      OSError, ValueError, RuntimeError: the first error of any rank that cannot read, on every rank.
    """
    windows = list(_windows(wanted, dtypes, files.window_bytes))
    begun = [_begin(files, window) for window in windows[:1]]
    for number, window in enumerate(windows):
        begun += [_begin(files, following) for following in windows[number + 1 : number + 2]]
        local = agreed(begun.pop(0), mesh)
        source = {name: files.layout(layout) for name, layout in window.items()}
        if source != window:
            kinds = {name: dtypes[name] for name in window}
            move = plan(source, window, kinds, src_ranks=mesh.ranks, dst_ranks=mesh.ranks)
            local = reshard(local, move, mesh)
        yield from local.items()
        del local


def agreed(read: Callable[[], dict[str, Tensor]], mesh: Mesh) -> dict[str, Tensor]:
    """The result of `read` on each rank, once all of them have it. Collective.

    Raises:
      OSError, ValueError, RuntimeError: the first error of any rank, on every rank.
    """
    result: dict[str, Tensor] = {}
    failure = None
    try:
        result = read()
    except (OSError, ValueError, RuntimeError) as error:
        failure = error
    failures = [error for error in gather_objects(failure, mesh) if error is not None]
    if failures:
        raise failures[0]
    return result


def contiguous_layout(layout: Layout) -> Layout:
    """Layout in which a tensor of a plain file is read: over all ranks, in contiguous parts of the file.

    Outer dims are split first, by the axes that split them in `layout` before the others, so that a rank reads of its
    own part what it can.
    """
    sizes = {axis: size for axis, size in zip(AXES, layout.sizes, strict=True) if size > 1}
    spec: list[tuple[str, ...]] = []
    for dim, (length, axes) in enumerate(zip(layout.shape, layout.spec, strict=True)):
        own: list[str] = []
        parts = 1
        is_last = dim == len(layout.shape) - 1
        for axis in (*axes, *sizes):
            if axis in sizes and (parts < length or is_last):  # with more ranks than numbers some read nothing
                own.append(axis)
                parts *= sizes.pop(axis)
        spec.append(tuple(own))
    return Layout(layout.shape, tuple(spec), layout.sizes)


def _begin(files: TensorFiles, window: Mapping[str, Layout]) -> PendingRead:
    """Begin to read a window; an error is raised by the returned function, where ranks can agree on it."""
    try:
        return files.begin({name: files.layout(layout) for name, layout in window.items()})
    except (OSError, ValueError, RuntimeError) as error:
        failure = error

    def fail() -> dict[str, Tensor]:
        raise failure

    return fail


def _windows(
    wanted: Mapping[str, Layout], dtypes: Mapping[str, torch.dtype], limit: int
) -> Iterator[dict[str, Layout]]:
    """Tensors in groups of at most `limit` bytes on rank 0, whose parts are the largest; the same on every rank."""
    window: dict[str, Layout] = {}
    nbytes = 0
    for name, layout in wanted.items():
        size = volume(layout.box(0)) * dtypes[name].itemsize
        if window and nbytes + size > limit:
            yield window
            window = {}
            nbytes = 0
        window[name] = layout
        nbytes += size
    if window:
        yield window
