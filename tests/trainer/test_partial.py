"""Partial rollouts: completions over several steps, by the weights of each."""

import dataclasses
import functools
from collections import Counter
from pathlib import Path

import pytest
import torch
from small_runs import GRPO, Quiet, assert_same, begin, digits_reward, one_step, run_steps, small_job
from test_checkpoint import assert_equal_steps, measured, run, run_to_resume

from funrl import trees
from funrl.algos import Algorithm, reduce, token_mean, unequal_scores
from funrl.batch import as_dict
from funrl.data.prompts import prompt_batch
from funrl.environments.resumable import UnfinishedEpisode
from funrl.mesh.mesh import single
from funrl.models.model import Inputs
from funrl.rollout.engine import complete, onload_engine
from funrl.rollout.requests import Request
from funrl.trainer.checkpoints.checkpoint import Recorded, load
from funrl.trainer.phases import draw_batch, learn_batch, score_batch
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.steps.sync import sync
from funrl.trainer.storage.shard_server import Array, CheckpointError
from funrl.trainer.storage.shards import ShardServer

PARTIAL = {"compose": GRPO, "max_new_tokens": 12, "new_tokens_per_step": 3, "batch_prompts": 3, "minibatches": 1}


def filtered():
    return dataclasses.replace(GRPO(), filter=unequal_scores())


def begun_places(state):
    """Places of the prompts that are begun."""
    begun = state.source["begun"]  # before the first step in the form of a checkpoint
    return set(begun["places"].tolist() if isinstance(begun, dict) else [group.place for group in begun.groups])


def ready_places(begun):
    """Places of the prompts whose completions have all ended."""
    return [group.place for group in begun.groups if not group.waiting]


def begun_rows(begun):
    """Rows that are not finished: prompt's number, seed, written tokens."""
    return [
        (group.place, seed, list(call.leaf.tokens))
        for group in begun.groups
        for seed, episode in zip(group.seeds, group.record.samples, strict=True)
        if isinstance(episode, UnfinishedEpisode)
        for call in episode.calls.ends
    ]


def test_with_the_same_weights_a_completion_is_that_of_one_step():
    job = small_job(**PARTIAL)
    run, state = begin(job, single())
    _, state, metrics = draw_batch(run, state)
    begun = begun_rows(state.source["begun"])
    assert len(begun) > 3 and {len(tokens) for _, _, tokens in begun} <= {3, 6, 9}
    assert metrics["partial/unfinished_prompts"] == len({place for place, _, _ in begun})
    results = []
    for _ in range(6):
        rows, state, _ = draw_batch(run, state)
        batch = rows.batch
        assert len(batch.length) == 6 and batch.group.unique().numel() == 3
        results += [tokens[:length].tolist() for tokens, length in zip(batch.tokens, batch.length, strict=True)]
    engine = run.parts.generator.engine
    for place, seed, tokens in begun:
        (prompt,) = prompt_batch(job.task.prompts, 1, 0, place)
        with onload_engine(engine):
            (whole,) = complete(engine, [Request(0, prompt.tokens, job.sampling, seed)])
        assert whole.tokens[: len(tokens)].tolist() == tokens
        assert prompt.tokens + whole.tokens.tolist() in results


def test_every_token_has_the_log_probability_of_the_weights_that_drew_it():
    job = small_job(**PARTIAL | {"temperature": 0.8})
    run, state = begin(job, single())
    weights, mixed, lags = {}, 0, []
    for _ in range(4):
        weights[state.version] = trees.clone(state.roles["policy"].params)
        rows, drawn, metrics = draw_batch(run, state)
        batch, engine_version = rows.batch, state.version
        lags.append(metrics["partial/staleness_max"])
        assert lags[-1] == (engine_version - batch.version[batch.mask]).max()
        for n, length in enumerate(batch.length.tolist()):
            tokens, versions = batch.tokens[n, :length], batch.version[n, :length]
            at = batch.mask[n, :length].nonzero().flatten()
            assert (versions[at].diff() >= 0).all() and versions.max() <= engine_version
            mixed += versions[at].unique().numel() > 1
            for version in versions[at].unique().tolist():
                hidden = job.model.apply(weights[version], Inputs(tokens[None])).hidden[0]
                logp = (hidden @ job.model.unembed(weights[version]).T / 0.8).log_softmax(-1)
                those = at[versions[at] == version]
                expected = logp[those - 1, tokens[those].long()]
                assert (batch.rollout_logp[n, those] - expected).abs().max() < 1e-10
        rows, drawn, _ = score_batch(run, drawn, rows)
        state = sync(run.parts, learn_batch(run, drawn, rows)[0])
    assert mixed > 3 and lags[0] == 0 < max(lags)


