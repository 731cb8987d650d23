"""Weights of the trainer ranks, for generators of other jobs to pull: no rank that trains waits for one.

Each rank that trains keeps a copy of its own parts in host memory and sends what it is asked for. A generator's rank
asks for each element that it needs once, from one of the ranks that hold it. A pull is of one version: where the run
has a newer one meanwhile, the generator lets go of what it has received and asks for the newer one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.plan import Box, slices, volume
from funrl.mesh.rules import Layout
from funrl.models.weight_dtypes import weight_dtype
from funrl.processes.connections import Connection, PeerError
from funrl.rollout.engine import WeightSpec
from funrl.rollout.joined.messages import PullRequest, TrainerFacts

VERSION_RETRY_S = 0.05  # until all trainer ranks have the same version
PULLS = 8  # ranks that are asked at the same time


class StaleVersionError(RuntimeError):
    """The trainer ranks have newer weights than the requested ones."""


class WeightServer:
    """Copies of a rank's parts of the newest weights.

    Attributes:
      facts: of the weights, for generators.
      version: of the weights; None: none yet.
    """

    def __init__(self, weights: WeightSpec, facts: TrainerFacts) -> None:
        """Begin without weights.

        Args:
          weights: laid out as they are on the trainer ranks.
          facts: the attribute.
        """
        self.facts = facts
        self.version: int | None = None
        self._weights = weights
        self._boxes = {name: layout.box(weights.mesh.rank) for name, layout in facts.stored.items()}
        self._parts: Mapping[str, Tensor] = {}
        self._lock = threading.Lock()

    def put(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy this rank's parts of all weights. A running pull still sends the old ones.

        Raises:
          KeyError: a weight is missing.
        """
        names = {there: name for name, (there, _) in self._weights.names.items()}
        parts = {}
        for there, x in named_weights:
            name = names[there]
            shape = tuple(high - low for low, high in self._boxes[name])
            dtype = weight_dtype(name, self._weights.dtype)
            parts[name] = x.detach().to("cpu", dtype, copy=True).reshape(shape).contiguous()
        if missing := sorted(set(self._boxes) - set(parts)):
            raise KeyError(f"weights are missing: {', '.join(missing)}")
        with self._lock:
            self._parts = parts
            self.version = version

    def serve(self, connection: Connection) -> None:
        """Answer pulls of a connection until it ends. Raises: PeerError."""
        connection.send(self.facts)
        while True:
            request: PullRequest = connection.receive(whenever=True)
            with self._lock:
                version = self.version
                parts = self._parts
            connection.send(version)
            if version != request.version:
                continue
            for name, box in request.pieces:
                piece = parts[name][slices(box, self._boxes[name])].contiguous()
                if piece.numel():
                    connection.send_raw(as_bytes(piece))


class Piece(NamedTuple):
    """A part of a weight that a rank is asked for.

    Attributes:
      rank: that is asked.
      name: of the weight.
      box: of the part.
    """

    rank: int
    name: str
    box: Box


def pieces_for(stored: Mapping[str, Layout], wanted: Mapping[str, Layout], rank: int, turn: int) -> list[Piece]:
    """The parts that a generator's rank needs: each element once.

    Args:
      stored, wanted: layout of each weight on the trainer ranks and on those of the generator, by name.
      rank: in the layouts `wanted`.
      turn: number by which callers differ, so that ranks with equal parts share the sending.

    Raises:
      ValueError: the weights are others.
    """
    if stored.keys() != wanted.keys():
        differ = sorted(stored.keys() ^ wanted.keys())
        raise ValueError(f"the run's model has other weights than this one: {', '.join(differ[:3])}")
    pieces = []
    holders_of: dict[Layout, dict[Box, list[int]]] = {}
    for leaf, (name, layout) in enumerate(stored.items()):
        if layout.shape != wanted[name].shape:
            raise ValueError(f"{name} has shape {layout.shape} in the run and {wanted[name].shape} here")
        if layout not in holders_of:
            boxes: dict[Box, list[int]] = {}
            for holder in range(layout.world):
                boxes.setdefault(layout.box(holder), []).append(holder)
            holders_of[layout] = boxes
        need = wanted[name].box(rank)
        for box, holders in holders_of[layout].items():
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, need, strict=True))
            if all(high > low for low, high in both):
                pieces.append(Piece(holders[(turn + leaf) % len(holders)], name, both))
    return pieces


def pull(
    connections: Sequence[Connection], pieces: Sequence[Piece], spec: WeightSpec, version: int, timeout_s: float
) -> tuple[trees.Tree, int]:
    """Weights of a version in an engine's layouts on this rank, and the bytes received.

    Args:
      connections: to all trainer ranks, by their numbers.
      pieces: of `pieces_for`.
      spec: of the engine.
      version: to pull.
      timeout_s: bound on the time until all ranks have this version.

    Raises:
      PeerError: a rank does not answer, or does not have this version in time.
      StaleVersionError: a rank has a newer one; the connections stay open.
    """
    layouts = dict(trees.named(spec.layouts))
    own = {name: layout.box(spec.mesh.rank) for name, layout in layouts.items()}
    out = {
        name: torch.empty([high - low for low, high in box], dtype=weight_dtype(name, spec.dtype))
        for name, box in own.items()
    }
    by_rank: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_rank.setdefault(piece.rank, []).append(piece)

    def from_rank(rank: int) -> int:
        some = by_rank[rank]
        connection = connections[rank]
        request = PullRequest(version, [(piece.name, piece.box) for piece in some])
        deadline = time.monotonic() + timeout_s
        while (there := connection.ask(request)) != version:
            if there is not None and there > version:
                raise StaleVersionError(f"rank {rank} has weights {there}, and {version} were asked for")
            if time.monotonic() > deadline:
                raise PeerError(f"rank {rank} has weights {there}, and {version} are needed")
            time.sleep(VERSION_RETRY_S)
        count = 0
        for piece in some:
            target = out[piece.name][slices(piece.box, own[piece.name])]
            whole = target.is_contiguous()
            part = target if whole else torch.empty(target.shape, dtype=target.dtype)
            connection.receive_raw(as_bytes(part))
            if not whole:
                target.copy_(part)
            count += volume(piece.box) * part.element_size()
        return count

    with ThreadPoolExecutor(PULLS) as threads:
        received = sum(threads.map(from_rank, sorted(by_rank)))
    tree = trees.from_named(spec.layouts, ((name, x.to(spec.mesh.device)) for name, x in out.items()))
    return tree, received


def as_bytes(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, shared with it."""
    return x.reshape(-1).view(torch.uint8).numpy().data
