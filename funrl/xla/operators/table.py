"""The table of operators: for each operator of torch's core that a program may hold, what it is in JAX.

A row is a function of arrays, and of what else the operator takes. The interpreter casts what it returns to the dtype
that the program has there and compares the shape, so a row is free to compute in a wider one. `aten` operators are
named without their overload: those of one name mean the same.
"""

from __future__ import annotations

from funrl.xla.operators import attention, collectives, foreach, indexing, pointwise, products, reductions, shapes
from funrl.xla.operators.result import Lowering

LOWERINGS: dict[str, Lowering] = {
    **pointwise.POINTWISE,
    **reductions.OVER_DIMS,
    **shapes.SHAPES,
    **indexing.INDEXING,
    **products.MATRIX_PRODUCTS,
    **attention.FOR_TPU,
    **foreach.LIST_LOWERINGS,
    **collectives.BETWEEN_DEVICES,
}
# Arguments about devices and memory, which mean nothing here; dtypes are those of the results.
WITHOUT_MEANING = frozenset(
    [
        *("device", "dtype", "implicit", "layout", "memory_format", "non_blocking"),
        *("physical_layout", "pin_memory", "requires_grad", "sparse_grad"),
    ]
)
