"""Products by oneDNN against torch's own: the same numbers, and who is given which."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import funrl.models.compiling.compiled_layer  # noqa: F401  # tells torch.compile what is constant
from funrl.compiled_kernels import linear as kernels
from funrl.compiled_kernels.exact import packs
from funrl.compiled_kernels.exact.dispatch import kernels_work
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.compiled_kernels.linear import ONEDNN, add_products_, linear, product, sum_of_products
from funrl.compiled_kernels.packed import pack_linear
from funrl.mesh.simulate import gather, per_rank, simulate

needs_kernels = pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
needs_onednn = pytest.mark.skipif(ONEDNN is None, reason="it is used on x86-64 only")


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weight_of(rows, columns, dtype=torch.float32):
    return (draw(rows, columns, seed=1) / columns**0.5).to(dtype)


def seen(fn):
    """Names of the operators that compute products; not by a dispatch mode, which would be one of the tracers."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fn()
    names = {event.name for event in profile.events()}
    return names & {"mkldnn::_linear_pointwise", "aten::mm", "aten::addmm"}


def with_gradients(fn, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = fn(*inputs)
    return [out, *torch.autograd.grad(out, inputs, draw(*out.shape, seed=2).to(out.dtype))]


@pytest.mark.parametrize("shape", [(1, 96), (3, 96), (2, 1300, 96), (2, 3, 5, 96)])
@pytest.mark.parametrize("rows", [192, 7])
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients_are_those_of_float64(shape, rows, biased):
    inputs = [draw(*shape), weight_of(rows, 96)] + [draw(rows, seed=3)] * biased
    got = with_gradients(linear, *inputs)
    expected = with_gradients(F.linear, *(x.double() for x in inputs))
    for tensor, two in zip(got, expected, strict=True):
        assert tensor.shape == two.shape and tensor.is_contiguous()
        assert (tensor - two).abs().max() < 1e-5 * (1 + two.abs().max())


def test_transposed_operands():
    x, w = draw(96, 40).T, weight_of(200, 96).T.contiguous().T
    assert (linear(x, w) - x.double() @ w.double().T).abs().max() < 1e-5
    assert (product(x, w) - x.double() @ w.double().T).abs().max() < 1e-5
    grad = draw(40, 200)
    assert (product(grad, w.T) - grad.double() @ w.double()).abs().max() < 1e-4
    assert (sum_of_products(grad, x) - grad.double().T @ x.double()).abs().max() < 1e-4


def test_float64_is_torchs_own():
    x, w = draw(5, 96, dtype=torch.float64), weight_of(192, 96, torch.float64)
    for item, two in zip(with_gradients(linear, x, w), with_gradients(F.linear, x, w), strict=True):
        assert (item - two).abs().max() < 1e-14 * two.abs().max() * 10
    assert torch.equal(product(x, w), x @ w.T) and torch.equal(sum_of_products(x, x), x.T @ x)


def test_no_rows_at_all():
    out, d_x, d_w = with_gradients(linear, draw(0, 96), weight_of(192, 96))
    assert out.shape == (0, 192) and d_x.shape == (0, 96) and torch.equal(d_w, torch.zeros(192, 96))
    assert torch.equal(sum_of_products(draw(0, 192), draw(0, 96)), torch.zeros(192, 96))


def test_only_the_gradients_that_are_asked_for():
    for asked in (0, 1):
        inputs = [draw(10, 96), weight_of(192, 96)]
        inputs[asked].requires_grad_()
        (got,) = torch.autograd.grad(linear(*inputs).sum(), inputs[asked])
        (expected,) = torch.autograd.grad(F.linear(*inputs).sum(), inputs[asked])
        assert (got - expected).abs().max() < 1e-5


def test_the_second_derivative():
    def second(fn):
        x, w = draw(10, 96).requires_grad_(), weight_of(192, 96).requires_grad_()
        first = torch.autograd.grad(fn(x, w).square().sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))

    for got, expected in zip(second(linear), second(F.linear), strict=True):
        assert (got - expected).abs().max() < 1e-4 * expected.abs().max()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_bits_of_a_row_do_not_depend_on_how_many_there_are(dtype):
    for rows, columns in ((192, 96), (300, 64), (7, 5), (72, 1500)):
        x, w = draw(300, columns, dtype=dtype), weight_of(rows, columns, dtype)
        whole = linear(x, w)
        for count in (1, 2, 3, 4, 5, 8, 15, 16, 17, 64, 65, 299):
            assert torch.equal(linear(x[:count], w), whole[:count]), count
            assert torch.equal(linear(x[-count:], w), whole[-count:]), count


