"""Counts of the products and collectives of a traced program, by the equations of its jaxpr."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

COLLECTIVES = {name: name.replace("_", "-") for name in ("all_gather", "reduce_scatter", "all_to_all")}
COLLECTIVES |= dict.fromkeys(("psum", "pmax"), "all-reduce")


class Sent(NamedTuple):
    """Collectives of one kind over the same axes, on one chip.

    Attributes:
      kind: such as "all-gather".
      axes: of the mesh.
      count: how many, those of a loop as often as it turns.
      nbytes: of the larger side of each, the argument or the result, together.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: int


def equations_of(jaxpr: Any, turns: int = 1) -> Iterator[tuple[Any, int]]:
    """The equations of a program and of the functions that it calls, each with how often a TPU computes it.

    A kernel is one equation.
    """
    for equation in jaxpr.eqns:
        yield equation, turns
        if equation.primitive.name != "pallas_call":
            inside = turns * equation.params["length"] if equation.primitive.name == "scan" else turns
            for inner in _functions_of(equation.params):
                yield from equations_of(inner, inside)


def _functions_of(params: Mapping[str, Any]) -> Iterator[Any]:
    """The functions that an equation with these parameters calls; of those for different platforms a TPU's."""
    platforms = params.get("branches_platforms") or ()  # None among them is all others
    branch = next((i for i, names in enumerate(platforms) if names is None or "tpu" in names), None)
    for value in params.values():
        for i, part in enumerate(value if isinstance(value, tuple | list) else (value,)):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns") and branch in (None, i):
                yield inner


def is_attention(equation: Any) -> bool:
    """True of splash attention's kernels."""
    return equation.primitive.name == "pallas_call" and (equation.params["name"] or "").startswith("splash")


def _kernel_flops(equation: Any, expert_ranks: int) -> int:
    """FLOPs of a kernel.

    Of splash attention those are the blocks on and below the diagonal; with a window it skips more.
    """
    mapping = equation.params["grid_mapping"]
    if mapping.num_dynamic_grid_bounds:  # sums by group, over tiles of the rows of groups
        return equation.params["cost_estimate"].flops // expert_ranks
    turns = math.prod(mapping.grid)
    if is_attention(equation):
        heads, rows, columns = mapping.grid
        turns = heads * rows * (columns + 1) // 2
    return turns * sum(product_flops(x) * n for x, n in equations_of(equation.params["jaxpr"]))


def product_flops(equation: Any, expert_ranks: int = 1) -> int:
    """FLOPs of a matrix product, or of a kernel's; 0 of another equation.

    Args:
      expert_ranks: chips that share the experts.
    """
    if equation.primitive.name == "pallas_call":
        return _kernel_flops(equation, expert_ranks)
    if equation.primitive.name == "ragged_dot_general":
        rows, columns = equation.invars[0].aval.shape[0], equation.invars[1].aval.shape[-1]
        weights = equation.invars[0].aval.shape[1] * columns
        summed = equation.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
        groups = 1 if summed else equation.invars[2].aval.shape[0]  # XLA multiplies all rows for each group's sum
        return 2 * rows * weights * groups // (expert_ranks if summed else 1)
    if equation.primitive.name != "dot_general":
        return 0
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def sent_by(counts: Sequence[tuple[Any, int]]) -> tuple[Sent, ...]:
    """The collectives among equations, by kind and axes of more than one device."""
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for equation, turns in counts:
        kind = COLLECTIVES.get(equation.primitive.name)
        if kind is not None:
            axes = equation.params.get("axes", equation.params.get("axis_name"))
            key = kind, (axes,) if isinstance(axes, str) else tuple(axes)
            sides = ([x.aval for x in side] for side in (equation.invars, equation.outvars))
            nbytes = max(sum(math.prod(x.shape) * x.dtype.itemsize for x in side) for side in sides)
            count, total = totals.get(key, (0, 0))
            totals[key] = count + turns, total + turns * nbytes
    return tuple(Sent(*key, *total) for key, total in sorted(totals.items()))
