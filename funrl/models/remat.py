"""Activation checkpointing by layer: activations are freed and computed again in the backward pass.

Inside of a compiled layer what is saved is marked in the graph, and the partitioner of its forward and backward pass
keeps to the marks: the same list for both, and what is computed again becomes part of the backward pass's own loops.
"""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from funrl import trees
from funrl.models.model import Layer

MODES = ("none", "full", "selective")
_SAVED = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "mkldnn::_linear_pointwise",
    "aten::_scaled_dot_product",
    "flash_attn::",
    "funrl::varlen_attention",
    "funrl::exact_linear",
    "funrl::exact_low_rank",
    "funrl::exact_grouped_linear",
    "funrl::exact_head_products",
    "funrl::chunk_states",
    "funrl::delta_rule",
    "funrl::grouped_linear",
    "funrl::choose_experts",
)
_SAVED_COLLECTIVES = tuple(
    f"_c10d_functional::{name}"
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "wait_tensor")
)


def rematerialized(layer: Layer, mode: str) -> Layer:
    """A layer of the same numbers that saves less for the backward pass.

    Where there is no gradient, and where there is a cache, it is the layer itself.

    Args:
      layer: `Model.layer`, or a replacement such as a compiled one.
      mode: "none"; "full" saves what enters the layer; "selective" also the results of matrix products, attention and
        sums over the mesh, so that only what is cheap is computed again.

    References: Chen et al., 2016, https://arxiv.org/abs/1604.06174
    """
    if mode == "none":
        return layer
    selective = functools.partial(create_selective_checkpoint_contexts, _policy)
    save = functools.partial(checkpoint, context_fn=selective) if mode == "selective" else checkpoint

    def again(config, mesh, params, x_BTD, context):
        if context.kv_cache is not None or not torch.is_grad_enabled():
            return layer(config, mesh, params, x_BTD, context)
        if torch.compiler.is_compiling():  # weights are inputs of the graph, whose saved form is autograd's own
            return save(lambda x: layer(config, mesh, params, x, context), x_BTD, use_reentrant=False)
        structure = trees.map(lambda _: 0, params)

        def run(x_BTD, *weights):
            return layer(config, mesh, trees.fill(structure, weights), x_BTD, context)

        # The weights are arguments, so that autograd saves them as it saves others: fully sharded ones as a note.
        weights = trees.leaves(params)
        return save(run, x_BTD, *weights, use_reentrant=False, preserve_rng_state=False)

    return again


def _policy(context, operation, *args, **kwargs) -> CheckpointPolicy:
    saved = operation.name().startswith(_SAVED + _SAVED_COLLECTIVES)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
