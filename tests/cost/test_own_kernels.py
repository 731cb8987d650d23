"""Kernels of this package in a dry run of a GPU: memory and FLOPs are theirs, not those of plain operators."""

import pytest
import torch
from dry_jobs import CPU, H100, small

from funrl.compiled_kernels.linear import add_products_
from funrl.compiled_kernels.logit_rows.operators import L2_SHARE, ColumnBlocks
from funrl.cost import dry_run
from funrl.cost.tracing.hardware import HARDWARE
from funrl.cost.tracing.tracer import Tracer
from funrl.models.decoder.gated_delta_net import GatedDeltaNet

VOCAB = 40_000


def updates(hardware, **flags):
    """Costs of the policy's update."""
    flags = {"batch_prompts": 8, "samples_per_prompt": 2, "token_budget": 512, "dtype": "bfloat16"} | flags
    return dry_run.estimate(small("grpo", {"kl_coef": 0.0}, **flags), 40, hardware).phases["update_policy"]


def test_logits_are_held_by_blocks_that_stay_in_the_cache():
    """Of the MI300X, whose cache is small, all columns of the tokens that have log-probabilities; on a CPU twice."""
    h100, mi300x, cpu = (
        max(peak["logits"] for peak in updates(hardware, sizes={"vocab": VOCAB}).peaks.values())
        for hardware in (H100, HARDWARE["mi300x"], CPU)
    )
    tokens = mi300x // (4 * VOCAB)
    numbers = int(L2_SHARE * (50 << 20)) // 4
    assert mi300x == 4 * VOCAB * tokens and h100 < L2_SHARE * (50 << 20)
    assert h100 == 4 * tokens * ColumnBlocks(numbers, 132).width(int(tokens), VOCAB)
    assert cpu > 1.4 * mi300x


@pytest.mark.slow
def test_a_gated_delta_rule_is_that_of_the_kernels(monkeypatch):
    """One operator each way. Their inverses are products of whole chunks, where torch solves triangular systems."""
    sizes = {"family": "qwen3_next", "mixers": (GatedDeltaNet(2, 4, 64, 64),), "vocab": 64}
    kernels = updates(H100, sizes=sizes, token_budget=2048)
    monkeypatch.setattr("funrl.compiled_kernels.delta_rule.gated_delta.LARGEST_DELTA_HEAD", 0)
    plain = updates(H100, sizes=sizes, token_budget=2048)
    assert 0.5 < kernels.flops / plain.flops < 3 and kernels.flops != plain.flops
    assert kernels.seconds < 0.8 * plain.seconds
    held = [max(peak["activations"] for peak in costs.peaks.values()) for costs in (kernels, plain)]
    assert held[0] < 0.8 * held[1]


def test_products_that_are_added_in_float32_are_counted():
    """Of a teacher's divergence, whose gradient of the unembedding is a sum over blocks of tokens."""
    with Tracer(H100) as tracer, tracer.phase("update_policy"):
        a, b = (tracer.empty((64, n), torch.bfloat16) for n in (48, 16))
        add_products_(tracer.empty((48, 16), torch.float32), a, b)
    assert tracer.phases["update_policy"].flops == 2 * 64 * 48 * 16
