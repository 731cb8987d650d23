"""Kernels of Pallas for TPUs: attention over segments, and sums by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LANE_NUMBERS = 128  # the kernel's blocks, and the sizes of its heads, are multiples
LARGEST_TILE = 512  # tokens
SUMMED_DTYPES = (jnp.bfloat16, jnp.float32)  # of the kernel for sums by group
ROW_TILES = (512, 256, 128)
TILES = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")  # there and back


class _Numbers(NamedTuple):
    """Constants of a call: as `blockwise_attention.kernel_attention`; a window or a cap of 0 is none."""

    window: int
    scale: float
    cap: float


def _numbers_of(values: Sequence[float]) -> _Numbers:
    return _Numbers(int(values[0]), *values[1:])


def splash_attention(result: Any, *operands: Any) -> jax.Array:
    """`blockwise_attention.kernel_attention`."""
    q_THN, k_TKN, v_TKN, offsets, numbers = operands
    with jax.enable_x64(False):  # the kernel's indices are of 32 bits
        out_THN = _attend((q_THN, k_TKN, v_TKN), offsets, _numbers_of(numbers))
    return jnp.where(_is_real(offsets, len(q_THN)), out_THN, 0)


def splash_attention_backward(result: Any, *operands: Any) -> tuple[jax.Array, ...]:
    """Its gradients by queries, keys and values; the kernel's own."""
    d_out_THN, q_THN, k_TKN, v_TKN, offsets, numbers = operands
    d_out_THN = jnp.where(_is_real(offsets, len(q_THN)), d_out_THN, 0).astype(q_THN.dtype)
    with jax.enable_x64(False):
        inputs = (q_THN, k_TKN, v_TKN)
        _, pull = jax.vjp(lambda *inputs: _attend(inputs, offsets, _numbers_of(numbers)), *inputs)
        return pull(d_out_THN)


def _attend(inputs: tuple[jax.Array, ...], offsets: jax.Array, numbers: _Numbers) -> jax.Array:
    """Results [T, H, N], of padding without a meaning."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    q_THN, k_TKN, v_TKN = inputs
    T, heads, size = q_THN.shape
    q_THN = (q_THN.astype(jnp.float32) * numbers.scale).astype(q_THN.dtype)
    filled = [_filled_heads(x) for x in (q_THN, k_TKN, v_TKN)]
    tokens = filled[0].shape[1]
    places = jnp.arange(tokens, dtype=jnp.int32)
    segments = jnp.searchsorted(offsets[1:].astype(jnp.int32), places, side="right").astype(jnp.int32)
    window = (numbers.window - 1, 0)
    mask = masks.LocalMask((tokens, tokens), window, 0) if numbers.window else masks.CausalMask((tokens, tokens))
    block = next(size for size in (LARGEST_TILE, 2 * LANE_NUMBERS, LANE_NUMBERS) if tokens % size == 0)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(TILES, block)),
        attn_logits_soft_cap=numbers.cap or None,
        head_shards=1,
        q_seq_shards=1,
    )
    out_HTN: Any = kernel(*filled, segment_ids=splash.SegmentIds(segments, segments))
    return jnp.swapaxes(out_HTN, 0, 1)[:T, :, :size]


def _filled_heads(x_THN: jax.Array) -> jax.Array:
    """[H, T, N], with zeros up to whole blocks of tokens and of a head."""
    T, _, N = x_THN.shape
    return jnp.swapaxes(jnp.pad(x_THN, ((0, -T % LANE_NUMBERS), (0, 0), (0, -N % LANE_NUMBERS))), 0, 1)


def _is_real(offsets: jax.Array, tokens: int) -> jax.Array:
    """[T, 1, 1]: false at padding."""
    return (jnp.arange(tokens) < offsets[-1])[:, None, None]


def grouped_sums(grad: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """`funrl.grouped_weight` by a Pallas kernel for TPUs, in float32: [E, N, K].

    Args:
      grad, x: [R, N] and [R, K], rows sorted by group.
      sizes: int32 [E], rows of each group.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    filled = [jnp.pad(rows, ((0, -len(rows) % LANE_NUMBERS), (0, 0))) for rows in (grad, x)]
    row_tile = next(size for size in ROW_TILES if len(filled[0]) % size == 0)
    sides = [min(ROW_TILES[0], -(-rows.shape[1] // LANE_NUMBERS) * LANE_NUMBERS) for rows in (grad, x)]
    with jax.enable_x64(False):  # the kernel's indices are of 32 bits
        return tgmm(filled[0].T, filled[1], sizes, preferred_element_type=jnp.float32, tiling=(row_tile, *sides))
