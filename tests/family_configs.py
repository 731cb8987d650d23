"""Small configurations of families and switches, as transformers' config classes take them, by a name each."""

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.3, 2.0],
    "long_factor": [2.0, 3.0, 9.0],
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4, "beta_slow": 1}
SWITCHES = {
    "llama mlp bias": {"model_type": "llama", "mlp_bias": True, "attention_bias": True},
    "llama gelu": {"model_type": "llama", "hidden_act": "gelu", "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3 tanh gelu": {"model_type": "qwen3", "hidden_act": "gelu_pytorch_tanh", "head_dim": 8},
    "granite mlp bias": {"model_type": "granite", "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "smollm3 mlp bias": {"model_type": "smollm3", "mlp_bias": True},
    "llama dynamic": {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "llama yarn": {
        "model_type": "llama",
        "rope_scaling": YARN | {"truncate": False, "attention_factor": 1.3},
        "rope_theta": 500.0,
    },
    "llama longrope": {
        "model_type": "llama",
        "head_dim": 6,
        "rope_scaling": LONGROPE | {"factor": 8.0, "attention_factor": 0.9},
    },
    "phi3 longrope": {
        "model_type": "phi3",
        "num_key_value_heads": 6,
        "rope_scaling": LONGROPE,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 128,
    },
    "phi3 partial rotary": {"model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": 9},
}
DENSE = {
    "gemma": {"model_type": "gemma", "head_dim": 8, "num_key_value_heads": 6},
    "gemma bias": {
        "model_type": "gemma",
        "head_dim": 12,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "hidden_act": "gelu",
    },
    "olmo3": {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 7},
    "olmo3 stretched": {
        "model_type": "olmo3",
        "sliding_window": 5,
        "attention_bias": True,
        "rope_theta": 400.0,
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 400.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 400.0},
        },
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "exaone4": {"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 7},
    "exaone4 full": {
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "head_dim": 12,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 8,
        "rope_parameters": YARN
        | {
            "rope_theta": 1e4,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "ministral3 window": {
        "model_type": "ministral3",
        "head_dim": 12,
        "sliding_window": 7,
        "tie_word_embeddings": True,
        "rope_parameters": YARN | {"rope_theta": 1e3, "llama_4_scaling_beta": 0.1},
    },
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 8},
    "ernie4_5 bias": {
        "model_type": "ernie4_5",
        "head_dim": 12,
        "use_bias": True,
        "tie_word_embeddings": False,
        "num_key_value_heads": 3,
    },
}
_GLM = {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
_ERNIE = {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 24,
    "moe_num_shared_experts": 1,
}
_QWEN = {
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
EXPERTS = {
    "qwen2_moe": _QWEN,
    "qwen2_moe window": _QWEN
    | {
        "use_sliding_window": True,
        "sliding_window": 7,
        "qkv_bias": False,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "glm4_moe": _GLM | {"use_qk_norm": True, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    "glm4_moe bias": _GLM
    | {
        "attention_bias": True,
        "head_dim": 16,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.25},
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "rotary_dim": 8,
    },
    "minimax_m2 whole rotary": {
        "model_type": "minimax_m2",
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "head_dim": 8,
        "num_key_value_heads": 6,
        "tie_word_embeddings": True,
    },
    "ernie4_5_moe": _ERNIE,
    "ernie4_5_moe some layers": _ERNIE
    | {
        "num_hidden_layers": 5,
        "moe_layer_interval": 2,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 2,
        "tie_word_embeddings": False,
    },
}
_GPT = {
    "model_type": "gpt_oss",
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 8,
    "sliding_window": 7,
    "rope_scaling": YARN | {"truncate": False},
    "rope_theta": 1e3,
}
SINKS = {
    "gpt_oss": _GPT,
    "gpt_oss full": _GPT
    | {
        "layer_types": ["full_attention"] * 3,
        "attention_bias": False,
        "swiglu_limit": 0.4,
        "swiglu_alpha": 1.2,
        "num_key_value_heads": 6,
        "tie_word_embeddings": True,
    },
    "gpt_oss plain rotary": {name: value for name, value in _GPT.items() if name != "rope_scaling"}
    | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "num_experts_per_tok": 1,
        "num_hidden_layers": 2,
        "head_dim": 12,
    },
}
_DELTA = {
    "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_DELTA_MOE = _DELTA | {
    "linear_value_head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
DELTA_NETS = {
    "qwen3_5": _DELTA | {"model_type": "qwen3_5_text"},
    "qwen3_5 in turn": _DELTA
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "layer_types": None,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": _DELTA_MOE | {"model_type": "qwen3_5_moe_text"},
    "qwen3_5_moe stretched": _DELTA_MOE
    | {
        "model_type": "qwen3_5_moe_text",
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4, "partial_rotary_factor": 0.5},
    },
}
_GEMMA = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": 7,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 101,
}
_WIDE_GEMMA = _GEMMA | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4 = {
    "gemma4": _WIDE_GEMMA,
    "gemma4 vectors": _GEMMA
    | {
        "hidden_size_per_layer_input": 12,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 1.5,
    },
    "gemma4 own keys": _GEMMA
    | {
        "hidden_size_per_layer_input": 6,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "num_hidden_layers": 3,
        "layer_types": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "gemma4 experts": _WIDE_GEMMA
    | {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 24,
        "num_global_key_value_heads": 2,
        "final_logit_softcapping": 1.5,
    },
}
_FULL = {"layer_types": ["full_attention"] * 3, "head_dim": 8}
_FULL_MOE = _FULL | {name: x for name, x in _DELTA_MOE.items() if name.endswith(("size", "experts", "tok"))}
WITHOUT_WINDOWS = {  # of families whose layers usually differ
    "olmo3 full": {"model_type": "olmo3"} | _FULL,
    "gemma2 full": {"model_type": "gemma2"} | _FULL,
    "gemma3 full": {"model_type": "gemma3_text"} | _FULL,
    "exaone4 unused window": {"model_type": "exaone4", "sliding_window": 7} | _FULL,
    "qwen3_next full": {"model_type": "qwen3_next"} | _FULL_MOE,
    "qwen3_5 full": {"model_type": "qwen3_5_text"} | _FULL,
    "qwen3_5_moe full": {"model_type": "qwen3_5_moe_text"} | _FULL_MOE,
}
ALL = SWITCHES | DENSE | SINKS | EXPERTS | DELTA_NETS | GEMMA4 | WITHOUT_WINDOWS
# The meshes on which a family's small model is compared with one device, with gradients and in float64.
# Those that have a kind of weights, positions or mixers that no other has; tests of adapters have more of them on tp2.
MESHES = {
    "ernie4_5 bias": ("tp2 split",),
    "ministral3 window": ("sp2",),
    "gpt_oss": ("sp2", "ep2,tp2 split"),
    "qwen3_5_moe": ("sp2", "ep2,tp2 split"),
    "gemma4 vectors": ("tp2 split", "dp2 fsdp", "sp2"),
    "gemma4 experts": ("ep2,tp2 split",),
}
