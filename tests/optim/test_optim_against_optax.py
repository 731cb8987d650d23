"""Every optimizer and schedule against optax: 20 steps in float64, to 1e-12."""

import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from selection import XLA_FLAGS

from funrl import optim, trees

pytestmark = pytest.mark.slow
PEER = Path(__file__).parent / "optax_peer.py"
STEPS = 20


def draw(seed):
    rng = np.random.default_rng(seed)
    w = lambda *shape: rng.normal(size=shape)  # noqa: E731
    return {"a": {"weight": w(4, 3), "bias": w(3)}, "layers": (w(2, 3, 2), w(5))}


@pytest.fixture(scope="module")
def theirs():
    """What optax finds: parameters of optimizers, and rates of schedules."""
    if find_spec("optax") is None:  # to import it here would start threads in a process that is forked later
        pytest.skip("optax is not installed")
    given = pickle.dumps((draw(0), [draw(step) for step in range(1, STEPS + 1)]))
    env = os.environ | {"XLA_FLAGS": XLA_FLAGS}
    done = subprocess.run([sys.executable, str(PEER)], input=given, capture_output=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr.decode()
    params, rates = pickle.loads(done.stdout)
    assert params.keys() == {other for _, other in OPTIMIZERS.values()} and rates.keys() == SCHEDULES.keys()
    return params, rates


def to_torch(tree):
    return trees.map(lambda x: torch.tensor(np.asarray(x)), tree)


def decays(params):
    return {"a": {"weight": True, "bias": False}, "layers": (True, False)}


def only_2d(params):
    return {"a": {"weight": True, "bias": False}, "layers": (False, False)}


OURS = optim.warmup_cosine(0.1, 5, 15, 0.01)
OPTIMIZERS = {  # name: (ours, name of theirs)
    "sgd": (lambda: optim.sgd(0.1), "sgd"),
    "momentum": (lambda: optim.sgd(0.1, 0.9), "momentum"),
    "nesterov": (lambda: optim.sgd(OURS, 0.8, True), "nesterov"),
    "scale_by_adam": (lambda: optim.scale_by_adam(0.8, 0.95, 1e-6), "scale_by_adam"),
    "adamw": (lambda: optim.adamw(0.1), "adamw"),
    "adamw decay": (lambda: optim.adamw(0.1, weight_decay=0.3), "adamw decay"),
    "adamw mask": (lambda: optim.adamw(OURS, 0.8, 0.9, 1e-5, 0.3, decays), "adamw mask"),
    "fused_adamw": (lambda: optim.fused_adamw(0.1), "adamw"),
    "fused_adamw mask": (lambda: optim.fused_adamw(OURS, 0.8, 0.9, 1e-5, 0.3, decays), "adamw mask"),
    "clip": (lambda: optim.chain(optim.clip_by_global_norm(4.0), optim.sgd(0.1)), "clip"),
    "decayed weights": (
        lambda: optim.chain(optim.add_decayed_weights(0.2, decays), optim.scale_by_schedule(OURS), optim.scale(-1)),
        "decayed weights",
    ),
    "partition": (
        lambda: optim.partition({True: optim.adamw(0.1, weight_decay=0.3), False: optim.sgd(0.2, 0.9)}, decays),
        "partition",
    ),
    "masked": (lambda: optim.chain(optim.masked(optim.trace(0.7), decays), optim.sgd(0.1)), "masked"),
    "orthogonal": (
        lambda: optim.chain(
            optim.masked(optim.chain(optim.trace(0.9), optim.orthogonalize("none")), only_2d), optim.scale(-0.1)
        ),
        "orthogonal",
    ),
    "all together": (
        lambda: optim.chain(optim.clip_by_global_norm(3.0, in_place=True), optim.fused_adamw(OURS, weight_decay=0.1)),
        "all together",
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_those_of_optax(name, theirs):
    make, other = OPTIMIZERS[name]
    ours, p = make(), to_torch(draw(0))
    state = ours.init(p)
    for step, expected in enumerate(theirs[0][other], 1):
        updates, state = ours.update(to_torch(draw(step)), state, p)
        p = optim.apply_updates(p, updates)
        for (leaf, x), y in zip(trees.named(p), trees.leaves(to_torch(expected)), strict=True):
            assert x.dtype == torch.float64
            torch.testing.assert_close(
                x, y, rtol=1e-12, atol=1e-12, msg=lambda m, leaf=leaf, n=step: f"{leaf} {n}: {m}"
            )
    assert step == STEPS


SCHEDULES = {
    "constant": optim.constant(0.3),
    "linear": optim.linear(0.3, 0.1, 11),
    "linear of no length": optim.linear(0.3, 0.1, 0),
    "cosine": optim.cosine(0.3, 13, 0.03),
    "warmup_constant": optim.warmup_constant(0.3, 4),
    "warmup_cosine": optim.warmup_cosine(0.3, 4, 15, 0.03, 0.1),
    "no warmup": optim.warmup_cosine(0.3, 0, 9),
    "warmup_linear": optim.warmup_linear(0.3, 4, 15, 0.03),
    "join": optim.join([optim.constant(0.1), optim.linear(0.2, 0.4, 5), optim.cosine(1.0, 6)], [3, 9]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_optax(name, theirs):
    ours, rates = SCHEDULES[name], theirs[1][name]
    for step in range(STEPS):
        expected = pytest.approx(rates[step], rel=1e-12, abs=1e-15)
        assert ours(step) == expected
        assert isinstance(ours(step), float)
        assert ours(torch.tensor(step)).item() == expected
