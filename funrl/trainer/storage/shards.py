"""Shards of named tensors on disk: which rank writes which chunk, and how bytes go to and from tensorstore.

Every chunk is written once, by one of the ranks that hold it; ranks take turns, so that each writes about as much. For
reading, a tensor that several ranks need is split over them, read once, and resharded.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.plan import slices, volume
from funrl.mesh.reading import TensorFiles, read_onto_mesh
from funrl.mesh.rules import Layout, whole_layout
from funrl.trainer.storage import shard_server
from funrl.trainer.storage.shard_server import Array, Edges, ReadShards, ShardPart

CHUNK_BYTES = 16 << 20  # the largest chunk: what a rank of another mesh reads to get any part of it
WINDOW_BYTES = 128 << 20  # read at a time, while what was read before is exchanged
SHARD_ALIGNMENT = 64
KILLED_S = 5.0  # for a process that was killed
SPLIT_ELEMENTS = 1 << 18  # what has fewer is read by every rank that needs it
TENSOR_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in TENSOR_DTYPES.items()}


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
      layouts: of split arrays; the others are whole on every rank.
      mesh: the ranks that hold the tensors.
    """
    arrays: dict[str, Array] = {}
    boxes: list[tuple[str, Edges]] = []
    created = set()
    turn = 0
    for name, x in tensors.items():
        layout = layouts.get(name) or whole_layout(x.shape, mesh)
        largest = layout.local_shape()  # the same on every rank, and so are the turns
        arrays[name] = Array(layout.shape, DTYPE_NAMES[x.dtype], chunk_shape(largest, x.element_size()))
        spread = tuple(axis for axis in AXES if axis not in layout.axes)
        ranks = mesh.size(spread)
        own_turn = int(mesh.index(spread))
        origin = tuple(low for low, _ in layout.box(mesh.rank))
        for number, local in enumerate(chunks(tuple(x.shape), arrays[name].chunk)):
            if (turn + number) % ranks != own_turn:
                continue
            box = tuple((low + start, high + start) for (low, high), start in zip(local, origin, strict=True))
            boxes.append((name, box))
            if not any(low for low, _ in box):
                created.add(name)
        turn += sum(1 for _ in chunks(largest, arrays[name].chunk))
        if not math.prod(largest) and mesh.rank == 0:
            created.add(name)
    parts, nbytes = place_parts(boxes, arrays)
    return OwnShards(arrays, parts, frozenset(created), nbytes=nbytes)


