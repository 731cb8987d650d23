"""Shape and dtype of an operator's result, as rows of the table receive them, and the dtypes of both libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

JaxArray = jax.Array
Lowering = Callable[..., Any]  # (OperatorResult, *arguments of the operator) -> its result, or a tuple of its results

JAX_DTYPES = {
    torch.float64: jnp.dtype(jnp.float64),
    torch.float32: jnp.dtype(jnp.float32),
    torch.bfloat16: jnp.dtype(jnp.bfloat16),
    torch.float16: jnp.dtype(jnp.float16),
    torch.int64: jnp.dtype(jnp.int64),
    torch.int32: jnp.dtype(jnp.int32),
    torch.int16: jnp.dtype(jnp.int16),
    torch.int8: jnp.dtype(jnp.int8),
    torch.uint8: jnp.dtype(jnp.uint8),
    torch.bool: jnp.dtype(jnp.bool_),
}
TORCH_DTYPES = {own: dtype for dtype, own in JAX_DTYPES.items()}


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
        return wide(self.dtype)


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype, or float32 for 16-bit floats."""
    return jnp.dtype(jnp.float32) if dtype in (jnp.bfloat16, jnp.float16) else dtype


def of_arguments(fn: Callable[..., Any]) -> Lowering:
    """A row of a function that asks nothing of its result."""
    return lambda result, *args, **kwargs: fn(*args, **kwargs)


def is_array(x: Any) -> bool:
    """True of arrays, and not of Python's numbers, which have no dtype of their own."""
    return hasattr(x, "dtype") and hasattr(x, "ndim")


def as_dtype(x: Any, dtype: jnp.dtype) -> Any:
    """An array in a dtype; a Python number stays one."""
    return x.astype(dtype) if is_array(x) else x
