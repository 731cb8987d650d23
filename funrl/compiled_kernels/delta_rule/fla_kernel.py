"""Gated delta rule of packed rows, on CUDA by the kernels of flash-linear-attention where it is installed.

They take tensors of 16 bits and the borders of sequences, and keep states in float32. The package is imported when a
model first asks on such a GPU, never on a CPU. Its function is not for `torch.compile(fullgraph=True)`, so it is called
in opaque operators, by its public name alone: the backward pass computes the forward pass once more.

References: Yang et al., 2024, https://arxiv.org/abs/2412.06464; https://github.com/fla-org/flash-linear-attention, of
which issue 640 is the fault of Triton below 3.7.1 on Hopper.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.delta_rule.gated_delta import gated_delta_rule
from funrl.compiled_kernels.exact.registration import operator

log = logging.getLogger(__name__)
_KEY = 256  # numbers of a key at most
_HEAD = 128  # numbers of keys and values of the trial, as of published models
_TRIED = "cuda"  # where the kernels are tried
_TOLERANCE = 3e-2  # of results and gradients of size 1 in bfloat16


def packed_delta_rule(
    q_1TKN: Tensor, k_1TKN: Tensor, v_1THM: Tensor, log_decay_1TH: Tensor, beta_1TH: Tensor, offsets: Tensor
) -> Tensor:
    """`gated_delta_rule` over one packed row.

    Args:
      offsets: [S + 1], where its sequences begin and end; what is behind the last one is a sequence too.
    """
    inputs = q_1TKN, k_1TKN, v_1THM, log_decay_1TH, beta_1TH
    if v_1THM.is_cuda and v_1THM.element_size() == 2 and q_1TKN.shape[-1] <= _KEY and fla_runs():
        return fla_delta_rule(*inputs, offsets)
    return gated_delta_rule(*inputs, packed_segments(offsets, v_1THM.shape[1]))


def packed_segments(offsets: Tensor, tokens: int) -> Tensor:
    """Number of each token's sequence in one packed row, [1, tokens]."""
    places = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, places, right=True).unsqueeze(0)


def fla_delta_rule(
    q_1TKN: Tensor, k_1TKN: Tensor, v_1THM: Tensor, log_decay_1TH: Tensor, beta_1TH: Tensor, offsets: Tensor
) -> Tensor:
    """`packed_delta_rule` by flash-linear-attention; queries and keys are rounded to the dtype of v.

    The host waits for the device, to learn the number of chunks.
    """
    q_1TKN, k_1TKN = (x.to(v_1THM.dtype) for x in (q_1TKN, k_1TKN))
    return _FlaRule.apply(q_1TKN, k_1TKN, v_1THM, log_decay_1TH, beta_1TH, offsets)


def fla_runs() -> bool:
    """`fla_works` as a constant of what is compiled; see `compiled_layer`."""
    return fla_works()


@functools.cache
def fla_works() -> bool:
    """True if flash-linear-attention computes what torch does on this machine's GPU, by a small call; logged once."""
    if torch.version.hip is not None or importlib.util.find_spec("fla") is None:
        return False
    if (fault := _fault_here()) is not None:
        log.warning("flash-linear-attention is not used: %s", fault)
        return False
    try:
        # The first call may stand within a checkpoint or under no_grad, which are not to see the trial.
        with _disable_current_modes(), torch.enable_grad():
            error = trial_error(_TRIED)
    except Exception as problem:  # a compiler's errors share no type
        log.warning("flash-linear-attention does not run here: %s: %s", type(problem).__name__, problem)
        return False
    if not error < _TOLERANCE:
        log.warning("flash-linear-attention is not used: its results differ by %.2g from the reference's", error)
        return False
    log.info("the gated delta rule on the GPU is by flash-linear-attention")
    return True


def known_fault(capability: tuple[int, int], triton: str, tilelang: bool) -> str | None:
    """The reason why the package would refuse its backward pass, which a trial learns after a minute; None: none.

    Args:
      capability: of the GPU.
      triton: its version.
      tilelang: whether that is installed, which the package takes instead.
    """
    numbers = tuple(map(int, re.findall(r"\d+", triton)[:3]))
    if capability[0] != 9 or tilelang or not (3, 4) <= numbers < (3, 7, 1):
        return None
    return f"Triton {triton} computes its gradients wrongly on Hopper; install triton>=3.7.1 or tilelang"


def _fault_here() -> str | None:
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return None
    import triton  # type: ignore[import-not-found]

    tilelang = importlib.util.find_spec("tilelang") is not None
    return known_fault(torch.cuda.get_device_capability(), triton.__version__, tilelang)


def trial_error(device: str) -> float:
    """Largest relative difference of results and gradients of a small row in bfloat16 from torch's in float64."""
    generator = torch.Generator().manual_seed(0)
    heads = 2
    group = 2
    tokens = 150
    offsets = torch.tensor([0, 70, 70, 141], dtype=torch.int32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator)

    unit = (F.normalize(normal(heads, _HEAD), dim=-1).bfloat16() for _ in range(2))
    gates = -F.softplus(normal(heads * group)), normal(heads * group).sigmoid().bfloat16()
    inputs = (*unit, normal(heads * group, _HEAD).bfloat16(), *gates)
    weight = normal(heads * group, _HEAD).bfloat16()

    def results(rule: Callable[..., Tensor], device: str, dtype: torch.dtype | None, borders: Tensor) -> list[Tensor]:
        """The result and the gradients, on the host."""
        leaves = [x.to(device, dtype or x.dtype).requires_grad_() for x in inputs]
        out = rule(*leaves, borders.to(device))
        grads = torch.autograd.grad(out, leaves, weight.to(device, out.dtype))
        return [x.detach().cpu().double() for x in (out, *grads)]

    got = results(fla_delta_rule, device, None, offsets)
    expected = results(gated_delta_rule, "cpu", torch.float64, packed_segments(offsets, tokens))
    errors = [(a - b).abs().max() / (1 + b.abs().max()) for a, b in zip(got, expected, strict=True)]
    return torch.stack(errors).max().item()  # not a number where one is not


def _rule(inputs: Sequence[Tensor], offsets: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    q, k, v, log_decay, beta = inputs
    borders = torch.unique_consecutive(F.pad(offsets, (0, 1), value=v.shape[1]))  # it takes no empty sequences
    out, _ = chunk_gated_delta_rule(q, k, v, g=log_decay, beta=beta, scale=1.0, cu_seqlens=borders.long())
    return out.contiguous()


@operator("funrl::fla_delta_rule")
def _forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, offsets: Tensor) -> Tensor:
    return _rule((q, k, v, log_decay, beta), offsets)


@_forward.register_fake
def _(q, k, v, log_decay, beta, offsets):
    return v.new_empty(v.shape)


@operator("funrl::fla_delta_rule_backward")
def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, offsets: Tensor
) -> list[Tensor]:
    # In an operator autograd records no operators, but the Function that the package's rule is.
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, log_decay, beta)]
        out = _rule(leaves, offsets)
    return [x.contiguous() for x in torch.autograd.grad(out, leaves, d_out)]


@_backward.register_fake
def _(d_out, q, k, v, log_decay, beta, offsets):
    return [x.new_empty(x.shape) for x in (q, k, v, log_decay, beta)]


class _FlaRule(AutogradFunction):
    @staticmethod
    def forward(q, k, v, log_decay, beta, offsets):
        return _forward(q, k, v, log_decay, beta, offsets)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, d_out):
        with torch.no_grad():
            return *_backward(d_out.contiguous(), *ctx.saved_tensors), None
