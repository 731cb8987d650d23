"""Rewards that fail: the run stops, counts them as zero, or trains without the completion; and rewards by name."""

import asyncio
import dataclasses
import itertools
import time

import numpy as np
import pytest
import torch
from scripted_engine import ScriptedEngine
from small_runs import GRPO, Quiet, begin, digits_reward, gap, scored_batch, small_job, whole_batch

from funrl.algos.recipes.remax import remax
from funrl.data.prompts import Example
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse, single
from funrl.rewards.pool import open_pool
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer import loop, phases
from funrl.trainer.jobs.row_source import open_rewards
from funrl.trainer.sources.generation import RewardedEngine, rollout

TWO_RANKS = pytest.param("dp2", marks=pytest.mark.gloo)


def fails(completion):
    return sum(map(ord, completion)) % 3 == 0


def picky(prompt, completion, **fields):
    if fails(completion):
        raise KeyError("no such unit")
    return digits_reward(prompt, completion)


def job_of(on_error, compose=GRPO, reward=picky, **settings):
    given = {"batch_prompts": 6, "samples_per_prompt": 4, "on_reward_error": on_error} | settings
    return small_job(compose, reward=reward, **given)


def drawn(on_error, mesh="dp1"):
    """The first scored batch of a job whose reward fails on some rows, all metrics, and what was remarked."""

    def program(m):
        show = Quiet()
        rows, _, metrics = scored_batch(*begin(job, m, show))
        return whole_batch(rows), metrics, show.notes, show.shown

    job = job_of(on_error, mesh=mesh, generate_mesh=mesh, queue="fixed")
    return program(single()) if mesh == "dp1" else launch(program, parse(mesh), "cpu")


