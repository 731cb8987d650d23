"""Runs with adapters on meshes: engine and trainer have the same bits, and what a sync sends."""

import functools

import pytest
from selection import quick
from small_runs import GRPO, begin, one_step, small_job, whole_weights

from funrl import trees
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.mesh.launch import launch
from funrl.trainer.gap import GAP_METRIC
from funrl.trainer.phases import prove_sync
from funrl.trainer.steps.sync import wait_for_proof

pytestmark = [pytest.mark.gloo, pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))]
SIZES = {"embed": 32, "layers": 1, "heads": 8, "kv_heads": 4, "head": 8, "mlp": 64}
MESHES = {
    "dp1": {},
    "tp2 to dp2": {"mesh": "tp2", "generate_mesh": "dp2"},
    "dp2,tp2 fsdp to tp4": {"mesh": "dp2,tp2", "fsdp": True, "generate_mesh": "tp4", "split_residual": "on"},
    "sp2 fsdp": {"mesh": "sp2", "fsdp": True, "fsdp_axes": "sp", "remat": "full"},
}
CASES = [  # the larger meshes in the dtype in which numbers are rounded on the way
    ("dp1", "float32"),
    ("tp2 to dp2", "float32"),
    ("dp2,tp2 fsdp to tp4", "bfloat16"),
    ("sp2 fsdp", "bfloat16"),
]
LORA = {"lora_rank": 3, "lora_alpha": 6.0, "lr": 0.05}


def proven_steps(job, count, mesh):
    """Gaps of some steps, the proof of each sync, and the adapters' norms at the end."""
    run, state = begin(job, mesh)
    proofs, gaps = [prove_sync(run, state, first=True)], []
    for _ in range(count):
        state, metrics = one_step(run, state)
        gaps.append(metrics[GAP_METRIC])
        proofs.append(prove_sync(run, state))
        wait_for_proof(run.parts)
    weights = whole_weights(run, state)["policy"]
    return gaps, proofs, {name: x.norm().item() for name, x in trees.named(weights)}


@pytest.mark.slow
@pytest.mark.parametrize("case", quick(CASES, [("dp1", "float32"), ("tp2 to dp2", "float32")]), ids=" ".join)
def test_the_gap_is_0(case):
    mesh, dtype = case
    job = small_job(
        functools.partial(GRPO, kl_coef=0.05),
        SIZES,
        dtype=dtype,
        on_gap="stop",
        batch_prompts=2,
        max_new_tokens=12,
        token_budget=48,
        steps=2,
        minibatches=2,
        verify_sync=True,
        **LORA,
        **MESHES[mesh],
    )
    gaps, proofs, norms = launch(functools.partial(proven_steps, job, 2), job.sizes, "cpu")
    assert gaps == [0.0] * 2 and len(proofs) == 3
    assert all(norm > 0 for norm in norms.values()) and any(name.endswith("_lora_b") for name in norms)
