"""A model of 671 billion weights generates on 16 H200 or 32 H100 in bfloat16, by the dry run."""

import json

import pytest
from dry_jobs import plain

from funrl import trees
from funrl.cost import dry_run
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.rules import GENERATE, layouts
from funrl.mesh.text import parse

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}


def job_on(mesh, hardware, folder, ranks, cache_gb):
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    rows = {"batch_prompts": 8 * ranks, "samples_per_prompt": 8, "max_new_tokens": 2048}
    flags = {"model": str(folder), "mesh": mesh, "generate_mesh": mesh, "dtype": "bfloat16", "kv_cache_gb": cache_gb}
    return plain("grpo", memory=hardware.memory, **flags, **rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "mesh", "cache_gb"), [("h200", 16, "ep8,tp2", 10.0), ("h100", 32, "ep4,tp8", None)]
)
def test_the_engine_of_deepseek_v3_fits(name, ranks, mesh, cache_gb, tmp_path):
    hardware = HARDWARE[name]
    job = job_on(mesh, hardware, tmp_path, ranks, cache_gb)
    assert 670e9 < trees.count(job.model.shapes) < 672e9
    costs = dry_run.estimate(job, 512, hardware, pool="generate").phases["generate"]
    wanted = layouts(job.model.shapes, job.model.axes, GENERATE, parse(mesh))
    numbers = trees.count(trees.map(lambda x, layout: x.new_empty(layout.local_shape()), job.model.shapes, wanted))
    # Routers and their biases may be in float32.
    assert 2 * numbers <= costs.peak["weights"] < 2.01 * numbers
    assert costs.peak["cache"] > 7e9
    assert sum(costs.peak.values()) < 0.92 * hardware.memory
