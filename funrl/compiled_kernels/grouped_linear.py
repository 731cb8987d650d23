"""Products of rows with the weight of their own group: one call for all experts of a layer.

Rows are sorted by group, and `ends` says where each group's run of rows ends; groups may be empty. Rows after the last
end belong to none, and their results are 0: so the number of rows may be static where that of the groups' rows is not.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.expert_operators import exact_grouped_linear, exact_head_products
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.gpu_kernels.trials import kernels_run, largest_error

ROW_ALIGNMENT = 16  # bytes between rows that torch's own operator needs
_OWN_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}  # of torch's own operator


def grouped_linear(x_RK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """x W_e^T for every row x of group e; differentiable by rows and weights.

    On a CPU a row of the result has the same bits whatever the other rows are.

    Args:
      x_RK: rows, sorted by group.
      weight_ENK: one matrix a group.
      ends_E: int32, the number of rows up to each group, itself included.

    Returns: [R, N]; 0 after the last end.

    Example:
      >>> x, w = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[[10.0]], [[7.0]], [[100.0]]])
      >>> grouped_linear(x, w, torch.tensor([1, 1, 2], dtype=torch.int32)).flatten().tolist()
      [10.0, 200.0, 0.0]
    """
    if computes_exactly(x_RK, weight_ENK):
        return grouped_linear_in_parts(x_RK, weight_ENK, ends_E, 1)
    return _GroupedLinear.apply(x_RK, weight_ENK, ends_E)


def grouped_linear_in_parts(x_RK: Tensor, weight_ENK: Tensor, ends_E: Tensor, parts: int, wide: bool = False) -> Tensor:
    """`grouped_linear` where `computes_exactly`, with the sums of `linear_in_parts`."""
    compute = _ExactGroupedLinear.apply if torch.is_grad_enabled() else exact_grouped_linear
    return compute(x_RK, weight_ENK, ends_E, parts, wide)


def head_products(x_MHK: Tensor, weight_HNK: Tensor, low: int, high: int, transposed: bool) -> Tensor:
    """Heads times some rows of their own matrices, where `computes_exactly`; differentiable.

    Args:
      x_MHK: K is that of the weight, or where `transposed` `high` - `low`.
      low, high: of the rows.
      transposed: multiply by the rows from the right: x W instead of x W^T.
    """
    compute = _HeadProducts.apply if torch.is_grad_enabled() else exact_head_products
    return compute(x_MHK, weight_HNK, low, high, transposed)


@operator("funrl::grouped_linear")
def _products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if x.device.type == "cpu" or not _has_matrix_strides(weight):  # on a CPU the layout decides the order of sums
        weight = weight.contiguous()
    if _has_operator(x, weight):
        out = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
        _zero_tail_(out, ends)  # which the operator does not write
        return out
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for i, rows in enumerate(_runs(ends)):
        if rows.stop > rows.start:
            torch.mm(x[rows], weight[i].T, out=out[rows])
    return out


@operator("funrl::grouped_weight")
def _weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if _has_operator(x, grad):
        return F.grouped_mm(grad.T, x, offs=ends)
    out = x.new_zeros(len(ends), grad.shape[1], x.shape[1])
    for i, rows in enumerate(_runs(ends)):
        if rows.stop > rows.start:
            torch.mm(grad[rows].T, x[rows], out=out[i])
    return out


@_products.register_fake
def _(x, weight, ends):
    return x.new_empty(x.shape[0], weight.shape[1])


@_weight_gradient.register_fake
def _(grad, x, ends):
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


class _GroupedLinear(AutogradFunction):
    """Not `register_autograd`: `torch.func` refuses what that makes."""

    @staticmethod
    def forward(x, weight, ends):
        return _products(x.contiguous(), weight, ends)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return *_gradients(ctx, grad), None


class _ExactGroupedLinear(AutogradFunction):
    """`exact_grouped_linear`; its gradients are of no fixed order."""

    @staticmethod
    def forward(x, weight, ends, parts, wide):
        return exact_grouped_linear(x, weight, ends, parts, wide)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx, grad):
        return *_gradients(ctx, grad), None, None, None


def _gradients(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by rows and weights."""
    x, weight, ends = ctx.saved_tensors
    with torch.no_grad():
        grad = grad.to(x.dtype).contiguous()
        d_x = _products(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
        d_weight = _weight_gradient(grad, x.contiguous(), ends) if ctx.needs_input_grad[1] else None
    return d_x, d_weight


class _HeadProducts(AutogradFunction):
    """`exact_head_products`; its gradients are of no fixed order."""

    @staticmethod
    def forward(x, weight, low, high, transposed):
        return exact_head_products(x, weight, low, high, transposed)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, *ctx.form = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        low, high, transposed = ctx.form
        rows = weight[:, low:high]
        x_HMK, grad_HMN = x.transpose(0, 1), grad.transpose(0, 1)
        d_x = torch.bmm(grad_HMN, rows.transpose(1, 2) if transposed else rows).transpose(0, 1)
        left, right = (x_HMK, grad_HMN) if transposed else (grad_HMN, x_HMK)
        d_weight = torch.zeros_like(weight)
        d_weight[:, low:high] = torch.bmm(left.transpose(1, 2), right)
        return d_x, d_weight, None, None, None


def _has_operator(x: Tensor, other: Tensor) -> bool:
    """True where torch's own operator takes these: a dtype that it knows, and rows that are aligned."""
    aligned = all(size * x.element_size() % ROW_ALIGNMENT == 0 for size in (*x.shape[1:], *other.shape[1:]))
    return aligned and len(x) > 0 and x.dtype in _OWN_DTYPES.get(x.device.type, ())


def _has_matrix_strides(weight: Tensor) -> bool:
    """True where torch's own operator reads the matrices as they lie: rows or columns end to end, at aligned steps."""
    inner, outer = sorted(weight.stride()[1:])
    alignment = ROW_ALIGNMENT // weight.element_size()
    return inner == 1 and outer % alignment == 0 and weight.stride(0) % alignment == 0


def _zero_tail_(out: Tensor, ends: Tensor) -> None:
    """Zero the rows after the last end in place, and on a GPU read and write no other row."""
    if out.device.type == "cpu":
        out[int(ends[-1]) :].zero_()
    elif kernels_run(zero_tail_error):
        from funrl.compiled_kernels.gpu_kernels.tail_kernel import launch_zero_tail

        launch_zero_tail(out, ends)
    else:
        out.masked_fill_((torch.arange(len(out), device=out.device) >= ends[-1]).unsqueeze(1), 0)


def zero_tail_error(device: str) -> float:
    """Largest error of the kernel that zeroes rows, in a small call on a device; not a number where it left a row."""
    from funrl.compiled_kernels.gpu_kernels.tail_kernel import launch_zero_tail

    expected_RN = torch.zeros(7, 5)
    expected_RN[:3] = 1.0
    out_RN = torch.where(expected_RN == 0, torch.nan, expected_RN).to(device)
    launch_zero_tail(out_RN, torch.tensor([1, 3], dtype=torch.int32, device=device))
    return largest_error([(out_RN, expected_RN)])


def _runs(ends: Tensor) -> list[slice]:
    return [slice(*run) for run in itertools.pairwise([0, *ends.tolist()])]
