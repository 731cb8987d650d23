"""Runs whose ranks train or generate: the same numbers as where every rank does both."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from selection import quick
from small_runs import GRPO, MEASURED, PPO, Quiet, small_job

from funrl import trees
from funrl.algos.recipes.dapo import dapo
from funrl.algos.recipes.online_dpo import online_dpo
from funrl.algos.recipes.prime import prime
from funrl.algos.recipes.remax import remax
from funrl.mesh.launch import launch
from funrl.mesh.text import MeshError
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.settings.declaration import SettingsError

pytestmark = pytest.mark.gloo
OWN = ("memory/", "sync/bytes")  # metrics of the ranks


class Ended(NamedTuple):
    """A run as its first rank saw it."""

    outcome: Any
    observer: Quiet
    weights: Any


def rank_of(job, mesh):
    observer = Quiet()
    outcome = run_rank(job, mesh, observer)
    weights = getattr(observer, "params", None)
    observer.params = None
    return Ended(outcome, observer, weights)


@functools.cache
def run(compose=GRPO, **settings):
    job = small_job(compose, **settings)
    return launch(functools.partial(rank_of, job), job.launched, "cpu")


def compare(placed, together, tolerance=0.0):
    """Samples, tables, metrics and weights of two runs."""
    assert placed.outcome.error is None and placed.outcome.last.keys() == together.outcome.last.keys()
    assert placed.observer.shown == together.observer.shown and placed.observer.shown
    assert placed.observer.table == together.observer.table and placed.observer.table
    for (_, a), (_, b) in zip(placed.observer.steps, together.observer.steps, strict=True):
        assert a.keys() == b.keys()
        names = [n for n in a if not n.startswith(OWN) and not n.endswith(MEASURED)]
        assert {n: a[n] for n in names} == pytest.approx({n: b[n] for n in names}, rel=tolerance, abs=tolerance)
    for a, b in zip(trees.leaves(placed.weights), trees.leaves(together.weights), strict=True):
        if a.shape == b.shape:
            assert torch.allclose(a, b, rtol=0, atol=tolerance)


LAYOUTS = {
    "dp1": ({}, {"place": "generate:1"}),
    "dp2 + dp1": ({"mesh": "dp2"}, {"place": "train:dp2@0-1 generate:dp1@2"}),
    "tp2 + dp2": ({"mesh": "tp2", "generate_mesh": "dp2"}, {"place": "train:tp2@0-1 generate:dp2@2-3"}),
    "fsdp + tp": (
        {"mesh": "dp2", "fsdp": True, "generate_mesh": "tp2"},
        {"place": "train:dp2@0,3 generate:tp2@1-2", "fsdp": True},
    ),
}


@pytest.mark.parametrize("name", quick(LAYOUTS, ["dp1"]))
def test_apart_the_bits_are_those_of_ranks_that_do_both(name):
    together, apart = LAYOUTS[name]
    placed = run(**apart)
    compare(placed, run(**together))
    compare(placed, run(), 1e-9)
    assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for _, metrics in placed.observer.steps)
    assert all(metrics["sync/verified"] == 1 for _, metrics in placed.observer.steps)


RUNS = {
    "ppo": (PPO, {"epochs": 2, "minibatches": 2}),
    "dapo": (dapo, {"max_refills": 3}),
    "pairs": (online_dpo, {}),
    "greedy baseline": (remax, {}),
    "prime": (prime, {"max_refills": 2}),
    "adapters": (GRPO, {"lora_rank": 2}),
    "merged probe": (GRPO, {"probe_sync_every": 1}),
    "curriculum": (GRPO, {"difficulty": "0.2,0.8"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_has_the_same_bits_apart(name):
    compose, settings = RUNS[name]
    placed = run(compose, place="train:dp2@0-1 generate:dp2@2-3", **settings)
    compare(placed, run(compose, mesh="dp2", **settings))


@pytest.mark.slow
def test_episodes_have_the_same_bits_apart():
    settings = {"task": "calculator", "reward": None, "episode_turns": 3}
    compare(run(place="train:dp2@0-1 generate:tp2@2-3", **settings), run(mesh="dp2", generate_mesh="tp2", **settings))


def fails_at_times(prompt, completion, **fields):
    raise ValueError(f"no score for {prompt}")


def test_a_reward_that_fails_ends_the_run_on_all_ranks():
    job = small_job(GRPO, reward=fails_at_times, place="generate:1")
    ended = launch(functools.partial(rank_of, job), job.launched, "cpu")
    assert "no score for" in ended.outcome.error


@pytest.mark.parametrize(
    "settings,problem",
    [
        ({"engine": "hf"}, "--engine=hf with --place=generate:1: every rank has to generate then"),
        ({"new_tokens_per_step": 2}, "--new_tokens_per_step=2 with --place=generate:1"),
        (
            {"generate_mesh": "dp1"},
            "--generate_mesh=dp1 does nothing: --place=generate:1 gives the mesh",
        ),
        ({"place": "train:1 generate:1", "mesh": "dp2"}, "--mesh=dp2 does nothing"),
        ({"place": "generate:3 train:1@1"}, "rank 0 writes the run's files"),
        ({"place": "generate:tp3"}, "--place=generate:tp3: embed: vocab has size 16, which does not divide over tp3"),
        ({"save_rollouts": 1, "task": "calculator", "reward": None}, "the episodes are on ranks that write no files"),
    ],
)
def test_flags_that_do_not_go_with_a_placement_are_refused(settings, problem):
    with pytest.raises((SettingsError, MeshError)) as error:
        small_job(GRPO, **{"place": "generate:1", **settings})
    assert problem in str(error.value)


def test_more_or_fewer_ranks_than_were_started_are_refused(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match="--place=generate:2: the mesh dp3 has 3 devices, 2 ranks were started"):
        small_job(GRPO, place="generate:2")