@functools.cache
def steps_on(mesh, **more):
    return run_steps(2, **PARTIAL | {"compose": filtered, "mesh": mesh} | more)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "queue"), [("dp2", "fixed"), pytest.param("tp2", "tickets", marks=pytest.mark.slow)])
def test_the_same_numbers_on_every_mesh(mesh, queue):
    steps = steps_on("dp1")
    assert any(batch.version[batch.mask].unique().numel() > 1 for batch in steps["batches"])
    assert_same(steps_on(mesh, queue=queue), steps, 1e-9)


def test_each_completion_is_rewarded_once_and_when_its_prompt_is_finished():
    seen = Counter()

    def reward(prompt, completion, **fields):
        seen[prompt, completion] += 1
        return digits_reward(prompt, completion)

    job = small_job(**PARTIAL, reward=reward)
    run, state = begin(job, single())
    rewarded, drawn = 0, 0
    for _ in range(5):
        _, state, metrics = draw_batch(run, state)
        drawn += metrics["partial/new_prompts"]
        rewarded += 6
        held = state.source["begun"]
        assert len(held.groups) == drawn - rewarded / 2
        assert sum(seen.values()) == rewarded + 2 * len(ready_places(held))


def test_a_batched_reward_sees_all_completions_of_a_prompt_though_they_end_in_several_steps():
    batches = []

    def reward(prompts, completions, **columns):
        batches.append(Counter(prompts))
        return [digits_reward("", completion) for completion in completions]

    run, state = begin(small_job(**PARTIAL, reward=reward), single())
    for _ in range(3):
        _, state, _ = draw_batch(run, state)
    assert batches and all(count % 2 == 0 for batch in batches for count in batch.values())


@pytest.mark.parametrize("compose", [GRPO, filtered], ids=["grpo", "filtered"])
def test_finished_prompts_that_a_batch_does_not_need_wait_for_the_next_one(compose):
    job = small_job(
        **PARTIAL | {"compose": compose, "batch_prompts": 4, "max_new_tokens": 24, "new_tokens_per_step": 8}
    )
    run, state = begin(job, single())
    left, trained = [0], []
    for _ in range(6):
        rows, after, metrics = draw_batch(run, state)
        assert len(rows.batch.score) == 8
        waiting = after.source["begun"]
        finished = ready_places(waiting)
        assert metrics["partial/finished_prompts_left"] == len(finished)
        if compose is filtered:
            assert (rows.batch.score.view(-1, 2).diff() != 0).all()
            seen = 4 + metrics["filter_groups/dropped_prompts"] + len(finished)
            assert metrics["filter_groups/sampled_prompts"] == seen
        elif left[-1]:
            assert metrics["partial/new_prompts"] == 4 - left[-1]
        held = begun_places(state) | set(range(*consumed(state, after)))
        gone = held - begun_places(after)
        if compose is GRPO:
            assert len(gone) == 4 and (not finished or min(finished) > max(gone))
        trained += gone
        left.append(len(finished))
        state = after
    assert max(left) > 0 and len(trained) == len(set(trained))


def consumed(before, after):
    return before.source["prompts_consumed"], after.source["prompts_consumed"]