def place_parts(boxes: Sequence[tuple[str, Edges]], arrays: Mapping[str, Array]) -> tuple[tuple[ShardPart, ...], int]:
    """Lay boxes of arrays end to end in memory: where each is, and the bytes of all."""
    parts = []
    offset = 0
    for name, box in boxes:
        parts.append(ShardPart(name, box, offset))
        nbytes = volume(box) * TENSOR_DTYPES[arrays[name].dtype].itemsize
        offset += -(-nbytes // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
    return tuple(parts), offset


def joined_shards(first: OwnShards, second: OwnShards) -> OwnShards:
    """The parts of two sets of tensors that one rank writes."""
    moved = (part._replace(offset=part.offset + first.nbytes) for part in second.parts)
    nbytes = first.nbytes + second.nbytes
    return OwnShards(
        first.arrays | second.arrays, (*first.parts, *moved), first.created | second.created, nbytes=nbytes
    )


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """A shape of at most `CHUNK_BYTES` that divides a rank's part of a tensor; outer dims are divided first."""
    chunk = list(shape)
    for dim, length in enumerate(shape):
        needed = -(-math.prod(chunk) * itemsize // CHUNK_BYTES)
        if needed > 1:
            chunk[dim] = length // next(n for n in range(min(needed, length), length + 1) if length % n == 0)
    return tuple(chunk)


def chunks(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[Edges]:
    """The boxes of the chunks of a tensor, row-major, the last ones cut at its end; none of an empty one."""
    if 0 in shape:
        return
    yield from itertools.product(
        *([(low, min(low + step, n)) for low in range(0, n, step)] for n, step in zip(shape, chunk, strict=True))
    )


class Memory:
    """Bytes that a rank shares with its server."""

    def __init__(self, nbytes: int) -> None:
        """Take memory that has a path, which the server opens."""
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
        """Free the bytes, once the last tensor on them is gone."""
        self.bytes = None
        self.file.close()


class ShardServer:
    """The process that has tensorstore; it starts with the first request and ends with this one."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self.process: subprocess.Popen[bytes] | None = None
        self.waiting = 0  # requests without an answer
        self._unsent: deque[bytes] = deque()
        self._sender: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, request: Any) -> None:
        """Send a request without blocking, even where the process reads nothing. Answers come in the order of requests.

        Raises:
          ShardError: the process has ended.
        """
        try:
            if self.process is None:
                self._start()
        except OSError as error:
            raise ShardError(f"the process that writes shards cannot be started: {error}") from error
        if self.process is not None and self.process.poll() is not None:
            raise ShardError(f"the process that writes shards has ended: status {self.process.returncode}")
        content = pickle.dumps(request)
        self.waiting += 1
        with self._lock:
            self._unsent.append(content)
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_all, args=(self.requests,), daemon=True)
                self._sender.start()

    def _send_all(self, requests: Connection) -> None:
        """Send all queued requests; if the process ends meanwhile, `answer` says so."""
        while True:
            with self._lock:
                if not self._unsent:
                    self._sender = None
                    return
                content = self._unsent.popleft()
            with contextlib.suppress(OSError):
                requests.send_bytes(content)

    def answers(self, wait: bool) -> list[str]:
        """Problems of the requests that have been answered, or with `wait` of all requests."""
        problems = []
        while self.waiting and (wait or self.replies.poll()):
            problem = self.answer()
            if problem is not None:
                problems.append(problem)
        return problems

    def answer(self) -> str | None:
        """Wait for the answer to the oldest request that has none yet: None, or its problem."""
        try:
            answer = self.replies.recv()
        except (EOFError, OSError):
            assert self.process is not None
            answer = f"the process that writes shards ended with status {self.process.wait()}"
            self.waiting = 1
        self.waiting -= 1
        return answer

    def close(self, timeout_s: float | None = None) -> None:
        """End the process when it has answered all requests, or after `timeout_s` seconds."""
        if self.process is None:
            return
        sender = self._sender
        if sender is not None:
            sender.join(timeout_s)
        stuck = sender is not None and sender.is_alive()  # the process reads nothing
        if not stuck:
            self.requests.close()
        try:
            self.process.wait(0.0 if stuck else timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk, and cannot be killed
                self.process.wait(KILLED_S)
        with self._lock:
            self._unsent.clear()
        if sender is not None and stuck:
            sender.join(KILLED_S)
            self.requests.close()
        self.replies.close()
        self.process = None
        self.waiting = 0

    def _start(self) -> None:
        """Start a fresh interpreter, which finds modules where this one does."""
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        requests_end, requests_own = os.pipe()
        replies_own, replies_end = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {shard_server.__name__} import main; main()"],
            stdin=requests_end,
            stdout=replies_end,
            env=os.environ | {"PYTHONPATH": paths},
            process_group=0,  # a Ctrl-C of the terminal is for the ranks
        )
        os.close(requests_end)
        os.close(replies_end)
        self.requests = Connection(requests_own, readable=False)
        self.replies = Connection(replies_own, writable=False)


def copy_to_memory(
    own: OwnShards, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh, memory: Memory
) -> None:
    """Copy this rank's chunks of some tensors to the shared memory: what changes afterwards is not written."""
    for part in (part for part in own.parts if part.name in tensors):
        x = tensors[part.name]
        layout = layouts.get(part.name) or whole_layout(x.shape, mesh)
        chunk = x.detach()[slices(part.box, layout.box(mesh.rank))]
        memory.tensor(part.offset, x.dtype, chunk.shape).copy_(chunk)


class Database(NamedTuple):
    """A checkpoint to read.

    Attributes:
      arrays: everything in it, by name.
      server: reads.
    """

    path: str
    arrays: Mapping[str, Array]
    server: ShardServer

    def begin(self, boxes: Mapping[str, Edges], device: torch.device) -> Callable[[], dict[str, Tensor]]:
        """Begin to read boxes of arrays. The function it returns waits for them and copies them to a device.

        Raises:
          ShardError: the process that reads has ended; from the function: a box cannot be read.
        """
        parts, nbytes = place_parts(list(boxes.items()), self.arrays)
        memory = Memory(nbytes)
        filled = tuple(part for part in parts if volume(part.box))
        arrays = {part.name: self.arrays[part.name] for part in filled}
        self.server.send(ReadShards(self.path, memory.path, arrays, parts=filled))

        def finish() -> dict[str, Tensor]:
            problem = self.server.answer()
            if problem is not None:
                raise ShardError(problem)
            tensors = {}
            for part in parts:
                dtype = TENSOR_DTYPES[self.arrays[part.name].dtype]
                x = memory.tensor(part.offset, dtype, [high - low for low, high in part.box])
                tensors[part.name] = x.to(device=device, copy=True)
                del x
            memory.close()
            return tensors

        return finish


def read_tensors(
    database: Database, dtypes: Mapping[str, torch.dtype], layouts: Mapping[str, Layout], mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """Read tensors of a checkpoint in this rank's layouts, a window at a time. Collective.

    Args:
      database: the checkpoint.
      dtypes: of the tensors to give, by name.
      layouts: of arrays to split.
      mesh: whose ranks read together.

    Raises:
      ShardError: on every rank, naming what one of them cannot read.
    """
    arrays = database.arrays
    wanted = {name: layouts.get(name) or whole_layout(arrays[name].shape, mesh) for name in dtypes}
    stored_dtypes = {name: TENSOR_DTYPES[arrays[name].dtype] for name in wanted}

    def begin(parts: Mapping[str, Layout]) -> Callable[[], dict[str, Tensor]]:
        return database.begin({name: layout.box(mesh.rank) for name, layout in parts.items()}, mesh.device)

    try:
        files = TensorFiles(_finer, begin, WINDOW_BYTES)
        for name, x in read_onto_mesh(wanted, stored_dtypes, files, mesh=mesh):
            yield name, x.to(dtypes[name])
    finally:
        database.server.answers(wait=True)


def _finer(layout: Layout) -> Layout:
    """A layout that splits a large tensor over the ranks that all need it too, in the outermost dim that divides."""
    sizes = dict(zip(AXES, layout.sizes, strict=True))
    spread = tuple(axis for axis in AXES if axis not in layout.axes and sizes[axis] > 1)
    ranks = math.prod(sizes[axis] for axis in spread)
    largest = layout.local_shape()
    if ranks > 1 and math.prod(largest) >= SPLIT_ELEMENTS:
        for dim, length in enumerate(largest):
            if length % ranks == 0:
                spec = tuple((*axes, *spread) if i == dim else axes for i, axes in enumerate(layout.spec))
                return Layout(layout.shape, spec, layout.sizes)
    return layout
