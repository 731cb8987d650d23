"""Runs whose ranks train or generate: the same numbers as where every rank does both."""

import contextlib
import functools
import os
from typing import Any, NamedTuple

import pytest
import torch
from selection import quick
from small_runs import GRPO, MEASURED, PPO, SIZES, Quiet, digits_reward, small_job
from test_episode_runs import episode_job

import funrl
from funrl import trees
from funrl.algos.recipes.dapo import dapo
from funrl.algos.recipes.online_dpo import online_dpo
from funrl.algos.recipes.prime import prime
from funrl.algos.recipes.remax import remax
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.mesh.launch import WorkerError, launch
from funrl.mesh.mesh import single
from funrl.mesh.text import MeshError
from funrl.models.decoder.routing import Experts
from funrl.rollout.episodes import Episode
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints
from funrl.trainer.checkpoints.saved_episodes import read_episodes
from funrl.trainer.checkpoints.saved_rows import ROLLOUTS
from funrl.trainer.jobs.row_source import make_source
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.settings.declaration import SettingsError

pytestmark = pytest.mark.gloo
OWN = (
    "memory/",
    "sync/bytes",
    "places/",
    "sync/sent_bytes",
    "sync/changed_share",
    "sync/resent",
)  # metrics of the ranks


class Ended(NamedTuple):
    """A run as its first rank saw it."""

    outcome: Any
    observer: Quiet
    weights: Any


