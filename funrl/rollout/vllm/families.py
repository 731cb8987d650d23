"""Model families that vLLM generates with, and reasons why it does not take a model.

A family is proven when its log-probabilities were compared with the native engine's before and after weights were
replaced; see tests/rollout/test_vllm_families.py. What vLLM's code of a family does not compute is refused by name.

Reference: https://docs.vllm.ai; the code of version 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from funrl.models.decoder.routing import ClampedGate
from funrl.models.flat import flat_fields
from funrl.models.huggingface.config import config_to_hf
from funrl.models.huggingface.family_fields import QUERY_GROWTH
from funrl.models.model import Model, ModelConfig
from funrl.rollout.vllm.pictures import PROCESSORS

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes of vLLM's attention on a CPU
CPU_LATENT = 512, 64  # sizes of the vector of keys and values, and of its rotated part, in latent attention on a CPU
CPU_EXPERTS = 32  # on a CPU it divides the embedding, and in gpt_oss a rank's part of an expert's inner size
GEMMA = ("gemma", "gemma2", "gemma3_text")
LLAMA_LIKE = ("ministral3", "phi3", "granite", "smollm3", "olmo2", "olmo3", "exaone4", "ernie4_5")
# That vLLM adds adapters to, proven as families are. On a CPU it has no kernel for experts beside adapters, and in phi3
# several of our weights are one matrix with one pair of factors.
ADAPTED_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", *GEMMA),
    *("granite", "smollm3", "olmo2", "olmo3", "exaone4", "ernie4_5"),
)
DENSE = ("llama", "mistral", "qwen2", "qwen3", *GEMMA, *LLAMA_LIKE, *PROCESSORS)
SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "minimax_m2", "ernie4_5_moe", "glm4_moe", "gpt_oss")
EXPERTS = (*SPARSE, "deepseek_v2", "deepseek_v3")
PROVEN_FAMILIES = DENSE + EXPERTS
PROVEN_SWITCHES: Mapping[str, Any] = {"activation": "silu", "mlp_bias": False}
WINDOWS_OF_LAYERS = ("gemma2", "gemma3_text", "olmo3", "exaone4")  # where vLLM has them for some of the layers
_GEMMA_SWITCHES = {"activation": "gelu", "attention_bias": False, "output_bias": False, "tied": True}
_PLAIN = {"attention_bias": False, "output_bias": False, "windows": None}
_LAYERS = {"attention_bias": False, "output_bias": False}
# The only values with which vLLM's code of a family computes.
FIXED_SWITCHES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(GEMMA, _GEMMA_SWITCHES),
    **dict.fromkeys(("ministral3", "granite", "smollm3", "olmo2", "ernie4_5", "ernie4_5_moe", "minimax_m2"), _PLAIN),
    **dict.fromkeys(("olmo3", "exaone4"), _LAYERS),
    "phi3": {"rotary_part": None, "windows": None},
    "qwen2_moe": {"attention_bias": True, "output_bias": False, "windows": None},
    "olmoe": {"norm_eps": 1e-5, **_PLAIN},
    "qwen3": {"output_bias": False},
    "qwen3_vl": {"output_bias": False},
    "mixtral": {"windows": None},
    "qwen3_moe": {"output_bias": False, "windows": None},
    "gpt_oss": {"attention_bias": True, "output_bias": True, "tied": False, "norm_eps": 1e-5},
}


def config_json(config: ModelConfig) -> dict[str, Any]:
    """A config.json for vLLM, which reads some fields by names that transformers has not."""
    fields = config_to_hf(config)
    if config.source.family == "ministral3":
        growth = fields["rope_scaling"]
        original = "original_max_position_embeddings"
        fields["llama_4_scaling"] = {"beta": growth[QUERY_GROWTH], original: growth[original]}
    if config.source.family == "minimax_m2":
        flat = flat_fields(config)
        fields |= {"rotary_dim": flat["rotary_part"] or flat["head"]}
        fields |= {"scoring_func": "sigmoid", "use_routing_bias": True}
    return fields


def vllm_problem(model: Model, device: str, dtype: torch.dtype, tensor: int = 1) -> str | None:
    """Reason why vLLM cannot generate with a model; None where none is known.

    Args:
      tensor: ranks that share the model.
    """
    family = model.config.source.family
    if family not in PROVEN_FAMILIES or model.abilities.code:
        return f"model_type is {family!r}; weights go into vLLM for {', '.join(PROVEN_FAMILIES)} so far"
    if tensor > 1 and model.owned is not None:
        return f"{tensor} tensor ranks share a model that sees pictures, with which vLLM has not been tried"
    if dtype == torch.float64:
        return "vLLM has no float64; use --dtype=float32 or bfloat16"
    fields = flat_fields(model.config)
    return (
        _switch_problem(fields, family)
        or (_cpu_problem(fields, family, tensor) if device == "cpu" else None)
        or (_gpt_oss_problem(fields) if family == "gpt_oss" else _attention_problem(fields, family))
    )


def _switch_problem(fields: Mapping[str, Any], family: str) -> str | None:
    """Reason why vLLM's code of a family may compute something else."""
    values = {**PROVEN_SWITCHES, **FIXED_SWITCHES.get(family, {})}
    unproven = [f"{name}={fields[name]}" for name, value in values.items() if fields.get(name, value) != value]
    scaling = fields.get("rope_scaling")
    if scaling is not None and (scaling.kind in ("longrope", "dynamic") or scaling.fixed_amplitude):
        unproven.append(f"rope_scaling={scaling}")
    return f"the model has {unproven[0]}, with which vLLM's {family} has not been tried" if unproven else None


