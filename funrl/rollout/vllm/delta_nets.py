"""Gated delta nets in vLLM on a CPU, where its own kernels take bfloat16 and heads of 128 alone.

Reference: `vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py` of version 0.32.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.compiled_kernels.delta_rule.net_pass import DeltaInputs, delta_net_pass
from funrl.compiled_kernels.paged_attention import Paging


def compute_delta_nets() -> None:
    """Let models that vLLM makes from now on compute gated delta nets by `delta_net_pass`, in their own dtype."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention  # type: ignore[import-not-found]
    from vllm.utils.torch_utils import LayerNameType  # type: ignore[import-not-found]

    names = ("mixed_qkv", "b", "a", "core_attn_out")
    # vLLM makes an operator of the function by its annotations, which are texts here.
    _delta_nets.__annotations__ = {**dict.fromkeys(names, Tensor), "layer_name": LayerNameType, "return": None}
    gdn_attention.cpu_gdn_attention_core = _delta_nets


def _delta_nets(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: str) -> None:
    """Write the results [N, H, M] of a layer; in a trial pass of vLLM, which has no sequences, nothing."""
    from vllm.forward_context import get_forward_context  # type: ignore[import-not-found]
    from vllm.utils.torch_utils import _resolve_layer_name  # type: ignore[import-not-found]

    context = get_forward_context()
    if context.attn_metadata is None:
        return
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    batch = context.attn_metadata[layer.prefix]
    count = batch.num_actual_tokens
    if not count:
        return
    wide = torch.promote_types(mixed_qkv.dtype, torch.float32)
    log_decay_NH = -layer.A_log.to(wide).exp() * F.softplus(a[:count].to(wide) + layer.dt_bias.to(wide))
    filters_DW = layer.conv1d.weight.view(layer.conv1d.weight.shape[0], -1)
    key_heads = layer.num_k_heads // layer.tp_size
    inputs = DeltaInputs(mixed_qkv[:count], log_decay_NH, b[:count].sigmoid(), filters_DW, key_heads, layer.head_k_dim)
    tails, states = layer.kv_cache
    states = states.view(*states.shape[:2], layer.head_k_dim, layer.head_v_dim)  # as vLLM's own kernels have them
    cells_S = batch.non_spec_state_indices_tensor.long()
    core_attn_out[:count] = delta_net_pass(inputs, (states, tails), cells_S, _paging(batch))


def _paging(batch: Any) -> Paging:
    """Places of the tokens of vLLM's batch, as far as `delta_net_pass` reads them."""
    begins = batch.non_spec_query_start_loc.tolist()
    sequences = len(begins) - 1
    goes_on = [True] * sequences if batch.has_initial_state is None else batch.has_initial_state.tolist()
    counts = [end - begin for begin, end in itertools.pairwise(begins)]
    groups_G5 = torch.tensor([(begins[s], s, 1, counts[s], 0) for s in range(sequences)])
    positions_N = torch.tensor(goes_on).long().repeat_interleave(torch.tensor(counts))
    none = torch.empty(0, dtype=torch.int64)
    return Paging(none, positions_N, none, none, none, groups_G5)
