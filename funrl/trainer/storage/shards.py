"""Shards of named tensors on disk: which rank writes which chunk, and how bytes go to and from tensorstore.

Every chunk is written once, by one of the ranks that hold it; ranks take turns, so that each writes about as much.
Small parts of ranks are joined to larger chunks before they are written, for many slivers take long. For reading, a
tensor that several ranks need is split over them, read once, and resharded.
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

from funrl.mesh import mesh as meshes
from funrl.mesh.collectives import ragged_all_to_all
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.plan import slices, volume
from funrl.mesh.reading import TensorFiles, read_onto_mesh
from funrl.mesh.rules import Layout, whole_layout
from funrl.trainer.storage import shard_server
from funrl.trainer.storage.shard_server import Array, Edges, ReadShards, ShardPart

CHUNK_BYTES = 16 << 20  # the largest chunk: what a rank of another mesh reads to get any part of it
LEAST_SHARE = 16  # a chunk has at least such a part of the largest one's bytes, a mebibyte, unless its tensor has less
EXCHANGE_BYTES = 64 << 20  # of a rank's parts, in one exchange that joins parts
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
      joined: arrays whose chunks have parts of several ranks.
    """

    arrays: dict[str, Array]
    parts: tuple[ShardPart, ...]
    created: frozenset[str]
    nbytes: int
    joined: Mapping[str, JoinedArray] = {}


class JoinedArray(NamedTuple):
    """An array that ranks write in another layout than they hold it.

    Attributes:
      layout: in which they write it.
      axes: over which they exchange its parts.
      turn: of its first chunk.
    """

    layout: Layout
    axes: tuple[str, ...]
    turn: int


def own_shards(
    tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh, *, join: bool = False
) -> OwnShards:
    """The chunks that this rank writes.

    Args:
      tensors: this rank's, by name; the same names in the same order on every rank.
      layouts: of split arrays; the others are whole on every rank.
      mesh: the ranks that hold the tensors.
      join: whether ranks join small parts; `copy_to_memory` is then collective.
    """
    arrays: dict[str, Array] = {}
    boxes: list[tuple[str, Edges]] = []
    created = set()
    joined = {}
    turn = 0
    for name, x in tensors.items():
        layout = layouts.get(name) or whole_layout(x.shape, mesh)
        if join and (axes := joined_axes(layout, x.element_size())):
            layout = without_axes(layout, axes)
            joined[name] = JoinedArray(layout, axes, turn)
        largest = layout.local_shape()  # the same on every rank, and so are the turns
        arrays[name] = Array(layout.shape, DTYPE_NAMES[x.dtype], chunk_shape(largest, x.element_size()))
        spread = tuple(axis for axis in AXES if axis not in layout.axes)
        ranks = mesh.size(spread)
        own_turn = int(mesh.index(spread))
        origin = tuple(low for low, _ in layout.box(mesh.rank))
        for number, local in enumerate(chunks(layout.local_shape(mesh.rank), arrays[name].chunk)):
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
    return OwnShards(arrays, parts, frozenset(created), nbytes=nbytes, joined=joined)


def joined_axes(layout: Layout, itemsize: int) -> tuple[str, ...]:
    """Axes over which ranks join their parts of a tensor, so that chunks are large enough; (): none.

    Whole dims are joined, those that an axis splits together as one: the one of the fewest parts that suffices, else
    that of the most and a further one.
    """
    sizes = dict(zip(AXES, layout.sizes, strict=True))
    axes: tuple[str, ...] = ()
    nbytes = math.prod(layout.local_shape()) * itemsize
    split = sorted((math.prod(sizes[axis] for axis in spec), spec) for spec in _split_together(layout))
    while split and nbytes * LEAST_SHARE < CHUNK_BYTES:
        ranks, spec = next((x for x in split if nbytes * x[0] * LEAST_SHARE >= CHUNK_BYTES), split[-1])
        split.remove((ranks, spec))
        axes += spec
        nbytes *= ranks
    return tuple(axis for axis in AXES if axis in axes)


def _split_together(layout: Layout) -> list[tuple[str, ...]]:
    """The axes that split each dim; those of dims that share an axis are one."""
    together: list[tuple[str, ...]] = []
    for spec in filter(None, layout.spec):
        shared = [axes for axes in together if set(axes) & set(spec)]
        together = [axes for axes in together if axes not in shared]
        together.append(tuple(dict.fromkeys(axis for axes in (*shared, spec) for axis in axes)))
    return together


