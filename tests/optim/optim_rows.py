"""One row for each public transformation, and the trees on which all of them are tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funrl import optim, trees


def _shape(*sizes):
    return torch.empty(sizes, device="meta")


SHAPES = {
    "attn": {"q": _shape(2, 3, 8), "q_bias": _shape(2, 3)},
    "embed": _shape(6, 8),
    "layers": ({"down": _shape(8, 4)}, {"down": _shape(8, 4)}),
    "norm": _shape(8),
}
AXES = {
    "attn": {"q": ("heads", "head", "embed"), "q_bias": ("heads", "head")},
    "embed": ("vocab", "embed"),
    "layers": ({"down": ("embed", "mlp")}, {"down": ("embed", "mlp")}),
    "norm": ("norm",),
}
NAMES = ["attn/q", "attn/q_bias", "embed", "layers/0/down", "layers/1/down", "norm"]
DOWN = ["layers/0/down", "layers/1/down"]
REST = ["attn/q", "attn/q_bias", "embed", "norm"]


class Where(NamedTuple):
    """The layouts of the parameters and the mesh that a transformation is made for."""

    layouts: trees.Tree = None
    mesh: Any = None

    def norm(self, tree):
        return optim.global_norm(tree, self.layouts, self.mesh)


class Row(NamedTuple):
    """How a transformation is made, the names of its state, and what it is besides."""

    make: Callable[[Where], optim.Transformation]
    state: list[str]
    takes_over: bool = False  # its update uses up gradients or state
    descends: bool = True  # it is an optimizer: a step down the gradient


def draw(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return trees.map(lambda x: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype), SHAPES)


def labels(params):
    return trees.map_named(lambda name, x: "sgd" if name in DOWN else "adamw", params)


def only_down(params):
    return trees.map_named(lambda name, x: name in DOWN, params)


def _like(prefix, names=NAMES):
    return [f"{prefix}/{name}" for name in names]


def _adam(prefix="", names=NAMES):
    return [f"{prefix}count", *_like(f"{prefix}mu", names), *_like(f"{prefix}nu", names)]


RATE = optim.warmup_constant(0.1, 3, start=0.02)
DECAY = {"weight_decay": 0.1, "mask": optim.matrices}
ROWS = {
    "adamw": Row(lambda at: optim.adamw(RATE, **DECAY), [*_adam("adam/"), "learning_rate/count"]),
    "fused_adamw": Row(lambda at: optim.fused_adamw(RATE, **DECAY), [*_adam("adam/"), "learning_rate/count"], True),
    "sgd": Row(lambda at: optim.sgd(0.05, 0.5, nesterov=True), _like("momentum/trace")),
    "muon": Row(
        lambda at: optim.muon(RATE, weight_decay=0.01, axes=AXES, layouts=at.layouts, mesh=at.mesh),
        [
            *_adam("adamw/adam/", ["attn/q_bias", "embed", "norm"]),
            "adamw/learning_rate/count",
            "muon/learning_rate/count",
            *_like("muon/momentum/trace", ["attn/q", *DOWN]),
        ],
    ),
    "chain": Row(
        lambda at: optim.chain(
            optim.clip_by_global_norm(1.0, at.norm), optim.trace(0.5), optim.trace(0.3), optim.scale(-0.1)
        ),
        [*_like("momentum/trace"), *_like("momentum_2/trace")],
    ),
    "partition": Row(
        lambda at: optim.partition({"sgd": optim.sgd(0.1, 0.5), "adamw": optim.adamw(0.1)}, labels),
        [*_adam("adamw/adam/", REST), *_like("sgd/momentum/trace", DOWN)],
    ),
    "masked": Row(
        lambda at: optim.chain(optim.masked(optim.trace(0.5), only_down), optim.scale(-0.1)),
        _like("momentum/trace", DOWN),
    ),
    "scale_by_adam": Row(lambda at: optim.scale_by_adam(0.8, 0.9), _adam(), descends=False),
    "trace": Row(lambda at: optim.trace(0.5), _like("trace"), descends=False),
    "scale": Row(lambda at: optim.scale(0.5), [], descends=False),
    "scale_by_schedule": Row(lambda at: optim.scale_by_schedule(RATE), ["count"], descends=False),
    "scale_by_learning_rate": Row(lambda at: optim.scale_by_learning_rate(0.05), []),
    "add_decayed_weights": Row(lambda at: optim.add_decayed_weights(0.1, only_down), [], descends=False),
    "orthogonalize": Row(
        lambda at: optim.masked(optim.orthogonalize("none", axes=AXES, layouts=at.layouts, mesh=at.mesh), only_down),
        [],
        descends=False,
    ),
    "clip_by_global_norm": Row(lambda at: optim.clip_by_global_norm(1.0, at.norm), [], descends=False),
    "clip_by_global_norm in place": Row(
        lambda at: optim.clip_by_global_norm(1.0, at.norm, in_place=True), [], True, descends=False
    ),
}
