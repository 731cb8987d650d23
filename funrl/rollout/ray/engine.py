"""Weights of trainer ranks for generators on Ray: each rank puts its own parts in the object store, in buckets.

A version of a model is one set of objects. Of equal parts on several ranks one puts its own, so that the store has each
weight once, cut as the devices of a generator hold it. Where few numbers of 16 bits have changed, a bucket has a second
object with patches, for generators that hold the version before; any other one takes the first. No process holds more
than its shards and two buckets: a generator takes one bucket after the other from the store into its second buffer.
"""

from __future__ import annotations

import copy
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.collectives import from_first_rank, gather_objects
from funrl.mesh.mesh import Mesh
from funrl.mesh.patches import LARGEST_SHARE, apply_patch, changed_bytes, encode_patch
from funrl.mesh.plan import Box, shape, slices, volume
from funrl.mesh.pools.channel import Requests
from funrl.mesh.pools.transfer import NARROW
from funrl.models.weight_dtypes import weight_dtype
from funrl.rollout.certificate import first_copy
from funrl.rollout.engine import WeightSpec
from funrl.rollout.ray.cluster import EXCHANGE_NAME, ClusterError, ReferenceExchange, import_ray, on_this_node
from funrl.rollout.remote.engine import RemoteEngine

OBJECT_BYTES = 256 << 20  # of parts of weights in one object, unless one part has more


class WeightBucket(NamedTuple):
    """Parts of weights in one object, and perhaps patches of them in another.

    Attributes:
      ranks: devices of a generator that hold these parts.
      boxes: name and box of each part.
      whole: reference of a list with the bytes of each.
      base: version that the patches are of.
      patches: reference of a list with the patch of each; None: too many numbers have changed.
    """

    ranks: tuple[int, ...]
    boxes: Sequence[tuple[str, Box]]
    whole: Any
    base: int | None = None
    patches: Any = None


