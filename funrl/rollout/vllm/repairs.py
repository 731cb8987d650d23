"""Repairs of vLLM 0.32, where it computes wrongly on a CPU or when weights are loaded a second time.

Each function says what would be wrong without it; a test of tests/rollout/test_vllm_families.py fails then.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def make_expert_group(tensor: int) -> None:
    """Make vLLM's group of the ranks that share experts, if it has its other groups. Collective over vLLM's processes.

    vLLM makes it for a process whose first model has experts, and lacks it if an earlier model had none.

    Args:
      tensor: ranks that share the model.
    """
    from vllm.distributed import parallel_state  # type: ignore[import-not-found]

    if not parallel_state.model_parallel_is_initialized() or parallel_state._EP is not None:
        return
    world = parallel_state.get_world_group()
    ranks = torch.arange(world.world_size).view(-1, tensor).tolist()
    backend = torch.distributed.get_backend(world.device_group)
    parallel_state._EP = parallel_state.init_model_parallel_group(ranks, world.local_rank, backend, group_name="ep")


def forget_rotations() -> None:
    """Drop cached rotary positions: ernie4_5 turns those of an earlier model to neighbours."""
    from vllm.model_executor.layers import rotary_embedding  # type: ignore[import-not-found]

    rotary_embedding._ROPE_DICT.clear()


def rotate_neighbours(module: Any) -> None:
    """Rotate neighbours by torch: on a CPU vLLM's kernel rotates several heads wrongly."""
    for layer in module.modules():
        if getattr(layer, "is_neox_style", True) is False and hasattr(layer, "_forward_method"):
            layer._forward_method = layer.forward_native


def choose_by_bias(module: Any) -> None:
    """Route with a bias in one group: on a CPU vLLM ignores it, or has no sigmoid, without groups."""
    for layer in module.modules():
        router: Any = getattr(layer, "router", None)
        if getattr(router, "e_score_correction_bias", None) is not None and not router.use_grouped_topk:
            router.use_grouped_topk = True
            router.num_expert_group = router.topk_group = 1


def forget_packed_experts(module: Any) -> None:
    """Pack the experts' matrices again at the next load: on a CPU vLLM packs those of the first load alone."""
    for layer in module.modules():
        if hasattr(getattr(layer, "quant_method", None), "moe_kernel"):
            layer.quant_method.moe_kernel = None


def name_loaders(module: Any) -> None:
    """Give loaders of weights that are partial functions the name that a second load asks for."""
    for parameter in module.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def pack_tied_head(decoder: Any) -> None:
    """Pack an unembedding that is the embedding: on a CPU vLLM would leave the packed copy of the old one."""
    head = getattr(decoder, "lm_head", None) or decoder.model.embed_tokens
    head.quant_method.process_weights_after_loading(head)


def place_sinks(module: Any, sinks: Mapping[str, Tensor]) -> None:
    """Write attention sinks, which a second load would leave as they were.

    Args:
      sinks: of all heads, by vLLM's names; a tensor rank takes those of its heads.
    """
    from vllm.distributed import get_tensor_model_parallel_rank  # type: ignore[import-not-found]

    parameters = dict(module.named_parameters())
    for name, x in sinks.items():
        own = parameters[name]
        begin = get_tensor_model_parallel_rank() * len(own)
        own.data.copy_(x[begin : begin + len(own)])
