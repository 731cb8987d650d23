"""Collectives between the devices of a mesh, under `shard_map`.

The mesh of a traced program names the group over some axes by these axes, so an operator says itself which they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax import lax

from funrl.xla.operators.result import JaxArray, Lowering, OperatorResult, of_arguments

GROUP_SEPARATOR = ","  # between the axes in the name of a group


def _axes(group: str) -> tuple[str, ...]:
    return tuple(group.split(GROUP_SEPARATOR))


def _all_reduce(result: OperatorResult, x: JaxArray, how: str, group: str) -> JaxArray:
    return {"sum": lax.psum, "max": lax.pmax}[how](x, _axes(group))


def _all_gather(result: OperatorResult, x: JaxArray, ranks: int, group: str) -> JaxArray:
    return lax.all_gather(x, _axes(group), axis=0, tiled=True)


def _reduce_scatter(result: OperatorResult, x: JaxArray, how: str, ranks: int, group: str) -> JaxArray:
    return lax.psum_scatter(x, _axes(group), scatter_dimension=0, tiled=True)


def _all_to_all(
    result: OperatorResult, x: JaxArray, received: Sequence[int], sent: Sequence[int], group: str
) -> JaxArray:
    """Exchange equal parts of dim 0."""
    parts = x.reshape(len(sent), -1)
    return lax.all_to_all(parts, _axes(group), 0, 0, tiled=True).reshape(result.shape)


BETWEEN_DEVICES: dict[str, Lowering] = {
    "_c10d_functional.all_reduce": _all_reduce,
    "_c10d_functional.all_gather_into_tensor": _all_gather,
    "_c10d_functional.reduce_scatter_tensor": _reduce_scatter,
    "_c10d_functional.all_to_all_single": _all_to_all,
    "_c10d_functional.wait_tensor": of_arguments(lambda x: x),
}
