"""Demonstrations beside the policy's own rows: what CHORD imitates, and what SPIN holds against a sample."""

import functools
import json
from typing import cast

import numpy as np
import pytest
import torch
from selection import quick
from small_runs import assert_same, begin, one_step, run_steps, scored_batch, small_job

from funrl.algos.objectives import OBJECTIVE, OBJECTIVE_FIELD
from funrl.algos.recipes.chord import chord
from funrl.algos.recipes.spin import spin
from funrl.batch import example
from funrl.data.json_lines import DataError
from funrl.fields import SOURCE_FIELDS
from funrl.mesh.mesh import single
from funrl.tasks import arithmetic
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import demonstrations_of
from funrl.trainer.settings.declaration import kinds_of
from funrl.trainer.settings.settings import SettingsError
from funrl.trainer.steps.advantage_phase import describe
from funrl.trainer.steps.engine_gap import engine_gap
from funrl.trainer.steps.roles import reads_scores
from funrl.trainer.steps.step_rows import rows_of

PROMPTS = [{"prompt": f"{n}+{n}=", "solution": str(2 * n)[::-1]} for n in range(3, 33)]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return str(file)


def texts(batch, rows):
    decode = arithmetic.tokenizer().decode
    return [decode(batch.tokens[row, : int(batch.length[row])].tolist(), skip_special_tokens=True) for row in rows]


def test_each_demonstration_is_a_row_that_no_group_sees():
    run, state = begin(small_job(chord, batch_prompts=5, samples_per_prompt=3), single())
    rows, _, metrics = scored_batch(run, state)
    batch = rows.batch
    given = batch.demonstration.any(1)
    assert given.tolist() == [False] * 15 + [True] * 5
    assert batch.group.tolist() == [g for g in range(5) for _ in range(3)] + [-1, -2, -3, -4, -5]
    for text in texts(batch, range(15, 20)):
        assert arithmetic.reward(*(part + end for part, end in zip(text.split("="), ("=", ""), strict=True))) == 1.0
    assert torch.equal(batch.demonstration[15:], batch.mask[15:]) and (batch.advantage[15:] == 0).all()
    assert batch.mask[15:].sum(1).tolist() == [len(t.split("=")[1]) + 1 for t in texts(batch, range(15, 20))]  # the end
    assert batch.weight[batch.demonstration].unique().tolist() == pytest.approx([0.9])
    assert batch.weight[batch.mask & ~batch.demonstration].unique().tolist() == pytest.approx([0.1])
    assert metrics["actor/imitation_weight"] == pytest.approx(0.9)
    assert metrics["reward/mean"] == pytest.approx(batch.score[:15].mean().item())
    assert metrics["rollout/logprob_gap_max"] < 1e-9
    assert metrics["response_length/mean"] == pytest.approx(batch.mask[:15].sum(1).double().mean().item())
    assert metrics["perf/total_num_tokens"] == batch.length.sum()


def test_demonstrations_are_of_the_source_of_their_prompts():
    """For the teacher of a source, and its objective."""
    reader = demonstrations_of(cast(RLJob, small_job(chord)))
    rows = rows_of(example(("tokens", "mask", "length", "group", "score")), np.zeros(4, dtype=np.int64), single())
    for name, field in {OBJECTIVE: OBJECTIVE_FIELD, **SOURCE_FIELDS}.items():
        numbered = rows.declaring({name: field}).with_fields(**{name: torch.tensor([1, 1, 0, 0])})
        assert reader.table(numbered, 2)[name].tolist() == [1, 0]


@pytest.mark.slow
def test_the_weight_of_imitation_fades_and_what_is_imitated_becomes_more_likely():
    compose = functools.partial(chord, phi=False, peak=0.9, valley=0.5, decay_steps=4)
    run, state = begin(small_job(compose, batch_prompts=8, minibatches=1, lr=0.01), single())
    weights, losses = [], []
    for _ in range(12):
        state, metrics = one_step(run, state)
        weights.append(metrics["actor/imitation_weight"])
        losses.append(metrics["actor/nll"])
    half = 0.2 * 2**-0.5  # of cos(pi / 4)
    assert weights[:6] == pytest.approx([0.9, 0.7 + half, 0.7, 0.7 - half, 0.5, 0.5])
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.5, losses


