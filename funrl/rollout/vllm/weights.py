"""Weights on their way into vLLM and back, by the names of Hugging Face files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
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
UNIT_ROWS = 1024  # of the unit matrix that a packed matrix is multiplied by at a time
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


def read_weight(module: Any, name: str, tied: bool) -> Tensor | None:
    """A matrix or vector that a vLLM model computes with, by vLLM's name; None: there is no such parameter.

    A matrix that is packed on a CPU is read by its own product with the unit matrix: each number of the result is one
    weight times 1 and others times 0, so that it has the weight's bits, but that 0 has no sign.

    Args:
      module: the model.
      tied: whether the embedding is the unembedding too.

    Raises:
      RuntimeError: the packed copy of an embedding that is the unembedding differs from it.
    """
    path, _, kind = name.rpartition(".")
    try:
        layer = module.get_submodule(path)
    except AttributeError:
        return None
    layer = getattr(layer, "base_layer", layer)  # which is inside of one for adapters
    held = getattr(layer, kind, None)
    if held is None or kind != "weight" or not hasattr(layer, "cpu_linear"):
        return held
    sizes = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next(getattr(layer, size) for size in sizes if hasattr(layer, size))
    pieces = torch.eye(width, dtype=held.dtype).split(UNIT_ROWS)
    packed = torch.cat([layer.cpu_linear(piece, held, None) for piece in pieces]).T
    if not path.endswith(("embed_tokens", "embedding")):
        return packed
    if tied and not torch.equal(packed, held):
        raise RuntimeError(f"vLLM's packed copy of {name}, by which it takes logits, has other numbers")
    return held


def unfused(model: Model, held: Callable[[str], Tensor | None], tensor: int = 1) -> Iterator[tuple[str, Tensor | None]]:
    """Weights of a vLLM decoder by their Hugging Face names.

    Args:
      model: of the weights.
      held: gives vLLM's parameters by their names. A weight is None if it cannot be read back: those of experts, which
        are packed in place.
      tensor: ranks over which vLLM splits all weights except most norms; with several, only whole norms can be read.
    """
    shapes = dict(names_of(model).values())
    read = functools.lru_cache(maxsize=4)(held)  # the parts of a matrix come near each other
    for ours, (name, shape) in names_of(model).items():
        if ours.startswith(f"{VISION}/"):
            x = held(name.removeprefix("model."))
            yield name, None if x is None or tuple(x.shape) != shape or tensor > 1 else x.detach()
            continue
        whole, begin = _place(name, shapes)
        x = None if _EXPERTS in name else read(name_in_vllm(model, whole))
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
