"""Passes over rows of logits by Triton kernels: when they are taken, and on a GPU; test_gpu_kernels.py has others."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kernel_programs import needs_triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from funrl import trees
from funrl.compiled_kernels import linear as products
from funrl.compiled_kernels.gpu_kernels import trials
from funrl.compiled_kernels.linear_divergence import divergence_error, linear_divergence, linear_divergence_reference
from funrl.compiled_kernels.linear_logprob import WANTS, linear_logprob, linear_logprob_reference, project
from funrl.compiled_kernels.logit_rows import operators


def test_which_hidden_states_are_for_the_kernels(monkeypatch, caplog):
    on_gpu = [SimpleNamespace(is_cuda=True, dtype=x) for x in (torch.bfloat16, torch.float32, torch.float64)]
    monkeypatch.setattr(operators, "kernels_run", lambda trial: True)
    assert [operators.by_kernels(x) for x in (*on_gpu, torch.zeros(1))] == [True, True, False, False]
    monkeypatch.undo()
    monkeypatch.setattr(trials, "trial_problem", lambda *_: "no triton")
    assert trials.kernels_run.__wrapped__(operators.logit_rows_error) is False
    assert caplog.messages == ["torch's operators on the GPU, which take several times as long: logit rows; no triton"]
    monkeypatch.setattr(trials, "trial_problem", lambda *_: None)
    with caplog.at_level("INFO", trials.__name__):
        assert trials.kernels_run.__wrapped__(operators.logit_rows_error) is True
    assert caplog.messages[-1] == "Triton kernels on the GPU: logit rows"


@pytest.mark.parametrize(
    "error,text",
    [
        (ImportError("No module named 'triton'"), "No module named 'triton'; torch for"),
        (KeyError("a\nb"), "KeyError: "),
    ],
)
def test_what_fails_leaves_plain_passes(error, text, monkeypatch):
    def refuse(*_):
        raise error

    monkeypatch.setattr(trials, "_PROBED", "cpu")
    monkeypatch.setattr(operators, "add_row_sums_", refuse)
    assert trials.trial_problem(operators.logit_rows_error).startswith(text)


def test_a_gpu_without_wide_products_of_16_bits_takes_float32(monkeypatch, caplog):
    """One that refuses them, one that rounds their sums, and one that has them."""
    mm = torch.mm

    def refusing(a, b, out_dtype=None):
        raise NotImplementedError("mm of bfloat16 in float32 is for CUDA 12\nand more")

    ways = {
        "is for CUDA 12": refusing,
        "differ by": lambda a, b, out_dtype: mm(a, b).to(out_dtype),
        "": lambda a, b, out_dtype: mm(a.to(out_dtype), b.to(out_dtype)),
    }
    monkeypatch.setattr(products, "_PROBED", "cpu")
    for text, way in ways.items():
        caplog.clear()
        monkeypatch.setattr(torch, "mm", way)
        assert products.has_wide_products.__wrapped__(torch.bfloat16) is (not text)
        assert text in caplog.text and bool(caplog.messages) is bool(text) and "and more" not in caplog.text


def test_a_gpu_that_adds_no_products_to_float32_takes_another_pass(monkeypatch, caplog):
    """One that refuses them, one that forgets the sum before, and one that has them."""

    def refusing(total, a, b, out_dtype, out):
        raise RuntimeError("self and mat2 must have the same dtype\nand more")

    ways = {
        "must have the same dtype": refusing,
        "differ by 1 ": lambda total, a, b, out_dtype, out: a.to(out_dtype) @ b.to(out_dtype),
        "": lambda total, a, b, out_dtype, out: out.add_(a.to(out_dtype) @ b.to(out_dtype)),
    }
    monkeypatch.setattr(products, "_PROBED", "cpu")
    for text, way in ways.items():
        caplog.clear()
        monkeypatch.setattr(torch, "addmm", way)
        assert products.has_wide_sums.__wrapped__(torch.bfloat16) is (not text)
        assert text in caplog.text and bool(caplog.messages) is bool(text) and "and more" not in caplog.text


@pytest.mark.parametrize("wide", [True, False])
def test_logits_on_a_gpu_are_in_float32(wide, monkeypatch):
    """Without a GPU: on tensors that only say that they are on one."""
    monkeypatch.setattr(products, "has_wide_products", lambda dtype: wide)
    with FakeTensorMode():
        hidden, unembed = (torch.empty(n, 16, device="cuda", dtype=torch.bfloat16) for n in (3, 40))
        assert project(hidden, unembed).dtype == torch.float32


class LogitOperators(TorchDispatchMode):
    """Names of the operators that read or write a tensor [rows, V], transposed or not, for some numbers of rows."""

    def __init__(self, rows, V):
        super().__init__()
        self.shapes = [{count, V} for count in rows]
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        tensors = [x for x in trees.leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if not func.is_view and any(set(x.shape) in self.shapes for x in tensors):
            self.names.append(func.overloadpacket.__name__)
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_are_read_once_a_pass(dtype, monkeypatch):
    """Without a GPU: on tensors without numbers."""
    monkeypatch.setattr(operators, "by_kernels", lambda *hidden: True)
    hidden, unembed = (torch.empty(n, 16, device="meta", dtype=dtype, requires_grad=True) for n in (8, 1000))
    ids_T = torch.empty(8, device="meta", dtype=torch.int64)
    with LogitOperators((4, 8), 1000) as forward:
        scores = linear_logprob(hidden, unembed, ids_T, temperature=0.7, want=WANTS, chunk=4, cap=30.0)
    with LogitOperators((4, 8), 1000) as backward:
        d_hidden, d_unembed = torch.autograd.grad((scores.logp + scores.entropy).sum(), (hidden, unembed))
    assert forward.names == ["mm", "logit_row_sums"] * 2
    assert backward.names == ["new_empty", *["mm", "logit_row_gradients"] * 2, "mm", "mm"]
    assert d_hidden.dtype == d_unembed.dtype == dtype


def test_blocks_of_logits_are_read_once_a_pass(monkeypatch):
    """As above, and no tensor has all columns of a chunk but the gradients of logits."""
    monkeypatch.setattr(operators, "by_kernels", lambda *hidden: True)
    monkeypatch.setattr(operators, "l2_blocks", lambda device: operators.ColumnBlocks(2 * 128 * 256, 1))
    hidden, unembed = (torch.empty(n, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in (8, 1000))
    ids_T = torch.empty(8, device="meta", dtype=torch.int64)
    with LogitOperators((4,), 512) as wide, LogitOperators((4,), 488) as narrow, LogitOperators((4,), 1000) as whole:
        scores = linear_logprob(hidden, unembed, ids_T, want=WANTS, chunk=4)
        blocks = ["mm", "logit_row_sums"] * 2
        assert wide.names == blocks and narrow.names == blocks and not whole.names
        for watched in (wide, narrow):
            watched.names.clear()
        torch.autograd.grad(scores.logp.sum(), (hidden, unembed))
        assert wide.names == narrow.names == ["mm", "logit_row_gradients"] * 2 and not whole.names


def test_the_gradient_of_the_unembedding_is_summed_in_place(monkeypatch):
    """Without zeros, a sum of its own and a rounded part: of several parts one cast at the end, of one part none."""
    monkeypatch.setattr(operators, "by_kernels", lambda *hidden: True)
    monkeypatch.setattr(products, "sums_wide", lambda a: a.element_size() == 2)
    for dtype, chunk, names in (
        (torch.bfloat16, 1, ["mm", "addmm", "_to_copy"]),
        (torch.bfloat16, 4, ["mm"]),
        (torch.float32, 1, ["mm", "addmm_"]),
    ):
        hidden, unembed = (torch.empty(n, 16, device="meta", dtype=dtype, requires_grad=True) for n in (8, 1000))
        ids_T = torch.empty(8, device="meta", dtype=torch.int64)
        logp = linear_logprob(hidden.detach(), unembed, ids_T, chunk=chunk).logp
        with ResultNames((1000, 16)) as watched:
            (d_unembed,) = torch.autograd.grad(logp.sum(), unembed)
        assert watched.names == names and d_unembed.dtype == dtype


class ResultNames(TorchDispatchMode):
    """Names of the operators whose result has a shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if not func.is_view and isinstance(out, torch.Tensor) and out.shape == self.shape:
            self.names.append(func.overloadpacket.__name__)
        return out


