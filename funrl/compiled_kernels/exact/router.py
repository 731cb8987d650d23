"""Scores of routers and gates, and choices by score; on a CPU with bits that depend on no other token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.expert_operators import exact_largest, exact_sigmoid, exact_softmax


def softmax(x: Tensor) -> Tensor:
    """e^x over the sum of those of the last dim; of float32 or wider."""
    if not computes_exactly(x):
        return x.softmax(-1)
    return _ExactSoftmax.apply(x) if torch.is_grad_enabled() else exact_softmax(x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), number by number."""
    if not computes_exactly(x):
        return x.sigmoid()
    return _ExactSigmoid.apply(x) if torch.is_grad_enabled() else exact_sigmoid(x)


def largest(x: Tensor, count: int) -> Tensor:
    """Indices of the largest numbers of the last dim, the largest first.

    On a CPU the first of equal numbers comes first.

    Args:
      x: float32 or wider.
    """
    return exact_largest(x, count) if computes_exactly(x) else x.topk(count, -1).indices


class _FromResult(AutogradFunction):
    """A function whose derivative reads its result."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)


class _ExactSoftmax(_FromResult):
    @staticmethod
    def forward(x):
        return exact_softmax(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(grad, out, -1, out.dtype)


class _ExactSigmoid(_FromResult):
    @staticmethod
    def forward(x):
        return exact_sigmoid(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return torch.ops.aten.sigmoid_backward(grad, *ctx.saved_tensors)
