"""`delta_net_pass` in core operators of static shapes, for programs that are traced.

New tokens are in rows of equally many. A sequence has one row or several that follow one another; the last may
be filled up. The recurrence over chunks is one operator, which begins a row by the row before or by a cell.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.compiled_kernels.delta_rule.gated_delta import (
    causal_convolution,
    condensed,
    continue_delta_rule,
    read_chunks,
)
from funrl.compiled_kernels.delta_rule.net_pass import DeltaInputs, convolved_heads
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.paged_attention import Paging


def static_delta_net_pass(inputs: DeltaInputs, cells: tuple[Tensor, Tensor], cells_R: Tensor, paging: Paging) -> Tensor:
    """Convolution and gated delta rule over rows of equally many new tokens, without a gradient.

    Args:
      inputs, cells: as in `delta_net_pass`.
      cells_R: int64, the cell of each row's sequence.
      paging: its positions say which tokens fill a row up: those whose position does not follow on the one before.

    Returns: as `delta_net_pass`; results of filling have no meaning.
    """
    rows = len(cells_R)
    states, tails = cells
    before = tails.shape[1]
    channels_RTD, log_decay_RTH, beta_RTH = (
        x.unflatten(0, (rows, -1)) for x in (inputs.channels_ND, inputs.log_decay_NH, inputs.beta_NH)
    )
    T = channels_RTD.shape[1]
    positions_RT = paging.positions_N.view(rows, T)
    first_R = positions_RT[:, 0]
    held_RT = positions_RT == first_R.unsqueeze(1) + torch.arange(T, device=first_R.device)
    goes_on_R = _goes_on(cells_R, first_R, T)
    begins_R = first_R == 0
    tail_RWD = tails.index_select(0, cells_R).masked_fill(begins_R[:, None, None], 0)
    if T > 1:
        previous_RWD = channels_RTD[:, T - before :].roll(1, 0).to(tail_RWD.dtype)
        tail_RWD = torch.where(goes_on_R[:, None, None], previous_RWD, tail_RWD)
        log_decay_RTH, beta_RTH = (x.masked_fill(~held_RT.unsqueeze(-1), 0) for x in (log_decay_RTH, beta_RTH))
    window_RTD = torch.cat((tail_RWD, channels_RTD), 1)  # in the dtype of the tails, which is the wider one
    mixed_RTD = causal_convolution(window_RTD, inputs.filters_DW)[:, before:].to(channels_RTD.dtype)
    heads = convolved_heads(F.silu(mixed_RTD), inputs.key_heads, inputs.key, states.shape[-1])
    state_RHNM = states.index_select(0, cells_R).masked_fill(begins_R[:, None, None, None], 0)
    if T == 1:
        out_RTHM, state_RHNM = continue_delta_rule(*heads, log_decay_RTH, beta_RTH, state_RHNM)
    else:
        parts = condensed(*heads, log_decay_RTH, beta_RTH, None)
        values, chunk_states = _continued_states(*parts[:4], state_RHNM, goes_on_R)
        out_RTHM = read_chunks(parts, values, chunk_states)[:, :T].to(channels_RTD.dtype)
        state_RHNM = parts.whole[:, -1, :, None, None] * chunk_states[:, -1] + parts.keys[:, -1].mT @ values[:, -1]
    last_W = held_RT.sum(1, keepdim=True) + torch.arange(before, device=first_R.device)
    tail_RWD = window_RTD.gather(1, last_W.unsqueeze(-1).expand_as(tail_RWD))
    # All rows of a sequence write the state after its last row, so the order in which they write does not count.
    number_R = (~goes_on_R).cumsum(0)
    last_R = (number_R.unsqueeze(0) <= number_R.unsqueeze(1)).sum(1) - 1
    states.index_copy_(0, cells_R, state_RHNM.index_select(0, last_R))
    tails.index_copy_(0, cells_R, tail_RWD.index_select(0, last_R))
    return out_RTHM.flatten(0, 1)


def _goes_on(cells_R: Tensor, first_R: Tensor, tokens: int) -> Tensor:
    """Bool: the rows that continue the row before, which is full."""
    same_R = (cells_R == cells_R.roll(1)) & (first_R == first_R.roll(1) + tokens)
    return same_R & (torch.arange(len(cells_R), device=cells_R.device) > 0)


@operator("funrl::continued_states")
def _continued_states(
    updates: Tensor, readers: Tensor, keys: Tensor, whole: Tensor, first: Tensor, goes_on: Tensor
) -> tuple[Tensor, Tensor]:
    """Values and states of the chunks of rows, as `funrl::chunk_states`, of rows one after the other.

    Args:
      updates, readers, keys, whole: [rows, chunks, H, ...], as in `gated_delta.ChunkEffects`.
      first: [rows, H, N, M], the state that a row begins with, unless
      goes_on: [rows] bool: it continues from the state after the row before.
    """
    values = torch.empty_like(updates)
    states = updates.new_empty(*updates.shape[:3], *first.shape[-2:])
    state = first[0]
    for row, continues in enumerate(goes_on.tolist()):
        state = state if continues else first[row]
        for chunk in range(updates.shape[1]):
            states[row, chunk] = state
            values[row, chunk] = updates[row, chunk] - readers[row, chunk] @ state
            state = whole[row, chunk, :, None, None] * state + keys[row, chunk].mT @ values[row, chunk]
    return values, states


@_continued_states.register_fake
def _(updates, readers, keys, whole, first, goes_on):
    return torch.empty_like(updates), updates.new_empty(*updates.shape[:3], *first.shape[-2:])
