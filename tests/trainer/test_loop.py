"""The whole program on one process and on meshes of real ranks: the same samples, losses, gradients and parameters."""

import functools

import pytest
from selection import quick
from small_runs import GRPO, SIZES, assert_same, run_steps

pytestmark = pytest.mark.gloo
MESHES = ("dp2", "dp4,tp2")


@functools.cache
def run(mesh, **settings):
    return run_steps(mesh=mesh, **settings)


def test_the_run_that_is_compared_learns_something():
    run_ = run("dp1")
    assert any(batch.advantage.abs().max() > 0.1 for batch in run_["batches"])
    assert all(
        grads["policy"].metrics["actor/pg_clipfrac"] == 0 for grads in run_["grads"]
    )  # the first pass: the ratio is 1
    assert min(m["actor/grad_norm"] for m in run_["metrics"]) > 1e-3
    assert run_["metrics"][-1]["critic/grad_norm"] > 1e-3
    assert len({tuple(b.tokens[b.mask].tolist()) for b in run_["batches"]}) == 3


@pytest.mark.parametrize("mesh", quick(MESHES, ("dp2",)))
def test_ppo_in_float64(mesh):
    assert_same(run(mesh), run("dp1"), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("generate_mesh", ["dp2,tp2", "tp4"])
def test_the_mesh_to_generate_on_changes_nothing(generate_mesh):
    assert_same(run("dp2,tp2", generate_mesh=generate_mesh), run("dp1"), 1e-9)


@pytest.mark.parametrize("mesh", quick(["tp2", "dp2,tp2"], ["tp2"]))
def test_grpo_in_float64(mesh):
    settings = {"compose": GRPO, "samples_per_prompt": 3, "minibatches": 3, "epochs": 2}
    assert_same(run(mesh, **settings), run("dp1", **settings), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2", "dp2,tp2"])
def test_fewer_key_value_heads_than_tensor_ranks(mesh):
    one = run_steps(2, sizes=SIZES | {"kv_heads": 1}, generate_mesh=mesh, mesh=mesh)
    assert_same(one, run_steps(2, sizes=SIZES | {"kv_heads": 1}), 1e-9)


@pytest.mark.slow
def test_every_family_trains_on_tensor_ranks():
    sizes = SIZES | {"family": "qwen3", "qk_norm": True, "attention_bias": True, "tied": True}
    assert_same(run_steps(2, sizes=sizes, mesh="dp2,tp2"), run_steps(2, sizes=sizes), 1e-9)