@needs_kernels
@needs_onednn
def test_gradients_are_computed_by_onednn_and_the_kernels():
    x, w = draw(2000, 128), weight_of(128, 128)
    assert seen(lambda: linear(x, w)) == set()
    for leaf, operators in ((x, {"mkldnn::_linear_pointwise"}), (w, set())):
        out = linear(*(one.detach().requires_grad_(one is leaf) for one in (x, w)))
        assert seen(lambda out=out: out.sum().backward()) == operators


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 128, 128), (5, 130, 1000), (513, 200, 256), (1500, 1000, 17), (1024, 64, 257)])
@torch.no_grad()
def test_gradients_of_weights_are_sums_in_an_order_that_threads_do_not_change(shape, monkeypatch):
    rows, outputs, inputs = shape
    a, b, before = draw(rows, outputs), draw(rows, inputs, seed=1), draw(outputs, inputs, seed=2)
    assert seen(lambda: sum_of_products(a, b)) == set()
    total = sum_of_products(a, b)
    expected = a.double().T @ b.double()
    assert (total - expected).abs().max() <= 2e-6 * (1 + rows) ** 0.5 * 4
    added = before.clone()
    add_products_(added, a, b)
    assert (added - (before + expected)).abs().max() <= 2e-6 * (1 + rows) ** 0.5 * 4
    assert torch.equal(sum_of_products(a.T.contiguous().T, b), total), "of another layout"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(sum_of_products(a, b), total)
    transposed = before.T.contiguous().T
    add_products_(transposed, a, b)
    assert (transposed - added).abs().max() < 1e-4


@needs_kernels
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.add_(1),
        lambda w: w.data.add_(1),
        lambda w: w[3:4].mul_(2),
        lambda w: w.numpy().__iadd__(1),
        lambda w: torch._foreach_add_([w], [w]),
        lambda w: w.detach().view(-1)[-1].fill_(7),
        lambda w: w.set_(w + 1),
    ],
)
@pytest.mark.parametrize("shape", [(5, 3), (192, 96)])
def test_a_weight_that_was_changed_in_place_is_packed_anew(shape, change):
    x, w = draw(4, shape[1]), draw(*shape)
    assert torch.equal(linear(x, w), linear(x, w.clone()))
    change(w)
    assert torch.equal(linear(x, w), linear(x, w.clone()))
    assert (linear(x, w) - F.linear(x, w)).abs().max() < 1e-4


@needs_kernels
def test_a_weight_is_packed_once_a_version_and_dies_with_its_memory(monkeypatch):
    packed = []
    monkeypatch.setattr(packs, "pack_linear", lambda *x: (packed.append(1), pack_linear(*x))[1])
    x, w = draw(4, 96), weight_of(192, 96)
    for view in (w, w.detach(), w.view(2, 96, 96).flatten(0, 1), w.requires_grad_()):
        linear(x, view)
    assert len(packed) == 1
    linear(x, w.detach()[96:])
    assert len(packed) == 2
    key = w.untyped_storage()._cdata
    assert key in packs._KNOWN
    del w, view
    linear(x, weight_of(192, 96))
    assert len(packed) == 3 and sum(known.memory.expired() for known in packs._KNOWN.values()) <= 1  # the last one's


@needs_kernels
def test_another_thread_may_drop_dead_weights_at_the_same_time(monkeypatch):
    linear(draw(4, 96), weight_of(192, 96))
    assert packs._KNOWN
    monkeypatch.setattr(torch.UntypedStorage, "_expired", lambda _: packs._KNOWN.clear() or True)
    packs._drop_dead()
    assert not packs._KNOWN


@needs_onednn
def test_who_computes_is_told_by_the_weight(monkeypatch):
    monkeypatch.setattr(kernels, "computes_exactly", lambda *_: False)  # as where there is no compiler

    def names(x, w):
        return seen(lambda: with_gradients(linear, x, w))

    assert names(draw(2000, 128), weight_of(128, 128)) == {"mkldnn::_linear_pointwise"}
    assert names(draw(2000, 128), weight_of(127, 128)) == {"aten::mm"}
    assert names(draw(2000, 128, dtype=torch.float64), weight_of(128, 128, torch.float64)) == {"aten::mm"}
    with torch.no_grad():
        for rows in (1, 2, 2000):
            assert seen(lambda n=rows: linear(draw(n, 128), weight_of(128, 128))) == {"mkldnn::_linear_pointwise"}


def test_tracers_see_operators_of_torchs_core():
    x, w = draw(5, 96), weight_of(192, 96)
    with FakeTensorMode() as fake:
        fakes = [fake.from_tensor(item) for item in (x, w)]
        assert seen(lambda: linear(*fakes)) <= {"aten::mm"}
    graphs = []

    def backend(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    compiled = torch.compile(linear, fullgraph=True, backend=backend)(x, w)
    assert torch.equal(compiled, linear(x, w)), "which torch.compile sees as one operator"
    assert "mkldnn" not in graphs[0] and ("exact_linear" in graphs[0]) == kernels_work()
    by_func = torch.func.grad(lambda w: linear(x, w).sum())(w)
    by_row = torch.func.vmap(lambda row: linear(row, w))(x)
    assert (by_func - x.sum(0)).abs().max() < 1e-5 and (by_row - linear(x, w)).abs().max() < 1e-5


def test_on_simulated_ranks():
    x, w = draw(4, 96), weight_of(384, 96)
    with simulate("tp2"):
        mine = linear(x, per_rank(2, lambda rank: w[192 * rank : 192 * rank + 192]))
        parts = [gather(mine, rank) for rank in range(2)]
    assert (torch.cat(parts, -1) - linear(x, w)).abs().max() < 1e-5
