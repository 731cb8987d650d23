"""Operators over some or all dims, and along one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from funrl.xla.operators.result import JaxArray, Lowering, OperatorResult, as_dtype

Dims = int | Sequence[int] | None


def _axes(dims: Dims) -> int | tuple[int, ...] | None:
    """Dims as numpy takes them: none given, or an empty list, is all of them."""
    if dims is None or isinstance(dims, int):
        return dims
    return tuple(dims) or None


def _sums(fn: Callable[..., JaxArray]) -> Lowering:
    """Reductions that add or multiply, in the wide dtype of the result."""

    def row(result: OperatorResult, x: JaxArray, dims: Dims = None, keepdim: bool = False) -> JaxArray:
        return fn(as_dtype(x, result.compute), axis=_axes(dims), keepdims=keepdim)

    return row


def _extremes(fn: Callable[..., JaxArray]) -> Lowering:
    return lambda result, x, dims=None, keepdim=False: fn(x, axis=_axes(dims), keepdims=keepdim)


def _extreme_and_place(best: Callable[..., JaxArray], place: Callable[..., JaxArray]) -> Lowering:
    """max and min: of all elements, or along a dim with the place of each."""

    def row(result: OperatorResult, x: JaxArray, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return best(x)
        return best(x, axis=dim, keepdims=keepdim), place(x, axis=dim, keepdims=keepdim)

    return row


def _places(fn: Callable[..., JaxArray]) -> Lowering:
    return lambda result, x, dim=None, keepdim=False: fn(x, axis=dim, keepdims=keepdim)


def _variance(
    result: OperatorResult, x: JaxArray, dims: Dims = None, correction: int = 1, keepdim: bool = False
) -> JaxArray:
    return jnp.var(as_dtype(x, result.compute), axis=_axes(dims), ddof=correction, keepdims=keepdim)


def _vector_norm(
    result: OperatorResult, x: JaxArray, order: float = 2, dims: Dims = None, keepdim: bool = False
) -> JaxArray:
    if order != 2:
        raise NotImplementedError(f"linalg_vector_norm of order {order}: the table has order 2")
    squares = jnp.square(as_dtype(x, result.compute))
    return jnp.sqrt(jnp.sum(squares, axis=_axes(dims), keepdims=keepdim))


def _cumulative(fn: Callable[..., JaxArray], combine: Callable[..., JaxArray]) -> Lowering:
    """Cumulative sums or products. On a TPU they are scans by pairs: JAX's own take minutes to compile in 64 bits."""

    def row(result: OperatorResult, x: JaxArray, dim: int) -> JaxArray:
        if not x.ndim:
            return x
        return jax.lax.platform_dependent(
            as_dtype(x, result.compute),
            tpu=lambda wide: jax.lax.associative_scan(combine, wide, axis=dim),
            default=lambda wide: fn(wide, axis=dim),
        )

    return row


def _softmax(fn: Callable[..., JaxArray]) -> Lowering:
    return lambda result, x, dim, to_float=False: fn(as_dtype(x, result.compute), axis=dim)


def _sort(result: OperatorResult, x: JaxArray, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)  # a stable order is one of any
    return jnp.take_along_axis(x, order, axis=dim), order


def _topk(result: OperatorResult, x: JaxArray, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    moved = jnp.moveaxis(x, dim, -1)
    if largest:
        values, places = jax.lax.top_k(moved, k)
    else:
        places = jnp.argsort(moved, axis=-1, stable=True)[..., :k]
        values = jnp.take_along_axis(moved, places, axis=-1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(places, -1, dim)


OVER_DIMS: dict[str, Lowering] = {
    "aten.sum": _sums(jnp.sum),
    "aten.mean": _sums(jnp.mean),
    "aten.prod": _sums(jnp.prod),
    "aten.var": _variance,
    "aten.linalg_vector_norm": _vector_norm,
    "aten.amax": _extremes(jnp.max),
    "aten.amin": _extremes(jnp.min),
    "aten.any": _extremes(jnp.any),
    "aten.all": _extremes(jnp.all),
    "aten.max": _extreme_and_place(jnp.max, jnp.argmax),
    "aten.min": _extreme_and_place(jnp.min, jnp.argmin),
    "aten.argmax": _places(jnp.argmax),
    "aten.argmin": _places(jnp.argmin),
    "aten.cumsum": _cumulative(jnp.cumsum, jnp.add),
    "aten.cumprod": _cumulative(jnp.cumprod, jnp.multiply),
    "aten._softmax": _softmax(jax.nn.softmax),
    "aten._log_softmax": _softmax(jax.nn.log_softmax),
    "aten.sort": _sort,
    "aten.topk": _topk,
}
