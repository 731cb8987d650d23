"""The whole program on one process and on meshes of real ranks: the same samples, losses, gradients and parameters."""

import functools

import pytest
from small_runs import GRPO, PPO, SIZES, assert_same, begin, gap, run_steps, scored_batch, small_job

from funrl.mesh.launch import launch
from funrl.mesh.reshard import unshard
from funrl.trainer import phases
from funrl.trainer.spmd import Clock

pytestmark = pytest.mark.gloo
MESHES = ("dp2", "tp2", "dp4,tp2")


@functools.cache
def run(mesh, **settings):
    return run_steps(mesh=mesh, **settings)


def test_the_run_that_is_compared_learns_something():
    run_ = run("dp1")
    assert any(batch.advantage.abs().max() > 0.1 for batch in run_["batches"])
    assert all(grads.metrics["actor/pg_clipfrac"] == 0 for grads in run_["grads"])  # the first pass: the ratio is 1
    assert min(m["actor/grad_norm"] for m in run_["metrics"]) > 1e-3
    assert run_["metrics"][-1]["critic/grad_norm"] > 1e-3
    assert len({tuple(b.tokens[b.mask].tolist()) for b in run_["batches"]}) == 3


@pytest.mark.parametrize("mesh", MESHES)
def test_ppo_in_float64(mesh):
    assert_same(run(mesh), run("dp1"), 1e-9)


@pytest.mark.parametrize("generate_mesh", ["dp2,tp2", "tp4"])
def test_the_mesh_to_generate_on_changes_nothing(generate_mesh):
    assert_same(run("dp2,tp2", generate_mesh=generate_mesh), run("dp1"), 1e-9)


def test_grpo_in_float64():
    settings = {"compose": GRPO, "samples_per_prompt": 3, "minibatches": 3, "epochs": 2}
    assert_same(run("dp2,tp2", **settings), run("dp1", **settings), 1e-9)


@pytest.mark.parametrize("mesh", ["tp2", "dp2,tp2"])
def test_fewer_key_value_heads_than_tensor_ranks(mesh):
    one = run_steps(2, sizes=SIZES | {"kv_heads": 1}, generate_mesh=mesh, mesh=mesh)
    assert_same(one, run_steps(2, sizes=SIZES | {"kv_heads": 1}), 1e-9)


def test_every_family_trains_on_tensor_ranks():
    sizes = SIZES | {"family": "qwen3", "qk_norm": True, "attention_bias": True, "tied": True}
    assert_same(run_steps(2, sizes=sizes, mesh="dp2,tp2"), run_steps(2, sizes=sizes), 1e-9)


@pytest.mark.parametrize("mesh", ["dp1", "dp2,tp2"])
@pytest.mark.parametrize("compose", [GRPO, functools.partial(PPO, kl_coef=0)], ids=["grpo", "ppo without a penalty"])
def test_a_single_update_takes_its_old_log_probabilities_from_its_own_forward_pass(compose, mesh):
    """Scored beforehand or not: the same loss, the same gap to the engine, the same parameters."""
    job = small_job(compose, mesh=mesh, minibatches=1, token_budget=40)

    def program(mesh):
        ends, said = [], []
        for scored in (True, False):
            models, state = begin(job, mesh)
            assert not models.score_old
            models = models._replace(score_old=scored)
            for step in (1, 2):
                batch, state, metrics = scored_batch(job, models, state, step)
                assert (batch.old_logp is not None) == scored
                state, learned = phases.learn(job, models, state, batch, step, Clock())
                phases.sync(job, models, state, Clock())
                said.append(metrics | learned)
            ends.append(unshard(state.policy.params, models.policy_layouts, mesh))
        return ends, said

    ends, said = launch(program, job.sizes, "cpu")
    assert gap(*ends) < 1e-9
    for scored, not_scored in zip(said[:2], said[2:], strict=True):
        assert scored.keys() == not_scored.keys()
        assert not_scored == pytest.approx(scored, rel=1e-9, abs=1e-9)
        assert 0 <= scored["rollout/logprob_gap_max"] < 1e-10
