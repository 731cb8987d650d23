"""Activation checkpointing by layer: what a layer computes is let go and computed again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from funrl import trees
from funrl.models import decoder

MODES = ("none", "full", "selective")
_KEPT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product", "flash_attn::")
_KEPT_COLLECTIVES = ("_c10d_functional::all_reduce", "_c10d_functional::wait_tensor")


def rematerialized(layer: Callable | None, mode: str) -> Callable | None:
    """A layer of the same numbers that keeps less for the backward pass.

    Where there is no gradient, and where there is a cache, it is the plain layer.

    Args:
      layer: as in `decoder.apply`; None: `decoder.decoder_layer`.
      mode: "none"; "full" keeps what enters the layer; "selective" also the results of matrix products, attention and
        sums over the mesh, so that only what is cheap is computed again.

    References: Chen et al., 2016, https://arxiv.org/abs/1604.06174
    """
    if mode == "none":
        return layer
    plain = layer or decoder.decoder_layer
    selective = functools.partial(create_selective_checkpoint_contexts, _policy)
    saves = functools.partial(checkpoint, context_fn=selective) if mode == "selective" else checkpoint

    def again(config, mesh, params, x_BTD, turn, view, kept, slots_BT):
        if kept is not None or not torch.is_grad_enabled():
            return plain(config, mesh, params, x_BTD, turn, view, kept, slots_BT)
        structure = trees.map(lambda _: 0, params)

        def run(x_BTD, *weights):
            return plain(config, mesh, trees.fill(structure, weights), x_BTD, turn, view, None, slots_BT)

        # The weights are arguments, so that autograd saves them as it saves others: fully sharded ones as a note.
        weights = trees.leaves(params)
        return saves(run, x_BTD, *weights, use_reentrant=False, preserve_rng_state=False)

    return again


def _policy(context, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation.name().startswith(_KEPT + _KEPT_COLLECTIVES)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
