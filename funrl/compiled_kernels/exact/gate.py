"""The gate of an mlp; on a CPU by the decoding step's function, whose bits it has."""

from __future__ import annotations

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.operators import exact_gate, exact_gate_backward

_ACTIVATIONS = {"silu": F.silu, "gelu": functools.partial(F.gelu, approximate="tanh")}


def gated(gate: Tensor, up: Tensor, activation: Literal["silu", "gelu"] = "silu") -> Tensor:
    """activation(gate) * up, number by number; "gelu" is the approximation by tanh.

    16-bit numbers are rounded after the activation too.
    """
    if not computes_exactly(gate, up):
        return _ACTIVATIONS[activation](gate) * up
    compute = _ExactGate.apply if torch.is_grad_enabled() else exact_gate
    return compute(gate, up, activation == "gelu")


class _ExactGate(torch.autograd.Function):
    @staticmethod
    def forward(gate, up, gelu):
        return exact_gate(gate, up, gelu)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *numbers, ctx.gelu = inputs
        ctx.save_for_backward(*numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *exact_gate_backward(grad, *ctx.saved_tensors, ctx.gelu), None
