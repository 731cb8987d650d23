"""Operators that compute each element by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from funrl.xla.operators.result import JaxArray, Lowering, OperatorResult, as_dtype, is_array, of_arguments


def _unary(fn: Callable[[JaxArray], JaxArray]) -> Lowering:
    return lambda result, x: fn(as_dtype(x, result.compute))


def _arithmetic(fn: Callable[[Any, Any], JaxArray]) -> Lowering:
    return lambda result, a, b: fn(as_dtype(a, result.compute), as_dtype(b, result.compute))


def _scaled(fn: Callable[[Any, Any], JaxArray]) -> Lowering:
    """Sums whose second term has a factor."""

    def row(result: OperatorResult, a: Any, b: Any, alpha: Any = 1) -> JaxArray:
        b = as_dtype(b, result.compute)
        return fn(as_dtype(a, result.compute), b if alpha == 1 else b * alpha)

    return row


def _comparison(fn: Callable[[Any, Any], JaxArray]) -> Lowering:
    return lambda result, a, b: fn(*_promoted(a, b))


def _promoted(*xs: Any) -> tuple[Any, ...]:
    """Operands in one dtype, as torch promotes them: a tensor without dims counts only by its kind of numbers."""
    arrays = [x for x in xs if is_array(x)]
    large = [x.dtype for x in arrays if x.ndim] or [x.dtype for x in arrays]
    dtype = jnp.result_type(*large)
    small = [x.dtype for x in arrays if _rank(x.dtype) > _rank(dtype)]
    dtype = jnp.result_type(*small) if small else dtype
    return tuple(as_dtype(x, dtype) for x in xs)


def _rank(dtype: jnp.dtype) -> int:
    """Place among the kinds of numbers: truth values, whole numbers, floats."""
    return 2 if jnp.issubdtype(dtype, jnp.floating) else int(dtype != jnp.bool_)


def _add(a: Any, b: Any) -> JaxArray:
    return a | b if _are_truths(a, b) else a + b


def _mul(a: Any, b: Any) -> JaxArray:
    return a & b if _are_truths(a, b) else a * b


def _are_truths(*xs: Any) -> bool:
    return all(is_array(x) and x.dtype == jnp.bool_ for x in xs)


def _div(result: OperatorResult, a: Any, b: Any, rounding_mode: str | None = None) -> JaxArray:
    a, b = as_dtype(a, result.compute), as_dtype(b, result.compute)
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    if rounding_mode == "trunc":
        return lax.div(*jnp.broadcast_arrays(a, b)) if _is_whole(result) else jnp.trunc(a / b)
    return a / b


def _is_whole(result: OperatorResult) -> bool:
    return _rank(result.dtype) < 2


def _pow(result: OperatorResult, base: Any, exponent: Any) -> JaxArray:
    if not is_array(exponent) and float(exponent).is_integer():
        return jnp.power(as_dtype(base, result.compute), int(exponent))  # by products, as torch does for small ones
    base = as_dtype(base, result.compute) if is_array(base) else jnp.asarray(base, result.compute)
    return jnp.power(base, as_dtype(exponent, result.compute))


def _where(result: OperatorResult, condition: JaxArray, a: Any, b: Any) -> JaxArray:
    return jnp.where(condition, as_dtype(a, result.dtype), as_dtype(b, result.dtype))


def _clamp(result: OperatorResult, x: JaxArray, low: Any = None, high: Any = None) -> JaxArray:
    x = as_dtype(x, result.dtype)
    x = x if low is None else jnp.maximum(x, as_dtype(low, result.dtype))
    return x if high is None else jnp.minimum(x, as_dtype(high, result.dtype))


def _gelu(result: OperatorResult, x: JaxArray, approximate: str = "none") -> JaxArray:
    return jax.nn.gelu(as_dtype(x, result.compute), approximate=approximate == "tanh")


def _logical(fn: Callable[..., JaxArray]) -> Lowering:
    return lambda result, *xs: fn(*(x.astype(jnp.bool_) for x in xs))


def _extreme(fn: Callable[[Any, Any], JaxArray]) -> Lowering:
    return lambda result, a, b: fn(as_dtype(a, result.dtype), as_dtype(b, result.dtype))


def _copied(result: OperatorResult, target: JaxArray, source: Any, *_: Any) -> JaxArray:
    return jnp.broadcast_to(as_dtype(source, result.dtype), result.shape)


# Functions of one name in both libraries.
_OF_BOTH = (
    jnp.abs,
    jnp.ceil,
    jnp.cos,
    jnp.cosh,
    jnp.exp,
    jnp.exp2,
    jnp.expm1,
    jnp.floor,
    jnp.log,
    jnp.log10,
    jnp.log1p,
)
_OF_BOTH += (jnp.log2, jnp.sign, jnp.sin, jnp.sinh, jnp.sqrt, jnp.tan, jnp.tanh, jnp.trunc)

POINTWISE: dict[str, Lowering] = {
    **{f"aten.{fn.__name__}": _unary(fn) for fn in _OF_BOTH},
    "aten.acos": _unary(jnp.arccos),
    "aten.asin": _unary(jnp.arcsin),
    "aten.atan": _unary(jnp.arctan),
    "aten.erf": _unary(jax.scipy.special.erf),
    "aten.neg": _unary(jnp.negative),
    "aten.reciprocal": _unary(lambda x: 1 / x),
    "aten.relu": _unary(jax.nn.relu),
    "aten.round": _unary(jnp.round),
    "aten.rsqrt": _unary(lambda x: 1 / jnp.sqrt(x)),  # as exact as torch's
    "aten.sigmoid": _unary(jax.nn.sigmoid),
    "aten.gelu": _gelu,
    "aten.isinf": of_arguments(jnp.isinf),
    "aten.isnan": of_arguments(jnp.isnan),
    "aten.add": _scaled(_add),
    "aten.sub": _scaled(lambda a, b: a - b),
    "aten.rsub": _scaled(lambda a, b: b - a),
    "aten.mul": _arithmetic(_mul),
    "aten.div": _div,
    "aten.atan2": _arithmetic(jnp.arctan2),
    "aten.fmod": _arithmetic(jnp.fmod),
    "aten.remainder": _arithmetic(jnp.remainder),
    "aten.floor_divide": _arithmetic(jnp.floor_divide),
    "aten.pow": _pow,
    "aten.maximum": _extreme(jnp.maximum),
    "aten.minimum": _extreme(jnp.minimum),
    "aten.eq": _comparison(lambda a, b: a == b),
    "aten.ne": _comparison(lambda a, b: a != b),
    "aten.lt": _comparison(lambda a, b: a < b),
    "aten.le": _comparison(lambda a, b: a <= b),
    "aten.gt": _comparison(lambda a, b: a > b),
    "aten.ge": _comparison(lambda a, b: a >= b),
    "aten.bitwise_and": of_arguments(lambda a, b: a & b),
    "aten.bitwise_or": of_arguments(lambda a, b: a | b),
    "aten.bitwise_xor": of_arguments(lambda a, b: a ^ b),
    "aten.__rshift__": of_arguments(jnp.right_shift),
    "aten.bitwise_not": of_arguments(lambda x: ~x),
    "aten.logical_and": _logical(jnp.logical_and),
    "aten.logical_or": _logical(jnp.logical_or),
    "aten.logical_xor": _logical(jnp.logical_xor),
    "aten.logical_not": _logical(jnp.logical_not),
    "aten.where": _where,
    "aten.clamp": _clamp,
    # Values that move unchanged, or to another dtype, which every result is cast to.
    "aten._to_copy": of_arguments(lambda x: x),
    "aten.alias": of_arguments(lambda x: x),
    "aten.clone": of_arguments(lambda x: x),
    "aten.copy": _copied,
    "aten.detach": of_arguments(lambda x: x),
    "aten.lift_fresh_copy": of_arguments(lambda x: x),
}
