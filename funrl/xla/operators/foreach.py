"""Operators on lists of tensors, which are other operators on each of them; optimizers call them."""

from __future__ import annotations

from typing import Any

from funrl.xla.operators import pointwise
from funrl.xla.operators.result import JaxArray, Lowering, OperatorResult, as_dtype


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


LIST_LOWERINGS: dict[str, Lowering] = {
    **{
        f"aten._foreach_{name}": _each(pointwise.POINTWISE[f"aten.{name}"])
        for name in ("add", "mul", "div", "sqrt", "copy")
    },
    "aten._foreach_addcmul": _each(_sum_with_product),
}
