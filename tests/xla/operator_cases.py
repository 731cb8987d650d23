"""An example of every operator in the table: an overload of torch's, and its arguments."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch


class Draw:
    """Random arguments in one float dtype, the same numbers for each."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)

    def f(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def positive(self, *shape):
        return self.f(*shape).abs() + 0.5

    def unit(self, *shape):
        return self.f(*shape).tanh() * 0.9

    def i(self, below, *shape):
        return torch.randint(0, below, shape, generator=self.generator)

    def b(self, *shape):
        return self.i(2, *shape) == 1


class Case(NamedTuple):
    """One call. `smooth`: its gradient is compared too; `first`: how many of its results are."""

    overload: str
    args: Callable[[Draw], tuple]
    options: Any = MappingProxyType({})
    smooth: bool = True

    @property
    def operator(self):
        namespace, name, overload = self.overload.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)

    @property
    def row(self):
        return self.overload.rpartition(".")[0]


def matrix(d):
    return (d.f(3, 4),)


def pair(d):
    return (d.f(3, 4), d.f(4))


def number(value):
    return lambda d: (d.f(3, 4), value)


def whole(d):
    return (d.i(9, 3, 4), d.i(9, 4) + 1)


def truths(d):
    return (d.b(3, 4), d.b(4))


def ends(d):
    return torch.tensor([2, 2, 5], dtype=torch.int32)


def chunks(d):
    return d.f(2, 3, 2, 5, 4), d.f(2, 3, 2, 5, 6), d.f(2, 3, 2, 5, 6), d.positive(2, 3, 2)


UNARY = ["abs", "cos", "cosh", "exp", "exp2", "expm1", "sin", "sinh", "tan", "tanh", "atan", "erf", "neg"]
UNARY += ["relu", "sigmoid"]
POSITIVE = ["log", "log10", "log1p", "log2", "sqrt", "rsqrt", "reciprocal"]
STEPS = ["ceil", "floor", "round", "sign", "trunc"]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
SAME = ["alias", "clone", "detach", "lift_fresh_copy"]
FILLED = ["empty_like", "zeros_like", "new_zeros", "ones_like", "new_ones"]