def test_no_more_prompts_are_left_unfinished_than_a_completion_takes_steps():
    """Completions of 12 tokens, three at a time: the first step begins what fills the later ones, and finishes the rest
    beyond the budget; later ones begin as many as they train on."""
    job = small_job(**PARTIAL)
    job = dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, stop=()))
    run, state = begin(job, single())
    counts = []
    for _ in range(5):
        rows, state, metrics = draw_batch(run, state)
        assert (rows.batch.mask.sum(1) == 12).all() and rows.batch.truncated.all()
        names = ("new_prompts", "unfinished_prompts", "prompts_beyond_budget")
        counts.append([metrics[f"partial/{name}"] for name in names])
    assert counts == [[12, 9, 3], [3, 9, 3], [3, 9, 3], [3, 9, 0], [3, 9, 0]]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path):
    settings = PARTIAL | {"compose": filtered}
    _, steps, _, weights = run_to_resume(tmp_path, **settings)
    _, resumed, _, ends = run(tmp_path, resume=True, run_dir="x", **settings)
    assert_equal_steps(resumed, steps[1:])
    assert all(map(torch.equal, ends, weights))


@pytest.mark.gloo
@pytest.mark.slow
def test_what_is_begun_goes_on_on_another_mesh(tmp_path):
    settings = PARTIAL | {"steps": 2, "eval_prompts": 2}
    _, steps, _, _ = run_to_resume(tmp_path, "dp2", **settings)
    _, resumed, _, _ = run(tmp_path, "dp3", resume=True, run_dir="x", **settings)
    for (a, metrics), (b, expected) in zip(resumed, steps[1:], strict=True):
        kept = [name for name in expected if not measured(name)]
        assert a == b
        assert [metrics[k] for k in kept] == pytest.approx([expected[k] for k in kept], rel=1e-9, abs=1e-9)


def test_the_saved_form_of_what_is_begun_continues_with_the_same_bits():
    run, state = begin(small_job(**PARTIAL | {"compose": filtered}), single())
    _, state, _ = draw_batch(run, state)
    stored = run.source.stored
    again = state._replace(source=stored.restored(stored.saved(state.source, int)))
    rows, after, metrics = draw_batch(run, state)
    others, _, same = draw_batch(run, again)
    for name, x in as_dict(rows.batch).items():
        assert all(map(torch.equal, trees.leaves(x), trees.leaves(as_dict(others.batch)[name]))), name
    assert metrics == same and begun_places(after)


@pytest.mark.parametrize("leaf", ["paused", "columns/finished"])
def test_begun_rows_of_an_earlier_version_are_refused_by_name(leaf):
    _, state = begin(small_job(**PARTIAL), single())
    record = Recorded(Path("step-1"), {f"source/begun/{leaf}": Array((6,), "bool", (6,))}, {})
    with pytest.raises(CheckpointError, match=r"step-1: it has unfinished completions.*with the version that wrote it"):
        load(record, state, {}, mesh=single(), server=ShardServer())


def test_samples_are_shown_and_a_run_learns():
    job, show = small_job(**PARTIAL), Quiet()
    run, state = begin(job, single(), show)
    for _ in range(2):
        state, metrics = one_step(run, state)
    ((step, prompts, texts, scores), *_) = show.shown
    assert step == 1 and len(prompts) == len(texts) == 3
    assert scores == [digits_reward("", text) for text in texts]
    assert metrics["actor/grad_norm"] > 0


def test_a_budget_that_no_completion_exceeds_is_refused():
    with pytest.raises(SettingsError, match=r"--new_tokens_per_step=12: a row has 12 new tokens at most"):
        small_job(**PARTIAL | {"new_tokens_per_step": 12})


def test_versions_are_there_for_algorithms_that_read_them_only_with_the_flag():
    def fresh_only():
        losses = {
            "policy": reduce(lambda logp, batch: (-logp * (batch.version == batch.version.max()), {}), token_mean())
        }
        return Algorithm(GRPO().advantage, losses)

    small_job(**PARTIAL | {"compose": fresh_only})
    with pytest.raises(SettingsError, match=r"version is missing.*--new_tokens_per_step"):
        small_job(fresh_only)
