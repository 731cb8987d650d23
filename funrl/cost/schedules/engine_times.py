"""Seconds of a generator's iterations, from the sizes of its model and the rates of its hardware."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from funrl.cost.search.closed_split import parameters, tables
from funrl.cost.tracing.hardware import USABLE, Hardware, collective_seconds
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.models import Model

GRAPH_KERNELS = 10  # of a layer, in a CUDA graph, whose launches are in part hidden


class EngineTimes(NamedTuple):
    """Seconds of one replica.

    An iteration with b rows, which attend to c tokens together, takes
    fixed + max(weights + experts (1 - idle^b), row b) + token c.

    Attributes:
      fixed: launches and the latency of collectives.
      weights: reading all weights that every token meets.
      experts: reading all experts.
      idle: share of a layer's experts that a token does not meet; the experts that b tokens meet are 1 - idle^b.
      row: arithmetic of one row.
      token: reading the cache of one token.
      read: reading one token of a prompt, or of a row whose cache is computed again.
      capacity: tokens that the cache holds.
    """

    fixed: float
    weights: float
    experts: float
    idle: float
    row: float
    token: float
    read: float
    capacity: float

    def without_context(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of an iteration but for reading the cache, by the number of rows."""
        streamed = self.weights + self.experts * (1 - self.idle**rows)
        return self.fixed + np.maximum(streamed, self.row * rows)


def engine_times(model: Model, hardware: Hardware, tensor: int = 1, item: int = 2) -> EngineTimes:
    """Times of a replica of some devices.

    Args:
      model: that it generates with.
      hardware: of each device.
      tensor: devices of the replica, which split each layer.
      item: bytes per number.
    """
    cost = model.abilities.cost
    speed = hardware.bandwidth * hardware.efficiency[1]
    rate = {2: hardware.half, 8: hardware.double}.get(item, hardware.single) * hardware.efficiency[0]
    own = cost.expert_parameters
    tabled = tables(model) / (1 if model.config.tied else 2) + cost.looked_up  # of which few rows are read
    dense = parameters(model) - own - tabled
    routers = model.abilities.routers
    layers = model.config.layers
    near = tensor <= RANKS_PER_NODE
    sums = 2 * layers * (tensor > 1)
    row_sums = collective_seconds(hardware, "all_reduce", 0, 2.0 * layers * model.config.embed * item, tensor, near)
    flops = 2 * (cost.used_parameters(parameters(model)) - tables(model) / 2)
    cached = cost.cached(tensor) * item
    state = cost.state(tensor) * max(item, 4)
    resting = item * parameters(model) / tensor
    return EngineTimes(
        fixed=layers * GRAPH_KERNELS * hardware.launch + sums * hardware.latency,
        weights=item * dense / tensor / speed,
        experts=item * own / tensor / speed,
        idle=0.0 if routers is None else 1 - routers.per_token / routers.experts,
        row=flops / tensor / rate + row_sums + 2 * state / speed,
        token=cached / speed,
        read=flops / tensor / rate + row_sums,
        capacity=max(0.0, hardware.memory * USABLE - resting) / cached,
    )
