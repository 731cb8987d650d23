"""Triton kernels of the gated delta rule by chunks of 64 tokens, forward and backward.

A chunk has keys K, queries Q [C, N], values V [C, M] and the state S [N, M] before it. With g the cumulative sum of its
logarithms of decays,

    W_ij = exp(g_i - g_j) for i >= j, else 0             decay within the chunk
    a_i = exp(g_i), e_j = exp(g_C - g_j)                 decay since its first and until its last token
    A = tril(beta_i W_ij k_i k_j, -1), X = (I + A)^-1    the WY form of the product of all updates
    U = X beta V, R = X beta a K, P = W * (Q K^T)

its new values, results and the next state are

    V' = U - R S,   O = a Q S + P V',   S_next = a_C S + (e K)^T V'

and with the gradient D of S_next, from the last chunk to the first one,

    dV' = P^T dO + e K D,   dS = a_C D + (a Q)^T dO - R^T dV'
    dQ = a dO S^T + (W * dO V'^T) K,   dK = e V' D^T + (W * dO V'^T)^T Q + ...,   dR = -dV' S^T
    dA = -tril((X^T dV') U^T + (X^T dR) R^T, -1), and beta, K, V and g from X^T dV', X^T dR and dA

The gradient of each g_i is q_i dq_i - k_i dk_i, as decays stand beside keys and queries only, and that of the last one
has the terms of a_C and e too. X doubles the size of its diagonal blocks six times: of two blocks with L below the
diagonal, the inverse has -X2 L X1 there. No power of A is taken, which would lose all digits where keys nearly agree.

A border of sequences in a row is data: the first token behind it has `operators.FORGET` as the logarithm of its decay,
and all factors across it are 0. Decays that follow in its chunk are rounded as a sum of that size, by 4e-6 a border.

Products take the dtype of the values and sum in float32, as states do; X is computed in TF32 or float32. Nothing
transposes the result of a product: Triton 3.4 to 3.7.0 computes that wrongly on Hopper (issue 640 of
flash-linear-attention), so a product of swapped factors is computed beside it. Heads are padded to powers of two by the
caller, as masked odd heads are another fault there (pull request 1241). NVIDIA and ROCm compile the kernels, and
Triton's interpreter runs them on a CPU.

References: Yang et al., 2024, https://arxiv.org/abs/2406.06484 (the WY form), https://arxiv.org/abs/2412.06464 (gated)
"""

# A kernel is in Triton's language, whose types a checker of Python's does not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_C = tl.constexpr(64)  # tokens of a chunk
_LEVELS = tl.constexpr(6)  # doublings of a block of 1 to a chunk
_VALUES = 32  # values of a program that goes from chunk to chunk: 128 programs of 32 heads of 128
_BLOCK = 64  # keys or values at a time where one chunk is condensed
_WARPS = 4
# The kernels of gradients have five sums of [C, 64]. A wave of CDNA has twice the lanes of a warp.
_WARPS_OF_GRADIENTS = 8 if torch.version.hip is None else 4
_STAGES = 2  # more would take more than 164 KB of shared memory, which is all that an A100 has