def _cpu_problem(fields: Mapping[str, Any], family: str, tensor: int) -> str | None:
    """Reason why vLLM's kernels on a CPU do not take a model that `tensor` ranks share."""
    latent = fields.get("latent")
    experts = fields.get("experts")
    if latent is None and fields["head"] not in CPU_HEADS:
        sizes = ", ".join(map(str, CPU_HEADS))
        return f"the model's heads have size {fields['head']}; vLLM's attention on a CPU takes {sizes}"
    if latent is not None and (latent.kv_rank, latent.rope) != CPU_LATENT:
        rank, rotated = CPU_LATENT
        return (
            f"latent.kv_rank is {latent.kv_rank} and latent.rope {latent.rope}; vLLM's latent attention on a CPU takes "
            f"{rank} and {rotated}"
        )
    if experts is not None and fields["embed"] % CPU_EXPERTS:
        return f"embed is {fields['embed']}; vLLM's experts on a CPU take multiples of {CPU_EXPERTS}"
    if family == "gpt_oss" and experts is not None and experts.mlp % (CPU_EXPERTS * tensor):
        return f"experts.mlp is {experts.mlp}; vLLM's gpt_oss on a CPU takes multiples of {CPU_EXPERTS * tensor}"
    return None


def _gpt_oss_problem(fields: Mapping[str, Any]) -> str | None:
    """Reason why vLLM's gpt_oss computes something else."""
    scaling = fields["rope_scaling"]
    experts = fields["experts"]
    if scaling is None or scaling.kind != "yarn" or scaling.mscale or scaling.mscale_all:
        return f"rope_scaling is {scaling}; vLLM's gpt_oss takes that of kind 'yarn', without mscale"
    if experts.clamped != ClampedGate():
        return f"experts.clamped is {experts.clamped}; vLLM's gpt_oss takes {ClampedGate()}"
    windows = fields["windows"] or (None,) * fields["layers"]
    if None in windows[::2] or any(window is not None for window in windows[1::2]) or len(set(windows[::2])) > 1:
        return f"the model's attention windows are {windows}; vLLM's gpt_oss has one window on every other layer"
    return None


def _attention_problem(fields: Mapping[str, Any], family: str) -> str | None:
    """Reason why vLLM's attention computes something else."""
    heads, head, embed = fields["heads"], fields["head"], fields["embed"]
    if family in ("qwen2", "qwen2_moe", "phi3", "olmoe") and heads * head != embed:
        return f"heads={heads} of size {head} do not make embed={embed}, as vLLM's {family} takes it"
    if len(set(fields.get("windows") or ())) > 1 and family not in WINDOWS_OF_LAYERS:
        return f"the model's layers have different attention windows, {fields['windows']}, which vLLM's {family} lacks"
    latent = fields.get("latent")
    if latent is not None and not latent.interleaved:
        return "latent.interleaved is False; vLLM's latent attention rotates neighbours"
    scaling = fields.get("rope_scaling")
    if latent is None or scaling is None:
        return None
    if not scaling.truncate or (scaling.mscale > 0) != (scaling.mscale_all > 0):
        return f"rope_scaling is {scaling}; vLLM's latent attention takes truncate, and both of mscale or neither"
    return None
