"""Rewards in workers: begun while completions are written, the same numbers as without, errors and endings too."""

import functools
import os
import time

import pytest
import torch
from scripted_engine import ScriptedEngine
from small_runs import GRPO, Quiet, digits_reward, gap, scored_batch, small_job

from funrl.data.prompts import Example
from funrl.mesh import collectives
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse, single
from funrl.rewards.call import CompletedRow, RewardError
from funrl.rewards.pool import Pool, open_pool
from funrl.rewards.views import read_as
from funrl.rollout.requests import Completion
from funrl.rollout.sampling_parameters import Sampling
from funrl.tasks import arithmetic
from funrl.trainer import loop, phases, startup
from funrl.trainer.jobs import row_source as job_source
from funrl.trainer.jobs.row_source import open_rewards, share_of_cores
from funrl.trainer.sources.generation import RewardedEngine, rollout
from funrl.trainer.sources.pending_rewards import PendingRewards
from funrl.trainer.steps.sync import sync

BOTH = pytest.mark.parametrize("workers", [0, 2])


def completed(done):
    return CompletedRow(f"p{done.number}", ",".join(map(str, done.tokens.tolist())))


def add(pending, rows):
    """Add completions: (number, token ids) pairs."""
    for number, ids in rows:
        tokens = torch.tensor(ids, dtype=torch.int64)
        pending.add(Completion(number, tokens, tokens.double(), tokens.double(), tokens, "length"))


@BOTH
def test_rows_come_in_any_order_and_number_and_rewards_in_that_of_the_rows(workers):
    with open_pool(
        [lambda prompt, completion: int(prompt[1:]), lambda prompt, completion: len(completion)], workers
    ) as pool:
        pending = PendingRewards(pool, completed)
        add(pending, [(3, [1, 2]), (1, []), (0, [12345]), (2, [7])])
        assert pending.collect(range(4))[:3] == ([[0, 5], [1, 0], [2, 1], [3, 3]], [False] * 4, "")
        assert PendingRewards(pool, completed).collect([])[:3] == ([], [], "")


@BOTH
def test_the_first_row_that_fails_is_raised_and_without_workers_nothing_is_begun_behind_it(workers, tmp_path):
    def fails_from_one(prompt, completion):
        (tmp_path / prompt).touch()
        return 1 / (prompt == "p0")

    with open_pool([fails_from_one], workers) as pool:
        pending = PendingRewards(pool, completed)
        add(pending, [(2, [2]), (0, [0]), (3, [3]), (1, [1])])
        with pytest.raises(RewardError, match=r"ZeroDivisionError.*\n  prompt: 'p1'\n  completion: '1'"):
            pending.collect(range(4))
    assert {"p0", "p1"} <= {path.name for path in tmp_path.iterdir()}
    assert workers or not (tmp_path / "p2").exists()


@BOTH
def test_where_rows_may_fail_they_are_marked_and_the_first_is_shown(workers):
    with open_pool([lambda prompt, completion: 1 / (prompt in ("p0", "p2"))], workers) as pool:
        pending = PendingRewards(pool, completed)
        add(pending, [(3, [3]), (2, [2]), (1, [1]), (0, [0])])
        rewarded = pending.collect(range(4), "zero")
    assert rewarded[:2] == ([[1.0], [0.0], [1.0], [0.0]], [False, True, False, True])
    assert "ZeroDivisionError" in rewarded.problem and "prompt: 'p1'" in rewarded.problem


def test_a_reward_begins_when_its_completion_is_done_and_others_are_not(tmp_path):
    def reward(prompt, completion):
        (tmp_path / completion).touch()
        return float(completion == "6")

    def write(request):
        """The second row is not complete before the reward of the first has begun."""
        end = time.monotonic() + 60
        while request.number and not (tmp_path / "5").exists():
            assert time.monotonic() < end, "nothing is rewarded while the engine writes"
            time.sleep(0.01)
        return [5 + request.number]

    examples, decode = [Example([1], "p", {}), Example([1], "q", {})], lambda ids: str(ids[-1])
    with open_pool([reward], 1) as pool:
        engine = RewardedEngine(ScriptedEngine(write), single(), decode, pool)
        done = rollout(engine, examples, Sampling(max_new_tokens=1), 0)
    assert done.score.tolist() == [0.0, 1.0]


def test_a_function_reads_what_it_asks_for():
    @read_as("marks")
    def marked(prompts, completions):
        return [float(text == "marks of [7, 8] after [1]") for text in completions]

    def plain(prompt, completion):
        return float(completion == "x")

    engine = RewardedEngine(
        ScriptedEngine(lambda request: [8]), single(), lambda ids: "x" * len(ids), Pool([marked, plain]), (1, 2)
    )
    engine = engine._replace(
        read=lambda names, *ids: {name: f"{name} of {[7, *ids[1]]} after {ids[0]}" for name in names}
    )
    done = rollout(engine, [Example([1], "p", {})], Sampling(max_new_tokens=1), 0)
    assert done.score.tolist() == [3.0]


@pytest.mark.slow
def test_rewards_that_wait_run_side_by_side_and_have_a_phase_of_their_own(tmp_path):
    def waits(prompt, completion, **fields):
        """Wait for a row in half of the workers."""
        (tmp_path / str(os.getpid())).touch()
        end = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 8:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.05)
        return os.getpid()

    job = small_job(reward=waits, batch_prompts=8, samples_per_prompt=8, reward_workers=16)
    with open_rewards(job, 0) as pool:
        run, state = startup.begin_run(job, single(), Quiet(), pool=pool)
        state = sync(run.parts, state)
        rows, _, _ = phases.draw_batch(run, state)
        run.source.evaluate(state.roles, 0)
    times = run.clock.take()
    assert times["generate"] > 0 and times["reward"] > 0.05 < times["eval"]  # whose rewards are in it
    assert 8 <= len(set(rows.batch.score.tolist())) <= 16


