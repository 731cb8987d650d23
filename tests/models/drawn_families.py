"""Random small configurations of families, as transformers takes them; all choices follow from a number."""

import random

from family_configs import DELTA_NETS, DENSE, EXPERTS, SINKS, SWITCHES

STARTS = SWITCHES | DENSE | SINKS | EXPERTS | DELTA_NETS
BIASED = ("llama", "granite", "smollm3")  # whose mlp may have biases
OWN_HEADS = ("llama", "qwen3", "mistral", "gemma", "gpt_oss", "glm4_moe", "ernie4_5", "ministral3", "exaone4")
WINDOWS = ("mistral", "phi3", "ministral3", "olmo3", "exaone4", "gpt_oss")


def drawn(number):
    """A configuration with all sizes, of a family that a named configuration of the tests has."""
    pick = random.Random(number)
    raw = dict(STARTS[pick.choice(list(STARTS))])
    family = raw["model_type"]
    heads = pick.choice([2, 3, 4, 6])
    raw |= {
        "vocab_size": pick.choice([37, 101, 128]),
        "hidden_size": heads * pick.choice([8, 12, 16]),
        "intermediate_size": pick.choice([24, 40, 56]),
        "num_attention_heads": heads,
        "num_key_value_heads": pick.choice([k for k in (1, 2, 3, heads) if heads % k == 0]),
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rms_norm_eps": pick.choice([1e-5, 1e-6, 1e-3]),
        "tie_word_embeddings": pick.random() < 0.3,
    }
    raw.setdefault("num_hidden_layers", 3)
    if "longrope" not in str(raw):
        size = raw["hidden_size"] // heads
        raw.pop("head_dim", None)
        if family in OWN_HEADS:
            raw["head_dim"] = pick.choice([8, 16, size])
    else:
        raw |= {"hidden_size": heads * 8} if family == "phi3" else {}
    if family in BIASED:
        raw["mlp_bias"] = pick.random() < 0.5
    if family in ("llama", "qwen3", "olmo2", "olmo3", "gemma", "granite", "gpt_oss", "glm4_moe"):
        raw["attention_bias"] = pick.random() < 0.5
    if family in ("llama", "granite", "qwen3", "mistral", "phi3", "ernie4_5", "exaone4", "olmo3"):
        raw["hidden_act"] = pick.choice(["silu", "gelu", "gelu_pytorch_tanh"])
    if family in WINDOWS and raw.get("sliding_window", 0) is not None:
        raw["sliding_window"] = pick.choice([2, 5, 17])  # of 1 a cache of transformers keeps all tokens
    if family == "minimax_m2":
        raw["head_dim"] = 16
    elif family == "glm4_moe" and raw["head_dim"] == 12:  # an odd number of them would be rotated, which is refused
        raw["head_dim"] = 8
    if family.startswith("qwen3_5"):
        key_heads = pick.choice([1, 2, 3])
        raw |= {
            "head_dim": pick.choice([8, 16]),
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": key_heads * pick.choice([1, 2, 3]),
            "linear_key_head_dim": pick.choice([4, 6, 8]),
            "linear_value_head_dim": pick.choice([4, 6, 12]),
            "linear_conv_kernel_dim": pick.choice([1, 2, 4]),
            "attention_bias": pick.random() < 0.5,
        }
    return raw