class DeltaRows(NamedTuple):
    """Inputs of B rows of T tokens, contiguous; head sizes N and M are powers of two of at least 16.

    Attributes:
      q, k: [B, T, K, N], key head h // (H / K) for value head h.
      v: [B, T, H, M].
      log_decay, beta: [B, T, H]; see above for borders of sequences.
      first: [B, H, N, M] float32, the state before the first token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    first: Tensor


class ChunkParts(NamedTuple):
    """Intermediate results, of which X, states and new values are there for the backward pass alone.

    Attributes:
      sums: g, [B, T, H] float32.
      updates, readers: U and R, as v and [B, T, H, N].
      inverses: X, [B, T, H, C].
      states: S before each chunk, [B, H, chunks, N, M].
      values: V', as v.
    """

    sums: Tensor
    updates: Tensor
    readers: Tensor
    inverses: Tensor
    states: Tensor
    values: Tensor


@triton.jit
def _row(ptr, c, T, stride):
    """A number of each token of a chunk, 0 from T on; float32."""
    i = tl.arange(0, _C)
    ptr += tl.cast(c, tl.int64) * _C * stride
    return tl.load(ptr + i * stride, mask=i < T - c * _C, other=0.0).to(tl.float32)


@triton.jit
def _save_row(ptr, c, T, stride, x):
    i = tl.arange(0, _C)
    tl.store(ptr + tl.cast(c, tl.int64) * _C * stride + i * stride, x, mask=i < T - c * _C)


@triton.jit
def _tile(ptr, c, T, stride, n):
    """Numbers n of each token of a chunk, 0 from T on."""
    i = tl.arange(0, _C)
    ptr += tl.cast(c, tl.int64) * _C * stride
    return tl.load(ptr + i[:, None] * stride + n[None, :], mask=(i < T - c * _C)[:, None], other=0.0)


@triton.jit
def _turned(ptr, c, T, stride, n):
    """`_tile` transposed, read that way."""
    i = tl.arange(0, _C)
    ptr += tl.cast(c, tl.int64) * _C * stride
    return tl.load(ptr + i[None, :] * stride + n[:, None], mask=(i < T - c * _C)[None, :], other=0.0)


@triton.jit
def _save(ptr, c, T, stride, n, x):
    i = tl.arange(0, _C)
    ptr += tl.cast(c, tl.int64) * _C * stride
    tl.store(ptr + i[:, None] * stride + n[None, :], x.to(ptr.dtype.element_ty), mask=(i < T - c * _C)[:, None])


@triton.jit
def _places(T, K: tl.constexpr, H: tl.constexpr, N: tl.constexpr):
    """The head of a program among those of all rows, and offsets into keys and into value heads."""
    b = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    return b * H + h, b * T * K * N + h // (H // K) * N, b * T * H + h


@triton.jit
def _within(sums, least: tl.constexpr):
    """W, where i - j is `least` or more."""
    i = tl.arange(0, _C)
    return tl.exp(tl.where(i[:, None] - i[None, :] >= least, sums[:, None] - sums[None, :], float("-inf")))


@triton.jit
def _turned_within(sums, least: tl.constexpr):
    """`_within` transposed."""
    i = tl.arange(0, _C)
    return tl.exp(tl.where(i[None, :] - i[:, None] >= least, sums[None, :] - sums[:, None], float("-inf")))


@triton.jit
def _sums_from(x):
    """The sum over all tokens from each one on: the gradient of what is summed in g."""
    i = tl.arange(0, _C)
    return tl.sum(tl.where(i[:, None] >= i[None, :], x[:, None], 0.0), 0)


@triton.jit
def _decays(sums_ptr, c, T, H):
    """g of a chunk, a, e and a_C; tokens from T on are as the last one."""
    sums_ptr += tl.cast(c, tl.int64) * _C * H
    last = tl.minimum(_C, T - c * _C) - 1
    sums = tl.load(sums_ptr + tl.minimum(tl.arange(0, _C), last) * H)
    last_sum = tl.load(sums_ptr + last * H)
    return sums, tl.exp(sums), tl.exp(last_sum - sums), tl.exp(last_sum)


@triton.jit(do_not_specialize=["T"])  # any number of tokens is one compilation
def _condense(
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    sums_ptr,
    updates_ptr,
    readers_ptr,
    inverses_ptr,
    T,
    K: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    block: tl.constexpr,
    keep: tl.constexpr,
    precision: tl.constexpr,
):
    """g, U, R and X of one chunk of a head."""
    c = tl.program_id(1)
    _, key, head = _places(T, K, H, N)
    i = tl.arange(0, _C)
    k_ptr += key
    sums_ptr += head
    sums = tl.cumsum(_row(log_decay_ptr + head, c, T, H), 0)
    _save_row(sums_ptr, c, T, H, sums)
    beta = _row(beta_ptr + head, c, T, H)
    overlap = tl.zeros([_C, _C], tl.float32)
    for n in tl.static_range(0, N, block):
        numbers = n + tl.arange(0, block)
        overlap += tl.dot(_tile(k_ptr, c, T, K * N, numbers), _turned(k_ptr, c, T, K * N, numbers))
    overlap *= _within(sums, 1) * beta[:, None]
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inverse -= tl.where(i[:, None] // 2 == i[None, :] // 2, overlap, 0.0)
    for level in tl.static_range(1, _LEVELS):
        in_pair = i[:, None] >> (level + 1) == i[None, :] >> (level + 1)
        in_block = i[:, None] >> level == i[None, :] >> level
        between = tl.where(in_pair & (in_block == 0), overlap, 0.0)
        right = tl.dot(between, inverse, input_precision=precision)
        inverse -= tl.dot(inverse, right, input_precision=precision)
    dtype = v_ptr.dtype.element_ty
    if keep:
        _save(inverses_ptr + head * _C, c, T, H * _C, i, inverse)
    weighted = (inverse * beta[None, :]).to(dtype)
    for m in tl.static_range(0, M, block):
        numbers = m + tl.arange(0, block)
        update = tl.dot(weighted, _tile(v_ptr + head * M, c, T, H * M, numbers))
        _save(updates_ptr + head * M, c, T, H * M, numbers, update)
    weighted = (inverse * (beta * tl.exp(sums))[None, :]).to(dtype)
    for n in tl.static_range(0, N, block):
        numbers = n + tl.arange(0, block)
        reader = tl.dot(weighted, _tile(k_ptr, c, T, K * N, numbers))
        _save(readers_ptr + head * N, c, T, H * N, numbers, reader)


@triton.jit(do_not_specialize=["T"])
def _advance(
    q_ptr,
    k_ptr,
    first_ptr,
    sums_ptr,
    updates_ptr,
    readers_ptr,
    states_ptr,
    values_ptr,
    out_ptr,
    end_ptr,
    T,
    K: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    block: tl.constexpr,
    keep: tl.constexpr,
):
    """States from chunk to chunk, of some values of a head: results and the last state, or all states and V'."""
    index, key, head = _places(T, K, H, N)
    n = tl.arange(0, N)
    m = tl.program_id(1) * block + tl.arange(0, block)
    square = n[:, None] * M + m[None, :]
    dtype = out_ptr.dtype.element_ty
    chunks = tl.cdiv(T, _C)
    state = tl.load(first_ptr + index * N * M + square)
    for c in range(0, chunks):
        sums, since, until, whole = _decays(sums_ptr + head, c, T, H)
        if keep:
            tl.store(states_ptr + (index * chunks + c) * N * M + square, state.to(dtype))
        turned_k = _turned(k_ptr + key, c, T, K * N, n)
        if not keep:  # first the products that need most registers
            q = _tile(q_ptr + key, c, T, K * N, n)
            weights = (tl.dot(q, turned_k) * _within(sums, 0)).to(dtype)
            out = tl.dot(q, state.to(dtype)) * since[:, None]
        value = _tile(updates_ptr + head * M, c, T, H * M, m).to(tl.float32)
        value -= tl.dot(_tile(readers_ptr + head * N, c, T, H * N, n), state.to(dtype))
        if keep:
            _save(values_ptr + head * M, c, T, H * M, m, value)
        else:
            out += tl.dot(weights, value.to(dtype))
            _save(out_ptr + head * M, c, T, H * M, m, out)
        state = whole * state + tl.dot(turned_k, (value * until[:, None]).to(dtype))
    if not keep:
        tl.store(end_ptr + index * N * M + square, state)


