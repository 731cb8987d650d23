"""Triton kernels of the gated delta rule: interpreted, compiled for two GPUs, when they are taken, and on a GPU."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernel_programs import interpreted_test, needs_triton, output_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from funrl.compiled_kernels.delta_rule import gated_delta, operators
from funrl.compiled_kernels.gpu_kernels.trials import trial_problem

CASES = (
    "shapes_equal_float64",
    "numbers_of_16_bits_equal_float64",
    "keys_that_are_alike_lose_no_digits",
    "strong_decays_leave_three_digits",
    "every_caller_computes_by_them",
    "any_number_of_tokens_is_one_graph",
    "operators_keep_their_promises",
    "wrong_kernels_are_found",
)


test_interpreted_kernels = interpreted_test("interpreted_delta.py", CASES)


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_gpus_of_both_makers(tmp_path):
    """No register of heads of 128 is spilled; shared memory suffices on an A100 and on an MI300."""
    compiled = output_of("compiled_delta.py", "128", TRITON_CACHE_DIR=str(tmp_path))
    assert len(compiled) == 2 * 7
    for name, facts in compiled.items():
        assert facts["spills"] == 0, name
        assert facts["shared"] <= (163 if "sm_90" in name else 64) << 10, name


def test_products_are_not_transposed():
    """Triton 3.4 to 3.7.0 computes a transposed result of a product wrongly on Hopper, as a factor of the next one."""
    source = Path(operators.__file__).with_name("kernels.py").read_text()
    assert "tl.dot" in source and "tl.trans" not in source and ".T" not in source.replace(".Tensor", "")


def _heads(key, value, dtype, tokens=10, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(1, tokens, *shape, generator=generator)

    units = [F.normalize(normal(2, key), dim=-1) for _ in range(2)]
    heads = *units, normal(4, value), -F.softplus(normal(4)), normal(4).sigmoid()
    return [x.to(device, torch.float32 if i in (0, 1, 3) else dtype).requires_grad_() for i, x in enumerate(heads)]


def test_which_rows_are_for_the_kernels(monkeypatch):
    trials = []
    monkeypatch.setattr(gated_delta, "delta_kernels_run", lambda *sizes: trials.append(sizes) or True)

    def taken(key: int, value: int, dtype: torch.dtype, device="cuda"):
        with FakeTensorMode():
            v = torch.empty(1, 10, 2, value, device=device, dtype=dtype)
        return gated_delta._by_kernels(v, key, value)

    assert taken(128, 64, torch.bfloat16) and taken(20, 256, torch.float16)
    refused = (128, 64, torch.float32), (512, 64, torch.bfloat16), (128, 64, torch.bfloat16, "cpu")
    assert not any(taken(*given) for given in refused)
    assert trials == [(128, 64, torch.bfloat16), (20, 256, torch.float16)], "sizes that are used are tried"


class Rooms(TorchDispatchMode):
    """Bytes of all tensors that are made without numbers."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if "empty" in func.name():
            self.nbytes += out.nbytes
        return out


class NoKernel:
    def __getitem__(self, grid):
        return lambda *args, **named: None


@needs_triton
@pytest.mark.parametrize(("tokens", "key", "value"), [(130, 64, 32), (64, 128, 128), (7, 16, 256)])
def test_the_dry_run_knows_the_room_of_intermediate_results(tokens, key, value, monkeypatch):
    from funrl.compiled_kernels.delta_rule import kernels

    for name in ("_condense", "_advance", "_retreat", "_read_gradients", "_condensed_gradients"):
        monkeypatch.setattr(kernels, name, NoKernel())
    q, k = (torch.zeros(2, tokens, 2, key, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(2, tokens, 4, value, dtype=torch.bfloat16)
    rows = kernels.DeltaRows(q, k, v, *(torch.zeros(2, tokens, 4) for _ in range(2)), torch.zeros(2, 4, key, value))
    results = v.nbytes + rows.first.nbytes
    with Rooms() as rooms:
        kernels.launch_rule(rows)
    assert rooms.nbytes == operators.rule_room(q, v) + results
    with Rooms() as rooms:
        kernels.launch_rule_gradients(v, rows.first, rows)
    assert rooms.nbytes == operators.rule_gradient_room(q, v) + results


def test_a_trial_that_fails_leaves_torchs_operators(monkeypatch, caplog):
    """On a CPU without the interpreter a kernel cannot run."""
    from funrl.compiled_kernels.gpu_kernels import trials

    monkeypatch.setattr(trials, "_PROBED", "cpu")

    def refuse(*_):
        raise RuntimeError("no kernel here\nand more")

    monkeypatch.setattr(gated_delta, "chunked_delta_rule", refuse)
    assert gated_delta._trial_runs.__wrapped__(16, 16, torch.bfloat16) is False
    assert len(caplog.messages) == 1
    assert "gated delta rule; RuntimeError: no kernel here" in caplog.text and "and more" not in caplog.text


@pytest.mark.parametrize("key, value", [(12, 40), (16, 64)])
def test_results_have_the_shapes_and_dtypes_of_torchs(key, value, monkeypatch):
    """Without a GPU: on tensors without numbers."""
    monkeypatch.setattr(gated_delta, "_by_kernels", lambda *_: True)
    heads = [x.detach().to("meta").requires_grad_() for x in _heads(key, value, torch.bfloat16)]
    out = gated_delta.gated_delta_rule(*heads, torch.zeros(1, 10, dtype=torch.int64, device="meta"))
    assert out.shape == heads[2].shape and out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.sum(), heads)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in heads]
    with torch.no_grad():
        state = torch.zeros(1, 4, key, value, device="meta")
        out, end = gated_delta.continue_delta_rule(*heads, state)
    assert out.shape == heads[2].shape and end.shape == state.shape and end.dtype == torch.float32


def test_a_cpu_does_not_import_triton(monkeypatch):
    monkeypatch.delitem(sys.modules, operators.__name__.replace("operators", "kernels"), raising=False)
    gated_delta.gated_delta_rule(*_heads(8, 8, torch.bfloat16))
    assert operators.__name__.replace("operators", "kernels") not in sys.modules


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("key, value", [(128, 128), (64, 64), (48, 96), (128, 256)])
def test_a_gpu_equals_float64(key, value):
    def gated_delta_rule_error(device):
        return gated_delta.kernel_error(device, key, value, torch.bfloat16)

    assert trial_problem(gated_delta_rule_error, gated_delta._TOLERANCE) is None
    heads = _heads(key, value, torch.bfloat16, 3000, "cuda")
    segments = gated_delta.packed_segments(torch.tensor([0, 70, 71, 2048, 2500]).cuda(), 3000)
    wide = [x.detach().cpu().double().requires_grad_() for x in heads]
    results = []
    for inputs, runs in ((heads, segments), (wide, segments.cpu())):
        out = gated_delta.gated_delta_rule(*inputs, runs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for got, expected in zip(*results, strict=True):
        assert (got.cpu().double() - expected).norm() < 2e-2 * expected.norm()
