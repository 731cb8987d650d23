"""With one update a batch, the update's own forward pass says what the policy said before it."""

import functools

import pytest
import torch
from small_runs import GRPO, PPO, assert_same, begin, gap, run_steps, scored_batch, small_job

from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.mesh.reshard import unshard
from funrl.trainer import ensemble, phases
from funrl.trainer.spmd import Clock

ALGORITHMS = {"grpo": GRPO, "entropy": functools.partial(GRPO, entropy_coef=0.1)}
BUDGET = 24  # tokens: two rows a micro-batch


def one_step(compose, mesh, score_old):
    """Metrics and whole weights of one step, and whether the batch had old log-probabilities before it."""
    job = small_job(compose, minibatches=1, samples_per_prompt=3, token_budget=BUDGET, mesh=mesh)

    def program(mesh):
        models, state = begin(job, mesh)
        assert not models.score_old
        models = models._replace(score_old=score_old)
        batch, state, said = scored_batch(job, models, state)
        state, learned = phases.learn(job, models, state, batch, 1, Clock())
        return said | learned, unshard(state.policy.params, models.policy_layouts, mesh), batch.old_logp is not None

    return launch(program, job.sizes, "cpu")


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("mesh", ["dp1", pytest.param("dp2,tp2", marks=pytest.mark.gloo)])
def test_a_pass_less_gives_the_same_update_and_metrics(name, mesh):
    metrics, weights, had = one_step(ALGORITHMS[name], mesh, False)
    expected, expected_weights, expected_had = one_step(ALGORITHMS[name], mesh, True)
    assert (had, expected_had) == (False, True)
    assert gap(weights, expected_weights) < 1e-9
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert metrics["rollout/logprob_gap_max"] >= metrics["rollout/logprob_gap_mean"]


def test_the_gap_to_the_engine_is_that_of_the_worst_token():
    job = small_job(GRPO, minibatches=1, samples_per_prompt=3, token_budget=BUDGET)
    models, state = begin(job, single())
    batch, state, _ = scored_batch(job, models, state)
    row, column = batch.mask.nonzero()[5].tolist()
    off = torch.zeros_like(batch.rollout_logp)
    off[row, column] = 0.25
    _, metrics = phases.learn(job, models, state, batch._replace(rollout_logp=batch.rollout_logp + off), 1, Clock())
    assert metrics["rollout/logprob_gap_max"] == pytest.approx(0.25, abs=1e-9)
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(0.25 / batch.mask.sum().item(), abs=1e-9)


@pytest.mark.gloo
def test_the_worst_token_is_found_on_every_rank():
    """Each rank's own largest gap is taken over the ranks: the metrics are those of one device."""
    settings = {"compose": GRPO, "samples_per_prompt": 3, "minibatches": 1}
    assert_same(run_steps(2, mesh="dp2", **settings), run_steps(2, **settings), 1e-9)


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
    assert ensemble.needs_old_scores(small_job(compose, **settings)) is expected
