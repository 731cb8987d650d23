"""Digest of the weights that tokens are sampled with: one number of 64 bits, from the engine's own tensors.

The digest of a tree of named weights is the sum, modulo 2^64, of the digests of its weights (`certificate.digest`),
each times an odd key of its name and dtype. Like these it is a sum over parts: a rank adds up one number for the parts
that it holds, and the ranks that share a model add theirs, 8 bytes a load. The trainer takes the same number of its own
weights, in the form that the engine takes them, when it publishes a version.

A replica whose ranks hold different copies of a part gets another number than the trainer's: the difference of each
copy is in the sum too, with a key of its own.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from funrl.mesh.collectives import psum
from funrl.mesh.mesh import AXES, coordinates
from funrl.models.weight_dtypes import weight_dtype
from funrl.processes.device_memory import copy_to_device
from funrl.rollout.certificate import beside, digest_parts, wait_for_digests
from funrl.rollout.engine import WeightSpec
from funrl.rollout.requests import Completion


class LoadDigest:
    """Digest of the weights of one load, which are read before the first token is sampled with them.

    Example:
      loaded = LoadDigest(engine.weights, engine.held_weights)
      loaded.read()
      loaded.number == tree_digest(trained, engine.weights)
    """

    def __init__(
        self,
        spec: WeightSpec,
        held: Callable[[], Iterable[tuple[str, Tensor | int | None]]],
        base: LoadDigest | None = None,
        damage: Callable[[], Tensor] | None = None,
    ) -> None:
        """Begin with weights that have not been read.

        Args:
          spec: the form in which the engine took them.
          held: gives what the engine holds, as `Engine.held_weights`.
          base: of the weights that they are added to, where they are the factors of an adapter.
          damage: counts numbers that the engine has derived from its weights, such as those in 8 bits, and that are not
            what these give now; None: it has derived none.
        """
        self._spec = spec
        self._held = held
        self._base = base
        self._damage = damage
        self._own: Tensor | None = None

    def read(self) -> None:
        """Read the weights, unless that has been done; a GPU does so beside other work."""
        if self._base is not None:
            self._base.read()
        if self._own is None:
            with beside(self._spec.mesh.device):
                self.take(digest_parts(self._spec, self._held(), []))

    def take(self, digests: Mapping[str, Tensor]) -> None:
        """Take digests of this rank's parts by name, which somebody has just read; of unreadable weights none."""
        mesh = self._spec.mesh
        layouts = self._spec.held_layouts
        shared = _sharing_axes(self._spec)
        index = coordinates(mesh.sizes, mesh.rank)
        keys = []
        for name in digests:
            axes = layouts[name].axes
            spare = [axis for axis in shared if axis not in axes]
            first = all(index[axis] == 0 for axis in spare)
            copies = math.prod(mesh.size(axis) for axis in spare)
            key = _key(name, self._spec) * first + _key(name, self._spec, "copies") * (1 - copies * first)
            keys.append(_signed(key))
        total = torch.zeros((), dtype=torch.int64, device=mesh.device)
        if digests:
            numbers = torch.stack(list(digests.values())).to(mesh.device)
            total = (numbers * copy_to_device(torch.tensor(keys), mesh.device)).sum()
        if self._damage is not None:
            total += self._damage() * _signed(_key("damage", self._spec))
        self._own = total

    @functools.cached_property
    def number(self) -> int:
        """The digest, a signed number of 64 bits. The first call is collective over the ranks that share the model."""
        self.read()
        assert self._own is not None
        mesh = self._spec.mesh
        wait_for_digests(mesh.device)
        own = int(psum(self._own, mesh, _sharing_axes(self._spec)).item())
        return own if self._base is None else adapted_digest(self._base.number, own)


def tree_digest(digests: Mapping[str, int], spec: WeightSpec) -> int:
    """The number that `LoadDigest` has of weights with these digests, each of the whole weight."""
    return _signed(sum(_key(name, spec) * number for name, number in digests.items()))


def adapted_digest(base: int, adapter: int) -> int:
    """The digest of an adapter on a base, of the digests of both."""
    return _signed(base * _hash("base") + adapter)


def shown_digest(number: int) -> str:
    """A digest as messages have it."""
    return f"{number % (1 << 64):016x}"


def digests_of(parts: Sequence[tuple[int, LoadDigest | int]], count: int) -> Tensor:
    """[count] int64 digest of each of some tokens.

    Args:
      parts: first token and weights of each part, ascending.
      count: of the tokens.
    """
    numbers = np.zeros(count, dtype=np.int64)
    for begin, x in parts:
        if begin < count:
            numbers[begin:] = x if isinstance(x, int) else x.number
    return torch.from_numpy(numbers)


def digests_before(begun: Completion) -> list[tuple[int, LoadDigest | int]]:
    """(First token, digest) pairs of a completion that is continued; raises as `all_digests`."""
    numbers = all_digests(begun)
    return [(n, number) for n, number in enumerate(numbers) if not n or number != numbers[n - 1]]


def all_digests(begun: Completion) -> list[LoadDigest | int]:
    """The digest of each token of a completion that is continued. Raises: ValueError, it has none."""
    if begun.digests is None:
        raise ValueError(
            f"completion {begun.number} is continued, and what sampled it was not recorded; --noverify_sync continues "
            "it without the proof"
        )
    return begun.digests.tolist()


def _sharing_axes(spec: WeightSpec) -> tuple[str, ...]:
    """Axes of the ranks that share a model: those that split some weight, and "tensor", also if adapters are whole."""
    used = {axis for layout in spec.held_layouts.values() for axis in layout.axes}
    return tuple(axis for axis in AXES if axis in used or axis == "tensor")


def _key(name: str, spec: WeightSpec, purpose: str = "weight") -> int:
    """An odd number that belongs to a weight and its numeric format."""
    return _hash(f"{purpose} {name} {weight_dtype(name, spec.dtype)} {spec.float8}")


@functools.lru_cache(maxsize=1 << 16)
def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) | 1


def _signed(number: int) -> int:
    """The signed number of 64 bits that is congruent to a number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
