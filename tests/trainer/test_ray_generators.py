"""Runs whose rows generators on a Ray cluster write, which come, die and go: the numbers of a run without any of it."""

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from ray_cluster import on_ray, wait_until
from selection import quick
from small_runs import GRPO, PPO, Quiet, small_job
from test_agents_apart import job_of as job_of_agents
from test_episode_runs import Branching, episode_job
from test_greedy_ahead import filtered_remax
from test_placement_runs import own_names
from test_refilled_runs import equal, reward, stale_dapo

from funrl import trees
from funrl.algos.recipes.dapo import dapo
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.mesh.launch import launch
from funrl.mesh.text import MeshError
from funrl.trainer.placement.logged import read_groups
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.settings.declaration import SettingsError

FORK = multiprocessing.get_context("fork")
JOB_S = 240.0


class Marking(Quiet):
    """An observer that leaves a file for each step, and its remarks."""

    def __init__(self, run_dir):
        super().__init__(str(Path(run_dir) / "checkpoints"))
        self.run_dir = Path(run_dir)

    def note(self, text):
        super().note(text)
        with open(self.run_dir / "notes", "a") as file:
            file.write(f"{text}\n")

    def step(self, step, metrics, seconds):
        super().step(step, metrics, seconds)
        (self.run_dir / f"step-{step}").touch()
        planned = self.run_dir / f"event-{step}"  # what is lost during the next step
        assert wait_until(lambda: not planned.exists(), JOB_S)


def rank_of(job, run_dir, mesh):
    observer = Marking(run_dir)
    outcome = run_rank(job, mesh, observer)
    weights = getattr(observer, "params", None)
    observer.params = observer.parts = None
    return outcome._replace(cause=None), observer, weights


def write_result(job, run_dir, environment):
    """The program of a process that trains: it leaves its result in a file."""
    os.environ |= environment
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    result = launch(functools.partial(rank_of, job, run_dir), job.launched, "cpu")
    Path(run_dir, "result").write_bytes(pickle.dumps(result))
    os._exit(0)


@contextlib.contextmanager
def training(job, run_dir, cluster):
    """A process that trains."""
    process = FORK.Process(target=write_result, args=(job, run_dir, cluster.environment))
    process.start()
    try:
        yield process
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def trained(job, run_dir, cluster):
    """Outcome, observer and weights of a run."""
    run_dir.mkdir(exist_ok=True)
    with training(job, run_dir, cluster) as process:
        process.join(JOB_S)
        assert process.exitcode == 0
    return pickle.loads((run_dir / "result").read_bytes())


def same(ended, other):
    """Samples, tables, metrics and weights of two runs, to the bit."""
    (outcome, observer, weights), (_, plain, own) = ended, other
    assert outcome.error is None
    assert observer.shown == plain.shown and observer.shown
    assert observer.table == plain.table and observer.table
    for (_, a), (_, b) in zip(observer.steps, plain.steps, strict=True):
        assert own_names(a) == own_names(b) and all(a[name] == b[name] for name in own_names(a))
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(weights), trees.leaves(own), strict=True))


class Alike(Branching):
    """`Branching`, whose episodes have the same reward after two prompts out of five."""

    async def run(self, policy, example, seed):
        episode = await super().run(policy, example, seed)
        return dataclasses.replace(episode, rewards={"policy": 0.5}) if equal(example.text) else episode


RUNS = {  # algorithm, environment, mesh, and further settings
    "tp2": (PPO, None, "tp2", {"reward": reward}),
    "fsdp": (GRPO, None, "dp2", {"fsdp": True, "probe_sync_every": 1}),
    "refills": (dapo, None, "dp1", {"reward": reward, "minibatches": 1, "steps": 4, "max_new_tokens": 12}),
    "greedy": (filtered_remax, None, "dp1", {"reward": reward}),
    "episodes": (GRPO, Alike, "dp2", {"steps": 2, "save_rollouts": 1}),
    "earlier self": (GRPO, None, "dp2", {"agents": "rival:frozen:2", "steps": 3, "minibatches": 1}),
    "second policy": (GRPO, None, "dp1", {"agents": "rival:policy:second", "steps": 2, "minibatches": 1}),
    "masks": (GRPO, None, "dp2", {"top_p": 0.8, "temperature": 0.7, "mask_replay": True, "on_gap": "stop"}),
    "patches": (GRPO, None, "dp2", {"fsdp": True, "dtype": "bfloat16", "lr": 1e-6, "steps": 4}),
    "two devices": (GRPO, None, "dp2", {"fsdp": True, "probe_sync_every": 1, "reward": reward}),
}


