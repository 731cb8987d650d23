"""Gated delta rule: linear attention whose state forgets by a gate and overwrites what a key already holds.

Each value head has a state S [N, M], zero before the first token of a sequence. Token t does

    S = exp(log_decay_t) S                     forget
    S = S + beta_t k_t (v_t - S^T k_t)^T       replace what k_t reads by v_t, beta_t of the way
    o_t = S^T q_t                              read

`gated_delta_rule` computes chunks of `CHUNK_TOKENS` tokens with matrix products and goes from chunk to chunk in a loop,
in time and memory linear in the tokens. All shapes are static: where sequences begin is data. On a GPU 16-bit numbers
are for Triton kernels (`kernels`, beside this file) where a trial shows that they compute the same.

References: Yang et al., 2024, https://arxiv.org/abs/2412.06464
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.delta_rule.operators import CHUNK_TOKENS, LARGEST_DELTA_HEAD, chunked_delta_rule
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.gpu_kernels.trials import assumed_gpu, kernels_run

_TOLERANCE = 2e-2  # of results and gradients in 16 bits, by their norms


def gated_delta_rule(
    q_BTKN: Tensor,
    k_BTKN: Tensor,
    v_BTHM: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    segments_BT: Tensor | None = None,
) -> Tensor:
    """The gated delta rule over rows of sequences.

    The products of a chunk's updates are condensed by one triangular system (the UT transform). States and products
    are in float32 or wider; the kernels' products are of 16-bit factors, queries and keys included.

    Args:
      q_BTKN, k_BTKN: queries and keys, scaled as they are to be used; K divides H, and key head h // (H / K) serves
        value head h.
      v_BTHM: values.
      log_decay_BTH: logarithm of the factor by which the state is multiplied, at most 0.
      beta_BTH: fraction of the way to the new value, 0 to 1.
      segments_BT: a token whose number differs from that of the token before begins a sequence; None: each row is one.

    Returns: [B, T, H, M] in the dtype of v; differentiable once.
    """
    if _by_kernels(v_BTHM, k_BTKN.shape[-1], v_BTHM.shape[-1]):
        heads = q_BTKN, k_BTKN, v_BTHM, log_decay_BTH, beta_BTH
        B, _, H, M = v_BTHM.shape
        first_BHNM = v_BTHM.new_zeros(B, H, k_BTKN.shape[-1], M, dtype=torch.float32)
        return chunked_delta_rule(heads, segments_BT, first_BHNM)[0]
    parts = condensed(q_BTKN, k_BTKN, v_BTHM, log_decay_BTH, beta_BTH, segments_BT)
    values, states = _ChunkStates.apply(parts.updates, parts.readers, parts.keys, parts.whole, None)
    return read_chunks(parts, values, states)[:, : v_BTHM.shape[1]].to(v_BTHM.dtype)


def continue_delta_rule(
    q_BTKN: Tensor, k_BTKN: Tensor, v_BTHM: Tensor, log_decay_BTH: Tensor, beta_BTH: Tensor, state_BHNM: Tensor
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` over rows with an initial state each, without a gradient.

    Args:
      state_BHNM: of the tokens before, in float32 or wider; unchanged. The others are as in `gated_delta_rule`.

    Returns: its result, and the state behind the last token.
    """
    if q_BTKN.shape[1] == 1:
        inputs = (q_BTKN, k_BTKN, v_BTHM, log_decay_BTH, beta_BTH)
        q_BKN, k_BKN, v_BHM, log_decay_BH, beta_BH = (x[:, 0].to(state_BHNM.dtype) for x in inputs)
        out_BHM, state_BHNM = _one_token(q_BKN, k_BKN, v_BHM, log_decay_BH, beta_BH, state_BHNM)
        return out_BHM.unsqueeze(1).to(v_BTHM.dtype), state_BHNM
    if _by_kernels(v_BTHM, k_BTKN.shape[-1], v_BTHM.shape[-1]):
        heads = q_BTKN, k_BTKN, v_BTHM, log_decay_BTH, beta_BTH
        out_BTHM, end_BHNM = chunked_delta_rule(heads, None, state_BHNM)
        return out_BTHM, end_BHNM.to(state_BHNM.dtype)
    parts = condensed(q_BTKN, k_BTKN, v_BTHM, log_decay_BTH, beta_BTH, None)
    states = []
    values = []
    for updates, readers, keys, whole in zip(*(x.unbind(1) for x in parts[:4]), strict=True):
        states.append(state_BHNM)
        values.append(updates - readers @ state_BHNM)
        state_BHNM = whole[..., None, None] * state_BHNM + keys.mT @ values[-1]
    out = read_chunks(parts, torch.stack(values, 1), torch.stack(states, 1))
    return out[:, : v_BTHM.shape[1]].to(v_BTHM.dtype), state_BHNM


