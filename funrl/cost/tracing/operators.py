"""Operators that a dry run counts: whether their results follow from shapes, and the work of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# These imports register their operators.
import funrl.compiled_kernels.delta_rule.gated_delta  # noqa: F401
import funrl.compiled_kernels.grouped_linear  # noqa: F401
import funrl.compiled_kernels.varlen_attention  # noqa: F401
from funrl.compiled_kernels.delta_rule.net_pass import pass_bytes, pass_flops
from funrl.compiled_kernels.latent_paged_attention import latent_paged_bytes, latent_paged_flops
from funrl.compiled_kernels.paged_attention import paged_bytes, paged_flops
from funrl.data.packing import UNIT, RowCost
from funrl.models.decoder.ring_attention import seen_pairs

_aten = torch.ops.aten


class Operator(NamedTuple):
    """Facts of an operator.

    Attributes:
      func: the operator.
      namespace, name: its namespace and name.
      mutable: whether it writes to an argument.
      by_shapes: whether the shapes of results do not depend on values of tensors.
      idle: whether its results are views of its arguments.
      flops: (arguments, `out_val`) -> FLOPs; None: it has no matrix product.
    """

    func: Any
    namespace: str
    name: str
    mutable: bool
    by_shapes: bool
    idle: bool
    flops: Callable | None


class OperatorWork(NamedTuple):
    """Work of one call of an operator; `dtype` is that of its first result."""

    flops: float
    nbytes: float
    dtype: torch.dtype


@functools.cache
def _known_facts() -> dict[int, Operator]:
    """Cache of the facts of operators by their ids, which no other object takes while the cache holds the operators."""
    return {}


def operator_facts(func: Any) -> Operator:
    """Facts of an operator, cached: the hash of an operator is slow, its id is not."""
    facts = _known_facts()
    known = facts.get(id(func))
    return facts.setdefault(id(func), _facts_of(func)) if known is None else known


def _facts_of(func: Any) -> Operator:
    namespace, _, name = func._schema.name.partition("::")
    own = _FORMULAS.get(func.overloadpacket)
    packet = func.overloadpacket
    flops = flop_registry.get(packet) if own is None else lambda *args, out_val, **_: own(*args)
    idle = func.is_view or all(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
    by_shapes = torch.Tag.pointwise in func.tags or func in _BY_SHAPES or namespace == "funrl"
    by_shapes |= name.startswith("_foreach_")
    mutable = func._schema.is_mutable
    return Operator(func, namespace, name, mutable=mutable, by_shapes=by_shapes, idle=idle, flops=flops)


def work_of(
    func: Any, operator: Operator, args: tuple, kwargs: dict, out: Any, outs: Sequence[Tensor]
) -> OperatorWork | None:
    """Work of one call; None: no work."""
    flops = 0 if operator.flops is None else operator.flops(*args, **kwargs, out_val=out)
    if not flops and operator.idle:
        return None
    packet = func.overloadpacket
    nbytes = _BYTES[packet](*args) if packet in _BYTES else nbytes_of((args, tuple(outs)))
    return OperatorWork(flops, nbytes, outs[0].dtype if outs else torch.float32)


def nbytes_of(values: Any) -> int:
    """Bytes of all tensors in nested tuples and lists."""
    return sum(x.numel() * x.element_size() for x in _tensors(values))


def _tensors(values: Any) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(x)


def _attended(q: Tensor, offsets: Tensor, window: int) -> float:
    """FLOPs of the two matrix products of `varlen_attention`: over pairs of a token and one it attends to."""
    pairs = int(RowCost(1.0, window or None).work(offsets.diff().numpy()).sum()) / UNIT - int(offsets[-1])
    return 4 * q.shape[1] * q.shape[2] * pairs


def _ringed(q: Tensor, offsets: Tensor, first: int, source: int, window: int, *_: float) -> float:
    """FLOPs of the two matrix products of a part of ring attention: over pairs of a token and one it attends to."""
    return 4.0 * q.shape[1] * q.shape[2] * seen_pairs(offsets, first, source, q.shape[0], window)


def _grouped_flops(x: Tensor, columns: int, ends: Tensor) -> float:
    """FLOPs of the rows that belong to a group; of all rows if that is unknown."""
    rows = x.shape[0] if isinstance(ends, FakeTensor) else int(ends[-1])
    return 2.0 * rows * x.shape[1] * columns


_FORMULAS = {  # of operators for which torch has no formula, or a wrong one
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, (q.shape[0], q.shape[1], *k.shape[2:]), (q.shape[0], q.shape[1], *v.shape[2:])
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(
        g.shape, q.shape, (q.shape[0], q.shape[1], *k.shape[2:]), (q.shape[0], q.shape[1], *v.shape[2:])
    ),
    torch.ops.funrl.varlen_attention: lambda q, k, v, offsets, window, *_: _attended(q, offsets, window),
    torch.ops.funrl.varlen_attention_backward: lambda g, q, k, v, out, lse, offsets, window, *_: (
        2.5 * _attended(q, offsets, window)
    ),
    torch.ops.funrl.ring_part: lambda q, k, v, offsets, *how: _ringed(q, offsets, *how),
    torch.ops.funrl.ring_part_backward: lambda g, q, k, v, out, lse, offsets, *how: 2.5 * _ringed(q, offsets, *how),
    torch.ops.funrl.grouped_linear: lambda x, weight, ends: _grouped_flops(x, weight.shape[1], ends),
    torch.ops.funrl.grouped_weight: lambda grad, x, ends: _grouped_flops(x, grad.shape[1], ends),
    torch.ops.funrl.chunk_states: lambda updates, readers, *_, **__: 4 * updates.numel() * readers.shape[-1],
    torch.ops.funrl.chunk_states_backward: lambda grad, states, *_, **__: 4 * grad.numel() * states.shape[-2],
    torch.ops.funrl.delta_net_pass: lambda channels, decay, beta, filters, states, *rest: pass_flops(
        states, rest[3], rest[4]
    ),
    _aten.linalg_solve_triangular: lambda triangle, sides, **_: triangle.shape[-1] * sides.numel(),
    torch.ops.funrl.paged_attention: lambda q, k, v, keys, *rest: paged_flops(q, rest[6], keys.shape[1]),
    torch.ops.funrl.latent_paged_attention: lambda q, latent, up, cache, *rest: latent_paged_flops(
        up, cache, rest[5], rest[6]
    ),
}
_BYTES = {  # of operators that do not read all of their arguments
    torch.ops.funrl.paged_attention: lambda q, k, v, keys, *rest: paged_bytes(q, keys, rest[6]),
    torch.ops.funrl.delta_net_pass: lambda channels, decay, beta, filters, states, tails, *rest: pass_bytes(
        channels, states, tails, rest[2]
    ),
    torch.ops.funrl.latent_paged_attention: lambda q, latent, up, cache, *rest: latent_paged_bytes(
        q, latent, up, cache, rest[5]
    ),
}
_BY_SHAPES = frozenset(
    (  # beside those that are elementwise; indices are positions then, and no masks
        _aten.index.Tensor,
        _aten.index_select.default,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten.index_copy.default,
        _aten.index_add_.default,
        _aten.embedding.default,
        _aten.gather.default,
        _aten.scatter_add.default,
    )
)
