"""Families with experts against transformers: logits, greedy tokens, files."""

import json

import pytest
import torch
import transformers
from hf_peers import SMALL, assert_peer, peer_of
from own_parts import own_part
from safetensors import safe_open

from funrl import trees
from funrl.compiled_kernels.decode_step import kernel_problem
from funrl.mesh import rules
from funrl.mesh.mesh import Mesh, parse
from funrl.models import ModelError
from funrl.models.decoder.compiled_step import step_sizes
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface import weight_slices
from funrl.models.huggingface.config import config_from_hf, config_to_hf

EIGHT = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4, "beta_slow": 1}
CONFIGS = {
    "deepseek_v2": DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
    "deepseek_v2 lite": DEEPSEEK
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_group": None,
        "topk_group": None,
        "n_shared_experts": 2,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3 plain queries": DEEPSEEK
    | {  # whose prompts make keys and values
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "rope_interleave": False,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "tie_word_embeddings": True,
    },
    "deepseek_v3 stretched": DEEPSEEK
    | {
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        "first_k_dense_replace": 2,
    },
    "deepseek_v3 yarn": DEEPSEEK | {"rope_scaling": YARN, "routed_scaling_factor": 1.0},
    "qwen3_moe": {"model_type": "qwen3_moe", **EIGHT, "norm_topk_prob": True, "head_dim": 16},
    "qwen3_moe some layers": {
        "model_type": "qwen3_moe",
        **EIGHT,
        "mlp_only_layers": [1],
        "num_experts_per_tok": 1,
        "attention_bias": True,
    },
    "qwen3_moe window": {
        "model_type": "qwen3_moe",
        **EIGHT,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 7,
        "tie_word_embeddings": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral window": {
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 5,
        "sliding_window": 9,
        "head_dim": 20,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 6},
    "olmoe normalized": {
        "model_type": "olmoe",
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "attention_bias": True,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_greedy_tokens_and_round_trip(name, tmp_path):
    assert_peer(CONFIGS[name], tmp_path, new_tokens=5)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_round_trip_through_transformers(name):
    config = config_from_hf(SMALL | CONFIGS[name])
    assert config_from_hf(config_to_hf(config)) == config
    theirs = transformers.AutoConfig.for_model(**SMALL | CONFIGS[name]).to_dict()  # every field, as transformers 5 does
    assert config_from_hf(theirs) == config
    assert "does not take" in (kernel_problem(step_sizes(config), torch.float32) or "")


@pytest.mark.parametrize(
    "name,change,message",
    [
        (
            "deepseek_v3",
            {"num_key_value_heads": 2},
            "num_key_value_heads is 2, latent attention has one for each of the",
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', supported is 'sigmoid'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True, supported is False"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', supported is 'greedy'"),
        ("deepseek_v3", {"n_group": 3}, "8 experts do not make 3 groups of at least 2, equally large"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "experts.per_token is 5, but 2 of 4 groups have 4"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is None: .*expected int"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, supported is None"),
        ("mixtral", {"num_experts_per_tok": 9}, "experts.per_token is 9, it must be at most their count, 4"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts is 0, it must be a whole number of at least 1"),
        ("qwen3_moe", {"layer_types": ["full_attention"] * 3}, "layer_types is .*supported is None"),
    ],
)
def test_what_a_family_does_not_support_is_named(name, change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | CONFIGS[name] | change))
    with pytest.raises(ModelError, match=message):
        hf.load_model(tmp_path)


def test_a_rank_reads_its_own_experts(tmp_path, monkeypatch):
    peer_of(CONFIGS["mixtral"], tmp_path)
    model, params = hf.load(tmp_path)
    sizes, read = parse("dp2,ep2"), []
    layouts = rules.layouts(model.shapes, model.axes, rules.fully_sharded(rules.STORED) | {"vocab": None}, sizes)

    class Watched:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def get_slice(self, name):
            read.append(name)
            return self.file.get_slice(name)

    monkeypatch.setattr(weight_slices, "safe_open", Watched)
    for rank in range(4):
        read.clear()
        mesh = Mesh(sizes, rank=rank)
        local = own_part(tmp_path, model, getattr(torch, model.config.source.dtype), layouts, rank)
        expected = rules.shard(params, layouts, mesh)
        assert all(torch.equal(a, b) for a, b in zip(trees.leaves(local), trees.leaves(expected), strict=True))
        numbers = {name.split(".experts.")[1].split(".")[0] for name in read if ".experts." in name}
        assert numbers == {str(2 * mesh.index("expert") + mesh.index("data"))}  # --fsdp splits a rank's two experts


def test_a_missing_expert_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    peer_of(CONFIGS["olmoe"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 tensors are missing, the first is model.layers.1.mlp.experts.5.up_proj"):
        hf.check_directory(tmp_path)
