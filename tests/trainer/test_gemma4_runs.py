"""Runs of a Gemma 4 with all its parts: layers that lend keys, vectors of layers, experts; the same on a mesh.

tests/models/test_families_on_meshes.py has its layers on further meshes.
"""

import pytest
from mesh_runs import assert_equal_metrics, learn_by_samples, learn_from_texts, saved_model

from funrl.tasks import arithmetic


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(
        tmp_path_factory.mktemp("gemma4"),
        "gemma4_text",
        vocab_size_per_layer_input=len(arithmetic.tokenizer()),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=12,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=6,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=4,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=8,
        max_position_embeddings=128,
        final_logit_softcapping=5.0,
    )


@pytest.mark.slow
@pytest.mark.gloo
def test_it_learns_from_texts_alike_on_tensor_ranks(folder, tmp_path):
    meshes = {"dp1": (), "tp2": ("--split_residual=on", "--remat=full")}
    changes = learn_from_texts(meshes, folder, tmp_path)
    assert all((change > 0) != name.endswith("layer_scalar") for name, change in changes.items())


@pytest.mark.slow
@pytest.mark.gloo
def test_it_learns_by_its_own_samples_alike_on_ranks_of_experts(folder, tmp_path):
    flags = ("--new_tokens_per_step=6", "--lora_rank=2")
    rows, gap = learn_by_samples({"dp1": flags, "ep2": flags}, folder, tmp_path)
    assert gap == 0 and all(row["actor/grad_norm"] > 0 for row in rows["dp1"])
    assert_equal_metrics(rows, ("ep2",), "response_length/mean", "reward/mean", "actor/pg_loss", "actor/grad_norm")