@pytest.mark.parametrize(
    "name,megabytes,processors,tokens,width",
    [
        ("H200", 60, 132, 1024, 8448),
        ("H100", 50, 132, 1024, 8448),
        ("B200", 126, 148, 1024, 18944),
        ("A100", 40, 108, 1024, 151936),
        ("MI300X", 4, 304, 1024, 151936),
        ("H200", 60, 132, 4096, 2048),
        ("H200", 60, 132, 100, 67584),
    ],
)
def test_sizes_of_blocks(name, megabytes, processors, tokens, width):
    """Two thirds of the L2 and whole turns of all processors; no blocks where the cache has one turn or less."""
    numbers = int(operators.L2_SHARE * megabytes * 2**20) // 4
    columns = operators.ColumnBlocks(numbers, processors).width(tokens, 151936)
    assert columns == width and (columns == 151936 or 128 * -(-tokens // 128) * columns <= numbers)


def test_kernels_get_the_temperature_and_the_cap(monkeypatch):
    settings = []

    def recorded(operator, *args):
        settings.append(args[-1])
        return operator(*args)

    for name in ("add_row_sums_", "logit_gradients"):
        monkeypatch.setattr(operators, name, partial(recorded, getattr(operators, name)))
    monkeypatch.setattr(operators, "by_kernels", lambda *hidden: True)
    hidden, unembed = (torch.empty(n, 16, device="meta", requires_grad=True) for n in (8, 1000))
    ids_T = torch.empty(8, device="meta", dtype=torch.int64)
    for temperature, cap in ((0.7, 30.0), (1.0, None)):
        settings.clear()
        scores = linear_logprob(hidden, unembed, ids_T, temperature=temperature, want=WANTS, cap=cap)
        torch.autograd.grad((scores.logp + scores.entropy).sum(), (hidden, unembed))
        assert {x[:3] for x in settings} == {(temperature, cap or 0.0, True)} and len(settings) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_of_a_divergence_are_read_twice_and_once(dtype, monkeypatch):
    monkeypatch.setattr(operators, "by_kernels", lambda *hidden, trial: True)
    hidden, unembed, *teacher = (torch.empty(n, 16, device="meta", dtype=dtype) for n in (8, 1000, 8, 1000))
    with LogitOperators((4,), 1000) as forward:
        value = linear_divergence(hidden.requires_grad_(), unembed, *teacher, 0.3, chunk=4, caps=(30.0, None))
    with LogitOperators((4,), 1000) as backward:
        torch.autograd.grad(value.sum(), hidden)
    assert forward.names == ["mm", "mm", "logit_row_sums", "logit_row_sums", "divergence_row_sums"] * 2
    assert backward.names == ["mm", "mm", "empty_like", "divergence_row_gradients", "mm"] * 2


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 0.02), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("vocab", [5003, 6000])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_gpu_equals_the_reference(dtype, tolerance, vocab, cap):
    assert trials.kernels_run(operators.logit_rows_error) and trials.kernels_run(divergence_error)
    generator = torch.Generator().manual_seed(0)
    hidden, unembed = (torch.randn(n, 64, generator=generator).to("cuda", dtype).requires_grad_() for n in (70, vocab))
    ids_T = torch.randint(vocab, (70,), generator=generator).cuda()
    got = linear_logprob(hidden, unembed, ids_T, temperature=0.7, chunk=32, want=WANTS, cap=cap)
    wide = [x.detach().double().requires_grad_() for x in (hidden, unembed)]
    expected = linear_logprob_reference(*wide, ids_T, 0.7, cap)
    for a, b in zip(got[:3], expected[:3], strict=True):
        assert (a - b).abs().max() < 1e-3
    grads = torch.autograd.grad(sum(x.sum() for x in got[:3]), (hidden, unembed))
    for a, b in zip(grads, torch.autograd.grad(sum(x.sum() for x in expected[:3]), wide), strict=True):
        assert a.dtype == dtype and (a.double() - b).norm() < tolerance * b.norm()
    generator = torch.Generator().manual_seed(1)
    teacher = [torch.randn(n, 48, generator=generator).to("cuda", dtype) for n in (70, vocab)]
    for beta in (0, 0.3, 1):
        got = linear_divergence(hidden, unembed, *teacher, beta, temperature=0.7, chunk=32)
        expected = linear_divergence_reference(*wide, *teacher, beta, 0.7)
        assert (got - expected).abs().max() < 1e-3
        grads = torch.autograd.grad(got.sum(), (hidden, unembed))
        size = max(tolerance, 1e-3)  # at 0.3 a difference of numbers that are a thousand times as large
        for a, b in zip(grads, torch.autograd.grad(expected.sum(), wide), strict=True):
            assert a.dtype == dtype and (a.double() - b).norm() < size * b.norm()
