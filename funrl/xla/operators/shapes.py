"""Operators that give elements another place, and those that make tensors of nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from funrl.xla.operators.result import JaxArray, Lowering, OperatorResult, of_arguments


def _reshape(result: OperatorResult, x: JaxArray, *_: Any) -> JaxArray:
    return jnp.reshape(x, result.shape)


def _view(result: OperatorResult, x: JaxArray, shape_or_dtype: Any) -> JaxArray:
    """Another shape, or the same bits in a dtype of the same size."""
    if isinstance(shape_or_dtype, torch.dtype):
        return lax.bitcast_convert_type(x, result.dtype)
    return jnp.reshape(x, result.shape)


def _expand(result: OperatorResult, x: JaxArray, *_: Any, **__: Any) -> JaxArray:
    return jnp.broadcast_to(x, result.shape)


def _part(
    x: JaxArray, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[slice, ...]:
    """Slices of all dims; torch's may end after the last element."""
    size = x.shape[dim]
    dim %= x.ndim
    low, high = (0 if start is None else start), (size if end is None else min(end, size))
    return (*(slice(None),) * dim, slice(low, high, step))


def _slice(result: OperatorResult, x: JaxArray, *part: Any) -> JaxArray:
    return x[_part(x, *part)]


def _slice_scatter(result: OperatorResult, x: JaxArray, source: JaxArray, *part: Any) -> JaxArray:
    return x.at[_part(x, *part)].set(source)


def _select(result: OperatorResult, x: JaxArray, dim: int, index: int) -> JaxArray:
    return lax.index_in_dim(x, index % x.shape[dim], dim % x.ndim, keepdims=False)


def _select_scatter(result: OperatorResult, x: JaxArray, source: JaxArray, dim: int, index: int) -> JaxArray:
    return x.at[(*(slice(None),) * (dim % x.ndim), index)].set(source)


def _split_with_sizes(result: OperatorResult, x: JaxArray, sizes: Sequence[int], dim: int = 0) -> tuple[JaxArray, ...]:
    return tuple(jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim))


def _split(result: OperatorResult, x: JaxArray, size: int, dim: int = 0) -> tuple[JaxArray, ...]:
    return tuple(jnp.split(x, list(range(size, x.shape[dim], size)), dim))


def _pad(result: OperatorResult, x: JaxArray, pad: Sequence[int], value: float = 0) -> JaxArray:
    """Pairs (before, after) from the last dim on; negative ones cut."""
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    whole = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    return lax.pad(x, jnp.asarray(value, x.dtype), [(low, high, 0) for low, high in whole])


def _as_strided(
    result: OperatorResult, x: JaxArray, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> JaxArray:
    """A view of a whole contiguous buffer."""
    if tuple(stride) == _contiguous(size) and np.prod(size) == x.size:
        return jnp.reshape(x, size)
    places = np.full((1,) * len(size), offset or 0)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        places = places + (np.arange(count) * step).reshape([-1 if i == dim else 1 for i in range(len(size))])
    return x.reshape(-1)[places]


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for count in reversed(size[1:]):
        strides.insert(0, strides[0] * count)
    return tuple(strides[: len(size)])


def _diagonal(result: OperatorResult, x: JaxArray, offset: int = 0, dim1: int = 0, dim2: int = 1) -> JaxArray:
    return jnp.diagonal(x, offset, dim1, dim2)


def _roll(result: OperatorResult, x: JaxArray, shifts: Sequence[int], dims: Sequence[int] = ()) -> JaxArray:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


def _filled(value: float) -> Lowering:
    return lambda result, *_: jnp.full(result.shape, value, result.dtype)


def _full(place: int) -> Lowering:
    """Tensors of one number, which is an argument of this place."""
    return lambda result, *args: jnp.full(result.shape, args[place], result.dtype)


def _arange(result: OperatorResult, *args: float) -> JaxArray:
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    return jnp.arange(start, end, step, dtype=result.dtype)


SHAPES: dict[str, Lowering] = {
    "aten.view": _view,
    "aten._unsafe_view": _reshape,
    "aten.reshape": _reshape,
    "aten.squeeze": _reshape,
    "aten.unsqueeze": _reshape,
    "aten.expand": _expand,
    "aten.permute": of_arguments(jnp.transpose),
    "aten.slice": _slice,
    "aten.slice_scatter": _slice_scatter,
    "aten.select": _select,
    "aten.select_scatter": _select_scatter,
    "aten.split": _split,
    "aten.split_with_sizes": _split_with_sizes,
    "aten.cat": of_arguments(lambda xs, dim=0: jnp.concatenate(xs, dim)),
    "aten.repeat": of_arguments(jnp.tile),
    "aten.flip": of_arguments(jnp.flip),
    "aten.roll": _roll,
    "aten.diagonal": _diagonal,
    "aten.constant_pad_nd": _pad,
    "aten.as_strided": _as_strided,
    "aten.arange": _arange,
    "aten.empty": _filled(0),
    "aten.empty_like": _filled(0),
    "aten.empty_permuted": _filled(0),
    "aten.empty_strided": _filled(0),
    "aten.new_empty": _filled(0),
    "aten.new_empty_strided": _filled(0),
    "aten.new_zeros": _filled(0),
    "aten.zeros": _filled(0),
    "aten.zeros_like": _filled(0),
    "aten.new_ones": _filled(1),
    "aten.ones": _filled(1),
    "aten.ones_like": _filled(1),
    "aten.scalar_tensor": _full(0),
    "aten.full": _full(1),
    "aten.full_like": _full(1),
    "aten.fill": _full(1),
    "aten.new_full": _full(2),
}
