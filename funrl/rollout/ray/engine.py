"""Weights of trainer ranks for generators on Ray: each rank puts its own parts in the object store, in buckets.

A version is one set of objects. Of equal parts on several ranks one puts its own, so that the store has each weight
once. No process holds more than its shards and one bucket: a generator takes one bucket after the other from the store
into its second buffer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.collectives import from_first_rank, gather_objects
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Box, shape, slices, volume
from funrl.mesh.pools.channel import Requests
from funrl.models.weight_dtypes import weight_dtype
from funrl.rollout.certificate import first_copy
from funrl.rollout.engine import WeightSpec
from funrl.rollout.ray.cluster import EXCHANGE_NAME, ClusterError, ReferenceExchange, import_ray, on_this_node
from funrl.rollout.remote.engine import RemoteEngine

OBJECT_BYTES = 256 << 20  # of parts of weights in one object, unless one part has more


class WeightBucket(NamedTuple):
    """Parts of weights in one object.

    Attributes:
      boxes: name and box of each part.
      reference: of a list with the bytes of each.
    """

    boxes: Sequence[tuple[str, Box]]
    reference: Any


class RayEngine(RemoteEngine):
    """The engine of generators on Ray, as the trainer ranks see it.

    Attributes:
      ray, exchange: of `connect_ranks`.
      publish: (version) -> None; called on the first rank once all ranks have put a version.
    """

    def __init__(self, weights: WeightSpec, stored: trees.Tree, mesh: Mesh) -> None:
        """Connect to the cluster. Collective.

        Args:
          weights: the form in which a generator has the weights.
          stored: their layouts on the trainer ranks.
          mesh: of these.
        """
        super().__init__(weights, Requests(mesh))
        self.ray, self.exchange = connect_ranks(mesh)
        self.publish: Callable[[int], None] = lambda version: None
        self._stored = dict(trees.named(stored))

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Put this rank's parts of all weights in the object store; no generator is waited for. Collective.

        Args:
          named_weights: this rank's shards.
          version: of the weights.
        """
        mesh = self.requests.mesh
        names = {there: name for name, (there, _) in self.weights.names.items()}
        buckets: dict[object, WeightBucket] = {}
        parts: dict[str, np.ndarray] = {}

        def put() -> None:
            boxes = [(name, self._stored[name].box(mesh.rank)) for name in parts]
            if parts:
                buckets[mesh.rank, len(buckets)] = WeightBucket(boxes, self.ray.put([*parts.values()]))
            parts.clear()

        for there, x in named_weights:
            name = names[there]
            if not first_copy(self._stored[name], mesh):
                continue
            part = as_bytes(x.detach().to("cpu", weight_dtype(name, self.weights.dtype)))
            if sum(other.nbytes for other in parts.values()) + part.nbytes > OBJECT_BYTES:
                put()
            parts[name] = part
        put()
        self.ray.get(self.exchange.post.remote(version, buckets))
        gather_objects(None, mesh)  # all parts are there
        self.version = version
        if mesh.rank == 0:
            self.publish(version)


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


def pull_weights(ray: Any, buckets: Iterable[WeightBucket], spec: WeightSpec) -> trees.Tree:
    """Weights of a version in a generator's layouts, from the object store.

    Raises:
      ValueError: a weight is missing.
    """
    own = {name: layout.box(spec.mesh.rank) for name, layout in trees.named(spec.layouts)}
    out = {
        name: torch.empty(shape(box), dtype=weight_dtype(name, spec.dtype), device=spec.mesh.device)
        for name, box in own.items()
    }
    lacks = {name: volume(box) for name, box in own.items()}
    for boxes, reference in buckets:
        for (name, box), part in zip(boxes, ray.get(reference), strict=True):
            both = _both(box, own[name])
            if count := volume(both):
                x = torch.from_numpy(part.copy()).view(out[name].dtype).reshape(shape(box))
                out[name][slices(both, own[name])] = x[slices(both, box)].to(spec.mesh.device)
                lacks[name] -= count
    if missing := [name for name, count in lacks.items() if count]:
        raise ValueError(f"the trainer ranks have not put all of {', '.join(missing[:3])}")
    return trees.from_named(spec.layouts, iter(out.items()))


def as_bytes(x: Tensor) -> np.ndarray:
    """The bytes of a tensor on the host, which share its memory where it is contiguous."""
    return x.contiguous().reshape(-1).view(torch.uint8).numpy()


def _both(box: Box, other: Box) -> Box:
    """The elements of both boxes; an empty box where there are none."""
    pairs = [(max(low, least), min(high, most)) for (low, high), (least, most) in zip(box, other, strict=True)]
    return tuple((low, max(low, high)) for low, high in pairs)