@contextlib.contextmanager
def one_thread():
    """Compute with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def rank_of(job, mesh):
    observer = Quiet()
    with one_thread():  # a rank takes its share of the cores, which differs between layouts, and last bits with it
        outcome = run_rank(job, mesh, observer)
    weights = getattr(observer, "params", None)
    observer.params = None
    return Ended(outcome, observer, weights)


@functools.cache
def run(compose=GRPO, **settings):
    job = small_job(compose, **{"steps": 2} | settings)
    return launch(functools.partial(rank_of, job), job.launched, "cpu")


def own_names(metrics):
    """Names of metrics that do not depend on ranks or time."""
    return {name for name in metrics if not name.startswith(OWN) and not name.endswith(MEASURED)}


def assert_same_runs(placed, together, tolerance=0.0):
    """Samples, tables, metrics and weights of two runs."""
    assert placed.outcome.error is None and own_names(placed.outcome.last) == own_names(together.outcome.last)
    assert placed.observer.shown == together.observer.shown and placed.observer.shown
    assert placed.observer.table == together.observer.table and placed.observer.table
    for (_, a), (_, b) in zip(placed.observer.steps, together.observer.steps, strict=True):
        names = own_names(a)
        assert names == own_names(b)
        assert {n: a[n] for n in names} == pytest.approx({n: b[n] for n in names}, rel=tolerance, abs=tolerance)
    for a, b in zip(trees.leaves(placed.weights), trees.leaves(together.weights), strict=True):
        if a.shape == b.shape:
            assert torch.allclose(a, b, rtol=0, atol=tolerance)


EXPERTS = SIZES | {"experts": Experts(count=4, per_token=2, mlp=8, dense=(0,))}
LAYOUTS = {
    "dp1": ({}, {"place": "generate:1"}),
    "fsdp + tp": (
        {"mesh": "dp2", "fsdp": True, "generate_mesh": "tp2"},
        {"place": "train:dp2@0,3 generate:tp2@1-2", "fsdp": True},
    ),
    "fixed groups": (
        {"mesh": "dp2", "queue": "fixed"},
        {"place": "train:dp2 generate:2", "queue": "fixed"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(LAYOUTS, ["dp1"]))
def test_apart_the_bits_are_those_of_ranks_that_do_both(name):
    together, apart = LAYOUTS[name]
    placed = run(**apart)
    assert_same_runs(placed, run(**together))
    assert_same_runs(placed, run(), 1e-9)
    assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for _, metrics in placed.observer.steps)
    assert all(metrics["sync/verified"] == 1 for _, metrics in placed.observer.steps)


@pytest.mark.slow
def test_generators_that_share_experts_write_what_one_process_writes():
    """Latest weights reach both ranks of a replica between the same two passes."""
    flags = {"sizes": EXPERTS, "task": "arithmetic_moe", "steps": 3}
    placed = run.__wrapped__(place="train:dp1 generate:dp1,ep2", **flags)
    assert_same_runs(placed, run.__wrapped__(**flags), 1e-9)
    assert all(metrics["sync/verified"] == 1 for _, metrics in placed.observer.steps)


RUNS = {
    "ppo": (PPO, {"epochs": 2, "minibatches": 2}),
    "greedy baseline": (remax, {"steps": 1}),
    "prime": (prime, {"max_refills": 2, "steps": 1}),
    "adapters": (GRPO, {"lora_rank": 2}),
    "curriculum of pairs": (online_dpo, {"difficulty": "0.2,0.8"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_has_the_same_bits_apart(name):
    compose, settings = RUNS[name]
    placed = run(compose, place="generate:1", **settings)
    assert_same_runs(placed, run(compose, **settings))
    assert all(metrics["sync/verified"] == 1 for _, metrics in placed.observer.steps)


@pytest.mark.slow
def test_a_role_on_ranks_of_its_own_writes_the_same_numbers():
    compose, settings = functools.partial(PPO, kl_coef=0.1), {"fsdp": True}
    placed = run(compose, place="train:dp2 generate:1 reference:tp2", **settings)
    assert_same_runs(placed, run(compose, mesh="dp2", **settings), 1e-9)
    assert placed.observer.steps[-1][1]["actor/reward_kl_penalty"] != 0


@pytest.mark.slow
def test_transformers_generate_on_ranks_of_their_own_with_merged_adapters():
    settings = {"engine": "hf", "dtype": "float32", "lora_rank": 2}
    placed = run(place="generate:1", **settings)
    assert_same_runs(placed, run(**settings))
    assert all(metrics["sync/verified"] == 1 for _, metrics in placed.observer.steps)


@pytest.mark.slow
def test_episodes_have_the_same_bits_apart():
    settings = {"task": "calculator", "reward": None, "episode_turns": 3, "steps": 1}
    placed = run(place="generate:1", **settings)
    assert_same_runs(placed, run(**settings))
    assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for _, metrics in placed.observer.steps)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["generate:1", "train:dp2@0,3 generate:tp2@1-2"])
def test_ten_updates_by_patches_have_the_bits_of_a_run_without_them(place):
    settings = {"steps": 10, "dtype": "bfloat16", "lr": 1e-5, "minibatches": 1}
    train = {"mesh": "dp2", "generate_mesh": "tp2"} if "tp2" in place else {}
    placed = run(place=place, **settings)
    assert_same_runs(placed, run(**settings, **train))
    metrics = [step for _, step in placed.observer.steps]
    assert all(step["sync/verified"] == 1 for step in metrics)
    assert all("sync/sent_bytes" not in step for step in metrics[:2])
    assert all(step["sync/changed_share"] < 0.08 and step["sync/resent"] == 0 for step in metrics[2:])
    assert all(step["sync/sent_bytes"] < step["sync/bytes"] for step in metrics[2:])


def logged_run(compose, folder, **settings):
    """Numbers, seeds and sampled tokens of the episodes of a run's steps, as its log has them."""
    folder.mkdir()
    calculator = {"task": "calculator", "reward": None, "episode_turns": 3, "steps": 2}
    job = small_job(compose, save_rollouts=1, run_dir=str(folder), **calculator, **settings)
    launch(functools.partial(rank_in, job, str(folder / "checkpoints")), job.launched, "cpu")
    return [
        sorted(
            (number, seed, [list(node.tokens) for end in episode.ends for node in end.nodes()])
            for number, seed, episode in read_episodes(folder / ROLLOUTS, step)
        )
        for step in (1, 2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("compose", [remax, dapo])
def test_the_log_has_the_same_episodes_apart(compose, tmp_path):
    """Those of dropped prompts and of greedy baselines too."""
    together, apart = (
        logged_run(compose, tmp_path / name, **place)
        for name, place in {"together": {}, "apart": {"place": "generate:2"}}.items()
    )
    assert together == apart and all(together)


STALE = {"minibatches": 1, "steps": 4, "place": "generate:1"}


def check_ages(steps, staleness):
    """Tokens of the newest weights have no gap, older ones have one, and none is older than may be."""
    assert steps and all(metrics["rollout/logprob_gap_max"] < 1e-12 for metrics in steps)
    assert all(metrics["age/max"] > 0 or metrics["rollout/stale_gap_max"] == 0 for metrics in steps)
    assert steps[0]["age/max"] == 0 and all(metrics["age/max"] <= staleness for metrics in steps)
    assert all(0 <= metrics["age/mean"] <= metrics["age/max"] for metrics in steps)
    waits = ("wait/trainer_s", "wait/generator_s", "sync/hidden_share")
    assert all(metrics.get(name, 0.0) >= 0 for metrics in steps for name in waits)


AHEAD = {
    "1": (1, {}),
    "2, two replicas": (2, {"place": "train:dp2@0-1 generate:dp2@2-3", "steps": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(AHEAD, ["1"]))
def test_no_token_is_older_than_the_staleness(name):
    staleness, settings = AHEAD[name]
    item = run(rollout_is, staleness=staleness, **(STALE | settings))
    assert item.outcome.error is None
    check_ages([metrics for _, metrics in item.observer.steps], staleness)
    first = run(rollout_is, minibatches=1, steps=1).observer.shown[0]
    assert first[0] == 0 and first in item.observer.shown
    assert item.observer.steps[0][1]["sync/verified"] == 1


@pytest.mark.slow
def test_many_steps_ahead_with_evaluations_between_them_end():
    ended = run(rollout_is, staleness=4, eval_every=1, **(STALE | {"steps": 6}))
    assert ended.observer.steps[-1][0] == 6
    check_ages([metrics for _, metrics in ended.observer.steps], 4)


@pytest.mark.slow
def test_groups_overtake_each_other_within_the_window():
    ended = run(rollout_is, staleness=1, window=4, **(STALE | {"place": "train:dp1 generate:dp2", "steps": 5}))
    check_ages([metrics for _, metrics in ended.observer.steps], 2)


@pytest.mark.slow
def test_episodes_are_written_ahead():
    settings = {"task": "calculator", "reward": None, "episode_turns": 3, "place": "train:dp1 generate:tp2"}
    ended = run(rollout_is, staleness=2, minibatches=1, **settings)
    assert ended.outcome.error is None
    check_ages([metrics for _, metrics in ended.observer.steps], 2)


class Failing:
    """An environment whose episodes work for every third prompt only."""

    async def run(self, policy, example, seed):
        if sum(example.tokens) % 3:
            raise RuntimeError("no such place")
        _, trajectory = await policy.sample(policy.start(example.tokens), max_tokens=2)
        return Episode([trajectory], {"policy": float(trajectory.leaf.tokens[0] % 2)})


@pytest.mark.slow
def test_a_step_whose_episodes_have_all_failed_is_skipped():
    settings = {"episode_retries": 0, "batch_prompts": 2, "steps": 4}
    apart = episode_job(GRPO, Failing(), place="generate:1", **settings)
    ended = launch(functools.partial(rank_of, apart), apart.launched, "cpu")
    together = rank_of(episode_job(GRPO, Failing(), **settings), single())
    assert ended.outcome.error is None and ended.observer.table == together.observer.table
    for a, b in zip(trees.leaves(ended.weights), trees.leaves(together.weights), strict=True):
        assert torch.equal(a, b)
    assert {metrics["episodes/skipped"] for _, metrics in ended.observer.steps} == {0, 1}


def fails_at_times(prompt, completion, **fields):
    raise ValueError(f"no score for {prompt}")


def test_a_reward_that_fails_ends_the_run_on_all_ranks():
    job = small_job(GRPO, reward=fails_at_times, place="generate:1")
    ended = launch(functools.partial(rank_of, job), job.launched, "cpu")
    assert "no score for" in ended.outcome.error


@pytest.mark.parametrize(
    "settings,problem",
    [
        ({"engine": "hf", "staleness": 1}, "--engine=hf and --staleness=1 with --place=generate:1"),
        ({"new_tokens_per_step": 2}, "--new_tokens_per_step=2 with --place=generate:1"),
        (
            {"new_tokens_per_step": 2, "staleness": 1},
            "with --staleness=1: completions are written on during the updates",
        ),
        (
            {"generate_mesh": "dp1"},
            "--generate_mesh=dp1 does nothing together with --place=generate:1",
        ),
        ({"place": "train:1 generate:1", "mesh": "dp2"}, "--mesh=dp2 does nothing"),
        (
            {"place": "generate:1 critic:1"},
            "critic cannot have ranks of its own: the roles of this run that only score are reference",
        ),
        ({"place": "generate:1 reference:1", "lora_rank": 2}, "with --lora_rank=2 it is the base of the policy"),
        ({"place": "generate:1 reference:tp5"}, "which does not divide over tp5"),
        ({"place": "generate:3 train:1@1"}, "rank 0 writes the run's files"),
        ({"place": "generate:tp5"}, "--place=generate:tp5: embed: vocab has size 16, which does not divide over tp5"),
        ({"staleness": 1}, "does not depend on rollout_logp"),
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


def rank_in(job, folder, mesh):
    """As `rank_of`, of a run with checkpoints in a folder."""
    observer = Quiet(folder)
    outcome = run_rank(job, mesh, observer)
    observer.params = None
    return Ended(outcome, observer, None)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_another_placement_and_the_same_numbers(tmp_path):
    whole = run(eval_every=1, save_every="1")
    places: list[dict[str, Any]] = [{"place": "generate:1"}, {"place": "train:dp2 generate:1", "resume": True}]
    for steps, place in zip((1, 2), places, strict=True):
        job = small_job(GRPO, steps=steps, eval_every=1, save_every="1", run_dir=str(tmp_path), **place)
        ended = launch(functools.partial(rank_in, job, str(tmp_path)), job.launched, "cpu")
    assert list(complete_checkpoints(str(tmp_path))) == [1, 2]
    for (_, a), (_, b) in zip(ended.observer.steps, whole.observer.steps[1:], strict=True):
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-9)
    assert ended.observer.shown[-1] == whole.observer.shown[-1]


def ends_its_process(prompt, completion, **fields):
    """A reward on the generator ranks; one of these ends during the batch of the fourth step."""
    global _rewarded
    _rewarded += 1
    if _rewarded > 2 * 8 + 6 + 8:  # two evaluations would be 6 each; each step has 8 completions
        os._exit(1)
    return digits_reward(prompt, completion)


_rewarded = 0


@pytest.mark.slow
def test_the_state_is_saved_where_a_rank_that_generates_dies(tmp_path):
    job = small_job(GRPO, reward=ends_its_process, steps=9, eval_every=9, place="train:dp2 generate:1")
    with pytest.raises(WorkerError, match="rank 2"):
        launch(functools.partial(rank_in, job, str(tmp_path)), job.launched, "cpu")
    assert list(complete_checkpoints(str(tmp_path))) == [3]


def test_a_source_of_ones_own_is_refused():
    with pytest.raises(SettingsError, match="other ranks write the rows"):
        funrl.train("grpo", place="generate:1", source=make_source, steps=1, batch_prompts=2, device="cpu")
