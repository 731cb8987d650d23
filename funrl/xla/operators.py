"""The table of operators: for each operator of torch's core that a program may hold, what it is in JAX.

A row is a function of arrays, and of what else the operator takes. The interpreter casts what it returns to the dtype
that the program has there and compares the shape, so a row is free to compute in a wider one. `aten` operators are
named without their overload: those of one name mean the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from funrl.xla import tpu_kernels

JaxArray = jax.Array
Lowering = Callable[..., Any]  # (OperatorResult, *arguments of the operator) -> its result, or a tuple of its results
Dims = int | Sequence[int] | None
Pair = tuple[JaxArray, JaxArray]

_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
JAX_DTYPES: dict[torch.dtype, jnp.dtype] = {getattr(torch, name): jnp.dtype(name) for name in _DTYPES}
HOST_DTYPES = {own: dtype for dtype, own in JAX_DTYPES.items()}
GROUP_SEPARATOR = ","  # between the axes in the name of a group over some axes of a mesh


class OperatorResult(NamedTuple):
    """Shape and dtype of an operator's result, or of each of its results.

    Attributes:
      shape: of the first result.
      dtype: of the first result.
      more: of the further ones.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    more: tuple[OperatorResult, ...] = ()

    @property
    def compute(self) -> jnp.dtype:
        """The dtype to compute in: as in torch, 16-bit numbers are rounded once, after the operator."""
        return jnp.dtype(jnp.float32) if self.dtype in (jnp.bfloat16, jnp.float16) else self.dtype


def of_arguments(fn: Callable[..., Any]) -> Lowering:
    """A row of a function that asks nothing of its result."""
    return lambda result, *args, **kwargs: fn(*args, **kwargs)


def is_array(x: Any) -> bool:
    """True of arrays, and not of Python's numbers, which have no dtype of their own."""
    return hasattr(x, "dtype") and hasattr(x, "ndim")


def as_dtype(x: Any, dtype: jnp.dtype) -> Any:
    """An array in a dtype; a Python number stays one."""
    return x.astype(dtype) if is_array(x) else x


def _wide(fn: Callable[..., JaxArray]) -> Lowering:
    """A row of a function of operands in the dtype to compute in."""
    return lambda result, *xs: fn(*(as_dtype(x, result.compute) for x in xs))


def _scaled(fn: Callable[[Any, Any], JaxArray]) -> Lowering:
    """Sums whose second term has a factor."""

    def row(result: OperatorResult, a: Any, b: Any, alpha: Any = 1) -> JaxArray:
        b = as_dtype(b, result.compute)
        return fn(as_dtype(a, result.compute), b if alpha == 1 else b * alpha)

    return row


def _comparison(fn: Callable[[Any, Any], JaxArray]) -> Lowering:
    """Comparisons of operands in one dtype, as torch promotes them."""

    def row(result: OperatorResult, *xs: Any) -> JaxArray:
        forms = [torch.empty((1,) * x.ndim, dtype=HOST_DTYPES[x.dtype]) if is_array(x) else x for x in xs]
        dtype = JAX_DTYPES[torch.result_type(*forms)]
        return fn(*(as_dtype(x, dtype) for x in xs))

    return row


def _div(result: OperatorResult, a: Any, b: Any, rounding_mode: str | None = None) -> JaxArray:
    a, b = as_dtype(a, result.compute), as_dtype(b, result.compute)
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    if rounding_mode == "trunc" and jnp.issubdtype(result.dtype, jnp.integer):
        return lax.div(*jnp.broadcast_arrays(a, b))
    return a / b if rounding_mode is None else jnp.trunc(a / b)


def _pow(result: OperatorResult, base: Any, exponent: Any) -> JaxArray:
    if not is_array(exponent) and float(exponent).is_integer():
        return jnp.power(as_dtype(base, result.compute), int(exponent))  # by products, as torch does for small ones
    base = as_dtype(base, result.compute) if is_array(base) else jnp.asarray(base, result.compute)
    return jnp.power(base, as_dtype(exponent, result.compute))


