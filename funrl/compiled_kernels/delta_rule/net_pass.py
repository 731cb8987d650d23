"""One pass of a gated delta net over the new tokens of many sequences, whose states stand in cells.

A sequence has one cell in every layer: the state of each value head, and the inputs of the convolution of its last
tokens. Sequences with equally many new tokens are computed together; of one token by the recurrence, of more by
chunks. One opaque operator, so that no graph depends on lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.compiled_kernels.delta_rule.gated_delta import CHUNK_TOKENS, causal_convolution, continue_delta_rule
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.paged_attention import Paging

UNIT_EPS = 1e-6  # added to the squared length of queries and keys


class DeltaInputs(NamedTuple):
    """Projections of the tokens of a pass, of this rank's heads.

    Attributes:
      channels_ND: inputs of the convolution: queries and keys of K heads of size N each, values of H heads of size M.
      log_decay_NH, beta_NH: as in `gated_delta_rule`.
      filters_DW: of the convolution.
      key_heads, key: K and N.
    """

    channels_ND: Tensor
    log_decay_NH: Tensor
    beta_NH: Tensor
    filters_DW: Tensor
    key_heads: int
    key: int


def delta_net_pass(inputs: DeltaInputs, cells: tuple[Tensor, Tensor], cells_S: Tensor, paging: Paging) -> Tensor:
    """Convolution and gated delta rule over new tokens, without a gradient.

    Args:
      inputs: of the new tokens.
      cells: states [cells, H, N, M] and inputs of the convolution before [cells, W - 1, D], in float32 or wider;
        written in place.
      cells_S: int64, the cell of each sequence. What it holds does not count for a sequence's first token.
      paging: places of the tokens.

    Returns: [N, H, M] in the dtype of the channels.
    """
    given = inputs.channels_ND, inputs.log_decay_NH, inputs.beta_NH, inputs.filters_DW
    sizes = inputs.key_heads, inputs.key
    return _delta_net_pass(*given, *cells, cells_S, paging.positions_N, paging.groups_G5, *sizes)


def convolved_heads(mixed_BTD: Tensor, key_heads: int, key: int, value: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [B, T, K, N], of unit length, and values [B, T, H, M] of the results of a convolution.

    Queries and keys are in float32 or wider.
    """
    width = key_heads * key
    q, k, v = mixed_BTD.split((width, width, mixed_BTD.shape[-1] - 2 * width), -1)
    q_BTKN = _unit(q.unflatten(-1, (key_heads, key))) * key**-0.5
    return q_BTKN, _unit(k.unflatten(-1, (key_heads, key))), v.unflatten(-1, (-1, value))


def _unit(x: Tensor) -> Tensor:
    """x of length one over the last dim, in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def pass_flops(states: Tensor, groups_G5: Tensor, key_heads: int) -> int:
    """FLOPs of the products of `delta_net_pass`."""
    H, N, M = states.shape[1:]
    total = 0
    for _, _, rows, count, _ in groups_G5.tolist():
        token = 6 * H * N * M
        if count > 1:
            inside = 4 * key_heads * N + H * (N + M) + 2 * H * M  # of queries and keys, the system, the values
            token += CHUNK_TOKENS * inside
            count = -(-count // CHUNK_TOKENS) * CHUNK_TOKENS
        total += rows * count * token
    return total


def pass_bytes(channels_ND: Tensor, states: Tensor, tails: Tensor, groups_G5: Tensor) -> int:
    """Bytes of `delta_net_pass` that are read or written: the new tokens', and the cell of each sequence."""
    sequences = int(groups_G5[:, 2].sum())
    return 2 * channels_ND.nbytes + 2 * sequences * (states[0].nbytes + tails[0].nbytes)


# Flat arguments, here and in the fake: torch.library takes tensors and numbers, no records.
@operator("funrl::delta_net_pass", mutates_args=("states", "tails"))
def _delta_net_pass(
    channels: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    filters: Tensor,
    states: Tensor,
    tails: Tensor,
    cells: Tensor,
    positions: Tensor,
    groups: Tensor,
    key_heads: int,
    key: int,
) -> Tensor:
    before = tails.shape[1]
    value = states.shape[-1]
    outs = []
    for first, low, rows, count in _equal_counts(groups):
        part = slice(first, first + rows * count)
        channels_RTD, log_decay_RTH, beta_RTH = (
            x[part].unflatten(0, (rows, count)) for x in (channels, log_decay, beta)
        )
        cells_R = cells[low : low + rows]
        begins_R = positions[first : first + rows * count : count] == 0
        state_RHNM = states.index_select(0, cells_R).masked_fill(begins_R[:, None, None, None], 0)
        tail_RWD = tails.index_select(0, cells_R).masked_fill(begins_R[:, None, None], 0)
        window_RTD = torch.cat((tail_RWD, channels_RTD), 1)  # in the dtype of the tails, which is the wider one
        mixed_RTD = causal_convolution(window_RTD, filters)[:, before:].to(channels.dtype)
        heads = convolved_heads(F.silu(mixed_RTD), key_heads, key, value)
        out_RTHM, state_RHNM = continue_delta_rule(*heads, log_decay_RTH, beta_RTH, state_RHNM)
        states.index_copy_(0, cells_R, state_RHNM)
        tails.index_copy_(0, cells_R, window_RTD[:, count:])
        outs.append(out_RTHM.flatten(0, 1))
    return torch.cat(outs).contiguous()  # as the fake's: chunks are read in another order of dims


@_delta_net_pass.register_fake
def _(channels, log_decay, beta, filters, states, tails, cells, positions, groups, key_heads, key):
    return channels.new_empty(channels.shape[0], states.shape[1], states.shape[-1])


def _equal_counts(groups_G5: Tensor) -> list[tuple[int, int, int, int]]:
    """Neighbouring groups with equally many new tokens as one: first token, first sequence, sequences, new tokens."""
    merged: list[tuple[int, int, int, int]] = []
    for first, low, rows, count, _ in groups_G5.tolist():
        if merged and merged[-1][3] == count:
            begin, start, many, _ = merged[-1]
            merged[-1] = (begin, start, many + rows, count)
        else:
            merged.append((first, low, rows, count))
    return merged
