"""Episodes across steps and checkpoints: nothing lost or doubled, versions kept, resumed runs with the same bits."""

import asyncio
import dataclasses
import functools
import os
import random
import shutil
import signal
from collections import Counter

import pytest
import torch
from small_runs import GRPO, Quiet, assert_same, begin, remove_later_checkpoints, steps_program
from test_checkpoint import assert_equal_steps, measured
from test_episode_runs import episode_job

from funrl import trees
from funrl.algos import unequal_scores
from funrl.algos.recipes import recipe
from funrl.mesh.launch import WorkerError, launch
from funrl.mesh.mesh import single
from funrl.models.model import Inputs
from funrl.rollout.episodes import Episode
from funrl.trainer import phases
from funrl.trainer.loop import train_loop
from funrl.trainer.phases import draw_batch, learn_batch, score_batch
from funrl.trainer.steps.sync import sync

PARTIAL = {
    "compose": GRPO,
    "max_new_tokens": 6,
    "new_tokens_per_step": 4,
    "batch_prompts": 3,
    "minibatches": 1,
    "samples_per_prompt": 2,
    "episode_turns": 4,
}


class Game:
    """Two to four turns with answers drawn from the seed; the last turn twice, side by side; at times another agent."""

    agents = ("policy", "other")

    async def run(self, policy, example, seed):
        draw = random.Random(self.seed(seed))
        trajectory = policy.start(example.tokens)
        rewards = {}
        for _ in range(draw.randrange(1, 4)):
            reply, trajectory = await policy.sample(trajectory)
            heard = [draw.randrange(3, 9), 5]
            rewards[trajectory.leaf] = sum(reply.tokens) % 7 / 7
            policy.answered((heard, rewards[trajectory.leaf]))
            trajectory = policy.extend(trajectory, heard)
        ends = [end for _, end in await asyncio.gather(policy.sample(trajectory), policy.sample(trajectory))]
        outcomes = {"policy": sum(rewards.values()) + sum(ends[0].token_ids()) % 5}
        if draw.random() < 0.5:
            reply, end = await policy.sample(policy.start([7, *example.tokens], agent="other"), max_tokens=5)
            ends.append(end)
            outcomes["other"] = float(sum(reply.tokens) % 3)
        return Episode(ends, outcomes, rewards)

    def seed(self, seed):
        return seed


class Forgetful(Game):
    """The same with answers of its own."""

    own = random.Random(0)

    def seed(self, seed):
        return self.own.random()


def filtered():
    return dataclasses.replace(GRPO(), filter=unequal_scores())


def job_of(environment=None, **settings):
    settings = PARTIAL | settings
    return episode_job(settings.pop("compose"), environment or Game(), **settings)


def run(folder, mesh="dp1", observer=Quiet, environment=None, **settings):
    """Metrics by step, notes and the weights at the end."""
    job = job_of(environment, mesh=mesh, **{"steps": 2, "eval_every": 2} | settings)

    def program(mesh):
        observe = observer(str(folder))
        train_loop(job, mesh, observe)
        return observe.steps, observe.notes, [x.clone() for x in trees.leaves(observe.params)]

    return launch(program, job.sizes, "cpu")


def run_to_resume(folder, mesh="dp1", after=1, **settings):
    """`run` to its end; only the checkpoints up to a step are left."""
    ended = run(folder, mesh, save_every="1", keep_checkpoints=4, **settings)
    remove_later_checkpoints(folder, after)
    return ended


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """mesh -> the directory of `run_to_resume` on it, and what it gives."""

    @functools.cache
    def of_mesh(mesh):
        folder = tmp_path_factory.mktemp("whole") / "run"
        return folder, run_to_resume(folder, mesh)

    return of_mesh


