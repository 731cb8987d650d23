"""A Ray cluster as processes of a run see it, and the actor through which they exchange references of objects."""

from __future__ import annotations

import importlib
import secrets
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from typing import Any

from funrl.mesh.collectives import from_first_rank, gather_objects
from funrl.mesh.mesh import Mesh

EXCHANGE_NAME = "exchange"  # of the actor, in the namespace of a run


class ClusterError(RuntimeError):
    """There is no Ray, or no cluster, or it lacks what a run needs; the message says what is missing."""


class ReferenceExchange:
    """Actor that hands references of objects to processes other than the ones that have put them.

    An object stays in the store of its node as long as a reference is here.

    Example:
      exchange = ray.remote(ReferenceExchange).remote()
      ray.get(exchange.post.remote("weights", {0: [ray.put(shard)]}))
      [reference] = ray.get(exchange.take.remote("weights", [0]))[0]
    """

    def __init__(self) -> None:
        self._topics: dict[Hashable, dict[Hashable, Any]] = defaultdict(dict)

    def post(self, topic: Hashable, references: Mapping[Hashable, Any]) -> None:
        """Add references to a topic, by keys."""
        self._topics[topic] |= references

    def take(self, topic: Hashable, keys: Collection[Hashable] | None = None) -> list[Any]:
        """References of some keys; None: all of the topic."""
        references = self._topics[topic]
        return list(references.values()) if keys is None else [references[key] for key in keys]

    def drop(self, topics: Collection[Hashable]) -> None:
        """Let go of topics."""
        for topic in topics:
            self._topics.pop(topic, None)


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
    exchange = None
    if mesh.rank == 0:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        node = ray.get_runtime_context().get_node_id()  # so that it is lost with this process alone
        here = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(ReferenceExchange)
        exchange = actor.options(name=EXCHANGE_NAME, num_cpus=0, scheduling_strategy=here).remote()
        ray.get(exchange.drop.remote([]))  # it is there, and has the name
    gather_objects(None, mesh)
    return ray, exchange or ray.get_actor(EXCHANGE_NAME)


def import_ray() -> Any:
    """The module `ray`. Raises: ClusterError, it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ClusterError(f"generators on Ray need Ray: pip install 'funrl[ray]' ({error})") from error


def devices_of_cluster(resource: str) -> str:
    """Devices that the cluster has, and how many are free.

    Args:
      resource: Ray's name of them, "GPU" or "CPU".
    """
    ray = import_ray()
    totals = [f"{node['Resources'].get(resource, 0):g} on {node['NodeName']}" for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources().get(resource, 0)
    return f"the cluster has {resource}s: {', '.join(totals)}; {free:g} of them are free"
