"""The whole program in float32, on two ranks, and in bfloat16."""

import functools

import pytest
import torch
from small_runs import PPO, relative, run_steps

from funrl import trees
from funrl.compiled_kernels.exact.dispatch import kernels_work

pytestmark = pytest.mark.gloo


@pytest.mark.slow
def test_loss_and_gradients_in_float32():
    """Of the first batch: parameters after Adam are compared in float64 only, it turns 1e-7 into 3e-5."""
    entropy = functools.partial(PPO, entropy_coef=0.1)  # the loss is then not near 0 while the ratio is 1
    settings = {"dtype": "float32"}
    row, other = (run_steps(1, with_gradients=True, mesh=m, compose=entropy, **settings) for m in ("tp2", "dp1"))
    assert torch.equal(row["batches"][0].tokens, other["batches"][0].tokens)
    a, b = row["grads"][0], other["grads"][0]
    for name in ("policy", "critic"):
        assert relative(a[name].tree, b[name].tree) < 1e-5
        assert float(a[name].loss) == pytest.approx(float(b[name].loss), rel=1e-5)


def right_length(prompt, completion, **fields):
    """A reward that a few steps can learn: completions of three characters."""
    return -abs(len(completion) - 3) / 3


@pytest.mark.slow
def test_bfloat16_learns_with_float32_weights():
    """The reward rises, and the weights hold what a bfloat16 weight could not."""
    settings = {"dtype": "bfloat16", "batch_prompts": 8, "samples_per_prompt": 8, "max_new_tokens": 6}
    run_ = run_steps(7, reward=right_length, minibatches=4, **settings)
    rewards = [m["reward/mean"] for m in run_["metrics"]]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    for tree in run_["weights"].values():
        assert {x.dtype for x in trees.leaves(tree)} == {torch.float32}
        assert any((x != x.bfloat16().float()).any() for x in trees.leaves(tree))
    first = run_steps(1, with_gradients=True, dtype="bfloat16")["grads"][0]
    assert first["policy"].tree["norm"].dtype == torch.float32
    assert max(m["rollout/logprob_gap_max"] for m in run_["metrics"]) <= (0 if kernels_work() else 0.1)
