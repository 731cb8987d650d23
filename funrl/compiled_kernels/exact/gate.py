"""The gate of an mlp; on a CPU by the decoding step's function, whose bits it has."""

from __future__ import annotations

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.operators import exact_gate, exact_gate_backward

Activation = Literal["silu", "gelu", "gelu_erf"]
# In the order of their numbers in the C++ code.
_ACTIVATIONS = {"silu": F.silu, "gelu": functools.partial(F.gelu, approximate="tanh"), "gelu_erf": F.gelu}
_NUMBERS = {name: number for number, name in enumerate(_ACTIVATIONS)}


def gated(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up, number by number; "gelu" is the approximation by tanh, "gelu_erf" the function itself.

    16-bit numbers are rounded after the activation too.
    """
    if not computes_exactly(gate, up):
        return _ACTIVATIONS[activation](gate) * up
    compute = _ExactGate.apply if torch.is_grad_enabled() else exact_gate
    return compute(gate, up, _NUMBERS[activation])


class _ExactGate(AutogradFunction):
    @staticmethod
    def forward(gate, up, activation):
        return exact_gate(gate, up, activation)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *numbers, ctx.activation = inputs
        ctx.save_for_backward(*numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *exact_gate_backward(grad, *ctx.saved_tensors, ctx.activation), None