@pytest.mark.slow
def test_a_sample_is_held_against_the_demonstration(prompts):
    """SPIN: neither a reward nor a second sample is needed."""
    assert kinds_of(spin()) == ("rl",) and not reads_scores(spin())
    fields = {"prompts": prompts, "fields": "demonstration:solution", "reward": None}
    job = small_job(spin, samples_per_prompt=1, batch_prompts=4, minibatches=1, lr=0.02, **fields)
    run, state = begin(job, single())
    rows, _, reported = scored_batch(run, state)
    batch = rows.batch
    assert batch.segments.max() == 2 and len(rows.owner) == 4 and "reward/mean" not in reported
    assert torch.equal(batch.demonstration, batch.mask & (batch.segments == 1))
    solutions = {row["prompt"] + row["solution"] for row in PROMPTS}
    chosen = [
        arithmetic.tokenizer().decode(t[s == 1].tolist(), skip_special_tokens=True)
        for t, s in zip(batch.tokens, batch.segments, strict=True)
    ]
    assert set(chosen) <= solutions
    margins = []
    for _ in range(12):
        state, metrics = one_step(run, state)
        margins.append(metrics["preference/margin"])
    assert sum(margins[-3:]) > sum(margins[:3])


def test_the_sample_of_the_least_reward_is_the_opponent():
    run, state = begin(small_job(spin, batch_prompts=4, samples_per_prompt=3), single())
    rows, _, metrics = scored_batch(run, state)
    assert len(rows.owner) == 4 and (rows.batch.demonstration.sum(1) > 0).all()
    assert 0 <= metrics["reward/mean"] <= 1  # that of a demonstration is higher, and does not count


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("compose", quick([chord, spin], [chord]))
def test_steps_are_the_same_on_a_mesh(compose):
    settings = {"compose": compose, "batch_prompts": 3, "samples_per_prompt": 2, "token_budget": 64}
    assert_same(run_steps(2, mesh="dp2", **settings), run_steps(2, **settings), 1e-9)


def test_no_engine_sampled_a_demonstration():
    batch = example(["tokens", "mask", "old_logp", "rollout_logp", "truncated", "length", "demonstration"])
    moved = batch._replace(rollout_logp=torch.where(batch.demonstration, -99.0, batch.old_logp))
    assert engine_gap(moved)["rollout/logprob_gap_max"].value == 0
    metrics = describe(rows_of(moved), moved)
    assert metrics["rollout/logprob_gap_max"] == metrics["rollout/logprob_gap_mean"] == 0


def test_what_cannot_be_imitated_is_refused(prompts, tmp_path):
    with pytest.raises(
        SettingsError, match=r"prompts.jsonl, line \d+: .* a text in its field 'demonstration', but the"
    ):
        small_job(spin, prompts=prompts, reward=None)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("".join(json.dumps(row | {"demonstration": ""}) + "\n" for row in PROMPTS))
    with pytest.raises(SettingsError, match="but it is ''; --fields=demonstration:COLUMN"):
        small_job(spin, prompts=str(empty), reward=None)
    with pytest.raises(SettingsError, match="--new_tokens_per_step: demonstrations need whole completions"):
        small_job(chord, new_tokens_per_step=2)
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"prompt": "1+1=", "demonstration": "2" * 99}) + "\n" for _ in range(20)))
    run, state = begin(small_job(spin, prompts=str(long), reward=None), single())
    with pytest.raises(DataError, match=r"long.jsonl, line \d+: the text has 104 tokens, but the model has \d+ pos"):
        run.source.next_rows(state.source, 1)