def texts_of(job, batch):
    return [
        job.tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=True)
        for tokens, mask in zip(batch.tokens, batch.mask, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp1", TWO_RANKS])
def test_a_completion_whose_reward_failed_is_zero_or_not_there(mesh):
    job = job_of("zero")
    zero, metrics, notes, _ = drawn("zero", mesh)
    texts = texts_of(job, zero)
    failed = torch.tensor([fails(text) for text in texts])
    assert 2 < failed.sum() < 20 and metrics["reward/failed"] == failed.sum() and zero.get("failed") is None
    expected = [0.0 if fails(text) else digits_reward("", text) for text in texts]
    assert zero.score.tolist() == pytest.approx(expected)
    about_heldout, note = notes
    assert about_heldout.startswith("6 held-out prompts: ")
    assert note.startswith(
        f"a reward function failed on {failed.sum()} of 24 completions, such as: the reward function "
    )
    assert "KeyError('no such unit')" in note

    skip, metrics, _, shown = drawn("skip", mesh)
    assert metrics["reward/failed"] >= failed.sum() and len(shown[0][1]) == 6
    kept = ~failed
    width = min(zero.tokens.shape[1], skip.tokens.shape[1])
    rows = int(kept.sum())  # prompts that lost all their rows are made up for by others behind them
    assert torch.equal(skip.tokens[:rows, :width], zero.tokens[kept][:, :width])
    assert torch.equal(skip.score[:rows], zero.score[kept])
    assert not any(map(fails, texts_of(job, skip)))
    assert metrics["reward/mean"] == pytest.approx(skip.score.mean().item())
    for group in skip.group.unique():  # statistics are those of the rows that are left
        mine = skip.group == group
        score = skip.score[mine]
        wanted = (score - score.mean()) / (score.std() + 1e-6) if len(score) > 1 and score.std() > 0 else 0 * score
        got = (skip.advantage * skip.mask).sum(1)[mine] / skip.mask.sum(1)[mine]
        assert torch.allclose(got, wanted, atol=1e-9)


@pytest.mark.slow
def test_a_run_in_which_every_reward_fails_ends():
    for on_error, says in (("stop", "the reward function raised"), ("skip", "a reward function failed on each of ")):
        observer = Quiet()
        outcome = loop.train_loop(job_of(on_error, reward=lambda p, c, **f: 1 / 0, steps=1), single(), observer)
        assert outcome.error.startswith(says) and not hasattr(observer, "params")  # it has learned nothing to save
    outcome = loop.train_loop(job_of("zero", reward=lambda p, c, **f: 1 / 0, steps=1), single(), observer)
    assert outcome.error is None and (outcome.last["eval/reward"], outcome.last["eval/accuracy"]) == (0, 0)


@pytest.mark.parametrize("compose,settings", [(GRPO, {"new_tokens_per_step": 2}), (remax, {"samples_per_prompt": 1})])
def test_partial_rollouts_and_greedy_baselines_leave_out_what_failed(compose, settings):
    job = job_of("skip", compose, **settings)
    run, state = begin(job, single())
    for _ in range(2):
        rows, state, metrics = scored_batch(run, state)
        texts = texts_of(job, whole_batch(rows))
        assert texts and not any(map(fails, texts)) and metrics["reward/failed"] > 0
        assert rows.batch.get("failed") is None and rows.batch.score.isfinite().all()
        state, _ = phases.learn_batch(run, state, rows)


def test_several_rewards_are_told_by_their_names():
    def digits(prompt, completion, **fields):
        return digits_reward(prompt, completion)

    def short(completions, **columns):
        return [None if fails(text) else 1 / (1 + len(text)) for text in completions]

    job = job_of("stop", reward=digits)
    job = dataclasses.replace(job, task=job.task._replace(rewards=(digits, short), weights=(1.0, 0.5)))
    show = Quiet()
    rows, _, metrics = scored_batch(*begin(job, single(), show))
    scores = rows.batch.scores
    assert job.reward_names == ("digits", "short") and scores.isnan().any()
    assert metrics["reward/digits/mean"] == pytest.approx(scores[:, 0].mean().item())
    assert metrics["reward/short/mean"] == pytest.approx(scores[:, 1].nanmean().item())
    texts, parts = show.shown[0][2], show.parts[0]
    assert [set(part) for part in parts] == [{"digits"} if fails(text) else {"digits", "short"} for text in texts]
    assert rows.batch.score.tolist() == pytest.approx((scores[:, 0] + 0.5 * scores[:, 1].nan_to_num()).tolist())


def plain(prompt, completion, level):
    return len(prompt) + level


def batched(prompts, level):
    batches.append(list(zip(prompts, level, strict=True)))
    return [len(prompt) + item for prompt, item in zip(prompts, level, strict=True)]


async def both(prompts, completion_ids, level):
    assert all(ids == [7] for ids in completion_ids)
    return [len(prompt) + item for prompt, item in zip(prompts, level, strict=True)]


batches = []


@pytest.mark.parametrize("workers", [0, 2])
def test_functions_of_every_form_give_a_rollout_the_same_scores(workers):
    begun, enough = [], asyncio.Event()

    async def awaited(prompt, completion, level):
        """Wait until so many have begun in this process."""
        begun.append(prompt)
        if len(begun) == 4:
            enough.set()
        await asyncio.wait_for(enough.wait(), 30)
        return len(prompt) + level

    examples = [Example([1], "p" * n, {"level": n % 3}) for n in range(8)]
    engine, functions = ScriptedEngine(lambda request: [7]), [plain, batched, awaited, both]
    batches.clear()
    with open_pool(functions, workers, 30) as pool:
        rewarded = RewardedEngine(engine, single(), str, pool, (1.0,) * 4)
        done = rollout(rewarded, examples, Sampling(samples=4, max_new_tokens=1), 0)
    wanted = [n + n % 3 for n in range(8) for _ in range(4)]
    assert done.scores.T.tolist() == [wanted] * 4
    if not workers:  # elsewhere each worker has its own list
        assert list(itertools.chain(*batches)) == [("p" * n, n % 3) for n in range(8) for _ in range(4)]


def test_a_batch_is_of_whole_prompts():
    def sizes(completions, level):
        time.sleep(0.02)
        return [float(len(level))] * len(completions)

    examples = [Example([1], f"p{n}", {"level": n}) for n in range(9)]
    with open_pool([sizes], 2, 30) as pool:
        engine = ScriptedEngine(lambda request: [7])
        done = rollout(RewardedEngine(engine, single(), str, pool), examples, Sampling(samples=3, max_new_tokens=1), 0)
    assert (done.score.numpy() % 3 == 0).all()
    assert all(len(set(row)) == 1 for row in np.reshape(done.score.tolist(), (9, 3)))


@pytest.mark.slow
@pytest.mark.gloo
def test_a_run_whose_rewards_are_skipped_is_the_same_with_workers():
    results = []
    for workers in (0, 2):
        job = job_of("skip", reward_workers=workers, steps=2)
        observer = Quiet()
        with open_rewards(job, 0) as pool:
            assert loop.train_loop(job, single(), observer, pool=pool).error is None
        results.append(observer.params)
    assert gap(*results) == 0