def job_of(name, run_dir, place=None):
    compose, environment, mesh, settings = RUNS[name]
    generate = {"generate_mesh": "tp2"} if name == "two devices" else {}
    where = {"mesh": mesh} | generate if place is None else {"place": f"train:{mesh} {place}{',tp2' * len(generate)}"}
    settings = settings | {"run_dir": str(run_dir)} | where
    if "agents" in settings:
        return job_of_agents(compose, **settings)
    if environment is not None:
        return episode_job(compose, environment(), **settings)
    return small_job(compose, **settings)


@on_ray
@pytest.mark.parametrize("name", quick(RUNS, ["fsdp"]))
def test_two_generators_give_the_bits_of_ranks_that_generate_themselves(ray_cluster, tmp_path, name):
    folders = tmp_path / "ray", tmp_path / "plain"
    ended = trained(job_of(name, folders[0], "generate:ray2"), folders[0], ray_cluster)
    same(ended, trained(job_of(name, folders[1]), folders[1], ray_cluster))
    assert len({tuple(episodes_of(folder)) for folder in folders}) == 1
    assert bool(episodes_of(folders[0])) == (name == "episodes")
    steps = ended[1].steps
    assert all(metrics.get("sync/verified") == 1 for _, metrics in steps)
    assert any("has started; " in note and "of 2 are there" in note for note in ended[1].notes)
    if name in ("refills", "greedy"):
        assert any(metrics["filter_groups/dropped_prompts"] for _, metrics in steps)
    if name == "patches":
        assert all(0 < 5 * metrics["sync/sent_bytes"] < metrics["sync/bytes"] for _, metrics in steps[1:])
    assert not ray_cluster.generators()


def episodes_of(run_dir):
    """Lines of the saved episodes of a run, whichever rank has written them."""
    files = sorted(run_dir.glob("rollouts/*/episodes-*.jsonl"))
    return sorted((file.parent.name, line) for file in files for line in file.read_text().splitlines())


def killed_run(cluster, run_dir, events, seed=7, place="generate:ray1-3", **settings):
    """A run in which something is lost after some steps: "actor", "node" or "trainer"; a seed draws which actor.

    Where generators have several devices, "follower" is the process of one that is not the first.
    """
    run_dir.mkdir()
    for step in events:
        (run_dir / f"event-{step}").touch()
    job = small_job(**settings, run_dir=str(run_dir), save_every="1", place=place)
    draws = random.Random(seed)
    process = FORK.Process(target=write_result, args=(job, run_dir, cluster.environment))
    process.start()
    try:
        for step, event in events.items():
            assert wait_until((run_dir / f"step-{step}").exists, JOB_S), (step, event)
            (run_dir / f"event-{step}").unlink()
            time.sleep(draws.uniform(0.0, 0.3))
            if event == "node":
                cluster.lose_further_node()
            elif event == "new node":
                cluster.further_node()
            elif event == "trainer":
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
                assert wait_until(lambda: not cluster.generators(), 30)
                job = small_job(**settings, run_dir=str(run_dir), save_every="1", place=place, resume=True)
                process = FORK.Process(target=write_result, args=(job, run_dir, cluster.environment))
                process.start()
            else:
                generators = wait_until(cluster.generators, JOB_S)
                newest = max(generators)  # which the first process of a generator has started
                with contextlib.suppress(OSError):
                    os.kill(newest if event == "follower" else draws.choice(generators), signal.SIGKILL)
        process.join(JOB_S)
        assert process.exitcode == 0
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return pickle.loads((run_dir / "result").read_bytes())


EVENTS = {1: "actor", 2: "actor", 3: "node", 4: "actor", 5: "trainer", 6: "actor"}
LATER_EVENTS = {2: "actor", 3: "actor", 4: "trainer", 6: "actor"}


