"""A program that takes steps with stock optax, in a process of its own, and writes where they lead.

A process that has used JAX has threads, and is not safely forked any more: tests of ranks, in the same process as those
of optimizers, fork. It reads a pickled `Given` from the standard input and writes a pickled `Found` to the standard
output, both as tuples of trees of numpy arrays.
"""

import pickle
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
import optax


class Given(NamedTuple):
    """What steps are taken with.

    Attributes:
      params: at the start.
      gradients: of each step.
    """

    params: Any
    gradients: list[Any]


class Found(NamedTuple):
    """What came out.

    Attributes:
      params: after each step, of each optimizer.
      rates: at each step from 0, of each schedule.
    """

    params: dict[str, list[Any]]
    rates: dict[str, list[float]]


def decays(params):
    return {"a": {"weight": True, "bias": False}, "layers": (True, False)}


def only_2d(params):
    return {"a": {"weight": True, "bias": False}, "layers": (False, False)}


def two_dims(params):
    return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(), params)


def schedule():
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 15, 0.01)
    return lambda count: rate(count.astype("float64"))  # an int32 count would be divided in float32


OPTIMIZERS = {  # made late, because jax makes constants when a schedule is made
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, 0.9),
    "nesterov": lambda: optax.sgd(schedule(), 0.8, True),
    "scale_by_adam": lambda: optax.scale_by_adam(0.8, 0.95, 1e-6),
    "adamw": lambda: optax.adam(0.1),
    "adamw decay": lambda: optax.adamw(0.1, weight_decay=0.3),
    "adamw mask": lambda: optax.adamw(schedule(), 0.8, 0.9, 1e-5, weight_decay=0.3, mask=decays),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(4.0), optax.sgd(0.1)),
    "decayed weights": lambda: optax.chain(
        optax.add_decayed_weights(0.2, decays), optax.scale_by_schedule(schedule()), optax.scale(-1)
    ),
    "partition": lambda: optax.partition(
        {True: optax.adamw(0.1, weight_decay=0.3), False: optax.sgd(0.2, 0.9)}, decays
    ),
    "masked": lambda: optax.chain(optax.masked(optax.trace(0.7), decays), optax.sgd(0.1)),
    "orthogonal": lambda: optax.chain(
        optax.masked(
            optax.contrib.scale_by_muon(beta=0.9, eps=0.0, nesterov=False, weight_dimension_numbers=two_dims), only_2d
        ),
        optax.scale(-0.1),
    ),
    "all together": lambda: optax.chain(optax.clip_by_global_norm(3.0), optax.adamw(schedule(), weight_decay=0.1)),
}
SCHEDULES = {
    "constant": lambda: optax.constant_schedule(0.3),
    "linear": lambda: optax.linear_schedule(0.3, 0.1, 11),
    "linear of no length": lambda: optax.linear_schedule(0.3, 0.1, 0),
    "cosine": lambda: optax.cosine_decay_schedule(0.3, 13, 0.1),
    "warmup_constant": lambda: optax.warmup_constant_schedule(0.0, 0.3, 4),
    "warmup_cosine": lambda: optax.warmup_cosine_decay_schedule(0.1, 0.3, 4, 15, 0.03),
    "no warmup": lambda: optax.warmup_cosine_decay_schedule(0.0, 0.3, 0, 9),
    "warmup_linear": lambda: optax.join_schedules(
        [optax.linear_schedule(0.0, 0.3, 4), optax.linear_schedule(0.3, 0.03, 11)], [4]
    ),
    "join": lambda: optax.join_schedules(
        [optax.constant_schedule(0.1), optax.linear_schedule(0.2, 0.4, 5), optax.cosine_decay_schedule(1.0, 6)], [3, 9]
    ),
}


def steps(optimizer, params, gradients):
    """Yield the parameters and the optimizer's state after each step."""
    params = jax.tree.map(jax.numpy.asarray, params)
    state: Any = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        yield jax.tree.map(np.asarray, params), state


def main():
    given = Given(*pickle.load(sys.stdin.buffer))
    params = {
        name: [after for after, _ in steps(make(), given.params, given.gradients)] for name, make in OPTIMIZERS.items()
    }
    rates = {
        name: [np.asarray(make()(step)).item() for step in range(len(given.gradients))]
        for name, make in SCHEDULES.items()
    }
    pickle.dump(tuple(Found(params, rates)), sys.stdout.buffer)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
