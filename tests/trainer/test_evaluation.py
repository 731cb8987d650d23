"""Evaluations with several samples: the same numbers on every mesh, parts of the held-out prompts, the table."""

import dataclasses
import json

import numpy as np
import pytest
from selection import quick
from small_runs import Quiet, begin, small_job

from funrl.data.prompts import Example
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.trainer.loop import train_loop
from funrl.trainer.sources.evaluation import Evaluated, metrics_of, sets_of

SAMPLED = {"eval_samples": 4, "eval_temperature": 1.0, "eval_prompts": 6, "max_new_tokens": 2}


def begins_with_a_digit(prompt, completion, **fields):
    return float(completion[:1].isdigit())


def graded(prompt, completion, **fields):
    return len(completion) / 2


def evaluation(mesh, reward=begins_with_a_digit, **settings):
    job = small_job(reward=reward, mesh=str(mesh), **SAMPLED | settings)
    show = Quiet()
    run, state = begin(job, mesh, show)
    return run.source.evaluate(state.roles, 5), show.table


def test_metrics_are_those_of_the_table():
    metrics, table = evaluation(single())
    assert len(table) == 24 and {row.step for row in table} == {5}
    right = np.array([row.correct for row in table], dtype=float).reshape(6, 4)
    assert 0 < right.mean() < 1 and [row.sample for row in table[:5]] == [0, 1, 2, 3, 0]
    assert metrics["eval/reward"] == metrics["eval/accuracy"] == pytest.approx(right.mean())
    assert metrics["eval/accuracy_ci_low"] < right.mean() < metrics["eval/accuracy_ci_high"]
    assert metrics["eval/pass@4"] == pytest.approx(right.max(1).mean())
    assert metrics["eval/accuracy"] <= metrics["eval/pass@2"] <= metrics["eval/pass@4"]
    assert metrics["eval/response_length"] == pytest.approx(np.mean([row.tokens for row in table]))
    assert metrics["eval/clip_ratio"] == pytest.approx(np.mean([not row.finished for row in table]))
    votes = []
    for rows in (table[i : i + 4] for i in range(0, 24, 4)):
        answers = [row.answer for row in rows]
        votes.append(rows[answers.index(max(answers, key=answers.count))].correct)
    assert metrics["eval/maj@4"] == pytest.approx(np.mean(votes)) and "eval/maj@2" not in metrics
    assert table[0].prompt.endswith("=") and table[0].completion == table[0].answer


def test_rewards_that_are_no_verdicts_have_the_best_of_k():
    metrics, table = evaluation(single(), graded)
    rewards = np.array([row.reward for row in table]).reshape(6, 4)
    assert metrics["eval/best@4"] == pytest.approx(rewards.max(1).mean()) and "eval/pass@4" not in metrics
    assert table[0].correct is None and metrics["eval/reward_ci_low"] <= metrics["eval/reward"]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mesh", quick(["dp2", "dp2,tp2"], ["dp2"]))
def test_the_same_numbers_and_table_on_every_mesh(mesh):
    expected = evaluation(single())
    assert launch(evaluation, small_job(mesh=mesh).sizes, "cpu") == expected


def test_parts_of_the_held_out_prompts_have_metrics_of_their_own():
    sources = ["x/a.jsonl, line 1", "x/a.jsonl, line 2", "you/b:test, row 1"]
    examples = [Example([1], "", {}, source) for source in sources]
    assert sets_of(examples) == {"a": [0, 1], "b:test": [2]} and sets_of(examples[:2]) == {}
    named = [Example([1], "", {"data_source": f"owner/{n % 2}"}, "x.jsonl, line 1") for n in range(3)]
    assert sets_of(named) == {"owner_0": [0, 2], "owner_1": [1]}
    assert sets_of([Example([1], "", {"data_source": str(n)}) for n in range(40)]) == {}  # too many to tell
    right = np.array([[True], [False], [True]])
    metrics = metrics_of(Evaluated(right.astype(float), right, {}, np.ones((3, 1)), right, [{}] * 3), examples)
    assert (metrics["eval/a/accuracy"], metrics["eval/b:test/reward"], metrics["eval/accuracy"]) == (
        0.5,
        1.0,
        pytest.approx(2 / 3),
    )


@pytest.mark.slow
def test_a_run_shows_some_prompts_spread_over_all_at_every_evaluation(tmp_path):
    show = Quiet()
    job = small_job(eval_prompts=100, steps=2, eval_every=2, batch_prompts=2)
    train_loop(job, single(), show)
    assert [row.step for row in show.table] == [0] * 32 + [2] * 32
    prompts = [e.text for e in job.task.heldout]
    shown = [prompts.index(row.prompt) for row in show.table[:32]]
    assert shown == sorted(shown) and shown[0] == 0 and shown[-1] == len(prompts) - 1


def test_without_rewards_there_are_lengths_alone():
    job = small_job(reward=None, **SAMPLED)
    job = dataclasses.replace(job, task=job.task._replace(rewards=(), weights=()))
    run, state = begin(job, single(), show := Quiet())
    assert set(run.source.evaluate(state.roles, 0)) == {"eval/examples", "eval/response_length", "eval/clip_ratio"}
    assert show.table[0].reward is None and json.dumps(show.table[0]._asdict())


def test_several_samples_need_a_temperature():
    with pytest.raises(ValueError, match="--eval_samples=4 does nothing without evaluation by samples"):
        small_job(eval_samples=4)