def _clamp(result: OperatorResult, x: JaxArray, low: Any = None, high: Any = None) -> JaxArray:
    x = as_dtype(x, result.dtype)
    x = x if low is None else jnp.maximum(x, as_dtype(low, result.dtype))
    return x if high is None else jnp.minimum(x, as_dtype(high, result.dtype))


def _dims(dims: Dims) -> int | tuple[int, ...] | None:
    """Dims as numpy takes them: none given, or an empty list, is all of them."""
    if dims is None or isinstance(dims, int):
        return dims
    return tuple(dims) or None


def _over(fn: Callable[..., JaxArray]) -> Lowering:
    """Reductions in the wide dtype of the result."""
    return lambda result, x, dims=None, keepdim=False: fn(
        as_dtype(x, result.compute), axis=_dims(dims), keepdims=keepdim
    )


def _extreme_and_place(best: Callable[..., JaxArray], place: Callable[..., JaxArray]) -> Lowering:
    """max and min: of all elements, or along a dim with the place of each."""

    def row(result: OperatorResult, x: JaxArray, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return best(x)
        return best(x, axis=dim, keepdims=keepdim), place(x, axis=dim, keepdims=keepdim)

    return row


def _vector_norm(
    result: OperatorResult, x: JaxArray, order: float = 2, dims: Dims = None, keepdim: bool = False
) -> JaxArray:
    if order != 2:
        raise NotImplementedError(f"linalg_vector_norm of order {order}: the table has order 2")
    squares = jnp.square(as_dtype(x, result.compute))
    return jnp.sqrt(jnp.sum(squares, axis=_dims(dims), keepdims=keepdim))


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


def _sort(result: OperatorResult, x: JaxArray, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)  # a stable order is one of any
    return jnp.take_along_axis(x, order, axis=dim), order


def _topk(result: OperatorResult, x: JaxArray, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    moved = jnp.moveaxis(x, dim, -1)
    places = lax.top_k(moved, k)[1] if largest else jnp.argsort(moved, stable=True)[..., :k]
    return tuple(jnp.moveaxis(part, -1, dim) for part in (jnp.take_along_axis(moved, places, axis=-1), places))


def _view(result: OperatorResult, x: JaxArray, shape_or_dtype: Any = None, *_: Any) -> JaxArray:
    """Another shape, or the same bits in a dtype of the same size."""
    if isinstance(shape_or_dtype, torch.dtype):
        return lax.bitcast_convert_type(x, result.dtype)
    return jnp.reshape(x, result.shape)


def _part(
    x: JaxArray, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[slice, ...]:
    """Slices of all dims; torch's may end after the last element."""
    size = x.shape[dim]
    low, high = (0 if start is None else start), (size if end is None else min(end, size))
    return (*_before(x, dim), slice(low, high, step))


def _before(x: JaxArray, dim: int) -> tuple[slice, ...]:
    """Slices of the whole dims before one."""
    return (slice(None),) * (dim % x.ndim)


def _split(result: OperatorResult, x: JaxArray, sizes: int | Sequence[int], dim: int = 0) -> tuple[JaxArray, ...]:
    ends = range(sizes, x.shape[dim], sizes) if isinstance(sizes, int) else np.cumsum(sizes)[:-1]
    return tuple(jnp.split(x, list(ends), dim))


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


def _filled(value: float) -> Lowering:
    return lambda result, *_: jnp.full(result.shape, value, result.dtype)


def _full(place: int) -> Lowering:
    """Tensors of one number, which is an argument of this place."""
    return lambda result, *args: jnp.full(result.shape, args[place], result.dtype)


def _arange(result: OperatorResult, *args: float) -> JaxArray:
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    return jnp.arange(start, end, step, dtype=result.dtype)


def _places(indices: Sequence[JaxArray | None]) -> tuple[Any, ...]:
    """Indices as numpy takes them; None is a whole dim."""
    return tuple(slice(None) if index is None else index for index in indices)


def _index_put(
    result: OperatorResult, x: JaxArray, indices: Sequence[JaxArray | None], values: JaxArray, accumulate: bool = False
) -> JaxArray:
    places = x.at[_places(indices)]
    return places.add(values) if accumulate else places.set(values)


def _along(dim: int, index: JaxArray) -> tuple[Any, ...]:
    """Places of a gather or scatter: those of the index itself in all dims but one."""
    places = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij", sparse=True))
    places[dim % index.ndim] = index
    return tuple(places)


def _written(x: JaxArray, index: JaxArray, source: Any) -> Any:
    """The part of a source that a scatter reads, in the dtype of its target."""
    part = source[tuple(slice(0, n) for n in index.shape)] if getattr(source, "ndim", 0) else source
    return as_dtype(part, x.dtype)


def _scatter_reduce(
    result: OperatorResult, x: JaxArray, dim: int, index: JaxArray, source: JaxArray, how: str
) -> JaxArray:
    places = x.at[_along(dim, index)]
    ways = {"sum": places.add, "amax": places.max, "amin": places.min, "prod": places.multiply}
    if how not in ways:
        raise NotImplementedError(f"scatter_reduce by {how!r}: the table has {', '.join(ways)}")
    return ways[how](_written(x, index, source))


def _searchsorted(
    result: OperatorResult, ordered: JaxArray, x: JaxArray, right: bool = False, side: str | None = None, **_: Any
) -> JaxArray:
    assert ordered.ndim == 1
    return jnp.searchsorted(ordered, x, side=side or ("right" if right else "left"))


def _product(result: OperatorResult, a: JaxArray, b: JaxArray) -> JaxArray:
    """a b with sums in the wide dtype of the result."""
    return jnp.matmul(a, b, preferred_element_type=result.compute)


def _added_product(
    result: OperatorResult, x: JaxArray, a: JaxArray, b: JaxArray, beta: Any = 1, alpha: Any = 1
) -> JaxArray:
    product = _product(result, a, b)
    x = as_dtype(x, result.compute)
    return (x if beta == 1 else x * beta) + (product if alpha == 1 else product * alpha)


def _group_sizes(ends: JaxArray) -> JaxArray:
    """Rows of each group, from the ends of the groups."""
    return jnp.diff(ends, prepend=0).astype(jnp.int32)


def _grouped_linear(result: OperatorResult, x: JaxArray, weight: JaxArray, ends: JaxArray) -> JaxArray:
    """Rows times the transposed matrix of their group; rows after the last group are 0."""
    out = lax.ragged_dot(x, jnp.swapaxes(weight, 1, 2), _group_sizes(ends), preferred_element_type=result.compute)
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
    if grad.dtype not in tpu_kernels.SUMMED_DTYPES:
        return by_xla(grad, x, _group_sizes(ends))
    return lax.platform_dependent(grad, x, _group_sizes(ends), tpu=tpu_kernels.grouped_sums, default=by_xla)


def _next_state(state: JaxArray, chunk: Sequence[JaxArray]) -> tuple[JaxArray, Pair]:
    """The state after a chunk; its values, and the state before it."""
    update, reader, key, kept = chunk
    values = update - reader @ state
    return kept[..., None, None] * state + jnp.swapaxes(key, -1, -2) @ values, (values, state)


def _chunk_states(result: OperatorResult, *operands: JaxArray) -> tuple[JaxArray, ...]:
    """The recurrence of `gated_delta.chunk_states`: values and states of all chunks."""
    updates, _, keys, _, *first = operands
    if not first:
        first = [jnp.zeros((*keys.shape[:1], *keys.shape[2:3], keys.shape[-1], updates.shape[-1]), updates.dtype)]
    _, outputs = lax.scan(_next_state, first[0], tuple(jnp.moveaxis(x, 1, 0) for x in operands[:4]))
    return tuple(jnp.moveaxis(x, 0, 1) for x in outputs)


def _continued_states(result: OperatorResult, *operands: JaxArray) -> tuple[JaxArray, ...]:
    """The recurrence of `static_pass.continued_states`, row after row."""
    *chunks, first, continues = operands
    shape = chunks[0].shape[:2]

    def step(state: JaxArray, numbered: tuple[JaxArray, ...]) -> tuple[JaxArray, Pair]:
        number, *chunk = numbered
        row = number // shape[1]
        begins = (number % shape[1] == 0) & ~continues[row]
        return _next_state(jnp.where(begins, first[row], state), chunk)

    flat = tuple(x.reshape(-1, *x.shape[2:]) for x in chunks)
    _, outputs = lax.scan(step, first[0], (jnp.arange(len(flat[0])), *flat))
    return tuple(x.reshape(*shape, *x.shape[1:]) for x in outputs)


def _chunk_states_backward(
    result: OperatorResult, d_values: JaxArray, d_states: JaxArray, readers: JaxArray, keys: JaxArray, whole: JaxArray
) -> Pair:
    """Gradients by the updates, and by the state after each chunk."""

    def step(after: JaxArray, chunk: tuple[JaxArray, ...]) -> tuple[JaxArray, Pair]:
        d_value, d_state, reader, key, kept = chunk
        d_update = d_value + key @ after
        before = kept[..., None, None] * after + d_state - jnp.swapaxes(reader, -1, -2) @ d_update
        return before, (d_update, after)

    chunks = tuple(jnp.moveaxis(x, 1, 0) for x in (d_values, d_states, readers, keys, whole))
    _, (d_updates, d_after) = lax.scan(step, jnp.zeros_like(d_states[:, 0]), chunks, reverse=True)
    return jnp.moveaxis(d_updates, 0, 1), jnp.moveaxis(d_after, 0, 1)


def _each(row: Lowering) -> Lowering:
    """A row for lists of one length: an argument that is no list is that of all."""

    def of_lists(result: OperatorResult, xs: list[JaxArray], *args: Any, **options: Any) -> tuple[JaxArray, ...]:
        results = []
        for i, want in enumerate((result._replace(more=()), *result.more)):
            own = [arg[i] if isinstance(arg, list | tuple) else arg for arg in args]
            results.append(row(want, xs[i], *own, **options))
        return tuple(results)

    return of_lists


def _sum_with_product(result: OperatorResult, x: JaxArray, a: JaxArray, b: JaxArray, value: Any = 1) -> JaxArray:
    a, b = as_dtype(a, result.compute), as_dtype(b, result.compute)
    return as_dtype(x, result.compute) + (a * b if value == 1 else value * a * b)


def _axes(group: str) -> tuple[str, ...]:
    return tuple(group.split(GROUP_SEPARATOR))


def _all_to_all(
    result: OperatorResult, x: JaxArray, received: Sequence[int], sent: Sequence[int], group: str
) -> JaxArray:
    """Exchange equal parts of dim 0."""
    parts = x.reshape(len(sent), -1)
    return lax.all_to_all(parts, _axes(group), 0, 0, tiled=True).reshape(result.shape)


_WIDE = ("abs", "acos", "asin", "atan", "atan2", "ceil", "cos", "cosh", "exp", "exp2", "expm1", "floor", "floor_divide")
_WIDE += ("fmod", "log", "log10", "log1p", "log2", "maximum", "minimum", "reciprocal", "remainder", "round", "sign")
_WIDE += ("sin", "sinh", "sqrt", "tan", "tanh", "trunc")
_OF_ANY = ("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "diagonal", "flip", "isinf", "isnan")
_OF_ANY += ("logical_and", "logical_not", "logical_or", "logical_xor", "where")
_UNCHANGED = ("_to_copy", "alias", "clone", "detach", "lift_fresh_copy")  # or in another dtype, which all are cast to
_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")

LOWERINGS: dict[str, Lowering] = {
    # functions of one name in both libraries
    **{f"aten.{name}": _wide(getattr(jnp, name)) for name in _WIDE},
    **{f"aten.{name}": of_arguments(getattr(jnp, name)) for name in _OF_ANY},
    **{f"aten.{name}": _comparison(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    # each element by itself
    **{f"aten.{name}": of_arguments(lambda x: x) for name in _UNCHANGED},
    "aten.erf": _wide(jax.scipy.special.erf),
    "aten.gelu": lambda result, x, approximate="none": jax.nn.gelu(as_dtype(x, result.compute), approximate == "tanh"),
    "aten.neg": _wide(jnp.negative),
    "aten.relu": _wide(jax.nn.relu),
    "aten.rsqrt": _wide(lambda x: 1 / jnp.sqrt(x)),  # as exact as torch's
    "aten.sigmoid": _wide(jax.nn.sigmoid),
    "aten.add": _scaled(jnp.add),
    "aten.sub": _scaled(lambda a, b: a - b),
    "aten.rsub": _scaled(lambda a, b: b - a),
    "aten.mul": _wide(jnp.multiply),
    "aten.div": _div,
    "aten.pow": _pow,
    "aten.__rshift__": of_arguments(jnp.right_shift),
    "aten.clamp": _clamp,
    "aten.copy": lambda result, x, source, *_: jnp.broadcast_to(as_dtype(source, result.dtype), result.shape),
    # over some dims or all, and along one
    **{f"aten.{name}": _over(getattr(jnp, name)) for name in ("sum", "mean", "prod", "any", "all")},
    "aten.var": lambda result, x, dims=None, correction=1, keepdim=False: jnp.var(
        as_dtype(x, result.compute), axis=_dims(dims), ddof=correction, keepdims=keepdim
    ),
    "aten.linalg_vector_norm": _vector_norm,
    "aten.amax": _over(jnp.max),
    "aten.amin": _over(jnp.min),
    "aten.max": _extreme_and_place(jnp.max, jnp.argmax),
    "aten.min": _extreme_and_place(jnp.min, jnp.argmin),
    "aten.argmax": of_arguments(lambda x, dim=None, keepdim=False: jnp.argmax(x, dim, keepdims=keepdim)),
    "aten.argmin": of_arguments(lambda x, dim=None, keepdim=False: jnp.argmin(x, dim, keepdims=keepdim)),
    "aten.cumsum": _cumulative(jnp.cumsum, jnp.add),
    "aten.cumprod": _cumulative(jnp.cumprod, jnp.multiply),
    "aten._softmax": lambda result, x, dim, to_float: jax.nn.softmax(as_dtype(x, result.compute), dim),
    "aten._log_softmax": lambda result, x, dim, to_float: jax.nn.log_softmax(as_dtype(x, result.compute), dim),
    "aten.sort": _sort,
    "aten.topk": _topk,
    # elements in other places, and tensors of nothing
    "aten.view": _view,
    **dict.fromkeys(("aten._unsafe_view", "aten.reshape", "aten.squeeze", "aten.unsqueeze"), _view),
    "aten.expand": lambda result, x, *_, **__: jnp.broadcast_to(x, result.shape),
    "aten.permute": of_arguments(jnp.transpose),
    "aten.slice": of_arguments(lambda x, *part: x[_part(x, *part)]),
    "aten.slice_scatter": of_arguments(lambda x, source, *part: x.at[_part(x, *part)].set(source)),
    "aten.select": of_arguments(lambda x, dim, index: x[(*_before(x, dim), index)]),
    "aten.select_scatter": of_arguments(lambda x, source, dim, index: x.at[(*_before(x, dim), index)].set(source)),
    "aten.split": _split,
    "aten.split_with_sizes": _split,
    "aten.cat": of_arguments(lambda xs, dim=0: jnp.concatenate(xs, dim)),
    "aten.repeat": of_arguments(jnp.tile),
    "aten.roll": lambda _, x, shifts, dims=(): jnp.roll(x, tuple(shifts) if dims else shifts[0], tuple(dims) or None),
    "aten.constant_pad_nd": _pad,
    "aten.as_strided": _as_strided,
    "aten.arange": _arange,
    **{f"aten.{name}": _filled(0) for name in (*_EMPTY, "new_zeros", "zeros", "zeros_like")},
    **{f"aten.{name}": _filled(1) for name in ("new_ones", "ones", "ones_like")},
    "aten.scalar_tensor": _full(0),
    "aten.full": _full(1),
    "aten.full_like": _full(1),
    "aten.fill": _full(1),
    "aten.new_full": _full(2),
    # by indices
    "aten.embedding": of_arguments(lambda weight, index, *_: jnp.take(weight, index, axis=0)),
    "aten.gather": lambda _, x, dim, index: x[_along(dim, index)] if x.ndim else jnp.broadcast_to(x, index.shape),
    "aten.index": of_arguments(lambda x, indices: x[_places(indices)]),
    "aten._unsafe_index": of_arguments(lambda x, indices: x[_places(indices)]),
    "aten.index_put": _index_put,
    "aten._unsafe_index_put": _index_put,
    "aten.index_select": lambda _, x, dim, index: jnp.take(x, jnp.atleast_1d(index), axis=dim) if x.ndim else x,
    "aten.scatter": lambda _, x, dim, index, source: x.at[_along(dim, index)].set(_written(x, index, source)),
    "aten.scatter_add": lambda _, x, dim, index, source: x.at[_along(dim, index)].add(_written(x, index, source)),
    "aten.scatter_reduce": _scatter_reduce,
    "aten.searchsorted": _searchsorted,
    # products of matrices, and loops over products
    **dict.fromkeys(("aten.mm", "aten.bmm", "aten.mv", "aten.dot"), _product),
    "aten.addmm": _added_product,
    "aten.baddbmm": _added_product,
    "aten.linalg_solve_triangular": lambda _, a, b, *, upper, left=True, unitriangular=False: (
        lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)
    ),
    "funrl.choose_experts": of_arguments(lambda probs, count: lax.top_k(probs, count)[1]),  # equal ones in order
    "funrl.grouped_linear": _grouped_linear,
    "funrl.grouped_weight": _grouped_weight,
    "funrl.chunk_states": _chunk_states,
    "funrl.chunk_states_backward": _chunk_states_backward,
    "funrl.continued_states": _continued_states,
    "funrl.segment_attention": tpu_kernels.splash_attention,
    "funrl.segment_attention_backward": tpu_kernels.splash_attention_backward,
    # lists of tensors, which optimizers have
    "aten._foreach_addcmul": _each(_sum_with_product),
    # between the devices of a mesh, under `shard_map`: the name of a group says itself which axes it goes over
    "_c10d_functional.all_reduce": lambda _, x, op, group: {"sum": lax.psum, "max": lax.pmax}[op](x, _axes(group)),
    "_c10d_functional.all_gather_into_tensor": lambda _, x, ranks, group: lax.all_gather(
        x, _axes(group), axis=0, tiled=True
    ),
    "_c10d_functional.reduce_scatter_tensor": lambda _, x, how, ranks, group: lax.psum_scatter(
        x, _axes(group), scatter_dimension=0, tiled=True
    ),
    "_c10d_functional.all_to_all_single": _all_to_all,
    "_c10d_functional.wait_tensor": of_arguments(lambda x: x),
}
LOWERINGS |= {
    f"aten._foreach_{name}": _each(LOWERINGS[f"aten.{name}"]) for name in ("add", "mul", "div", "sqrt", "copy")
}
# Arguments about devices and memory, which mean nothing here; dtypes are those of the results.
WITHOUT_MEANING = {"device", "dtype", "implicit", "layout", "memory_format", "non_blocking"}
WITHOUT_MEANING |= {"physical_layout", "pin_memory", "requires_grad", "sparse_grad"}
