"""Runs of a Gemma 4 with all its parts: layers that lend keys, vectors of layers, experts; the same on every mesh."""

import pytest
from mesh_runs import assert_equal_metrics, learn_by_samples, learn_from_texts, saved_model

from funrl.tasks import arithmetic


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(
        tmp_path_factory.mktemp("gemma4"), "gemma4_text", vocab_size_per_layer_input=len(arithmetic.tokenizer()),
        hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, global_head_dim=12, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=6,
        num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=4, enable_moe_block=True,
        num_experts=4, top_k_experts=2, moe_intermediate_size=8, max_position_embeddings=128,
        final_logit_softcapping=5.0,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.gloo
def test_it_learns_from_texts_alike_on_every_mesh(folder, tmp_path):
    meshes = {"dp1": (), "tp2": ("--split_residual=on",), "ep2": (), "sp2": ("--remat=full",)}
    changes = learn_from_texts(meshes, folder, tmp_path)
    assert all((change > 0) != name.endswith("layer_scalar") for name, change in changes.items())


@pytest.mark.slow
@pytest.mark.gloo
def test_it_learns_by_its_own_samples_alike_on_every_mesh(folder, tmp_path):
    meshes = {"dp1": (), "dp2": ("--fsdp",), "tp2": ("--new_tokens_per_step=6",), "ep2": ("--lora_rank=2",)}
    rows, gap = learn_by_samples(meshes, folder, tmp_path)
    assert gap == 0
    assert_equal_metrics(rows, ("dp2", "tp2"), "train/loss")