@triton.jit(do_not_specialize=["T"])
def _retreat(
    d_out_ptr,
    d_end_ptr,
    q_ptr,
    k_ptr,
    sums_ptr,
    readers_ptr,
    d_states_ptr,
    d_values_ptr,
    d_first_ptr,
    T,
    K: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    block: tl.constexpr,
):
    """D and dV' from the last chunk to the first one, of some values of a head."""
    index, key, head = _places(T, K, H, N)
    n = tl.arange(0, N)
    m = tl.program_id(1) * block + tl.arange(0, block)
    square = n[:, None] * M + m[None, :]
    dtype = d_out_ptr.dtype.element_ty
    chunks = tl.cdiv(T, _C)
    d_state = tl.load(d_end_ptr + index * N * M + square)
    for step in range(0, chunks):
        c = chunks - 1 - step
        sums, since, until, whole = _decays(sums_ptr + head, c, T, H)
        tl.store(d_states_ptr + (index * chunks + c) * N * M + square, d_state.to(dtype))
        k = _tile(k_ptr + key, c, T, K * N, n)
        turned_q = _turned(q_ptr + key, c, T, K * N, n)
        d_out = _tile(d_out_ptr + head * M, c, T, H * M, m)
        weights = (tl.dot(k, turned_q) * _turned_within(sums, 0)).to(dtype)
        d_value = tl.dot(k, d_state.to(dtype)) * until[:, None]
        d_value += tl.dot(weights, d_out)
        _save(d_values_ptr + head * M, c, T, H * M, m, d_value)
        d_state = whole * d_state + tl.dot(turned_q, (d_out.to(tl.float32) * since[:, None]).to(dtype))
        d_state -= tl.dot(_turned(readers_ptr + head * N, c, T, H * N, n), d_value.to(dtype))
    tl.store(d_first_ptr + index * N * M + square, d_state)