@on_ray
def test_runs_that_lose_generators_a_node_and_the_trainer_end_as_if_nothing_was_lost(ray_cluster, tmp_path):
    settings = {"compose": rollout_is, "steps": 8, "minibatches": 1, "eval_every": 2}
    _, plain, own = trained(small_job(**settings), tmp_path / "plain", ray_cluster)
    ray_cluster.further_node()
    _, observer, weights = killed_run(ray_cluster, tmp_path / "now", EVENTS, **settings)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(weights), trees.leaves(own), strict=True))
    for (step, a), (_, b) in zip(observer.steps, plain.steps[-len(observer.steps) :], strict=True):
        assert a["actor/grad_norm"] == b["actor/grad_norm"] and a.get("eval/reward") == b.get("eval/reward"), step
    late = settings | {"staleness": 2, "save_rollouts": 1, "compose": stale_dapo, "reward": reward}
    late |= {"max_new_tokens": 12}
    outcome, observer, _ = killed_run(ray_cluster, tmp_path / "late", LATER_EVENTS, **late)
    assert outcome.error is None
    log = read_groups(tmp_path / "late")
    groups = [group for step in sorted(log.by_step) for group in log.by_step[step]]
    kept = [group.position for group in groups]
    dropped = [prompt.position for group in groups for prompt in group.dropped]
    assert len(kept) == 8 * 4 and len({*kept, *dropped}) == len(kept) + len(dropped) and dropped
    assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for _, metrics in observer.steps)
    assert any(metrics["rollout/stale_gap_max"] > 0 for _, metrics in observer.steps)


@on_ray
def test_a_generator_that_loses_one_of_its_devices_is_replaced(ray_cluster, tmp_path):
    settings = {"compose": rollout_is, "steps": 5, "minibatches": 1}
    _, _, own = trained(small_job(**settings, generate_mesh="dp1"), tmp_path / "plain", ray_cluster)
    events = {1: "follower", 3: "actor"}
    _, observer, weights = killed_run(ray_cluster, tmp_path / "run", events, place="generate:ray1,tp2", **settings)
    assert sum("is lost: " in note for note in observer.notes) == 2
    for x, y in zip(trees.leaves(weights), trees.leaves(own), strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-9)


@on_ray
def test_a_run_without_enough_generators_says_what_is_missing(ray_cluster, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("funrl.rollout.ray.link.SHORT_S", 0.5)
    job = small_job(GRPO, place="generate:ray9")
    job = dataclasses.replace(
        job,
        settings=dataclasses.replace(job.settings, waiting=dataclasses.replace(job.settings.waiting, timeout=0.1)),
    )
    (tmp_path / "run").mkdir()
    with training(job, tmp_path / "run", ray_cluster) as process:
        process.join(JOB_S)
    missing = "9 generators with 1 CPU each, and "
    error = capfd.readouterr().err
    if process.exitcode == 0:  # a step has ended the run by the error, and not the start of it
        error += pickle.loads((tmp_path / "run/result").read_bytes())[0].error
    assert f" s (--timeout) for {missing}" in error and "the cluster has CPUs: 2 on 127.0.0." in error
    assert f"waiting for {missing}" in (tmp_path / "run/notes").read_text()


@pytest.mark.parametrize(
    "settings,problem",
    [
        ({"engine": "hf"}, "--engine=hf with --place=generate:ray1-4: requests of a batch share their noise"),
        (
            {"engine": "vllm_server", "engine_url": "http://127.0.0.1:1"},
            "--engine=vllm_server with --place=generate:ray1-4: Ray starts generators as it has devices",
        ),
        ({"engine": "vllm", "place": "generate:ray2,tp2"}, "generators on Ray of several devices are native"),
        ({}, "--place=generate:ray1-4: ray is not installed; pip install 'funrl[ray]'"),
        ({"place": "generate:join"}, "write generate:ray1-8"),
        ({"place": "generate:ray"}, "'generate:ray' is not a number of generators"),
        ({"place": "generate:ray4-2"}, "'generate:ray4-2' is not a number of generators"),
        ({"place": "generate:ray2,tp0"}, "'generate:ray2,tp0' is not a number of generators"),
        ({"place": "train:dp2@0,2 generate:ray2"}, "generators on Ray are no ranks of this run"),
        ({"place": "train:dp2 generate:ray2 generate:2"}, "the pool 'generate' is given twice"),
    ],
)
def test_what_does_not_go_with_generators_on_ray_is_refused(settings, problem, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises((SettingsError, MeshError), match=None) as caught:
        small_job(GRPO, **{"place": "generate:ray1-4", **settings})
    assert problem in str(caught.value)
