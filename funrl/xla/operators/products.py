"""Products of matrices, and funrl's own operators that are loops over products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from funrl.xla.operators.attention import LANE_NUMBERS
from funrl.xla.operators.result import JaxArray, Lowering, OperatorResult, as_dtype

SUMMED_DTYPES = (jnp.bfloat16, jnp.float32)  # of the kernel for sums by group
ROW_TILES = (512, 256, 128)


def _product(result: OperatorResult, a: JaxArray, b: JaxArray) -> JaxArray:
    """a b with sums in the wide dtype of the result."""
    return jnp.matmul(a, b, preferred_element_type=result.compute)


def _added_product(
    result: OperatorResult, x: JaxArray, a: JaxArray, b: JaxArray, beta: Any = 1, alpha: Any = 1
) -> JaxArray:
    product = jnp.matmul(a, b, preferred_element_type=result.compute)
    product = product if alpha == 1 else product * alpha
    x = as_dtype(x, result.compute)
    return (x if beta == 1 else x * beta) + product


def _solve_triangular(
    result: OperatorResult, a: JaxArray, b: JaxArray, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> JaxArray:
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


def _choose_experts(result: OperatorResult, probs: JaxArray, per_token: int) -> JaxArray:
    return lax.top_k(probs, per_token)[1]  # equal ones in order, as in torch's


def _sizes(ends: JaxArray) -> JaxArray:
    """Rows of each group, from the ends of the groups."""
    return jnp.diff(ends, prepend=0).astype(jnp.int32)


def _grouped_linear(result: OperatorResult, x: JaxArray, weight: JaxArray, ends: JaxArray) -> JaxArray:
    """Rows times the transposed matrix of their group; rows after the last group are 0."""
    out = lax.ragged_dot(x, jnp.swapaxes(weight, 1, 2), _sizes(ends), preferred_element_type=result.compute)
    return jnp.where((jnp.arange(x.shape[0]) < ends[-1])[:, None], out, 0)


def _grouped_weight(result: OperatorResult, grad: JaxArray, x: JaxArray, ends: JaxArray) -> JaxArray:
    """For each group the sum over its rows of grad x^T.

    XLA multiplies all rows once for each group, on a TPU too; the kernel there multiplies only tiles of a group's rows.
    """

    def by_xla(grad: JaxArray, x: JaxArray, sizes: JaxArray) -> JaxArray:
        contracted = (((0,), (0,)), ((), ()))
        numbers = lax.RaggedDotDimensionNumbers(contracted, lhs_ragged_dimensions=[0], rhs_group_dimensions=[])
        return lax.ragged_dot_general(grad, x, sizes, numbers, preferred_element_type=result.compute)

    rows = jnp.arange(x.shape[0])
    grad = jnp.where((rows < ends[-1])[:, None], grad, 0)
    if grad.dtype not in SUMMED_DTYPES:
        return by_xla(grad, x, _sizes(ends))
    return lax.platform_dependent(grad, x, _sizes(ends), tpu=grouped_sums, default=by_xla)


def grouped_sums(grad: JaxArray, x: JaxArray, sizes: JaxArray) -> JaxArray:
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


def _chunk_states(
    result: OperatorResult,
    updates: JaxArray,
    readers: JaxArray,
    keys: JaxArray,
    whole: JaxArray,
    first: JaxArray | None = None,
) -> tuple[JaxArray, JaxArray]:
    """The recurrence of `gated_delta.chunk_states`: values and states of all chunks."""

    def step(state: JaxArray, chunk: tuple[JaxArray, ...]) -> tuple[JaxArray, tuple[JaxArray, JaxArray]]:
        update, reader, key, kept = chunk
        values = update - reader @ state
        return kept[..., None, None] * state + jnp.swapaxes(key, -1, -2) @ values, (values, state)

    chunks = tuple(jnp.moveaxis(x, 1, 0) for x in (updates, readers, keys, whole))
    if first is None:
        first = jnp.zeros((*keys.shape[:1], *keys.shape[2:3], keys.shape[-1], updates.shape[-1]), updates.dtype)
    _, (values, states) = lax.scan(step, first, chunks)
    return jnp.moveaxis(values, 0, 1), jnp.moveaxis(states, 0, 1)


def _continued_states(result: OperatorResult, *operands: JaxArray) -> tuple[JaxArray, JaxArray]:
    """The recurrence of `static_pass.continued_states`, row after row."""
    updates, readers, keys, whole, first, goes_on = operands
    chunks = updates.shape[1]

    def step(state: JaxArray, chunk: tuple[JaxArray, ...]) -> tuple[JaxArray, tuple[JaxArray, JaxArray]]:
        number, update, reader, key, kept = chunk
        row = number // chunks
        begins = (number % chunks == 0) & ~goes_on[row]
        state = jnp.where(begins, first[row], state)
        values = update - reader @ state
        return kept[..., None, None] * state + jnp.swapaxes(key, -1, -2) @ values, (values, state)

    flat = tuple(x.reshape(-1, *x.shape[2:]) for x in (updates, readers, keys, whole))
    _, outputs = lax.scan(step, first[0], (jnp.arange(len(flat[0])), *flat))
    values, states = (x.reshape(*updates.shape[:2], *x.shape[1:]) for x in outputs)
    return values, states


def _chunk_states_backward(
    result: OperatorResult, d_values: JaxArray, d_states: JaxArray, readers: JaxArray, keys: JaxArray, whole: JaxArray
) -> tuple[JaxArray, JaxArray]:
    """Gradients by the updates, and by the state after each chunk."""

    def step(after: JaxArray, chunk: tuple[JaxArray, ...]) -> tuple[JaxArray, tuple[JaxArray, JaxArray]]:
        d_value, d_state, reader, key, kept = chunk
        d_update = d_value + key @ after
        before = kept[..., None, None] * after + d_state - jnp.swapaxes(reader, -1, -2) @ d_update
        return before, (d_update, after)

    chunks = tuple(jnp.moveaxis(x, 1, 0) for x in (d_values, d_states, readers, keys, whole))
    _, (d_updates, d_after) = lax.scan(step, jnp.zeros_like(d_states[:, 0]), chunks, reverse=True)
    return jnp.moveaxis(d_updates, 0, 1), jnp.moveaxis(d_after, 0, 1)


MATRIX_PRODUCTS: dict[str, Lowering] = {
    "aten.mm": _product,
    "aten.bmm": _product,
    "aten.mv": _product,
    "aten.dot": _product,
    "aten.addmm": _added_product,
    "aten.baddbmm": _added_product,
    "aten.linalg_solve_triangular": _solve_triangular,
    "funrl.choose_experts": _choose_experts,
    "funrl.grouped_linear": _grouped_linear,
    "funrl.grouped_weight": _grouped_weight,
    "funrl.chunk_states": _chunk_states,
    "funrl.chunk_states_backward": _chunk_states_backward,
    "funrl.continued_states": _continued_states,
}
