"""Runs by the clock of their engines are the same twice, whatever waits: no log is needed."""

import contextlib
import functools
import random
import time
from unittest import mock

import pytest
import torch
from selection import quick
from small_runs import MEASURED, Quiet, small_job
from test_placement_runs import Ended, check_ages

from funrl import trees
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.mesh.launch import launch
from funrl.mesh.pools.transfer import WeightReceiver, WeightSender
from funrl.rollout.native.engine import NativeEngine
from funrl.trainer import loop
from funrl.trainer.checkpoints.saved_rows import open_rows
from funrl.trainer.placement.ranks import run_rank

pytestmark = pytest.mark.gloo
OWN = ("memory/", "sync/bytes", "sync/hidden_share", "wait/")
SETTINGS = {
    "minibatches": 1,
    "steps": 5,
    "staleness": 2,
    "clock": "tokens",
    "max_new_tokens": 12,
    "eval_every": 2,
    "place": "train:dp1 generate:dp2",
}


def sleepy(function, pauses, longest_s):
    """The function, before whose calls the process sleeps now and then."""

    @functools.wraps(function)
    def after_a_pause(*args, **kwargs):
        if pauses.random() < 0.3:
            time.sleep(pauses.uniform(0, longest_s))
        return function(*args, **kwargs)

    return after_a_pause


SLEEPS = (
    (NativeEngine, "step", 0.01),
    (WeightSender, "_attempt", 0.2),
    (WeightReceiver, "_receive_next", 0.2),
    (loop, "learn_batch", 0.3),
)


def slowed(job, seed, folder, mesh):
    """A run of this rank whose parts sleep at random."""
    observer = Quiet(folder)
    with contextlib.ExitStack() as stack:
        for place, (owner, name, longest_s) in enumerate(SLEEPS if seed else ()):
            pauses = random.Random(1000 * seed + 100 * place + mesh.rank)
            stack.enter_context(mock.patch.object(owner, name, sleepy(getattr(owner, name), pauses, longest_s)))
        outcome = run_rank(job, mesh, observer)
    weights = getattr(observer, "params", None)
    observer.params = None
    return Ended(outcome, observer, weights)


def run(seed, folder, compose=rollout_is, **settings):
    job = small_job(compose, save_rollouts=1, **SETTINGS | settings)
    return launch(functools.partial(slowed, job, seed, str(folder / "checkpoints")), job.launched, "cpu")


def check_same(one, other, folders, steps):
    """Rows, versions of tokens, samples, tables, metrics that are no seconds, and weights, all to the bit."""
    assert one.outcome.error is None and other.outcome.error is None
    assert one.observer.shown == other.observer.shown and one.observer.table == other.observer.table
    assert [step for step, _ in one.observer.steps] == list(range(1, steps + 1))
    for (_, a), (_, b) in zip(one.observer.steps, other.observer.steps, strict=True):
        names = [name for name in a | b if not name.startswith(OWN) and not name.endswith((*MEASURED, "_s"))]
        assert {name: a.get(name) for name in names} == {name: b.get(name) for name in names}
    for a, b in zip(trees.leaves(one.weights), trees.leaves(other.weights), strict=True):
        assert torch.equal(a, b)


RUNS = {
    "one replica": {"place": "train:dp1 generate:dp1", "staleness": 1},
    "two replicas": {},
    "window": {"window": 3},
    "window, tp2": {"window": 3, "place": "train:dp1 generate:tp2", "staleness": 1},
}


@pytest.mark.parametrize("name", quick(RUNS, ["window"]))
def test_two_runs_have_the_same_bits_whatever_sleeps(name, tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    one, other = (run(seed, folder, **RUNS[name]) for seed, folder in enumerate(folders, 1))
    check_same(one, other, folders, 5)