@triton.jit(do_not_specialize=["T"])
def _read_gradients(
    d_out_ptr,
    q_ptr,
    k_ptr,
    sums_ptr,
    states_ptr,
    values_ptr,
    d_states_ptr,
    d_values_ptr,
    dq_ptr,
    dk_ptr,
    d_readers_ptr,
    d_sums_ptr,
    T,
    K: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    keys: tl.constexpr,
    block: tl.constexpr,
):
    """dQ, dR, and dK and dg but for those by X, of some keys of one chunk of a head."""
    c = tl.program_id(1)
    index, key, head = _places(T, K, H, N)
    n = tl.program_id(2) * keys + tl.arange(0, keys)
    square = (index * tl.cdiv(T, _C) + c) * N * M + n[None, :] * M
    sums, since, until, whole = _decays(sums_ptr + head, c, T, H)
    dtype = d_out_ptr.dtype.element_ty
    d_p = tl.zeros([_C, _C], tl.float32)
    d_p_turned = tl.zeros([_C, _C], tl.float32)
    dq = tl.zeros([_C, keys], tl.float32)
    dk = tl.zeros([_C, keys], tl.float32)
    d_reader = tl.zeros([_C, keys], tl.float32)
    d_whole = tl.zeros([keys], tl.float32)
    for first in tl.range(0, M, block):
        m = first + tl.arange(0, block)
        d_out = _tile(d_out_ptr + head * M, c, T, H * M, m)
        value = _tile(values_ptr + head * M, c, T, H * M, m)
        state = tl.load(states_ptr + square + m[:, None])
        d_state = tl.load(d_states_ptr + square + m[:, None])
        d_p += tl.dot(d_out, _turned(values_ptr + head * M, c, T, H * M, m))
        d_p_turned += tl.dot(value, _turned(d_out_ptr + head * M, c, T, H * M, m))
        dq += tl.dot(d_out, state)
        dk += tl.dot(value, d_state)
        d_reader -= tl.dot(_tile(d_values_ptr + head * M, c, T, H * M, m), state)
        d_whole += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 0)
    _save(d_readers_ptr + head * N, c, T, H * N, n, d_reader)
    q = _tile(q_ptr + key, c, T, K * N, n)
    k = _tile(k_ptr + key, c, T, K * N, n)
    dk *= until[:, None]
    d_last = tl.sum(tl.sum(dk * k.to(tl.float32), 1), 0) + whole * tl.sum(d_whole, 0)
    dq = dq * since[:, None] + tl.dot((d_p * _within(sums, 0)).to(dtype), k)
    dk += tl.dot((d_p_turned * _turned_within(sums, 0)).to(dtype), q)
    _save(dq_ptr + head * N, c, T, H * N, n, dq)
    _save(dk_ptr + head * N, c, T, H * N, n, dk)
    dg = tl.sum(dq * q.to(tl.float32) - dk * k.to(tl.float32), 1)
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(0) * T
    _save_row(d_sums_ptr + part + head, c, T, H, _sums_from(dg) + d_last)  # a_C and e are of the end


