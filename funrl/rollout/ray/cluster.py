"""A Ray cluster as processes of a run see it, and the actor with references of objects. It imports no torch."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from typing import Any

EXCHANGE_NAME = "exchange"  # of the actor, in the namespace of a run


class ClusterError(RuntimeError):
    """There is no Ray, or no cluster, or it lacks what a run needs; the message says what is missing."""


class ReferenceExchange:
    """Actor that hands references of objects to processes other than the ones that have put them.

    An object stays in the store of its node as long as a reference is here.

    Example:
      exchange = ray.remote(ReferenceExchange).remote()
      ray.get(exchange.post.remote("weights", {0: ray.put(shard)}))
      reference = ray.get(exchange.take.remote("weights"))[0]
    """

    def __init__(self) -> None:
        self._topics: dict[Hashable, dict[Hashable, Any]] = defaultdict(dict)

    def post(self, topic: Hashable, references: Mapping[Hashable, Any]) -> None:
        """Add references to a topic, by keys."""
        self._topics[topic] |= references

    def take(self, topic: Hashable) -> dict[Hashable, Any]:
        """References of a topic, by their keys."""
        return dict(self._topics[topic])

    def drop(self, topics: Collection[Hashable]) -> None:
        """Forget topics and their references."""
        for topic in topics:
            self._topics.pop(topic, None)


def import_ray() -> Any:
    """The module `ray`. Raises: ClusterError, it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ClusterError(f"generators on Ray need Ray: pip install 'funrl[ray]' ({error})") from error


def on_this_node(ray: Any) -> Any:
    """A scheduling strategy: the node of this process."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def devices_of_cluster(resource: str) -> str:
    """Devices that the cluster has, and how many are free.

    Args:
      resource: Ray's name of them, "GPU" or "CPU".
    """
    ray = import_ray()
    totals = [f"{node['Resources'].get(resource, 0):g} on {node['NodeName']}" for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources().get(resource, 0)
    return f"the cluster has {resource}s: {', '.join(totals)}; {free:g} of them are free"
