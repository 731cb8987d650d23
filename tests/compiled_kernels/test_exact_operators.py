"""The C++ functions of a step as operators: numbers and gradients against float64, shapes without numbers, tracers."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.gate import gated
from funrl.compiled_kernels.exact.low_rank import ThinFactors, low_rank_linear
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.exact.router import largest, sigmoid, softmax
from funrl.compiled_kernels.exact.shared_norm import NormNumbers, scale_rows, square_sums
from funrl.compiled_kernels.grouped_linear import grouped_linear, grouped_linear_in_parts, head_products
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.compiled_kernels.linear import linear, linear_in_parts
from funrl.compiled_kernels.norm import rms_norm, rms_norm_reference
from funrl.compiled_kernels.rotary import frequencies, rotary, rotate, rotate_reference

pytestmark = pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
POSITIONS = torch.tensor([0, 3, 15, 7, 21])
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 3e-2}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def turned(size):
    def fn(x):
        return rotate(x, rotary(POSITIONS, frequencies(size, 10000.0, None, wide(x)), x.dtype))

    def reference(x):
        first = rotate_reference(x[..., :size], POSITIONS, frequencies(size, 10000.0, dtype=torch.float64))
        return torch.cat((first, x[..., size:]), -1)

    return fn, reference


def wide(x):
    return torch.promote_types(x.dtype, torch.float32)


def groups(fn):
    """Products of 4, 0 and 3 rows, and of 2 that belong to no group."""

    def reference(x, w):
        return torch.cat((x[:4] @ w[0].T, x[4:7] @ w[2].T, x.new_zeros(2, w.shape[1])))

    return fn, reference


ENDS = torch.tensor([4, 4, 7], dtype=torch.int32)
# name -> shapes of the arguments, the function, and the same by operators of torch
CASES = {
    "norm": ([(5, 33), (33,)], lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: rms_norm_reference(x, w, 1e-6)),
    "norm of heads": (
        [(2, 5, 3, 8), (8,)],
        lambda x, w: rms_norm(x, w, 1e-2),
        lambda x, w: rms_norm_reference(x, w, 1e-2),
    ),
    "norm with an offset": (
        [(70, 48), (48,)],
        lambda x, w: rms_norm(x, w, 1e-6, 1.0),
        lambda x, w: rms_norm_reference(x, w, 1e-6, 1.0),
    ),
    "rotation": ([(2, 5, 3, 12)], *turned(12)),
    "rotation of a part": ([(1, 5, 3, 20)], *turned(8)),
    "silu": ([(7, 19), (7, 19)], gated, lambda a, b: F.silu(a) * b),
    "gelu": ([(3, 50), (3, 50)], lambda a, b: gated(a, b, "gelu"), lambda a, b: F.gelu(a, approximate="tanh") * b),
    "gelu, not approximated": ([(3, 50), (3, 50)], lambda a, b: gated(a, b, "gelu_erf"), lambda a, b: F.gelu(a) * b),
    "product": ([(2, 5, 24), (9, 24), (9,)], linear, F.linear),
    "products of groups": ([(9, 24), (3, 10, 24)], *groups(lambda x, w: grouped_linear(x, w, ENDS))),
    "products of groups in parts": (
        [(9, 24), (3, 10, 24)],
        *groups(lambda x, w: grouped_linear_in_parts(x, w, ENDS, 4)),
    ),
    "products of heads": (
        [(5, 3, 7), (3, 12, 7)],
        lambda x, w: head_products(x, w, 2, 11, False),
        lambda x, w: torch.einsum("mhk,hnk->mhn", x, w[:, 2:11]),
    ),
    "products of heads, transposed": (
        [(5, 3, 9), (3, 12, 7)],
        lambda x, w: head_products(x, w, 2, 11, True),
        lambda x, w: torch.einsum("mhk,hkn->mhn", x, w[:, 2:11]),
    ),
    "norm in parts": (
        [(5, 48), (48,)],
        lambda x, w: scale_rows(x, square_sums(x, 8), w, NormNumbers(48, 1e-2, 0.0)),
        lambda x, w: rms_norm_reference(x, w, 1e-2),
    ),
    "norm in parts with an offset": (
        [(5, 40), (40,)],
        lambda x, w: scale_rows(x, square_sums(x, 8), w, NormNumbers(40, 1e-2, 1.0)),
        lambda x, w: rms_norm_reference(x, w, 1e-2, 1.0),
    ),
    "sigmoid": ([(5, 19)], sigmoid, torch.sigmoid),
    "product in parts": ([(5, 24), (9, 24)], lambda x, w: linear_in_parts(x, w, 8), F.linear),
    "product with an adapter": (
        [(2, 5, 24), (9, 24), (3, 24), (9, 3)],
        lambda x, w, a, b: low_rank_linear(x, w, ThinFactors(a, b, 0.7)),
        lambda x, w, a, b: F.linear(x, w + 0.7 * b @ a),
    ),
    "product with an adapter and a bias, in parts": (
        [(5, 24), (40, 24), (17, 24), (40, 17), (40,)],
        lambda x, w, a, b, bias: low_rank_linear(x, w, ThinFactors(a, b, 2.5), bias, parts=8),
        lambda x, w, a, b, bias: F.linear(x, w + 2.5 * b @ a, bias),
    ),
}


def arguments(name, dtype=torch.float64):
    return [draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate(CASES[name][0])]


def with_gradients(fn, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = fn(*inputs)
    return [out, *torch.autograd.grad(out, inputs, draw(*out.shape, seed=9).to(out.dtype))]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_numbers_and_gradients_are_those_of_float64(name, dtype):
    _, fn, reference = CASES[name]
    inputs = arguments(name, dtype)
    got = with_gradients(fn, inputs)
    expected = with_gradients(reference, [x.double() for x in inputs])
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        assert (a - b).abs().max() <= TOLERANCE[dtype] * b.abs().max()


@pytest.mark.parametrize("name", [name for name in CASES if "groups" not in name])
def test_a_row_depends_on_no_other_row_and_on_no_thread(name):
    _, fn, _ = CASES[name]
    inputs = arguments(name, torch.float32)
    if "rotation" in name:
        whole, part = fn(inputs[0]), fn(inputs[0][:1])
        assert torch.equal(whole[:1], part)
        return
    many = [torch.cat([x] * 700) if x.shape == inputs[0].shape else x for x in inputs]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(fn(*many), torch.cat([fn(*inputs)] * 700))
    finally:
        torch.set_num_threads(threads)


CORE = [name for name in CASES if "parts" not in name and "products of" not in name]


@pytest.mark.parametrize("name", CORE)
def test_what_traces_sees_operators_of_torchs_core(name):
    _, fn, reference = CASES[name]
    inputs = arguments(name)
    graph = make_fx(lambda *x: fn(*x))(*inputs)
    assert "funrl" not in graph.code
    assert (graph(*inputs) - reference(*inputs)).abs().max() < 1e-12
    assert "rotation" in name or fn(*(x.to("meta") for x in inputs)).device.type == "meta"


@pytest.mark.parametrize(
    "call",
    [
        lambda o: (o.exact_linear, (draw(5, 24), draw(9, 24), draw(9), 8, False)),
        lambda o: (
            o.exact_linear,
            (draw(5, 24, dtype=torch.bfloat16), draw(9, 24, dtype=torch.bfloat16), None, 1, True),
        ),
        lambda o: (o.exact_low_rank, (draw(5, 24), draw(9, 24), draw(9), [draw(3, 24), draw(9, 3)], 0.5, 8)),
        lambda o: (o.exact_norm, (draw(5, 8), draw(8), 1e-6, 0.0)),
        lambda o: (o.exact_norm_backward, (draw(5, 8), draw(5, 8), draw(8), 1e-6, 0.0)),
        lambda o: (o.exact_rotate, (draw(5, 2, 8), draw(5, 1, 8), draw(5, 1, 8), 1)),
        lambda o: (o.exact_gate, (draw(5, 8), draw(5, 8), 1)),
        lambda o: (o.exact_grouped_linear, (draw(9, 24), draw(3, 10, 24), ENDS, 8, False)),
        lambda o: (o.exact_grouped_linear, (draw(9, 4).bfloat16(), draw(3, 10, 4).bfloat16(), ENDS, 1, True)),
        lambda o: (o.exact_head_products, (draw(5, 3, 7), draw(3, 12, 7), 2, 11, False)),
        lambda o: (o.exact_head_products, (draw(5, 3, 9), draw(3, 12, 7), 2, 11, True)),
        lambda o: (o.exact_softmax, (draw(5, 8),)),
        lambda o: (o.exact_sigmoid, (draw(5, 8),)),
        lambda o: (o.exact_largest, (draw(5, 8), 3)),
        lambda o: (o.exact_square_sums, (draw(5, 8).bfloat16(), 4)),
        lambda o: (o.exact_scale_rows, (draw(5, 8), draw(5).exp(), draw(8), 16, 1e-6, 0.0)),
        lambda o: (o.exact_gate_backward, (draw(5, 8), draw(5, 8), draw(5, 8), 2)),
    ],
)
def test_shapes_without_numbers(call):
    operator, inputs = call(torch.ops.funrl)
    torch.library.opcheck(operator.default, inputs, test_utils=("test_schema", "test_faketensor"))


def test_a_softmax_and_the_largest_numbers():
    x = draw(40, 37).requires_grad_()
    got, expected = softmax(x), x.softmax(-1)
    assert (got - expected).abs().max() < 1e-15
    assert (
        torch.autograd.grad(got.square().sum(), x)[0] - torch.autograd.grad(expected.square().sum(), x)[0]
    ).abs().max() < 1e-15
    assert torch.equal(softmax(x[3:4]), got[3:4])
    assert torch.equal(largest(x, 5), x.topk(5).indices)
    assert largest(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]]), 4).tolist() == [[1, 2, 4, 3]]
    assert largest(torch.tensor([[1.0, torch.nan, -torch.inf, 2.0]]), 3).tolist() == [[1, 3, 0]]


def test_a_selective_checkpoint_sees_products_and_keeps_their_bits():
    x, w = draw(5, 24, dtype=torch.float32).requires_grad_(), draw(9, 24, dtype=torch.float32).requires_grad_()
    seen = []

    def policy(context, operation, *args, **kwargs):
        seen.append(operation.name())
        return CheckpointPolicy.MUST_SAVE

    again = checkpoint(
        lambda x, w: (linear(x, w), computes_exactly(x, w)),
        x,
        w,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    assert again[1] and torch.equal(again[0], linear(x, w)) and "funrl::exact_linear" in seen
    got, expected = (torch.autograd.grad(y.sum(), (x, w)) for y in (again[0], linear(x, w)))
    assert all(map(torch.equal, got, expected))


def test_a_frozen_weight_has_no_gradient_and_the_others_are_the_same():
    x, w, a, b = (draw(*shape, seed=i).requires_grad_() for i, shape in enumerate([(5, 24), (9, 24), (3, 24), (9, 3)]))
    whole = torch.autograd.grad(low_rank_linear(x, w, ThinFactors(a, b, 0.7)).sum(), (x, a, b))
    out = low_rank_linear(x, w.detach(), ThinFactors(a, b, 0.7))
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (x, a, b)), whole))
    assert torch.equal(out, linear(x, w) + linear(0.7 * linear(x, a), b))


@operator("funrl::doubled_for_a_test")
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x.detach()


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_gradient_through_an_operator_without_a_formula_is_an_error():
    """Called directly or by what is compiled; without a gradient it computes."""
    x = torch.randn(3, 5)
    leaf = x.clone().requires_grad_()
    for function in (doubled, torch.compile(doubled, backend="eager", fullgraph=True)):
        expected = function(x)
        out = function(leaf)
        assert torch.equal(out, expected)
        with pytest.raises(RuntimeError, match="funrl::doubled_for_a_test has no formula for its gradient"):
            out.sum().backward()
        assert leaf.grad is None
        with torch.no_grad():
            assert torch.equal(function(leaf), expected)