@triton.jit(do_not_specialize=["T"])
def _condensed_gradients(
    k_ptr,
    v_ptr,
    beta_ptr,
    sums_ptr,
    updates_ptr,
    readers_ptr,
    inverses_ptr,
    d_values_ptr,
    d_readers_ptr,
    dk_ptr,
    dv_ptr,
    d_beta_ptr,
    d_sums_ptr,
    T,
    K: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    block: tl.constexpr,
):
    """dV, dbeta, and the parts of dK and dg by X, of one chunk of a head."""
    c = tl.program_id(1)
    _, key, head = _places(T, K, H, N)
    i = tl.arange(0, _C)
    sums, since, _, _ = _decays(sums_ptr + head, c, T, H)
    beta = _row(beta_ptr + head, c, T, H)
    dtype = v_ptr.dtype.element_ty
    inverse = _tile(inverses_ptr + head * _C, c, T, H * _C, i)
    turned = _turned(inverses_ptr + head * _C, c, T, H * _C, i)
    d_a = tl.zeros([_C, _C], tl.float32)
    d_a_turned = tl.zeros([_C, _C], tl.float32)
    d_beta = tl.zeros([_C], tl.float32)
    d_since = tl.zeros([_C], tl.float32)
    for first in tl.range(0, M, block):
        m = first + tl.arange(0, block)
        z = tl.dot(turned, _tile(d_values_ptr + head * M, c, T, H * M, m))
        z_turned = tl.dot(_turned(d_values_ptr + head * M, c, T, H * M, m), inverse)
        d_a -= tl.dot(z.to(dtype), _turned(updates_ptr + head * M, c, T, H * M, m))
        d_a_turned -= tl.dot(_tile(updates_ptr + head * M, c, T, H * M, m), z_turned.to(dtype))
        d_beta += tl.sum(z * _tile(v_ptr + head * M, c, T, H * M, m).to(tl.float32), 1)
        _save(dv_ptr + head * M, c, T, H * M, m, z * beta[:, None])
    for first in tl.range(0, N, block):
        n = first + tl.arange(0, block)
        z = tl.dot(turned, _tile(d_readers_ptr + head * N, c, T, H * N, n))
        z_turned = tl.dot(_turned(d_readers_ptr + head * N, c, T, H * N, n), inverse)
        d_a -= tl.dot(z.to(dtype), _turned(readers_ptr + head * N, c, T, H * N, n))
        d_a_turned -= tl.dot(_tile(readers_ptr + head * N, c, T, H * N, n), z_turned.to(dtype))
        d_since += tl.sum(z * _tile(k_ptr + key, c, T, K * N, n).to(tl.float32), 1) * since
    d_beta += d_since
    dg = d_since * beta
    d_a *= _within(sums, 1)
    d_a_turned *= _turned_within(sums, 1) * beta[None, :]
    for first in tl.range(0, N, block):
        n = first + tl.arange(0, block)
        k = _tile(k_ptr + key, c, T, K * N, n)
        z = tl.dot(turned, _tile(d_readers_ptr + head * N, c, T, H * N, n))
        rows = tl.dot(d_a.to(dtype), k)
        columns = tl.dot(d_a_turned.to(dtype), k)
        of_beta = tl.sum(rows * k.to(tl.float32), 1)
        d_beta += of_beta
        dg += of_beta * beta - tl.sum(columns * k.to(tl.float32), 1)
        dk = _tile(dk_ptr + head * N, c, T, H * N, n).to(tl.float32)
        dk += columns + (rows + z * since[:, None]) * beta[:, None]
        _save(dk_ptr + head * N, c, T, H * N, n, dk)
    _save_row(d_beta_ptr + head, c, T, H, d_beta)
    _save_row(d_sums_ptr + head, c, T, H, _sums_from(dg))


