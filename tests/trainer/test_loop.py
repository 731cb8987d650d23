"""The whole program on one process and on meshes of real ranks: the same samples, losses, gradients and parameters."""

import functools

import pytest
from small_runs import GRPO, SIZES, assert_same, run_steps

pytestmark = pytest.mark.gloo


@functools.cache
def run(mesh, **settings):
    return run_steps(2, with_gradients=True, mesh=mesh, **settings)


def test_the_run_that_is_compared_learns_something():
    run_ = run("dp1")
    assert any(batch.advantage.abs().max() > 0.1 for batch in run_["batches"])
    assert all(
        grads["policy"].metrics["actor/pg_clipfrac"] == 0 for grads in run_["grads"]
    )  # the first pass: the ratio is 1
    assert min(m["actor/grad_norm"] for m in run_["metrics"]) > 1e-3
    assert run_["metrics"][-1]["critic/grad_norm"] > 1e-3
    assert len({tuple(b.tokens[b.mask].tolist()) for b in run_["batches"]}) == 2


@pytest.mark.slow
def test_ppo_in_float64():
    """Other meshes are in tests/trainer/test_layouts.py."""
    assert_same(run("dp2"), run("dp1"), 1e-9)


@pytest.mark.slow
def test_grpo_in_float64():
    settings = {"compose": GRPO, "samples_per_prompt": 3, "minibatches": 3, "epochs": 2}
    assert_same(run("tp2", **settings), run("dp1", **settings), 1e-9)


@pytest.mark.slow
def test_a_family_with_one_key_head_and_tied_weights_trains_on_tensor_ranks():
    switches = {"family": "qwen3", "qk_norm": True, "attention_bias": True, "tied": True, "kv_heads": 1}
    sizes = SIZES | switches
    assert_same(run_steps(1, sizes=sizes, mesh="tp2"), run_steps(1, sizes=sizes), 1e-9)
