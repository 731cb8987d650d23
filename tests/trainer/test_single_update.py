"""With one update a batch, the update's own forward pass says what the policy said before it."""

import dataclasses
import functools
import math

import pytest
import torch
from selection import quick
from small_runs import GRPO, PPO, assert_same, begin, gap, run_steps, scored_batch, small_job, whole_weights

from funrl.mesh.mesh import single
from funrl.trainer.jobs.job import needs_old_scores
from funrl.trainer.phases import learn_batch
from funrl.trainer.steps.advantage_phase import describe
from funrl.trainer.steps.sync import sync

ALGORITHMS = {
    "entropy": functools.partial(GRPO, entropy_coef=0.1),
    "ppo without a penalty": functools.partial(PPO, kl_coef=0),
}
BUDGET = 24  # tokens: two rows a micro-batch


def two_steps(compose, score_old):
    """Metrics of two steps and whole weights after them."""
    job = small_job(compose, minibatches=1, samples_per_prompt=3, token_budget=BUDGET)
    run, state = begin(job, single())
    policy = run.parts.roles["policy"]
    assert not policy.writes
    if score_old:
        roles = {**run.parts.roles, "policy": policy._replace(writes={"old_logp": "logp"})}
        run = run._replace(parts=dataclasses.replace(run.parts, roles=roles))
    records = []
    for _ in range(2):
        rows, state, metrics = scored_batch(run, state)
        assert ("old_logp" in rows.batch.names()) == score_old
        state, learned = learn_batch(run, state, rows)
        state = sync(run.parts, state)
        records.append(metrics | learned)
    return records, whole_weights(run, state)


@pytest.mark.parametrize("name", quick(ALGORITHMS, ["entropy"]))
def test_a_pass_less_gives_the_same_updates_and_metrics(name):
    records, weights = two_steps(ALGORITHMS[name], False)
    expected, expected_weights = two_steps(ALGORITHMS[name], True)
    assert gap(weights, expected_weights) < 1e-9
    for metrics, others in zip(records, expected, strict=True):
        assert metrics.keys() == others.keys()
        assert metrics == pytest.approx(others, rel=1e-9, abs=1e-12)
        assert 1e-10 > metrics["rollout/logprob_gap_max"] >= metrics["rollout/logprob_gap_mean"] >= 0


def test_the_gap_to_the_engine_is_that_of_the_worst_token():
    job = small_job(GRPO, minibatches=1, samples_per_prompt=3, token_budget=BUDGET)
    run, state = begin(job, single())
    rows, state, _ = scored_batch(run, state)
    batch = rows.batch
    row, column = batch.mask.nonzero()[5].tolist()
    off = torch.zeros_like(batch.rollout_logp)
    off[row, column] = 0.25
    _, metrics = learn_batch(run, state, rows.with_fields(rollout_logp=batch.rollout_logp + off))
    assert metrics["rollout/logprob_gap_max"] == pytest.approx(0.25, abs=1e-9)
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(0.25 / batch.mask.sum().item(), abs=1e-9)


@pytest.mark.parametrize("score_old", [False, True])
def test_the_effective_share_of_stale_tokens(score_old):
    """A fifth of n equal weights becomes 3 times as large: share (n + 2k)^2 / (n (n + 8k))."""
    job = small_job(GRPO, minibatches=1, samples_per_prompt=3, token_budget=BUDGET)
    run, state = begin(job, single())
    rows, state, _ = scored_batch(run, state)
    batch = rows.batch
    places = batch.mask.nonzero()[::5].unbind(1)
    off = torch.zeros_like(batch.rollout_logp)
    off[places] = math.log(3)
    stale = off != 0
    rows = rows.with_fields(rollout_logp=batch.rollout_logp - off, stale=stale)
    if score_old:
        rows = rows.with_fields(old_logp=batch.rollout_logp)
        metrics = describe(rows, rows.batch)
    else:
        _, metrics = learn_batch(run, state, rows)
    n, k = int(batch.mask.sum()), int(stale.sum())
    assert metrics["rollout/effective_share"] == pytest.approx((n + 2 * k) ** 2 / (n * (n + 8 * k)), rel=1e-6)


@pytest.mark.gloo
def test_the_worst_token_is_found_on_every_rank():
    """Each rank's own largest gap is taken over the ranks: the metrics are those of one device."""
    settings = {"compose": ALGORITHMS["entropy"], "samples_per_prompt": 3, "minibatches": 1}
    assert_same(run_steps(1, mesh="dp2", **settings), run_steps(1, **settings), 1e-9)


@pytest.mark.parametrize(
    ("compose", "settings", "expected"),
    [
        (GRPO, {"minibatches": 1}, False),
        (GRPO, {"minibatches": 2}, True),
        (GRPO, {"minibatches": 1, "epochs": 2}, True),
        (PPO, {"minibatches": 1}, True),  # its reward holds the KL of the old policy
        (functools.partial(PPO, kl_coef=0.0), {"minibatches": 1}, False),
    ],
)
def test_when_a_pass_is_saved(compose, settings, expected):
    assert needs_old_scores(small_job(compose, **settings)) is expected
