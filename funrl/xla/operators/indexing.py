"""Operators that read and write elements by indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from funrl.xla.operators.result import JaxArray, Lowering, OperatorResult, as_dtype, of_arguments


def _places(indices: Sequence[JaxArray | None]) -> tuple[Any, ...]:
    """Indices as numpy takes them; None is a whole dim."""
    return tuple(slice(None) if index is None else index for index in indices)


def _index_put(
    result: OperatorResult, x: JaxArray, indices: Sequence[JaxArray | None], values: JaxArray, accumulate: bool = False
) -> JaxArray:
    places = x.at[_places(indices)]
    return places.add(values) if accumulate else places.set(values)


def _index_select(result: OperatorResult, x: JaxArray, dim: int, index: JaxArray) -> JaxArray:
    return jnp.take(x, jnp.atleast_1d(index), axis=dim) if x.ndim else x


def _gather(result: OperatorResult, x: JaxArray, dim: int, index: JaxArray) -> JaxArray:
    return x[_along(dim, index)] if x.ndim else jnp.broadcast_to(x, index.shape)


def _along(dim: int, index: JaxArray) -> tuple[Any, ...]:
    """Places of a gather or scatter: those of the index itself in all dims but one."""
    places = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij", sparse=True))
    places[dim % index.ndim] = index
    return tuple(places)


def _written(index: JaxArray, source: Any) -> Any:
    """The part of a source that a scatter reads."""
    return source[tuple(slice(0, n) for n in index.shape)] if getattr(source, "ndim", 0) else source


def _scatter(result: OperatorResult, x: JaxArray, dim: int, index: JaxArray, source: Any) -> JaxArray:
    return x.at[_along(dim, index)].set(as_dtype(_written(index, source), x.dtype))


def _scatter_add(result: OperatorResult, x: JaxArray, dim: int, index: JaxArray, source: JaxArray) -> JaxArray:
    return x.at[_along(dim, index)].add(_written(index, source))


def _scatter_reduce(
    result: OperatorResult, x: JaxArray, dim: int, index: JaxArray, source: JaxArray, how: str
) -> JaxArray:
    places = x.at[_along(dim, index)]
    ways = {"sum": places.add, "amax": places.max, "amin": places.min, "prod": places.multiply}
    if how not in ways:
        raise NotImplementedError(f"scatter_reduce by {how!r}: the table has {', '.join(ways)}")
    return ways[how](_written(index, source))


def _searchsorted(
    result: OperatorResult, ordered: JaxArray, x: JaxArray, right: bool = False, side: str | None = None, **_: Any
) -> JaxArray:
    assert ordered.ndim == 1
    return jnp.searchsorted(ordered, x, side=side or ("right" if right else "left"))


INDEXING: dict[str, Lowering] = {
    "aten.embedding": of_arguments(lambda weight, index, *_: jnp.take(weight, index, axis=0)),
    "aten.gather": _gather,
    "aten.index": of_arguments(lambda x, indices: x[_places(indices)]),
    "aten.index_put": _index_put,
    "aten._unsafe_index": of_arguments(lambda x, indices: x[_places(indices)]),
    "aten._unsafe_index_put": _index_put,
    "aten.index_select": _index_select,
    "aten.scatter": _scatter,
    "aten.scatter_add": _scatter_add,
    "aten.scatter_reduce": _scatter_reduce,
    "aten.searchsorted": _searchsorted,
}