def part_of_delta_rule(
    q_BTKN: Tensor,
    k_BTKN: Tensor,
    v_BTHM: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    segments_BT: Tensor,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` over parts of rows, as linear functions of the state S before the first token.

    The columns behind the values are those of the state's own effect: a loop that begins with S = [0 | identity].

    Returns, in float32 or wider, differentiable once:
      [B, T, H, M + N]: results without S, and what reads it: the result is out[..., :M] + out[..., M:] S.
      [B, H, N, M + N]: likewise the state behind the last token, end[..., :M] + end[..., M:] S.
    """
    B, _, H, M = v_BTHM.shape
    key = k_BTKN.shape[-1]
    wide = torch.promote_types(v_BTHM.dtype, torch.float32)
    first_NX = F.pad(torch.eye(key, dtype=wide, device=v_BTHM.device), (M, 0))
    first_BHNX = first_NX.expand(B, H, *first_NX.shape)
    if _by_kernels(v_BTHM, key, M + key):
        heads = q_BTKN, k_BTKN, F.pad(v_BTHM, (0, key)), log_decay_BTH, beta_BTH
        out_BTHX, end_BHNX = chunked_delta_rule(heads, segments_BT, first_BHNX)
        return out_BTHX.to(wide), end_BHNX
    parts = condensed(q_BTKN, k_BTKN, v_BTHM, log_decay_BTH, beta_BTH, segments_BT)
    updates = F.pad(parts.updates, (0, key))
    values, states = _ChunkStates.apply(updates, parts.readers, parts.keys, parts.whole, first_BHNX)
    end_BHNX = parts.whole[:, -1, :, None, None] * states[:, -1] + parts.keys[:, -1].mT @ values[:, -1]
    return read_chunks(parts, values, states)[:, : v_BTHM.shape[1]], end_BHNX


def packed_segments(offsets: Tensor, tokens: int) -> Tensor:
    """Number of each token's sequence in one packed row, [1, tokens].

    Args:
      offsets: [S + 1], where its sequences begin and end; what is behind the last one is a sequence too.
      tokens: of the row.
    """
    places = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, places, right=True).unsqueeze(0)


def delta_kernels_run(key: int, value: int, dtype: torch.dtype) -> bool:
    """`_trial_runs` as a constant of what is compiled; see `compiled_layer`."""
    return _trial_runs(key, value, dtype)


def _by_kernels(v_BTHM: Tensor, key: int, value: int) -> bool:
    """True if rows of these sizes of a head are for the Triton kernels."""
    if v_BTHM.element_size() > 2 or max(key, value) > LARGEST_DELTA_HEAD:
        return False
    return assumed_gpu() is not None or (v_BTHM.is_cuda and delta_kernels_run(key, value, v_BTHM.dtype))


@functools.cache
def _trial_runs(key: int, value: int, dtype: torch.dtype) -> bool:
    # A compiler's fault may be one of some sizes, so the trial is of those that are used.
    def gated_delta_rule_error(device: str) -> float:
        return kernel_error(device, key, value, dtype)

    # The first call may stand within a checkpoint or under no_grad, which are not to see the trial.
    with _disable_current_modes(), torch.enable_grad():
        return kernels_run(gated_delta_rule_error, _TOLERANCE)


def kernel_error(device: str, key: int, value: int, dtype: torch.dtype) -> float:
    """Largest difference of the kernels' results and gradients from torch's in float64, as a part of their norm.

    Args:
      device: where the kernels run.
      key, value: sizes of a head, N and M.
      dtype: of the inputs.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = 150
    segments_BT = packed_segments(torch.tensor([0, 70, 70, 141]), tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator)

    units = [F.normalize(normal(tokens, 2, key), dim=-1).to(dtype) for _ in range(2)]
    gates = -0.1 * F.softplus(normal(tokens, 4)), normal(tokens, 4).sigmoid().to(dtype)
    inputs = *units, normal(tokens, 4, value).to(dtype), *gates, normal(4, key, value)
    weights = normal(tokens, 4, value).to(dtype), normal(4, key, value)

    def by_torch(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay, beta, first_BHNM = leaves
        out_BTHX, end_BHNX = part_of_delta_rule(q, k, v, log_decay, beta, segments_BT)
        read_BTHM = torch.einsum("bthn,bhnm->bthm", out_BTHX[..., value:], first_BHNM)
        return out_BTHX[..., :value] + read_BTHM, end_BHNX[..., :value] + end_BHNX[..., value:] @ first_BHNM

    leaves = [x.to(device).requires_grad_() for x in inputs]
    q, k, v, log_decay, beta, first_BHNM = leaves
    results = chunked_delta_rule((q, k, v, log_decay, beta), segments_BT.to(device), first_BHNM)
    grads = torch.autograd.grad(results, leaves, [x.to(device) for x in weights])
    wide = [x.double().requires_grad_() for x in inputs]
    expected = by_torch(wide)
    wide_grads = torch.autograd.grad(expected, wide, [x.double() for x in weights])
    pairs = zip((*results, *grads), (*expected, *wide_grads), strict=True)
    return torch.stack([(x.cpu().double() - y).norm() / y.norm() for x, y in pairs]).max().item()


class ChunkEffects(NamedTuple):
    """Effect of chunks of tokens on the state S of a head, [B, chunks, H, C, ...].

    A chunk's new values are updates - readers S; the state after it is whole S + keys^T values, and its results are
    queries S + attended values.
    """

    updates: Tensor
    readers: Tensor
    keys: Tensor
    whole: Tensor
    queries: Tensor
    attended: Tensor


def condensed(
    q_BTKN: Tensor,
    k_BTKN: Tensor,
    v_BTHM: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    segments_BT: Tensor | None,
) -> ChunkEffects:
    """Chunks of rows."""
    group = v_BTHM.shape[2] // k_BTKN.shape[2]
    wide = torch.promote_types(v_BTHM.dtype, torch.float32)
    inputs = (q_BTKN, k_BTKN, v_BTHM, log_decay_BTH, beta_BTH)
    q, k, v, log_decay, beta = (_heads_of_chunks(x.to(wide)) for x in inputs)
    within, since, whole = _decays(log_decay, _runs(v_BTHM, segments_BT))

    def of_group(x: Tensor, factor: Tensor) -> Tensor:
        """Multiply values of each key head by factors of its value heads."""
        return (x.unsqueeze(3) * factor.unflatten(2, (-1, group))).flatten(2, 3)

    def of_keys(x: Tensor, k: Tensor) -> Tensor:
        """Products of matrices of the value heads and those of their key heads: one for a whole group."""
        rows = x.unflatten(2, (-1, group)).flatten(3, 4) @ k
        return rows.unflatten(3, (group, -1)).flatten(2, 3)

    overlap = of_group(k @ k.mT, within * beta.unsqueeze(-1)).tril(-1)
    # The inverse is smaller than the sides of the system, and products are faster than systems.
    unit = torch.eye(overlap.shape[-1], dtype=wide, device=overlap.device).expand_as(overlap)
    inverse = torch.linalg.solve_triangular(overlap, unit, upper=False, unitriangular=True)
    weighted = inverse * beta.unsqueeze(-2)
    return ChunkEffects(
        updates=weighted @ v,
        readers=of_keys(weighted * since.unsqueeze(-2), k),
        keys=of_group(k, within[..., -1, :].unsqueeze(-1)),
        whole=whole,
        queries=of_group(q, since.unsqueeze(-1)),
        attended=of_group(q @ k.mT, within),
    )


def read_chunks(parts: ChunkEffects, values: Tensor, states: Tensor) -> Tensor:
    """Results of all tokens of all chunks, [B, tokens, H, M]."""
    factors = (parts.queries, states, parts.attended, values)
    queries, states, attended, values = (x.flatten(0, 2) for x in factors)
    out = torch.baddbmm(queries @ states, attended, values).unflatten(0, parts.queries.shape[:3])
    return out.transpose(2, 3).flatten(1, 2)


def _one_token(
    q_BKN: Tensor, k_BKN: Tensor, v_BHM: Tensor, log_decay_BH: Tensor, beta_BH: Tensor, state_BHNM: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row, as the formula is written; static shapes."""
    group = v_BHM.shape[1] // k_BKN.shape[1]
    q_BHN, k_BHN = (x.repeat_interleave(group, 1) for x in (q_BKN, k_BKN))
    state_BHNM = state_BHNM * log_decay_BH.exp()[..., None, None]
    read_BHM = (k_BHN.unsqueeze(-2) @ state_BHNM).squeeze(-2)
    change_BHM = (v_BHM - read_BHM) * beta_BH.unsqueeze(-1)
    state_BHNM = torch.addcmul(state_BHNM, k_BHN.unsqueeze(-1), change_BHM.unsqueeze(-2))
    return (q_BHN.unsqueeze(-2) @ state_BHNM).squeeze(-2), state_BHNM


def gated_delta_rule_reference(
    q_BTKN: Tensor,
    k_BTKN: Tensor,
    v_BTHM: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    segments_BT: Tensor | None = None,
) -> Tensor:
    """`gated_delta_rule` token by token, as the formula is written."""
    group = v_BTHM.shape[2] // k_BTKN.shape[2]
    q_BTHN, k_BTHN = (x.repeat_interleave(group, 2) for x in (q_BTKN, k_BTKN))
    runs_BT = _runs(v_BTHM, segments_BT)
    state_BHNM = torch.zeros_like(k_BTHN[:, 0, :, :, None] * v_BTHM[:, 0, :, None, :])
    outs = []
    for t in range(v_BTHM.shape[1]):
        kept_B = runs_BT[:, t] == runs_BT[:, max(t - 1, 0)]
        decay_BH = log_decay_BTH[:, t].exp() * kept_B.unsqueeze(-1)
        state_BHNM = state_BHNM * decay_BH[..., None, None]
        read_BHM = torch.einsum("bhnm,bhn->bhm", state_BHNM, k_BTHN[:, t])
        change_BHM = (v_BTHM[:, t] - read_BHM) * beta_BTH[:, t].unsqueeze(-1)
        state_BHNM = state_BHNM + torch.einsum("bhn,bhm->bhnm", k_BTHN[:, t], change_BHM)
        outs.append(torch.einsum("bhnm,bhn->bhm", state_BHNM, q_BTHN[:, t]))
    return torch.stack(outs, 1)


def causal_convolution(x_BTD: Tensor, weight_DW: Tensor, segments_BT: Tensor | None = None) -> Tensor:
    """Convolution of each channel over the last W tokens of its sequence: sum_i weight[:, W - 1 - i] x[t - i].

    Args:
      x_BTD: any float dtype; summed in float32 or wider.
      weight_DW: the last column is that of the token itself.
      segments_BT: as in `gated_delta_rule`.

    Returns: [B, T, D] in the dtype of x.
    """
    T = x_BTD.shape[1]
    width = weight_DW.shape[1]
    wide = torch.promote_types(x_BTD.dtype, torch.float32)
    wide_BTD = x_BTD.to(wide)
    weight_DW = weight_DW.to(wide)
    runs_BT = _runs(x_BTD, segments_BT)
    out_BTD = wide_BTD * weight_DW[:, -1]
    for back in range(1, width):
        same_BT = F.pad(runs_BT, (back, 0), value=-1)[:, :T] == runs_BT
        earlier_BTD = F.pad(wide_BTD, (0, 0, back, 0))[:, :T]
        earlier_BTD = earlier_BTD.masked_fill(~same_BT.unsqueeze(-1), 0)
        out_BTD = torch.addcmul(out_BTD, earlier_BTD, weight_DW[:, width - 1 - back])
    return out_BTD.to(x_BTD.dtype)


def causal_convolution_reference(x_BTD: Tensor, weight_DW: Tensor, segments_BT: Tensor | None = None) -> Tensor:
    """`causal_convolution` token by token."""
    width = weight_DW.shape[1]
    runs_BT = _runs(x_BTD, segments_BT)
    outs = []
    for t in range(x_BTD.shape[1]):
        total_BD = torch.zeros_like(x_BTD[:, t])
        for back in range(min(width, t + 1)):
            same_B1 = (runs_BT[:, t] == runs_BT[:, t - back]).unsqueeze(-1)
            total_BD = total_BD + torch.where(same_B1, x_BTD[:, t - back] * weight_DW[:, width - 1 - back], 0)
        outs.append(total_BD)
    return torch.stack(outs, 1)


def _runs(x_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
    """Number of each token's sequence in its row, [B, T]: 0, 1, ... in order."""
    if segments_BT is None:
        return torch.zeros(x_BT.shape[:2], dtype=torch.int64, device=x_BT.device)
    begins_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
    return F.pad(begins_BT.cumsum(1), (1, 0))


def _chunks(tokens: int) -> int:
    """Number of chunks."""
    # A compiled graph expects other strides than it finds where a dim that varies is 1.
    least = 2 if torch.compiler.is_compiling() else 1
    return max(least, -(-tokens // CHUNK_TOKENS))


def _heads_of_chunks(x: Tensor) -> Tensor:
    """[B, T, H, ...] as [B, chunks, H, CHUNK_TOKENS, ...]; the last chunk is filled with 0s, which change no state."""
    count = _chunks(x.shape[1])
    padded = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, count * CHUNK_TOKENS - x.shape[1]))
    return padded.reshape(x.shape[0], count, CHUNK_TOKENS, *x.shape[2:]).transpose(2, 3).contiguous()


def _decays(log_decay_BcHC: Tensor, runs_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of the state over parts of a chunk; 0 where a sequence begins in between.

    Returns:
      [B, chunks, H, C, C]: from after the second token to the first one, itself included; 0 where it comes later.
      [B, chunks, H, C]: from the chunk's beginning to each token.
      [B, chunks, H]: over the whole chunk.
    """
    B, T = runs_BT.shape
    count = _chunks(T)
    filling = runs_BT[:, -1:].expand(B, count * CHUNK_TOKENS - T)  # which keeps the state behind the last token
    runs_BcC = torch.cat((runs_BT, filling), 1).reshape(B, count, CHUNK_TOKENS)
    seen_BcCC = (runs_BcC.unsqueeze(-1) == runs_BcC.unsqueeze(-2)).tril()
    # Sums of the factors between two tokens, not differences of sums: a strong decay before both leaves no rounding.
    sums = log_decay_BcHC.unsqueeze(-1).expand(*log_decay_BcHC.shape, CHUNK_TOKENS).tril(-1).cumsum(-2)
    within = sums.masked_fill(~seen_BcCC.unsqueeze(2), -torch.inf).exp()
    last_Bc1 = F.pad(runs_BcC[:, :-1, -1], (1, 0)).unsqueeze(-1)
    carried_Bc1C = (runs_BcC == last_Bc1).unsqueeze(2)
    since = log_decay_BcHC.cumsum(-1).masked_fill(~carried_Bc1C, -torch.inf).exp()
    return within, since, since[..., -1]


@operator("funrl::chunk_states")
def _chunk_states(
    updates: Tensor, readers: Tensor, keys: Tensor, whole: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    values = updates.new_empty(updates.shape)
    states = updates.new_empty(*updates.shape[:3], keys.shape[-1], updates.shape[-1])
    states[:, 0] = 0 if first is None else first
    for chunk in range(updates.shape[1]):
        state = states[:, chunk]
        torch.sub(updates[:, chunk], readers[:, chunk] @ state, out=values[:, chunk])
        if chunk + 1 < updates.shape[1]:
            change = keys[:, chunk].mT @ values[:, chunk]
            torch.addcmul(change, whole[:, chunk, :, None, None], state, out=states[:, chunk + 1])
    return values, states


@_chunk_states.register_fake
def _(updates, readers, keys, whole, first=None):
    return updates.new_empty(updates.shape), updates.new_empty(*updates.shape[:3], keys.shape[-1], updates.shape[-1])


@operator("funrl::chunk_states_backward")
def _chunk_states_backward(
    d_values: Tensor, d_states: Tensor, readers: Tensor, keys: Tensor, whole: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients by the updates, and by the state after each chunk."""
    d_updates = torch.empty_like(d_values)
    d_after = torch.zeros_like(d_states)
    for chunk in reversed(range(d_values.shape[1])):
        after = d_after[:, chunk]
        d_updates[:, chunk] = d_values[:, chunk] + keys[:, chunk] @ after
        if chunk:
            kept = whole[:, chunk, :, None, None] * after + d_states[:, chunk]
            d_after[:, chunk - 1] = kept - readers[:, chunk].mT @ d_updates[:, chunk]
    return d_updates, d_after


@_chunk_states_backward.register_fake
def _(d_values, d_states, readers, keys, whole):
    return torch.empty_like(d_values), torch.empty_like(d_states)


class _ChunkStates(AutogradFunction):
    """The loop over chunks c: values_c = updates_c - readers_c S_c, S_(c + 1) = whole_c S_c + keys_c^T values_c.

    S_0 is `first`, a constant, or 0. One operator, so that no graph holds a node for each chunk; not
    `register_autograd`, which `torch.func` refuses.
    """

    @staticmethod
    def forward(updates, readers, keys, whole, first):
        return _chunk_states(updates, readers, keys, whole, first)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:4], *output)

    @staticmethod
    def backward(ctx, d_values, d_states):
        readers, keys, whole, values, states = ctx.saved_tensors
        with torch.no_grad():
            d_updates, d_after = _chunk_states_backward(
                d_values.contiguous(), d_states.contiguous(), readers, keys, whole
            )
            d_readers = -(d_updates @ states.mT)
            d_keys = values @ d_after.mT
            d_whole = (d_after * states).sum((-2, -1))
        return d_updates, d_readers, d_keys, d_whole, None