CASES = [
    *(Case(f"aten.{name}.default", matrix) for name in UNARY),
    *(Case(f"aten.{name}.default", lambda d: (d.positive(3, 4),)) for name in POSITIVE),
    *(Case(f"aten.{name}.default", matrix, smooth=False) for name in STEPS),
    *(Case(f"aten.{name}.default", lambda d: (d.unit(3, 4),)) for name in ("acos", "asin")),
    *(Case(f"aten.{name}.Tensor", pair) for name in COMPARISONS),
    *(Case(f"aten.{name}.Scalar", number(0.25)) for name in COMPARISONS),
    *(Case(f"aten.{name}.default", matrix) for name in SAME),
    Case("aten.neg.default", lambda d: (d.i(5, 3),)),
    Case("aten.gelu.default", matrix),
    Case("aten.gelu.default", matrix, {"approximate": "tanh"}),
    Case("aten.isinf.default", lambda d: (d.f(3) / torch.tensor([0, 1, 2]),)),
    Case("aten.isnan.default", lambda d: (torch.tensor([0, 1, 2]) * d.f(3) / torch.tensor([0, 1, 2]),)),
    Case("aten.add.Tensor", pair),
    Case("aten.add.Tensor", pair, {"alpha": 3}),
    Case("aten.add.Tensor", whole),
    Case("aten.add.Tensor", truths),
    Case("aten.add.Tensor", lambda d: (d.f(3), torch.tensor(0.3, dtype=torch.float64))),  # without dims: of no weight
    Case("aten.add.Tensor", lambda d: (d.i(5, 3), torch.tensor(0.3))),
    Case("aten.add.Scalar", number(0.3)),
    Case("aten.sub.Tensor", pair, {"alpha": 2}),
    Case("aten.sub.Scalar", number(0.3)),
    Case("aten.rsub.Scalar", number(0.3)),
    Case("aten.rsub.Tensor", pair),
    Case("aten.mul.Tensor", pair),
    Case("aten.mul.Tensor", truths),
    Case("aten.mul.Scalar", number(0.3)),
    Case("aten.div.Tensor", lambda d: (d.f(3, 4), d.positive(4))),
    Case("aten.div.Tensor", whole),
    Case("aten.div.Scalar", number(0.3)),
    Case("aten.div.Tensor_mode", lambda d: (d.f(3, 4), d.positive(4)), {"rounding_mode": "floor"}, smooth=False),
    Case("aten.div.Tensor_mode", lambda d: (d.f(3, 4), d.positive(4)), {"rounding_mode": "trunc"}, smooth=False),
    Case("aten.div.Tensor_mode", whole, {"rounding_mode": "floor"}),
    Case("aten.div.Tensor_mode", lambda d: (d.i(9, 5) - 4, d.i(3, 5) + 1), {"rounding_mode": "trunc"}),
    Case("aten.atan2.default", pair),
    Case("aten.fmod.Tensor", lambda d: (d.f(3, 4), d.positive(4)), smooth=False),
    Case("aten.remainder.Tensor", lambda d: (d.f(3, 4), d.positive(4)), smooth=False),
    Case("aten.remainder.Scalar", lambda d: (d.i(9, 5) - 4, 3)),
    Case("aten.floor_divide.default", whole),
    Case("aten.pow.Tensor_Scalar", number(2)),
    Case("aten.pow.Tensor_Scalar", number(3.0)),
    Case("aten.pow.Tensor_Scalar", lambda d: (d.positive(3), -0.5)),
    Case("aten.pow.Tensor_Tensor", lambda d: (d.positive(3), d.f(3))),
    Case("aten.pow.Scalar", lambda d: (0.9, d.f(3))),
    Case("aten.maximum.default", pair),
    Case("aten.minimum.default", pair),
    *(Case(f"aten.bitwise_{name}.Tensor", truths) for name in ("and", "or", "xor")),
    Case("aten.bitwise_and.Tensor", whole),
    Case("aten.__rshift__.Scalar", lambda d: (d.i(99, 5) - 50, 2)),
    Case("aten.bitwise_not.default", lambda d: (d.b(3),)),
    *(Case(f"aten.logical_{name}.default", whole) for name in ("and", "or", "xor")),
    Case("aten.logical_not.default", lambda d: (d.i(2, 5),)),
    Case("aten.where.self", lambda d: (d.b(3, 4), d.f(3, 4), d.f(4))),
    Case("aten.clamp.default", lambda d: (d.f(3, 4), -0.5)),
    Case("aten.clamp.default", lambda d: (d.f(3, 4), -0.5, 0.5)),
    Case("aten.clamp.Tensor", lambda d: (d.f(3, 4), None, d.f(4))),
    Case("aten._to_copy.default", matrix, {"dtype": torch.float64}),
    Case("aten._to_copy.default", matrix, {"dtype": torch.int64}, smooth=False),
    Case("aten._to_copy.default", lambda d: (d.i(3, 5),), {"dtype": torch.bool}),
    Case("aten.copy.default", pair, smooth=False),
    # reductions
    Case("aten.sum.default", matrix),
    Case("aten.sum.default", lambda d: (d.b(3, 4),)),
    Case("aten.sum.dim_IntList", lambda d: (d.f(3, 4), [0], True)),
    Case("aten.sum.dim_IntList", lambda d: (d.f(3, 4), [])),
    Case("aten.sum.dim_IntList", lambda d: (d.f(3, 4), [1]), {"dtype": torch.float64}),
    Case("aten.mean.dim", lambda d: (d.f(3, 4), [-1])),
    Case("aten.mean.default", matrix),
    Case("aten.prod.dim_int", lambda d: (d.f(3, 4), 1)),
    Case("aten.var.correction", lambda d: (d.f(3, 4), [1]), {"correction": 1}),
    Case("aten.linalg_vector_norm.default", matrix),
    Case("aten.linalg_vector_norm.default", lambda d: (d.f(3, 4), 2, [1], True)),
    Case("aten.amax.default", lambda d: (d.f(3, 4), [1])),
    Case("aten.amin.default", lambda d: (d.f(3, 4), [0], True)),
    Case("aten.any.default", lambda d: (d.b(3, 4),)),
    Case("aten.any.dim", lambda d: (d.b(3, 4), 1)),
    Case("aten.all.dims", lambda d: (d.b(3, 4), [0])),
    Case("aten.max.default", matrix),
    Case("aten.max.dim", lambda d: (d.f(3, 4), 1)),
    Case("aten.min.dim", lambda d: (d.f(3, 4), 0, True)),
    Case("aten.argmax.default", lambda d: (d.f(3, 4), -1)),
    Case("aten.argmin.default", matrix),
    Case("aten.cumsum.default", lambda d: (d.f(3, 4), 1)),
    Case("aten.cumsum.default", lambda d: (d.i(5, 6), 0)),
    Case("aten.cumprod.default", lambda d: (d.f(3, 4), 0)),
    Case("aten._softmax.default", lambda d: (d.f(3, 4), -1, False)),
    Case("aten._log_softmax.default", lambda d: (d.f(3, 4), 0, False)),
    Case("aten.sort.default", lambda d: (d.f(3, 4), 0, True)),
    Case("aten.sort.stable", lambda d: (d.i(3, 9),), {"stable": True}),
    Case("aten.topk.default", lambda d: (d.f(3, 7), 3)),
    Case("aten.topk.default", lambda d: (d.f(7, 3), 2, 0, False)),
    # shapes
    Case("aten.view.default", lambda d: (d.f(3, 4), [2, -1])),
    Case("aten.view.dtype", lambda d: (d.f(3, 4).double(), torch.int64), smooth=False),
    Case("aten._unsafe_view.default", lambda d: (d.f(3, 4), [12])),
    Case("aten.reshape.default", lambda d: (d.f(3, 4), [4, 3])),
    Case("aten.squeeze.dims", lambda d: (d.f(3, 1, 4), [1])),
    Case("aten.unsqueeze.default", lambda d: (d.f(3, 4), -1)),
    Case("aten.expand.default", lambda d: (d.f(3, 1), [2, -1, 4])),
    Case("aten.permute.default", lambda d: (d.f(2, 3, 4), [2, 0, 1])),
    Case("aten.slice.Tensor", lambda d: (d.f(3, 7), 1, 1, 2**63 - 1, 2)),
    Case("aten.slice.Tensor", lambda d: (d.f(7), 0, -3)),
    Case("aten.slice_scatter.default", lambda d: (d.f(3, 4), d.f(3, 2), 1, 1, 3)),
    Case("aten.select.int", lambda d: (d.f(3, 4), -1, -2)),
    Case("aten.select_scatter.default", lambda d: (d.f(3, 4), d.f(3), 1, 2)),
    Case("aten.split.Tensor", lambda d: (d.f(5, 2), 2)),
    Case("aten.split_with_sizes.default", lambda d: (d.f(2, 6), [1, 3, 2], 1)),
    Case("aten.cat.default", lambda d: ([d.f(2, 3), d.f(2, 1)], 1)),
    Case("aten.repeat.default", lambda d: (d.f(2, 3), [2, 1, 2])),
    Case("aten.flip.default", lambda d: (d.f(2, 3), [1])),
    Case("aten.roll.default", lambda d: (d.f(2, 6), [3], [1])),
    Case("aten.roll.default", lambda d: (d.f(2, 6), [1])),
    Case("aten.diagonal.default", lambda d: (d.f(3, 4), 1)),
    Case("aten.constant_pad_nd.default", lambda d: (d.f(2, 3, 4), [1, -1, 0, 2], 0.5)),
    Case("aten.as_strided.default", lambda d: (d.f(3, 4), [2, 6], [6, 1])),
    Case("aten.as_strided.default", lambda d: (d.f(3, 4), [4, 3], [1, 4])),
    Case("aten.as_strided.default", lambda d: (d.f(3, 4), [2, 2], [4, 1], 5)),
    Case("aten.arange.default", lambda d: (5,)),
    Case("aten.arange.start_step", lambda d: (1, 9, 2), {"dtype": torch.float32}),
    *(
        Case(f"aten.{name}.default", lambda d, name=name: (d.f(2, 3), *([[4]] if "new" in name else [])))
        for name in FILLED
    ),
    Case("aten.empty.memory_format", lambda d: ([2, 3],)),
    Case("aten.empty_permuted.default", lambda d: ([2, 3], [1, 0])),
    Case("aten.empty_strided.default", lambda d: ([2, 3], [3, 1])),
    Case("aten.new_empty.default", lambda d: (d.f(2), [3])),
    Case("aten.new_empty_strided.default", lambda d: (d.f(2), [3], [1])),
    Case("aten.zeros.default", lambda d: ([2, 3],)),
    Case("aten.ones.default", lambda d: ([2, 3],)),
    Case("aten.scalar_tensor.default", lambda d: (2.5,)),
    Case("aten.full.default", lambda d: ([2, 3], 7)),
    Case("aten.full_like.default", lambda d: (d.f(2, 3), 0.5)),
    Case("aten.fill.Scalar", lambda d: (d.f(2, 3), 0.5)),
    Case("aten.new_full.default", lambda d: (d.f(2), [3], 0.5)),
    # indices
    Case("aten.embedding.default", lambda d: (d.f(7, 3), d.i(7, 2, 4))),
    Case("aten.gather.default", lambda d: (d.f(5, 4), 0, d.i(5, 3, 4))),
    Case("aten.gather.default", lambda d: (d.f(5, 4), -1, d.i(4, 5, 2))),
    Case("aten.index.Tensor", lambda d: (d.f(5, 4), [d.i(5, 3)])),
    Case("aten.index.Tensor", lambda d: (d.f(5, 4), [None, d.i(4, 2, 3)])),
    Case("aten.index_put.default", lambda d: (d.f(5, 4), [torch.tensor([3, 0])], d.f(2, 4))),
    Case("aten.index_put.default", lambda d: (d.f(5, 4), [d.i(5, 7)], d.f(7, 4), True)),
    Case("aten._unsafe_index.Tensor", lambda d: (d.f(5, 4), [d.i(5, 3)])),
    Case("aten._unsafe_index_put.default", lambda d: (d.f(5), [d.i(5, 7)], d.f(7), True)),
    Case("aten.index_select.default", lambda d: (d.f(5, 4), 1, d.i(4, 6))),
    Case("aten.scatter.src", lambda d: (d.f(5, 4), 0, torch.tensor([[1, 0, 4, 2], [0, 1, 2, 3]]), d.f(2, 4))),
    Case("aten.scatter.value", lambda d: (d.f(3, 4), 1, d.i(4, 3, 2), 0.5)),
    Case("aten.scatter_add.default", lambda d: (d.f(5, 4), 0, d.i(5, 3, 4), d.f(3, 4))),
    Case("aten.scatter_reduce.two", lambda d: (d.f(5), 0, d.i(5, 8), d.f(8), "amax"), smooth=False),
    Case("aten.scatter_reduce.two", lambda d: (d.f(5), 0, d.i(5, 8), d.f(8), "sum")),
    Case("aten.searchsorted.Tensor", lambda d: (ends(d), torch.arange(7, dtype=torch.int32)), {"right": True}),
    # products
    Case("aten.mm.default", lambda d: (d.f(3, 4), d.f(4, 5))),
    Case("aten.bmm.default", lambda d: (d.f(2, 3, 4), d.f(2, 4, 5))),
    Case("aten.mv.default", lambda d: (d.f(3, 4), d.f(4))),
    Case("aten.dot.default", lambda d: (d.f(4), d.f(4))),
    Case("aten.addmm.default", lambda d: (d.f(5), d.f(3, 4), d.f(4, 5)), {"beta": 2, "alpha": 3}),
    Case("aten.baddbmm.default", lambda d: (d.f(2, 3, 5), d.f(2, 3, 4), d.f(2, 4, 5))),
    Case(
        "aten.linalg_solve_triangular.default",
        lambda d: (d.f(2, 4, 4).float().double() / 4, d.f(2, 4, 3).double()),
        {"upper": False, "left": True, "unitriangular": True},
    ),
    # funrl's own
    Case("funrl.choose_experts.default", lambda d: (d.f(6, 5).double(), 3)),  # it takes no 16-bit numbers
    Case("funrl.grouped_linear.default", lambda d: (d.f(7, 4), d.f(3, 5, 4), ends(d)), smooth=False),
    Case("funrl.grouped_weight.default", lambda d: (d.f(7, 4), d.f(7, 5), ends(d)), smooth=False),
    Case("funrl.chunk_states.default", chunks, smooth=False),
    Case(
        "funrl.chunk_states_backward.default",
        lambda d: (d.f(2, 3, 2, 5, 4), d.f(2, 3, 2, 6, 4), *chunks(d)[1:]),
        smooth=False,
    ),
    Case(
        "funrl.continued_states.default",
        lambda d: (*chunks(d)[:4], d.f(2, 2, 6, 4), torch.tensor([False, True])),
        smooth=False,
    ),
    # lists
    Case("aten._foreach_add.List", lambda d: ([d.f(3), d.f(2, 2)], [d.f(3), d.f(2, 2)]), {"alpha": 0.5}),
    Case("aten._foreach_add.Scalar", lambda d: ([d.f(3), d.f(2, 2)], 0.5)),
    Case("aten._foreach_mul.Tensor", lambda d: ([d.f(3), d.f(2, 2)], d.f()), smooth=False),
    Case("aten._foreach_div.Tensor", lambda d: ([d.f(3), d.f(2, 2)], d.positive()), smooth=False),
    Case("aten._foreach_sqrt.default", lambda d: ([d.positive(3), d.positive(2, 2)],)),
    Case("aten._foreach_copy.default", lambda d: ([d.f(3), d.f(2, 2)], [d.f(3), d.f(2, 2)]), smooth=False),
    Case("aten._foreach_addcmul.Scalar", lambda d: ([d.f(3)], [d.f(3)], [d.f(3)], 0.1)),
]
