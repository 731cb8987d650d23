"""Weights on their way into vLLM and back, by the names of Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from funrl.models.huggingface.names import UNEMBED, by_expert, fused, names_of
from funrl.models.model import Model
from funrl.models.vision.model import VISION

# vLLM's matrices that hold several of a file's, one after another.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
# vLLM's names of a single expert's weights in gpt_oss, whose files have one tensor of all of them.
GPT_OSS_EXPERT = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}
_EXPERTS = ".experts."
_SINKS = ".sinks"


def as_loaded(
    model: Model, named_weights: Iterable[tuple[str, Tensor]], sinks: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names of `names_of` as vLLM's loaders take them: those of each expert by themselves.

    Args:
      sinks: receives the attention sinks by their names, which vLLM's loader drops.
    """
    family = model.config.source.family
    for name, x in by_expert(fused(family, names_of(model), named_weights)):
        if family == "gpt_oss" and _EXPERTS in name:
            prefix, _, kind = name.rpartition(".")
            for i, expert in enumerate(x):
                yield f"{prefix}.{i}.{GPT_OSS_EXPERT[kind]}", expert
            continue
        if name.endswith(_SINKS):
            sinks[name] = x.clone()
        yield name, x


def unfused(model: Model, held: Mapping[str, Tensor], tensor: int = 1) -> Iterator[tuple[str, Tensor | None]]:
    """Weights of a vLLM decoder by their Hugging Face names.

    Args:
      model: of the weights.
      held: vLLM's parameters. A weight is None if it cannot be read back: a packed and released matrix, which is
        empty, and those of experts, which are packed in place.
      tensor: ranks over which vLLM splits all weights except most norms; with several, only whole norms can be read.
    """
    shapes = dict(names_of(model).values())
    for ours, (name, shape) in names_of(model).items():
        if ours.startswith(f"{VISION}/"):
            x = held.get(name.removeprefix("model."))
            yield name, None if x is None or tuple(x.shape) != shape or tensor > 1 else x.detach()
            continue
        whole, begin = _place(name, shapes)
        x = None if _EXPERTS in name else held.get(name_in_vllm(model, whole))
        is_norm = name.split(".")[-2].endswith("norm")
        if x is None or not x.numel() or (tensor > 1 and not (is_norm and tuple(x.shape) == shape)):
            yield name, None
        else:
            yield name, x.detach()[begin : begin + shape[0]]  # rows of the vocabulary are padded


def name_in_vllm(model: Model, name: str) -> str:
    """vLLM's name of a decoder's weight, from the name in Hugging Face files with fused matrices."""
    if model.owned is not None:
        inner = name.removeprefix("model.").removeprefix("language_model.")
        return f"language_model.{inner}" if name == UNEMBED else f"language_model.model.{inner}"
    if model.config.source.family == "gpt_oss":
        return name.replace(".self_attn.", ".attn.").replace("embed_tokens", "embedding")
    return name


def _place(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, int]:
    """The name of vLLM's matrix that holds a weight, and the first of its rows that are the weight's."""
    parent, layer, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", *name.split("."))
    for whole, parts in FUSED.items():
        siblings = [f"{parent}.{part}.{kind}" for part in parts]
        if layer in parts and all(sibling in shapes for sibling in siblings):
            before = siblings[: parts.index(layer)]
            return f"{parent}.{whole}.{kind}", sum(shapes[sibling][0] for sibling in before)
    return name, 0
