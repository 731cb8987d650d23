"""Engines that have been given a trainer's weights, rightly or wrongly, and their proof."""

import itertools

import torch

from funrl import trees
from funrl.models import decoder_config, decoder_model, place
from funrl.rollout.certificate import certify
from funrl.rollout.native.engine import NativeEngine, native_engine

SMALL = {"vocab": 40, "embed": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 48, "max_positions": 64}
CONFIG = decoder_config(**SMALL)
WRONG = "layers/1/mlp/up"


def weights(config=CONFIG, dtype=torch.float32, seed=0):
    return decoder_model(config).init(torch.Generator().manual_seed(seed), dtype)


def synced(params, dtype=torch.float32, change=None, model=None):
    """An engine that has been given weights of its own memory, changed by a function of dicts."""
    engine = native_engine(model or decoder_model(CONFIG), dtype=dtype)
    named = {name: x.clone() for name, x in engine.weights.named(trees.cast(params, dtype))}
    engine.load((change(named) if change else named).items(), 3)
    return engine


def check(engine, params, version=3, **how):
    placed = place(decoder_model(CONFIG), dtype=engine.weights.dtype)
    return certify(placed, params, engine, version, **how)


def one_element(named):
    flat = named[WRONG].view(torch.int32).view(-1)
    flat[77] ^= 1
    return named


def two_layers(named):
    return named | {WRONG: named["layers/2/mlp/up"], "layers/2/mlp/up": named[WRONG]}


def another_step(named):
    return {name: x + 1e-6 * x.abs().mean() for name, x in named.items()}


def half_precision(named):
    return {name: x.bfloat16().float() for name, x in named.items()}


def zeroed(named):
    return named | {WRONG: torch.zeros_like(named[WRONG])}


class Showing(NativeEngine):
    """The native engine, showing its weights through a function of (name, tensor) pairs."""

    def held_weights(self):
        return self.show(super().held_weights())


def shows(engine, show):
    engine.__class__, engine.show = Showing, show
    return engine


def without(named):
    return ((name, x) for name, x in named if name != WRONG)


def twice(named):
    return (pair for pair in named for _ in range(1 + (pair[0] == WRONG)))


def with_another(named):
    return itertools.chain(named, [("bias", torch.zeros(3))])


def in_half(named):
    return ((name, x.half()) for name, x in named)


def cut(named):
    return ((name, x[:-1] if name == WRONG else x) for name, x in named)


def hidden(named):
    return ((name, None if name == WRONG else x) for name, x in named)


def all_hidden(named):
    return ((name, None) for name, _ in named)


class Stale(NativeEngine):
    """An engine that shows new weights and computes with those of its first load, as with a cache of that time."""

    first = shown = None

    def load(self, named_weights, version=0):
        super().load(named_weights, version)
        held = [(name, x.clone()) for name, x in super().held_weights()]
        if self.first is None:
            self.first = trees.from_named(self.weights.layouts, held)
        else:
            self.shown = held
            self._backend.load(self.first)

    def held_weights(self):
        return iter(self.shown) if self.shown else super().held_weights()


def stale(engine):
    engine.__class__ = Stale
    return engine