@pytest.mark.slow
def test_every_token_has_the_log_probability_of_the_weights_that_sampled_it():
    job = job_of()
    trainer, state = begin(job, single())
    weights, mixed, lags, seen = {}, 0, [], Counter()
    for _ in range(5):
        weights[state.version] = trees.clone(state.roles["policy"].params)
        rows, drawn, metrics = draw_batch(trainer, state)
        batch = rows.batch
        lags.append(metrics["partial/staleness_max"])
        assert lags[-1] == (state.version - batch.version[batch.mask]).max() <= 5
        assert metrics["partial/waiting_episodes"] <= 2 * metrics["partial/unfinished_prompts"]
        assert batch.group.unique().numel() == 3 and metrics["episodes/failed"] == 0
        assert 0 < metrics["episodes/context_tokens"] < metrics["episodes/tokens"]
        seen.update(tuple(row[:n].tolist()) for row, n in zip(batch.tokens, batch.length, strict=True))
        for n, length in enumerate(batch.length.tolist()):
            tokens, versions = batch.tokens[n, :length], batch.version[n, :length]
            at = batch.mask[n, :length].nonzero().flatten()
            assert (versions[at].diff() >= 0).all() and versions.max() <= state.version
            if not metrics["partial/prompts_beyond_budget"]:
                assert versions[at].unique(return_counts=True)[1].max() <= 4
            mixed += versions[at].unique().numel() > 1
            for version in versions[at].unique().tolist():
                hidden = job.model.apply(weights[version], Inputs(tokens[None])).hidden[0]
                logp = (hidden @ job.model.unembed(weights[version]).T).log_softmax(-1)
                those = at[versions[at] == version]
                expected = logp[those - 1, tokens[those].long()]
                assert (batch.rollout_logp[n, those] - expected).abs().max() < 1e-10
        rows, drawn, _ = score_batch(trainer, drawn, rows)
        state = sync(trainer.parts, learn_batch(trainer, drawn, rows)[0])
    trainer.source.close()
    assert mixed > 3 and lags[0] == 0 < max(lags)


@pytest.mark.parametrize("settings", [{}, {"new_tokens_per_step": None}], ids=["across steps", "whole"])
def test_only_episodes_of_one_step_are_kept_to_be_repeated(settings):
    job = job_of(compose=recipe("remax"), save_rollouts=1, **settings)
    trainer, state = begin(job, single())
    for _ in range(2):
        _, state, _ = draw_batch(trainer, state)
    trainer.source.close()
    assert bool(trainer.source.log.episodes) == bool(settings)  # the greedy baseline's are whole


@functools.cache
def steps_on(mesh, **more):
    job = job_of(compose=filtered, mesh=mesh, **more)
    return launch(steps_program(job, 2), job.sizes, "cpu")


@pytest.mark.gloo
@pytest.mark.slow
def test_the_same_numbers_on_two_ranks():
    steps = steps_on("dp1")
    assert any(batch.version[batch.mask].unique().numel() > 1 for batch in steps["batches"])
    assert_same(steps_on("dp2", queue="tickets"), steps, 1e-9)


@pytest.mark.gloo
@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(whole, tmp_path):
    folder, (steps, _, weights) = whole("dp1")
    shutil.copytree(folder, tmp_path / "run")
    resumed, notes, ends = run(tmp_path / "run", resume=True, run_dir="x")
    assert any("resumed after step 1" in note for note in notes)
    assert steps[0][1]["partial/waiting_episodes"] > 3
    assert_equal_steps(resumed, steps[1:])
    assert all(map(torch.equal, ends, weights))


@pytest.mark.gloo
@pytest.mark.slow
def test_episodes_go_on_on_another_mesh(whole, tmp_path):
    folder, (steps, _, _) = whole("dp2")
    shutil.copytree(folder, tmp_path / "run")
    resumed, _, _ = run(tmp_path / "run", "dp3", resume=True, run_dir="x")
    for (a, metrics), (b, expected) in zip(resumed, steps[1:], strict=True):
        kept = [name for name in expected if not measured(name)]
        assert a == b
        assert [metrics[k] for k in kept] == pytest.approx([expected[k] for k in kept], rel=1e-9, abs=1e-9)