def without_axes(layout: Layout, axes: tuple[str, ...]) -> Layout:
    """The layout of a tensor that some axes do not split."""
    return Layout(layout.shape, tuple(() if set(spec) & set(axes) else spec for spec in layout.spec), layout.sizes)


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
        first.arrays | second.arrays,
        (*first.parts, *moved),
        first.created | second.created,
        nbytes=nbytes,
        joined={**first.joined, **second.joined},
    )


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """A shape of about `CHUNK_BYTES` at most that divides a rank's part of a tensor; outer dims are divided first.

    A dim that no number divides into large enough parts stays whole.
    """
    chunk = list(shape)
    for dim, length in enumerate(shape):
        nbytes = math.prod(chunk) * itemsize
        needed = -(-nbytes // CHUNK_BYTES)
        if needed > 1:
            parts = next(n for n in range(min(needed, length), length + 1) if length % n == 0)
            if nbytes // parts * LEAST_SHARE >= CHUNK_BYTES:
                chunk[dim] = length // parts
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
        self.nbytes = nbytes
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
    """Copy this rank's chunks of some tensors to the shared memory: what changes afterwards is not written.

    Collective where `own` has joined arrays.
    """
    places = {}
    for part in (part for part in own.parts if part.name in tensors):
        x = tensors[part.name]
        shape = [high - low for low, high in part.box]
        place = memory.tensor(part.offset, x.dtype, shape)
        if part.name in own.joined:
            places[part.name, part.box] = place
            continue
        layout = layouts.get(part.name) or whole_layout(x.shape, mesh)
        place.copy_(x.detach()[slices(part.box, layout.box(mesh.rank))])
    for names in _exchanges(own, tensors, layouts):
        _join_parts(own, {name: tensors[name] for name in names}, layouts, mesh, places)


def _exchanges(own: OwnShards, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> Iterator[list[str]]:
    """Names of joined arrays whose parts are exchanged together, over the same axes; the same on every rank."""
    by_axes: dict[tuple[str, ...], list[str]] = {}
    for name, array in own.joined.items():
        if name in tensors:
            by_axes.setdefault(array.axes, []).append(name)
    for names in by_axes.values():
        together: list[str] = []
        nbytes = 0
        for name in names:
            together.append(name)
            nbytes += math.prod(layouts[name].local_shape()) * tensors[name].element_size()
            if nbytes >= EXCHANGE_BYTES:
                yield together
                together = []
                nbytes = 0
        if together:
            yield together


def _join_parts(
    own: OwnShards,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    places: Mapping[tuple[str, Edges], Tensor],
) -> None:
    """Exchange parts of arrays with the ranks over their axes. Collective.

    Args:
      own: of this rank.
      tensors: this rank's parts of the arrays, all joined over the same axes.
      layouts: of the parts.
      mesh: whose ranks write together.
      places: memory of the chunks that this rank writes.
    """
    axes = own.joined[next(iter(tensors))].axes
    ranks = meshes.peers(mesh.sizes, axes, mesh.rank)
    pieces: list[list[Tensor]] = [[] for _ in ranks]
    arriving: list[list[tuple[Tensor, int]]] = [[] for _ in ranks]
    for name, x in tensors.items():
        boxes = [layouts[name].box(rank) for rank in ranks]
        for chunk, writer in _writers(own, name, mesh):
            if writer is None:
                continue
            here = overlap(chunk, boxes[int(mesh.index(axes))])
            if here is not None:
                pieces[writer].append(_bytes_of(x.detach()[slices(here, boxes[int(mesh.index(axes))])]))
            if ranks[writer] != mesh.rank:
                continue
            for source, box in enumerate(boxes):
                part = overlap(chunk, box)
                if part is not None:
                    place = places[name, chunk][slices(part, chunk)]
                    arriving[source].append((place, place.numel() * place.element_size()))
    empty = torch.zeros(0, dtype=torch.uint8, device=mesh.device)
    sent = torch.cat([empty, *(piece.to(mesh.device) for own_pieces in pieces for piece in own_pieces)])
    send = [sum(map(len, own_pieces)) for own_pieces in pieces]
    receive = [sum(nbytes for _, nbytes in parts) for parts in arriving]
    arrived = ragged_all_to_all(sent, send, receive, mesh, axes).cpu()
    begin = 0
    for place, nbytes in itertools.chain(*arriving):
        place.copy_(arrived[begin : begin + nbytes].clone().view(place.dtype).view(place.shape))
        begin += nbytes


def _writers(own: OwnShards, name: str, mesh: Mesh) -> Iterator[tuple[Edges, int | None]]:
    """Chunks of this rank's part of a joined array, each with the rank over its axes that writes it; None: another."""
    layout, axes, turn = own.joined[name]
    spread = [axis for axis in AXES if axis not in layout.axes]
    sizes = [mesh.sizes[axis] for axis in spread]
    origin = layout.box(mesh.rank)
    for number, local in enumerate(chunks(layout.local_shape(mesh.rank), own.arrays[name].chunk)):
        box = tuple((low + start, high + start) for (low, high), (start, _) in zip(local, origin, strict=True))
        position = (turn + number) % math.prod(sizes)
        writer = 0
        stride = 1
        for axis, size in zip(reversed(spread), reversed(sizes), strict=True):
            position, place = divmod(position, size)
            if axis in axes:
                writer += place * stride
                stride *= size
            elif place != mesh.index(axis):
                stride = 0
                break
        yield box, writer if stride else None


def overlap(one: Edges, other: Edges) -> Edges | None:
    """The box that two boxes share; None: none."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(low < high for low, high in box) else None


def _bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


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