class RayEngine(RemoteEngine):
    """An engine of generators on Ray, as the trainer ranks see it.

    Attributes:
      ray, exchange: of `connect_ranks`.
      publish: (model, version) -> None; called on the first rank once all ranks have put a version.
      published: model -> newest version that they have put.
      models: the engines of all models of the generators by name; "" is the policy's.
      sent: bytes of the newest version that a generator takes if it holds the one before; None: nothing is patched.
    """

    def __init__(self, weights: WeightSpec, stored: trees.Tree, mesh: Mesh, *, patches: bool = False) -> None:
        """Connect to the cluster. Collective.

        Args:
          weights: the form in which a generator has the weights.
          stored: their layouts on the trainer ranks.
          mesh: of these.
          patches: whether generators show the weights that they have, so that these can be patched.
        """
        super().__init__(weights, Requests(mesh))
        self.ray, self.exchange = connect_ranks(mesh)
        self.publish: Callable[[str, int], None] = lambda model, version: None
        self.published: dict[str, int] = {}
        self.models: dict[str, RayEngine] = {"": self}
        self.sent: int | None = None
        self._stored = dict(trees.named(stored))
        self._patches = patches and weights.dtype.itemsize == NARROW and not weights.float8
        self._buckets: Sequence[WeightBucket] = ()  # of the newest version

    def of_model(self, name: str) -> RayEngine:
        """The engine of another model of agents."""
        other = copy.copy(self)
        other.model = name
        other.publish = lambda model, version: self.publish(model, version)
        self.models[name] = other
        return other

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Put this rank's parts of all weights in the object store; no generator is waited for. Collective.

        Args:
          named_weights: this rank's shards.
          version: of the weights.
        """
        mesh = self.requests.mesh
        names = {there: name for name, (there, _) in self.weights.names.items()}
        wanted = dict(trees.named(self.weights.layouts))
        buckets: list[WeightBucket] = []
        parts: defaultdict[tuple[int, ...], dict[tuple[str, Box], np.ndarray]] = defaultdict(dict)
        nbytes = sent = 0
        for there, x in named_weights:
            name = names[there]
            if not first_copy(self._stored[name], mesh):
                continue
            box = self._stored[name].box(mesh.rank)
            part = x.detach().to("cpu", weight_dtype(name, self.weights.dtype)).reshape(shape(box))
            if nbytes + part.nbytes > OBJECT_BYTES:
                sent += self._put(parts, buckets)
                nbytes = 0
            nbytes += part.nbytes
            owners = defaultdict[Box, list[int]](list)
            for rank in range(self.weights.mesh.world):
                owners[_both(box, wanted[name].box(rank))].append(rank)
            for piece, ranks in owners.items():
                if volume(piece):
                    parts[tuple(ranks)][name, piece] = as_bytes(part[slices(piece, box)])
        sent += self._put(parts, buckets)
        topic = self.model, version
        self.ray.get(self.exchange.post.remote(topic, {(mesh.rank, n): x for n, x in enumerate(buckets)}))
        sent = sum(gather_objects(sent, mesh))  # all parts are there
        self.sent = sent if self._patches else None
        self._buckets = buckets
        self.version = version
        self.published[self.model] = version
        if mesh.rank == 0:
            self.publish(*topic)

    def _put(self, parts: dict[tuple[int, ...], dict[tuple[str, Box], np.ndarray]], buckets: list[WeightBucket]) -> int:
        """Put parts in the store, and patches if these have few enough bytes; add their buckets.

        Args:
          parts: by the devices that hold them, names and boxes; afterwards there are none.
          buckets: receives them. Those of the version before are made in the same order.

        Returns: bytes of the parts, or of the patches where there are some.
        """
        sent = 0
        for ranks, own in parts.items():
            bucket = WeightBucket(ranks, [*own], self.ray.put([*own.values()]))
            nbytes = sum(x.nbytes for x in own.values())
            before = self._buckets[len(buckets)] if len(buckets) < len(self._buckets) else None
            if self._patches and before is not None and before.boxes == bucket.boxes:
                new = [_words(x) for x in own.values()]
                old = [_words(x.copy()) for x in self.ray.get(before.whole)]
                if changed_bytes(new, old)[1] < LARGEST_SHARE * nbytes:
                    patches = [encode_patch(*pair).numpy() for pair in zip(new, old, strict=True)]
                    nbytes = sum(patch.nbytes for patch in patches)
                    bucket = bucket._replace(base=self.version, patches=self.ray.put(patches))
            sent += nbytes
            buckets.append(bucket)
        parts.clear()
        return sent


def connect_ranks(mesh: Mesh) -> tuple[Any, Any]:
    """Connect every rank of a mesh to the cluster that RAY_ADDRESS names, or to the one of this machine. Collective.

    Returns: the module `ray`, and the `ReferenceExchange` of the run.

    Raises:
      ClusterError: Ray is not installed, or no cluster answers.
    """
    ray = import_ray()
    namespace = from_first_rank(secrets.token_hex(8) if mesh.rank == 0 else None, mesh)
    try:
        ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(
            f"generators on Ray: no Ray cluster answers ({error}); `ray start --head` starts one, RAY_ADDRESS names one"
        ) from error
    exchange = ray.remote(ReferenceExchange).options(  # on this node, so that it is lost with one of these ranks alone
        name=EXCHANGE_NAME, get_if_exists=True, num_cpus=0, scheduling_strategy=on_this_node(ray)
    )
    return ray, exchange.remote()


def pull_weights(
    ray: Any, buckets: Iterable[WeightBucket], spec: WeightSpec, base: Mapping[int | None, trees.Tree]
) -> tuple[trees.Tree, bool]:
    """Weights of a version in a generator's layouts, from the object store.

    Args:
      ray: the module.
      buckets: of the version.
      spec: of the generator's engine.
      base: version of weights that it holds -> this device's shards of them, which may be patched.

    Returns: the weights, and whether all checksums agree; what is not intact has been taken whole.

    Raises:
      ValueError: a weight is missing.
    """
    own = {name: layout.box(spec.mesh.rank) for name, layout in trees.named(spec.layouts)}
    out = {
        name: torch.empty(shape(box), dtype=weight_dtype(name, spec.dtype), device=spec.mesh.device)
        for name, box in own.items()
    }
    lacking = sum(map(volume, own.values()))
    intact = True
    for bucket in buckets:
        if spec.mesh.rank not in bucket.ranks:
            continue
        held = base.get(bucket.base) if bucket.patches is not None else None
        parts = None if held is None else _patched(ray.get(bucket.patches), bucket, dict(trees.named(held)), own)
        intact &= held is None or parts is not None
        for (name, box), part in zip(bucket.boxes, parts or ray.get(bucket.whole), strict=True):
            x = torch.from_numpy(part.copy()).view(out[name].dtype).reshape(shape(box))
            out[name][slices(box, own[name])] = x.to(spec.mesh.device)
            lacking -= volume(box)
    if lacking:
        raise ValueError(f"the trainer ranks have not put all weights: {lacking:,} numbers are missing")
    return trees.from_named(spec.layouts, iter(out.items())), intact


def as_bytes(x: Tensor) -> np.ndarray:
    """The bytes of a tensor on the host, which share its memory where it is contiguous."""
    return x.contiguous().reshape(-1).view(torch.uint8).numpy()


def _words(x: np.ndarray) -> Tensor:
    """Bytes as numbers of 16 bits."""
    return torch.from_numpy(x).view(torch.int16)


def _patched(
    patches: Sequence[np.ndarray], bucket: WeightBucket, held: Mapping[str, Tensor], own: Mapping[str, Box]
) -> list[np.ndarray] | None:
    """The parts of a bucket, made by patches of the weights that are held; None: a checksum does not agree."""
    parts = []
    for (name, box), patch in zip(bucket.boxes, patches, strict=True):
        old = _words(as_bytes(held[name].detach()[slices(box, own[name])].cpu()))
        new, agrees = apply_patch(old, torch.from_numpy(patch.copy()))
        if not agrees:
            return None
        parts.append(as_bytes(new))
    return parts


def _both(box: Box, other: Box) -> Box:
    """The elements of both boxes; an empty box where there are none."""
    pairs = [(max(low, least), min(high, most)) for (low, high), (least, most) in zip(box, other, strict=True)]
    return tuple((low, max(low, high)) for low, high in pairs)