class Interrupted(Quiet):
    """An observer that interrupts the run by Ctrl-C in its second step."""

    def step(self, step, metrics, seconds):
        super().step(step, metrics, seconds)
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_a_run_that_is_interrupted_goes_on(whole, tmp_path):
    steps, _, weights = whole("dp1")[1]
    with pytest.raises(AttributeError, match="params"):  # it ends before its model is written
        run(tmp_path / "run", observer=Interrupted)
    assert [path.name for path in tmp_path.glob("run/step-*")] == ["step-1"]
    resumed, _, ends = run(tmp_path / "run", resume=True, run_dir="x")
    assert_equal_steps(resumed, steps[1:])
    assert all(map(torch.equal, ends, weights))


@pytest.mark.slow
@pytest.mark.gloo
def test_the_state_before_a_failure_is_saved_with_its_episodes(whole, tmp_path, monkeypatch):
    steps, _, weights = whole("dp2")[1]
    scored = phases.score_batch

    def failing(trainer, state, rows):
        if state.step == 1 and trainer.parts.mesh.rank == 1:
            raise MemoryError("no room for the scores")
        return scored(trainer, state, rows)

    monkeypatch.setattr(phases, "score_batch", failing)
    with pytest.raises(WorkerError, match="rank 1 failed:"):
        run(tmp_path / "run", "dp2", save_every="0")
    monkeypatch.setattr(phases, "score_batch", scored)
    resumed, notes, ends = run(tmp_path / "run", "dp2", resume=True, run_dir="x")
    assert any("resumed after step 1" in note for note in notes)
    assert_equal_steps(resumed, steps[1:])
    assert all(map(torch.equal, ends, weights))


@pytest.mark.slow
def test_an_environment_that_draws_by_itself_begins_anew_after_a_checkpoint(tmp_path):
    run_to_resume(tmp_path / "run", after=2, steps=4, environment=Forgetful())
    resumed, notes, _ = run(tmp_path / "run", steps=4, environment=Forgetful(), resume=True, run_dir="x")
    restarted = resumed[0][1]["partial/restarted_episodes"]
    assert restarted > 0 and resumed[1][1]["partial/restarted_episodes"] == 0
    (note,) = [note for note in notes if "begin anew" in note]
    assert note.startswith(f"{restarted:.0f} episodes begin anew") and "draw from the seed that it gets" in note
    assert all(metrics["episodes/failed"] == 0 for _, metrics in resumed)


class FailsUntil(Game):
    """Raises until it has been called so often."""

    def __init__(self, calls):
        self.calls = calls

    async def run(self, policy, example, seed):
        self.calls -= 1
        if self.calls >= 0:
            raise RuntimeError("no such place")
        return await super().run(policy, example, seed)


EPISODES = [({"new_tokens_per_step": None}, 6), ({}, 12)]  # of a step in which all of them fail


@pytest.mark.parametrize("settings,count", EPISODES, ids=["whole", "partial"])
def test_a_step_without_a_usable_episode_is_left_out(settings, count):
    environment = FailsUntil(2 * (6 + 2 * count))  # in the first evaluation and two steps, with one more try each
    steps, notes, _ = run(None, environment=environment, steps=4, **settings)
    assert [metrics["episodes/skipped"] for _, metrics in steps] == [1, 1, 0, 0]
    assert ["actor/pg_loss" in metrics for _, metrics in steps] == [False, False, True, True]
    none = (
        f"none of {count} episodes can be trained on: {count} failed, 0 are unscored; a failed one leaves out its group"
    )
    assert sum(f"{none}; the step has no update" in note for note in notes) == 2


@pytest.mark.parametrize("settings,count", EPISODES, ids=["whole", "partial"])
def test_a_run_ends_after_some_such_steps_in_a_row(settings, count):
    job = job_of(FailsUntil(10**6), steps=9, eval_every=9, **settings)
    observer = Quiet()
    outcome = train_loop(job, single(), observer)
    assert len(observer.steps) == 4
    assert f"step 5: none of {count} episodes can be trained on: {count} failed" in outcome.error
    assert "the 4 steps before had none either" in outcome.error


def test_a_run_closes_its_environments():
    class Closed(Game):
        open = 0

        async def run(self, policy, example, seed):
            Closed.open += 1
            try:
                return await super().run(policy, example, seed)
            finally:
                Closed.open -= 1

    run(None, environment=Closed(), steps=2)
    assert Closed.open == 0
