"""The config.json of published models, with all its fields: accepted, with the published number of parameters."""

import json

import pytest

from funrl import trees
from funrl.models.huggingface import directories as hf

USUAL = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"}
QWEN = USUAL | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "bos_token_id": 151643,
    "eos_token_id": 151645, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "use_sliding_window": False,
    "transformers_version": "4.51.0", "vocab_size": 151936,
}  # fmt: skip
QWEN3 = QWEN | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "max_position_embeddings": 40960,
}  # fmt: skip
LLAMA = USUAL | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_act": "silu",
    "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 128256,
}  # fmt: skip
GEMMA = USUAL | {
    "attention_bias": False, "bos_token_id": 2, "cache_implementation": "hybrid", "head_dim": 256, "pad_token_id": 0,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
}  # fmt: skip
PHI = USUAL | {
    "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}, "bos_token_id": 1, "embd_pdrop": 0.0,
    "eos_token_id": 32000, "hidden_act": "silu", "model_type": "phi3", "pad_token_id": 32000, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "original_max_position_embeddings": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
DEEPSEEK = USUAL | {
    "attention_bias": False, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"}, "ep_size": 1,
    "aux_loss_alpha": 0.001, "seq_aux": True, "hidden_act": "silu", "kv_lora_rank": 512, "moe_layer_freq": 1,
    "max_position_embeddings": 163840, "pretraining_tp": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "rms_norm_eps": 1e-06, "rope_theta": 10000, "tie_word_embeddings": False,
    "transformers_version": "4.33.1",
}  # fmt: skip
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def sized(hidden, mlp, layers, heads, kv_heads, **fields):
    return fields | {
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }  # fmt: skip


PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": (494_032_768, QWEN | sized(
        896, 4864, 24, 14, 2, max_position_embeddings=32768, max_window_layers=21, sliding_window=32768,
        tie_word_embeddings=True, use_mrope=False,
    )),
    "Qwen/Qwen3-0.6B-FP8": (596_049_920, QWEN3 | sized(
        1024, 3072, 28, 16, 8, max_window_layers=28, tie_word_embeddings=True,
        quantization_config=FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]},
    )),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, QWEN3 | sized(
        2048, 6144, 48, 32, 4, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", decoder_sparse_step=1,
        mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
        output_router_logits=False, router_aux_loss_coef=0.001, max_window_layers=48, tie_word_embeddings=False,
    )),
    "meta-llama/Llama-3.2-1B-Instruct": (1_235_814_400, LLAMA | sized(
        2048, 8192, 16, 32, 8, bos_token_id=128000, eos_token_id=[128001, 128008, 128009], head_dim=64,
        max_position_embeddings=131072, tie_word_embeddings=True, rope_scaling={
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    )),
    "google/gemma-2-2b": (2_614_341_888, GEMMA | sized(
        2304, 9216, 26, 8, 4, architectures=["Gemma2ForCausalLM"], model_type="gemma2", attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, eos_token_id=1, hidden_act="gelu_pytorch_tanh", max_position_embeddings=8192,
        rope_theta=10000.0, sliding_window=4096, vocab_size=256000,
    )),
    "google/gemma-3-1b-it": (999_885_952, GEMMA | sized(
        1152, 6912, 26, 4, 1, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", eos_token_id=[1, 106],
        attn_logit_softcapping=None, final_logit_softcapping=None, max_position_embeddings=32768, sliding_window=512,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window_pattern=6, vocab_size=262144,
    )),
    "google/gemma-3-4b-it": (4_300_079_472, {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": 255999,
        "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02,
        "mm_tokens_per_image": 256, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    }),
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": (893_675_552, {
        "architectures": ["LlavaOnevisionForConditionalGeneration"], "model_type": "llava_onevision",
        "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
        "image_token_index": 151646, "video_token_index": 151647, "projector_hidden_act": "gelu",
        "tie_word_embeddings": False, "torch_dtype": "float16", "use_image_newline_parameter": True,
        "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "text_config": {
            "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645,
            "hidden_size": 896, "intermediate_size": 4864, "max_window_layers": 24, "model_type": "qwen2",
            "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1000000.0,
            "sliding_window": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 152000,
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False,
        },
    }),
    "mistralai/Mistral-7B-v0.3": (7_248_023_552, USUAL | sized(
        4096, 14336, 32, 32, 8, architectures=["MistralForCausalLM"], model_type="mistral", bos_token_id=1,
        eos_token_id=2, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-05, rope_theta=1000000.0,
        sliding_window=None, tie_word_embeddings=False, vocab_size=32768, head_dim=None,
    )),
    "mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, USUAL | sized(
        4096, 14336, 32, 32, 8, architectures=["MixtralForCausalLM"], model_type="mixtral", bos_token_id=1,
        eos_token_id=2, hidden_act="silu", max_position_embeddings=32768, num_experts_per_tok=2, num_local_experts=8,
        output_router_logits=False, rms_norm_eps=1e-05, rope_theta=1000000.0, router_aux_loss_coef=0.02,
        sliding_window=None, tie_word_embeddings=False, vocab_size=32000,
    )),
    "microsoft/Phi-3-mini-4k-instruct": (3_821_079_552, PHI | sized(
        3072, 8192, 32, 32, 32, sliding_window=2047, vocab_size=32064,
    )),
    "microsoft/phi-4": (14_659_507_200, PHI | sized(
        5120, 17920, 40, 40, 10, sliding_window=None, vocab_size=100352, rope_theta=250000, bos_token_id=100257,
        eos_token_id=100265, pad_token_id=100349, max_position_embeddings=16384,
    )),
    "allenai/OLMo-2-0425-1B": (1_484_916_736, USUAL | sized(
        2048, 8192, 16, 16, 16, architectures=["Olmo2ForCausalLM"], model_type="olmo2", attention_bias=False,
        eos_token_id=100257, hidden_act="silu", max_position_embeddings=4096, pad_token_id=100277, rms_norm_eps=1e-06,
        rope_scaling=None, rope_theta=500000, tie_word_embeddings=False, torch_dtype="float32", vocab_size=100352,
    )),
    "allenai/OLMoE-1B-7B-0924": (6_919_161_856, USUAL | sized(
        2048, 1024, 16, 16, 16, architectures=["OlmoeForCausalLM"], model_type="olmoe", attention_bias=False,
        clip_qkv=None, eos_token_id=50279, hidden_act="silu", max_position_embeddings=4096, norm_topk_prob=False,
        num_experts=64, num_experts_per_tok=8, output_router_logits=False, pad_token_id=1, rms_norm_eps=1e-05,
        rope_scaling=None, rope_theta=10000.0, router_aux_loss_coef=0.01, tie_word_embeddings=False, vocab_size=50304,
    )),
    "HuggingFaceTB/SmolLM3-3B": (3_075_098_624, LLAMA | sized(
        2048, 11008, 36, 16, 4, architectures=["SmolLM3ForCausalLM"], model_type="smollm3", bos_token_id=None,
        eos_token_id=128012, layer_types=["full_attention"] * 36, max_position_embeddings=65536, max_window_layers=28,
        no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, pad_token_id=128004, pretraining_tp=2,
        rms_norm_eps=1e-06, rope_scaling=None, rope_theta=5000000.0, sliding_window=None, use_sliding_window=False,
    )),
    "ibm-granite/granite-3.3-2b-instruct": (2_533_539_840, LLAMA | sized(
        2048, 8192, 40, 32, 8, architectures=["GraniteForCausalLM"], model_type="granite", bos_token_id=0,
        eos_token_id=0, pad_token_id=0, attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=8.0,
        residual_multiplier=0.22, max_position_embeddings=131072, rope_scaling=None, rope_theta=10000000.0,
        tie_word_embeddings=True, vocab_size=49159,
    )),
    "Qwen/Qwen1.5-MoE-A2.7B": (14_315_784_192, QWEN | sized(
        2048, 5632, 24, 16, 16, architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", decoder_sparse_step=1,
        max_position_embeddings=8192, max_window_layers=21, moe_intermediate_size=1408, norm_topk_prob=False,
        num_experts=60, num_experts_per_tok=4, output_router_logits=False, router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=5632, sliding_window=32768, tie_word_embeddings=False,
    )),
    "openai/gpt-oss-20b": (20_914_757_184, USUAL | sized(
        2880, 2880, 24, 64, 8, architectures=["GptOssForCausalLM"], model_type="gpt_oss", attention_bias=True,
        eos_token_id=200002, experts_per_token=4, head_dim=64, hidden_act="silu", initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072, num_local_experts=32,
        num_experts_per_tok=4, output_router_logits=False, pad_token_id=199999, rms_norm_eps=1e-05, rope_theta=150000,
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        }, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False,
        vocab_size=201088, quantization_config={
            "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        },
    )),
    "google/gemma-2b": (2_506_172_416, GEMMA | sized(
        2048, 16384, 18, 8, 1, architectures=["GemmaForCausalLM"], model_type="gemma", eos_token_id=1,
        hidden_act="gelu", hidden_activation=None, max_position_embeddings=8192, rope_scaling=None, rope_theta=10000.0,
        vocab_size=256000,
    )),
    "allenai/Olmo-3-1025-7B": (7_298_011_136, USUAL | sized(
        4096, 11008, 32, 32, 32, architectures=["Olmo3ForCausalLM"], model_type="olmo3", attention_bias=False,
        eos_token_id=100257, hidden_act="silu", pad_token_id=100277, rms_norm_eps=1e-06, rope_theta=500000,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8, max_position_embeddings=65536,
        rope_scaling={
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        }, sliding_window=4096, tie_word_embeddings=False, vocab_size=100278,
    )),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, QWEN3 | sized(
        2048, 5120, 48, 16, 2, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", head_dim=256,
        decoder_sparse_step=1, full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128, max_position_embeddings=262144,
        mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True, num_experts=512, num_experts_per_tok=10,
        output_router_logits=False, partial_rotary_factor=0.25, rope_theta=10000000, router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=512, tie_word_embeddings=False,
    )),
    "deepseek-ai/DeepSeek-V2-Lite": (15_706_484_224, DEEPSEEK | sized(
        2048, 10944, 27, 16, 16, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", n_group=1,
        bos_token_id=100000, eos_token_id=100001, first_k_dense_replace=1, moe_intermediate_size=1408,
        n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=6, q_lora_rank=None,
        routed_scaling_factor=1.0, scoring_func="softmax", topk_group=1, topk_method="greedy", vocab_size=102400,
        rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    )),
    "deepseek-ai/DeepSeek-V3": (671_026_419_200, DEEPSEEK | sized(
        7168, 18432, 61, 128, 128, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", n_group=8,
        bos_token_id=0, eos_token_id=1, first_k_dense_replace=3, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, num_nextn_predict_layers=1, q_lora_rank=1536,
        quantization_config=FP8, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=4, vocab_size=129280,
        topk_method="noaux_tc", rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_read_as_it_is(name, tmp_path):
    parameters, raw = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = hf.load_model(tmp_path)
    assert trees.count(model.shapes) == parameters
    assert model.config.source.dtype == raw["torch_dtype"]
    renamed = {key: value for key, value in raw.items() if key != "torch_dtype"} | {"dtype": raw["torch_dtype"]}
    (tmp_path / "config.json").write_text(json.dumps(renamed))
    assert hf.load_model(tmp_path).config == model.config
