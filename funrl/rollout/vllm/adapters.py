"""Adapters beside vLLM's weights, by its runtime LoRA, which gets tensors here instead of files.

Each adapter has a slot of its own, so a completion that has begun ends under the factors that it began with, as long as
there are slots for all that are in use.

Reference: vllm/lora of version 0.32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.reshard import replicated
from funrl.models.huggingface.names import names_of
from funrl.models.lora import PROJECTIONS, trained_part, with_lora
from funrl.models.model import Lora, Model
from funrl.rollout.engine import WeightSpec
from funrl.rollout.native.loading import spec_of_adapter
from funrl.rollout.vllm.families import ADAPTED_FAMILIES
from funrl.rollout.vllm.weights import name_in_vllm

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's slots
FIRST_END, SECOND_END = ".lora_A.weight", ".lora_B.weight"


def vllm_adapter_problem(model: Model, lora: Lora, device: str, dtype: torch.dtype) -> str | None:
    """Reason why vLLM cannot add adapters to a model, so that it needs merged weights; None: it can."""
    family = model.config.source.family
    if family not in ADAPTED_FAMILIES or model.owned is not None:
        return f"model_type is {family!r}; vLLM adds adapters to {', '.join(ADAPTED_FAMILIES)} so far"
    if others := set(lora.targets) - set(PROJECTIONS):
        return f"{', '.join(sorted(others))} has adapters; vLLM adds those of attention and dense mlps"
    if lora.rank > RANKS[-1]:
        return f"the rank is {lora.rank}; vLLM takes {RANKS[-1]} at most"
    if device == "cuda" and dtype == torch.float32:
        return "vLLM's kernels for adapters on a GPU compute in 16 bits"
    return None


def vllm_adapter_weights(model: Model, whole: WeightSpec, lora: Lora) -> WeightSpec:
    """The form in which vLLM takes the factors of an adapter: whole on every rank, by PEFT's names.

    Args:
      model: without adapters.
      whole: the form of its weights.
    """
    spec = spec_of_adapter(model, whole, lora)
    adapted = with_lora(model, lora)
    names = names_of(adapted)
    own = {name: names[name] for name, _ in trees.named(trained_part(adapted, adapted.shapes))}
    return dataclasses.replace(spec, names=own, layouts=replicated(spec.layouts), streamed=True)


def slot_options(model: Model, lora: Lora | None, slots: int) -> dict[str, Any]:
    """Arguments of vLLM for adapters; {}: without."""
    if lora is None:
        return {}
    names = names_of(model)
    targets = {there.split(".")[-2] for name, (there, _) in names.items() if name.rsplit("/", 1)[-1] in lora.targets}
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
        "lora_target_modules": sorted(targets),
    }


def lora_request(number: int) -> Any:
    """Name of an adapter in vLLM's requests; None for number 0, the weights alone."""
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    return LoRARequest(f"adapter-{number}", number, "in memory") if number else None


class SlotFactors(NamedTuple):
    """Factors of one matrix in a slot of vLLM.

    Attributes:
      name: of the matrix in Hugging Face files, less ".weight".
      a: [rank, in].
      b: [out, rank], as given.
      scaled: `b` times the scale, which vLLM multiplies by.
    """

    name: str
    a: Tensor
    b: Tensor
    scaled: Tensor


def place_factors(
    manager: Any, model: Model, number: int, scale: float, factors: Mapping[str, Tensor]
) -> dict[str, SlotFactors]:
    """Put the factors of an adapter into a free slot; returns them by vLLM's names of their matrices.

    Args:
      manager: vLLM's LoRAModelManager.
      number: of the adapter; one that has it is replaced.
      scale: of the product.
      factors: by PEFT's names; they are copied.
    """
    from vllm.lora.lora_model import LoRAModel  # type: ignore[import-not-found]
    from vllm.lora.lora_weights import LoRALayerWeights  # type: ignore[import-not-found]

    manager.remove_adapter(number)
    dtype = manager.lora_config.lora_dtype
    placed = {}
    loras = {}
    for first, x in factors.items():
        if not first.endswith(FIRST_END):
            continue
        name = first.removesuffix(FIRST_END)
        a, b = (x.detach().to(dtype, copy=True) for x in (x, factors[name + SECOND_END]))
        module = name_in_vllm(model, f"{name}.weight").removesuffix(".weight")
        placed[module] = SlotFactors(name, a, b, b * scale)
        loras[module] = LoRALayerWeights(module, len(a), len(a), a, placed[module].scaled)
    rank = max(len(lora.lora_a) for lora in loras.values())
    manager.add_adapter(LoRAModel(number, rank, loras))
    manager.activate_adapter(number)
    return placed


def read_factors(manager: Any, number: int, placed: Mapping[str, SlotFactors]) -> Iterator[tuple[str, Tensor | None]]:
    """Factors in a slot by PEFT's names: those of `placed` where the slot has exactly them, else what the slot has."""
    slot = manager.lora_index_to_id.index(number)
    for module_name, module in manager.modules.items():
        names = manager.packed_modules.get(module_name, [module_name])
        parts = [placed.get(name) for name in names]
        firsts = _own_part(module, "slice_lora_a", [part and part.a for part in parts])
        seconds = _own_part(module, "slice_lora_b", [part and part.scaled for part in parts])
        held = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
        for part, a, b, (slot_a, slot_b) in zip(parts, firsts, seconds, held, strict=True):
            if part is not None and a is not None and b is not None:
                yield part.name + FIRST_END, part.a if _holds(slot_a[slot, 0], a) else slot_a[slot, 0]
                yield part.name + SECOND_END, part.b if _holds(slot_b[slot, 0], b) else slot_b[slot, 0]


def _own_part(module: Any, slice_name: str, factors: list[Tensor | None]) -> list[Tensor | None]:
    """This tensor rank's parts of the factors of a module's matrices, as vLLM splits them."""
    if module.tp_size == 1:
        return factors
    split = getattr(module, slice_name)
    return split(factors) if len(factors) > 1 else [split(x) for x in factors]


def _holds(slot: Tensor, x: Tensor) -> bool:
    """True if a slot has a factor, and zeros beside it."""
    padded = torch.zeros_like(slot)
    padded[: x.shape[0], : x.shape[1]] = x
    return torch.equal(slot, padded)