@pytest.mark.gloo
def test_waiting_for_rewards_is_not_waiting_for_another_ranks_completions():
    """Rank 1 is slow to reward; rank 0 waits for it only where it is not slow to generate itself."""

    def write(request):
        time.sleep(seconds)
        return [5]

    def program(mesh):
        nonlocal seconds
        results = []
        for of_rank in ((0.0, 0.0), (1.5, 0.0)):
            seconds, engine = of_rank[mesh.rank], ScriptedEngine(write)
            pool = Pool([lambda prompt, completion: time.sleep(1.5 * mesh.rank) or 1.0])
            collectives.psum(torch.ones(1), mesh, "data")  # so that they begin together
            rewarded = RewardedEngine(engine, mesh, str, pool, queue="fixed")
            results.append(rollout(rewarded, examples, Sampling(max_new_tokens=1), 0).reward_s)
        return results

    seconds, examples = 0.0, [Example([1], "p", {})] * 2
    waiting, busy = launch(program, parse("dp2"), "cpu")
    assert waiting > 1.0 and 0 <= busy < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "dp1",
        pytest.param("dp2", marks=pytest.mark.gloo),
        pytest.param("tp2", marks=[pytest.mark.gloo, pytest.mark.slow]),
    ],
)
def test_workers_change_no_bit_of_a_run(mesh, tmp_path):
    def reward(prompt, completion, **fields):
        (tmp_path / f"{workers} {os.getpid()}").touch()
        return digits_reward(prompt, completion) / 3

    def program(m, pool):
        observer = Quiet()
        loop.train_loop(job, m, observer, pool=pool)
        return observer.steps, observer.params, os.getpid(), pool is not None

    results = []
    for workers in (0, 2):
        settings = {"reward": reward, "reward_workers": workers, "queue": "fixed", "steps": 1, "eval_prompts": 2}
        job = small_job(GRPO, mesh=mesh, generate_mesh=mesh, **settings)
        steps, params, rank, has = launch(program, job.sizes, "cpu", before=functools.partial(open_rewards, job))
        assert has == (workers > 0)
        pids = {int(path.name.split()[1]) for path in tmp_path.glob(f"{workers} *")}
        replicas = 2 if mesh == "dp2" else 1
        assert replicas <= len(pids) <= max(1, workers) * replicas  # one of two workers may have been quick enough
        assert (rank in pids) == (workers == 0)
        steps = [(n, {k: v for k, v in metrics.items() if not k.startswith("memory/")}) for n, metrics in steps]
        results.append((steps, params))
    assert results[0][0] == results[1][0]
    assert gap(results[0][1], results[1][1]) == 0


def test_only_the_first_tensor_rank_of_a_replica_has_workers():
    job = small_job(mesh="dp2,tp2", generate_mesh="dp2,tp2", reward_workers=1)
    for rank in range(4):
        with open_rewards(job, rank) as pool:
            assert (pool is not None) == (rank in (0, 2))


@pytest.mark.slow
def test_by_default_a_rank_has_its_share_of_the_cores_but_for_the_embedded_task(monkeypatch):
    monkeypatch.setattr(job_source, "cores", lambda: 12)
    shares = {"dp1": 12, "dp2": 6, "dp4": 3, "dp2,tp2": 3}
    for mesh, share in shares.items():
        assert share_of_cores(small_job(mesh=mesh)) == share
    assert share_of_cores(small_job(mesh="dp2,tp2", generate_mesh="dp2,tp2")) == 6  # two of four ranks ask
    monkeypatch.setattr(job_source, "cores", lambda: 3)
    assert share_of_cores(small_job(mesh="dp4")) == 1
    monkeypatch.setattr(job_source, "cores", lambda: 400)
    assert share_of_cores(small_job()) == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert share_of_cores(small_job()) == 16
    monkeypatch.setattr(job_source, "cores", lambda: 17)
    with open_rewards(small_job(), 0) as pool:
        assert pool is not None and pool.workers == 16  # at most; it begins with 2
    with open_rewards(small_job(reward=arithmetic.reward), 0) as pool:
        assert pool is None
    with open_rewards(small_job(reward=arithmetic.reward, reward_workers=1), 0) as pool:
        assert pool is not None and pool.workers == 1


@pytest.mark.slow
def test_a_reward_that_takes_longer_than_its_flag_ends_the_run(tmp_path):
    def hangs(prompt, completion, **fields):
        while (tmp_path / "late").exists():
            time.sleep(0.1)
        return digits_reward(prompt, completion)

    job = small_job(reward=hangs, reward_workers=2, reward_timeout=2)

    class Late(Quiet):
        def step(self, step, metrics, seconds):
            super().step(step, metrics, seconds)
            (tmp_path / "late").touch()

    observer = Late()
    with open_rewards(job, 0) as pool:
        outcome = loop.train_loop(job, single(), observer, pool=pool)
    assert outcome.error.startswith("the reward function took longer than 2 s\n  prompt: ")
    assert observer.error == outcome.error and [step for step, _ in observer.steps] == [1]


def test_a_trainer_without_a_pool_rewards_by_itself():
    job = small_job(reward=lambda prompt, completion, **fields: os.getpid())
    run, state = startup.begin_run(job, single(), Quiet())
    rows, _, _ = scored_batch(run, sync(run.parts, state))
    assert run.parts.pool is None and set(rows.batch.score.tolist()) == {os.getpid()}