def launch_rule(rows: DeltaRows) -> tuple[Tensor, Tensor]:
    """Results, as v, and the states after the last tokens, as `first`."""
    out = torch.empty_like(rows.v)
    end = torch.empty_like(rows.first)
    _launch_states(rows, out, end, keep=False)
    return out, end


def launch_rule_gradients(d_out: Tensor, d_end: Tensor, rows: DeltaRows) -> list[Tensor]:
    """Gradients of q, k, v, log_decay, beta and first by those of the results of `launch_rule`, which it recomputes."""
    q, k, v, log_decay, beta, first = rows
    B, T, K, N = q.shape
    H, M = v.shape[2:]
    parts = _launch_states(rows, v, first, keep=True)
    sizes = T, K, H, N, M
    d_states = torch.empty_like(parts.states)
    d_values = torch.empty_like(v)
    d_readers = torch.empty_like(parts.readers)
    d_first = torch.empty_like(first)
    values = min(_VALUES, M)
    _retreat[B * H, M // values](
        *(d_out, d_end, q, k, parts.sums, parts.readers, d_states, d_values, d_first, *sizes),
        block=values,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    dq, dk = torch.empty_like(d_readers), torch.empty_like(d_readers)
    blocks = triton.cdiv(N, _BLOCK)
    d_sums = torch.empty(blocks + 1, *log_decay.shape, dtype=torch.float32, device=v.device)
    d_beta = torch.empty_like(d_sums[0])
    dv = torch.empty_like(v)
    chunks = triton.cdiv(T, _C.value)
    _read_gradients[B * H, chunks, blocks](
        *(d_out, q, k, parts.sums, parts.states, parts.values, d_states, d_values),
        *(dq, dk, d_readers, d_sums, *sizes),
        keys=min(_BLOCK, N),
        block=values,
        num_warps=_WARPS_OF_GRADIENTS,
        num_stages=_STAGES,
    )
    _condensed_gradients[B * H, chunks](
        *(k, v, beta, parts.sums, parts.updates, parts.readers, parts.inverses, d_values, d_readers),
        *(dk, dv, d_beta, d_sums[blocks], *sizes),
        block=min(_VALUES, N, M),
        num_warps=_WARPS_OF_GRADIENTS,
        num_stages=_STAGES,
    )
    dq, dk = (x.unflatten(2, (K, -1)).sum(3) for x in (dq, dk))
    return [dq, dk, dv, d_sums.sum(0).to(log_decay.dtype), d_beta.to(beta.dtype), d_first]


def _launch_states(rows: DeltaRows, out: Tensor, end: Tensor, keep: bool) -> ChunkParts:
    """Write results and last states, or with `keep` all that gradients need."""
    q, k, v, log_decay, beta, first = rows
    B, T, K, N = q.shape
    H, M = v.shape[2:]
    chunks = triton.cdiv(T, _C.value)
    sizes = T, K, H, N, M
    parts = ChunkParts(
        sums=torch.empty(B, T, H, dtype=torch.float32, device=v.device),
        updates=torch.empty_like(v),
        readers=v.new_empty(B, T, H, N),
        inverses=v.new_empty((B, T, H, _C.value) if keep else 0),
        states=v.new_empty((B, H, chunks, N, M) if keep else 0),
        values=torch.empty_like(v) if keep else v.new_empty(0),
    )
    _condense[B * H, chunks](
        *(k, v, log_decay, beta, *parts[:4], *sizes),
        block=min(_BLOCK, N, M),
        keep=keep,
        precision="tf32" if torch.version.hip is None and v.element_size() == 2 else "ieee",
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    values = min(_VALUES, M)
    _advance[B * H, M // values](
        *(q, k, first, *parts[:3], *parts[4:], out, end, *sizes),
        block=values,
        keep=keep,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return parts
