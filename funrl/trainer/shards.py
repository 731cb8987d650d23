"""Shards of named tensors on disk: which rank writes which chunk, and the way of the bytes to and from tensorstore.

Every chunk is written once, by one of the ranks that hold it; they take turns, so that each writes about as much. For
reading, what several ranks hold is split over them, read once, and resharded.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.plan import plan
from funrl.mesh.reshard import reshard
from funrl.mesh.rules import Layout
from funrl.trainer import chunk_files, shard_server
from funrl.trainer.shard_server import Array, Ends, ShardPart

CHUNK_BYTES = 16 << 20  # the largest chunk: what a rank of another mesh reads to get any part of it
WINDOW_BYTES = 128 << 20  # read at a time, while what was read before is copied; the same memory serves again
SHARD_ALIGNMENT = 64
SPLIT_BYTES = 1 << 20  # what is smaller is read by every rank that needs it
NAMES = {
    torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.bool: "bool",
}  # fmt: skip
TENSOR_DTYPES = {name: dtype for dtype, name in NAMES.items()}


class ShardError(RuntimeError):
    """Shards that could not be written or read; the message says which and why."""


class OwnShards(NamedTuple):
    """The part of a state that one rank writes.

    Attributes:
      arrays: of the whole state, by name.
      parts: this rank's chunks.
      created: the arrays that this rank declares.
      nbytes: of all its chunks, as they are in memory.
    """

    arrays: dict[str, Array]
    parts: tuple[ShardPart, ...]
    created: frozenset[str]
    nbytes: int


def own_shards(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh) -> OwnShards:
    """The chunks that this rank writes.

    Args:
      tensors: this rank's, by name; the same names in the same order on every rank.
      layouts: of those that are split; the others are whole on every rank.
    """
    arrays, parts, created = {}, [], set()
    offset = turn = 0
    for name, x in tensors.items():
        whole = _layout(name, x, layouts, mesh)
        largest = whole.local_shape()  # the same on every rank, and so are the turns
        array = arrays[name] = Array(whole.shape, NAMES[x.dtype], chunk_shape(largest, x.element_size()))
        spread = tuple(axis for axis in AXES if axis not in whole.axes)
        ranks, mine = mesh.size(spread), int(mesh.index(spread))
        origin = tuple(low for low, _ in whole.box(mesh.rank))
        for number, box in enumerate(chunks(tuple(x.shape), array.chunk)):
            if (turn + number) % ranks == mine:
                at = tuple((low + o, high + o) for (low, high), o in zip(box, origin, strict=True))
                parts.append(ShardPart(name, at, offset))
                offset += -(-_volume(box) * x.element_size() // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
                if not any(low for low, _ in at):
                    created.add(name)
        turn += sum(1 for _ in chunks(largest, array.chunk))
        if not math.prod(largest) and mesh.rank == 0:
            created.add(name)
    return OwnShards(arrays, tuple(parts), frozenset(created), offset)


def joined_shards(one: OwnShards, other: OwnShards) -> OwnShards:
    """The parts of two sets of tensors that one rank writes."""
    parts = (*one.parts, *(part._replace(offset=part.offset + one.nbytes) for part in other.parts))
    return OwnShards(one.arrays | other.arrays, parts, one.created | other.created, one.nbytes + other.nbytes)


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """A shape of at most `CHUNK_BYTES` that divides a rank's part of a tensor; outer dims are divided first."""
    chunk = list(shape)
    for dim, length in enumerate(shape):
        needed = -(-math.prod(chunk) * itemsize // CHUNK_BYTES)
        if needed > 1:
            chunk[dim] = length // next(n for n in range(min(needed, length), length + 1) if length % n == 0)
    return tuple(chunk)


def chunks(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[Ends]:
    """The boxes of the chunks of a tensor, row-major, the last ones cut at its end; none of an empty one."""
    if 0 in shape:
        return
    yield from itertools.product(
        *([(low, min(low + step, n)) for low in range(0, n, step)] for n, step in zip(shape, chunk, strict=True))
    )


def _layout(name: str, x: Tensor, layouts: Mapping[str, Layout], mesh: Mesh) -> Layout:
    """The layout of a tensor, which is whole on every rank where no other is given."""
    return layouts.get(name) or Layout(tuple(x.shape), ((),) * x.ndim, tuple(mesh.sizes[axis] for axis in AXES))


def _volume(box: Ends) -> int:
    return math.prod(high - low for low, high in box)


class Memory:
    """Bytes that a rank shares with its server."""

    def __init__(self, nbytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self.file = os.fdopen(os.memfd_create("funrl-shards"), "r+b")
            self.path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
        else:
            self.file = tempfile.NamedTemporaryFile(prefix="funrl-shards-")  # noqa: SIM115  (closed by `close`)
            self.path = self.file.name
        os.ftruncate(self.file.fileno(), nbytes)
        self.bytes = mmap.mmap(self.file.fileno(), nbytes) if nbytes else None

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """A tensor in these bytes."""
        count = math.prod(shape)
        if not count or self.bytes is None:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self.bytes, dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def close(self) -> None:
        """Give the bytes back, when the last tensor on them has gone."""
        self.bytes = None
        self.file.close()


class ShardServer:
    """The process that has tensorstore; it starts with the first request and ends with this one."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.waiting = 0

    def send(self, request: Any) -> None:
        """Ask for something. The answers come in the order of the requests."""
        try:
            if self.process is None:
                self._start()
            self.requests.send(request)
        except OSError as error:
            raise ShardError(f"the process that writes shards has gone: {error}") from error
        self.waiting += 1

    def answers(self, wait: bool) -> list[str]:
        """Problems of the requests that have been answered, or where `wait` of all of them."""
        problems = []
        while self.waiting and (wait or self.replies.poll()):
            problem = self.answer()
            if isinstance(problem, str):
                problems.append(problem)
        return problems

    def answer(self) -> Any:
        """The answer to the oldest request that has none yet, when it is there; a text: its problem."""
        try:
            answer = self.replies.recv()
        except (EOFError, OSError):
            assert self.process is not None
            answer, self.waiting = f"the process that writes shards ended with status {self.process.wait()}", 1
        self.waiting -= 1
        return answer

    def close(self, timeout_s: float | None = None) -> None:
        """End the process when it has done what it was asked, or after `timeout_s` seconds."""
        if self.process is None:
            return
        self.requests.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()
        self.process, self.waiting = None, 0

    def _start(self) -> None:
        """Start a fresh interpreter, which finds modules where this one does."""
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {shard_server.__name__} import main; main()"],
            stdin=theirs_in, stdout=theirs_out, env=os.environ | {"PYTHONPATH": paths},
            process_group=0,  # a Ctrl-C of the terminal is for the ranks
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.requests, self.replies = Connection(ours_out, readable=False), Connection(ours_in, writable=False)


def copy_to_memory(own: OwnShards, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh,
                   memory: Memory) -> None:  # fmt: skip
    """Copy this rank's chunks of some tensors to the shared memory: what changes afterwards is not written."""
    for part in (part for part in own.parts if part.name in tensors):
        x = tensors[part.name]
        box = _layout(part.name, x, layouts, mesh).box(mesh.rank)
        local = tuple(slice(low - o, high - o) for (low, high), (o, _) in zip(part.box, box, strict=True))
        chunk = x.detach()[local]
        memory.tensor(part.offset, x.dtype, chunk.shape).copy_(chunk)


def read_tensors(
    path: str, arrays: Mapping[str, Array], like: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh,
    server: ShardServer,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """The tensors of a checkpoint in this rank's layouts, a window at a time. Collective.

    Args:
      arrays: of the checkpoint.
      like: tensors of the shapes and dtypes to give, by name; their numbers do not count.
      layouts: of those that are split.

    Raises:
      ShardError: on every rank, naming what one of them cannot read.
    """
    largest = {name: _layout(name, x, layouts, mesh).local_shape() for name, x in like.items()}
    windows = [_window(names, arrays, like, layouts, mesh) for names in _windows(like, largest, arrays)]
    memories = [Memory(max((one.nbytes for one in windows[i::2]), default=0)) for i in range(2)]

    def ask(number: int) -> None:
        parts, chunks = windows[number].parts, windows[number].chunks
        those = {part.name: arrays[part.name] for part in parts}
        keys = tuple(key for name in chunks for key in chunks[name])
        server.send(shard_server.ReadShards(path, memories[number % 2].path, those, parts, keys))

    try:
        for number, window in enumerate(windows):
            if number == 0:
                ask(0)
            if number + 1 < len(windows):  # is read while this one is copied
                ask(number + 1)
            own, problem = _own_chunks(window, server.answer(), arrays, mesh.rank)
            problems = [problem for problem in gather_objects(problem, mesh) if problem is not None]
            if problems:
                raise ShardError(problems[0])
            yield from _copied(window, memories[number % 2], own, arrays, like, mesh).items()
    finally:
        server.answers(wait=True)
        for memory in memories:
            memory.close()


class _Window(NamedTuple):
    """Tensors that are read at once.

    Attributes:
      source, target: layouts in which they are read, and that they are to have.
      chunks: keys of the chunks that this rank reads itself, by the tensor that they make up.
      parts: of the other tensors, which the server reads, and where they are in memory.
    """

    source: dict[str, Layout]
    target: dict[str, Layout]
    chunks: dict[str, list[str]]
    parts: tuple[ShardPart, ...]
    nbytes: int


def _window(
    names: Sequence[str], arrays: Mapping[str, Array], like: Mapping[str, Tensor], layouts: Mapping[str, Layout],
    mesh: Mesh,
) -> _Window:  # fmt: skip
    target = {name: _layout(name, like[name], layouts, mesh) for name in names}
    source = {name: _finer(layout, like[name], mesh) for name, layout in target.items()}
    parts, chunks, offset = [], {}, 0
    for name, layout in source.items():
        part = ShardPart(name, layout.box(mesh.rank), offset)
        if keys := shard_server.large_chunks(part, arrays[name]):
            chunks[name] = keys
            continue
        parts.append(part)
        size = _volume(layout.box(mesh.rank)) * TENSOR_DTYPES[arrays[name].dtype].itemsize
        offset += -(-size // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
    return _Window(source, target, chunks, tuple(parts), offset)


def _own_chunks(
    window: _Window, answer: Any, arrays: Mapping[str, Array], rank: int
) -> tuple[dict[str, Tensor], str | None]:
    """The tensors that this rank reads itself, and what hinders it or the server.

    Args:
      answer: of the server: where the chunks are, or what went wrong.
    """
    found: dict[str, Tensor] = {}
    if isinstance(answer, str):
        return found, answer
    wanted = []
    for name, keys in window.chunks.items():
        shape = [high - low for low, high in window.source[name].box(rank)]
        found[name] = torch.empty(shape, dtype=TENSOR_DTYPES[arrays[name].dtype])
        values = np.split(found[name].view(-1).view(torch.uint8).numpy(), len(keys))
        wanted += [(name, answer[key], one) for key, one in zip(keys, values, strict=True)]
    try:
        chunk_files.read_chunks(wanted, torch.get_num_threads())
    except chunk_files.UnreadableChunk as error:
        return found, str(error)
    return found, None


def _copied(
    window: _Window, memory: Memory, own: Mapping[str, Tensor], arrays: Mapping[str, Array],
    like: Mapping[str, Tensor], mesh: Mesh,
) -> dict[str, Tensor]:  # fmt: skip
    """The tensors of a window that has been read, in the layouts that they are to have."""
    local = {name: x.to(device=mesh.device, dtype=like[name].dtype) for name, x in own.items()}
    for part in window.parts:
        x, shape = like[part.name], [high - low for low, high in part.box]
        found = memory.tensor(part.offset, TENSOR_DTYPES[arrays[part.name].dtype], shape)
        local[part.name] = found.to(device=mesh.device, dtype=x.dtype, copy=True)
    local = {name: local[name] for name in window.source}
    if window.source == window.target:
        return local
    dtypes = {name: like[name].dtype for name in window.source}
    ways = plan(window.source, window.target, dtypes, src_ranks=mesh.ranks, dst_ranks=mesh.ranks)
    return reshard(local, ways, mesh)


def _windows(
    like: Mapping[str, Tensor], largest: Mapping[str, tuple[int, ...]], arrays: Mapping[str, Array]
) -> Iterator[list[str]]:
    """The names in groups of some bytes, the same on every rank; what is read at once.

    Args:
      largest: shapes of the largest part of each that a rank has.
    """
    window: list[str] = []
    nbytes = 0
    for name, x in like.items():
        size = math.prod(largest[name]) * max(x.element_size(), TENSOR_DTYPES[arrays[name].dtype].itemsize)
        if window and nbytes + size > WINDOW_BYTES:
            yield window
            window, nbytes = [], 0
        window.append(name)
        nbytes += size
    if window:
        yield window


def _finer(layout: Layout, x: Tensor, mesh: Mesh) -> Layout:
    """A layout that splits a large tensor over the ranks that all need it too, in the outermost dim that divides."""
    spread = tuple(axis for axis in AXES if axis not in layout.axes and mesh.sizes[axis] > 1)
    ranks, largest = mesh.size(spread), layout.local_shape()
    if ranks > 1 and math.prod(largest) * x.element_size() >= SPLIT_BYTES:
        for dim, length in enumerate(largest):
            if length % ranks == 0:
                spec = tuple((*axes, *spread) if i == dim else axes for i, axes in enumerate(layout.spec))
                return Layout(layout.shape, spec, layout.sizes)
    return layout
