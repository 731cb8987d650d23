"""Weights on their way into vLLM and back, by the names of Hugging Face files."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import AXES
from funrl.mesh.rules import WHOLE_EXPERTS, Layout, layout
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
VOCABULARY_MULTIPLE = 64  # of the tokens for which vLLM has rows
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


@dataclasses.dataclass(frozen=True)
class VocabularyLayout(Layout):
    """Layout of rows of tokens, which vLLM fills up to a multiple of 64 before it splits them; without the filling."""

    def box(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The interval that a rank holds in each dim; see `Layout`."""
        tokens = self.shape[0]
        filled = dataclasses.replace(
            self, shape=(-(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE, *self.shape[1:])
        )
        rows, *others = Layout.box(filled, rank)
        return (min(rows[0], tokens), min(rows[1], tokens)), *others


def held_layouts(model: Model, sizes: Mapping[str, int]) -> trees.Tree:
    """Layouts of what a tensor rank of vLLM holds of the weights that can be read back.

    vLLM splits heads, mlps and the vocabulary in equal parts. Of norms, which it splits in some models, those that are
    whole can be read.

    Args:
      sizes: of the mesh axes.
    """

    def held(name: str, x: Tensor, logical: tuple[str, ...]) -> Layout:
        logical = ("norm",) * len(logical) if name.endswith("norm") else logical
        own = layout(name, tuple(x.shape), logical, WHOLE_EXPERTS, sizes)
        return VocabularyLayout(own.shape, own.spec, own.sizes) if logical[0] == "vocab" else own

    return trees.map_named(held, model.shapes, model.axes)


def unfused(
    model: Model, held: Callable[[str], Tensor | None], tensor: int = 1, index: int = 0
) -> Iterator[tuple[str, Tensor | None]]:
    """A tensor rank's parts of the weights of a vLLM decoder, by their Hugging Face names.

    Args:
      model: of the weights.
      held: gives vLLM's parameters by their names. A weight is None if it cannot be read back: those of experts, which
        are packed in place, and those that vLLM splits otherwise than `held_layouts`, such as keys and values of fewer
        heads than ranks.
      tensor: ranks over which vLLM splits the model.
      index: of this rank among them.
    """
    layouts = dict(trees.named(held_layouts(model, dict.fromkeys(AXES, 1) | {"tensor": tensor})))
    counts = {name: math.prod(layouts[ours].local_shape(index)) for ours, (name, _) in names_of(model).items()}
    read = functools.lru_cache(maxsize=4)(held)  # the parts of a matrix come near each other
    for ours, (name, shape) in names_of(model).items():
        if ours.startswith(f"{VISION}/"):
            x = held(name.removeprefix("model."))
            yield name, None if x is None or tuple(x.shape) != shape or tensor > 1 else x.detach()
            continue
        whole, parts = _place(name, counts)
        x = None if _EXPERTS in name else read(name_in_vllm(model, whole))
        total = sum(counts[part] for part in parts)
        fills = isinstance(layouts[ours], VocabularyLayout)
        if x is None or not x.numel() or total > x.numel() or (total < x.numel() and not fills):
            yield name, None
        else:
            before = sum(counts[part] for part in parts[: parts.index(name)])
            begin, end = (count // x[0].numel() for count in (before, before + counts[name]))
            yield name, x.detach()[begin:end]


def name_in_vllm(model: Model, name: str) -> str:
    """vLLM's name of a decoder's weight, from the name in Hugging Face files with fused matrices."""
    if model.owned is not None:
        inner = name.removeprefix("model.").removeprefix("language_model.")
        return f"language_model.{inner}" if name == UNEMBED else f"language_model.model.{inner}"
    if model.config.source.family == "gpt_oss":
        return name.replace(".self_attn.", ".attn.").replace("embed_tokens", "embedding")
    return name


def _place(name: str, names: Collection[str]) -> tuple[str, Sequence[str]]:
    """The name of vLLM's matrix that holds a weight, and the weights that it holds one after another.

    Args:
      names: of all weights.
    """
    parent, layer, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", *name.split("."))
    for whole, parts in FUSED.items():
        siblings = [f"{parent}.{part}.{kind}" for part in parts]
        if layer in parts and all(sibling in names for sibling in siblings):
            return f"{parent}.{whole}.{kind}", siblings
    return name, [name]
