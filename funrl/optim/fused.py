"""AdamW in place on trees that the caller gives up: few kernels, little memory, the numbers of `adamw`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.gpu_kernels.trials import kernels_run, largest_error
from funrl.optim.adam import AdamState, correction
from funrl.optim.base import Transformation, stateful
from funrl.optim.recipes import adamw
from funrl.optim.scaling import Mask, ScheduleState, mask_of
from funrl.optim.schedules import Schedule

GROUP = 2**26  # elements that share one temporary


def fused_adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Mask = None,
    mu_dtype: torch.dtype | None = None,
) -> Transformation:
    """`adamw` in place: the same numbers and the same state, with few passes over memory.

    `update` takes over the state, and the gradients, whose memory becomes the updates; gradients of a lower dtype
    than the moments get other memory for them. On CUDA and ROCm a Triton kernel makes one pass over each leaf.
    Elsewhere torch's operators make several over many leaves, with one temporary of about 64 million elements, or of
    the largest leaf if that is larger. With `apply_updates_` the parameters are donated as well.

    Args: those of `adamw`.
    """
    init = adamw(learning_rate, b1, b2, eps=eps, weight_decay=weight_decay, mask=mask, mu_dtype=mu_dtype).init

    def update(grads: trees.Tree, state: trees.Tree, params: trees.Tree) -> tuple[trees.Tree, trees.Tree]:
        adam: AdamState = state["adam"]
        count = adam.count + 1
        timer = state["learning_rate"]
        rate = learning_rate
        if callable(rate):
            rate = rate(timer.count)
            timer = ScheduleState(timer.count + 1)
        step = AdamStep(correction(b1, count), correction(b2, count), rate, betas=(b1, b2), eps=eps)
        decays = trees.map(lambda on: weight_decay if on else 0.0, mask_of(mask, params))
        leaves = [trees.leaves(tree) for tree in (adam.mu, adam.nu, params, decays)]
        if kernel_takes(trees.leaves(grads), leaves):
            updates = trees.map(lambda grad, v: grad if grad.dtype == v.dtype else torch.empty_like(v), grads, adam.nu)
            update_by_kernel([trees.leaves(grads), *leaves], trees.leaves(updates), step)
        else:
            updates = trees.map(lambda grad, v: grad.to(v.dtype), grads, adam.nu)
            update_by_torch([trees.leaves(updates), *leaves], step)
        return updates, state | {"adam": AdamState(count, adam.mu, adam.nu), "learning_rate": timer}

    return stateful("adamw", init, update)


class AdamStep(NamedTuple):
    """Scalars of an update that all leaves share.

    Attributes:
      c1, c2: corrections of the two moments, scalars on the device.
      rate: learning rate, a number or a scalar on the device.
      betas: decays of the moments.
      eps: added to the root.
    """

    c1: Tensor
    c2: Tensor
    rate: float | Tensor
    betas: tuple[float, float]
    eps: float


def update_by_torch(columns: Sequence[list], step: AdamStep) -> None:
    """Update the moments in place, and make gradients into updates.

    Args:
      columns: gradients in the dtype of `nu`, mu, nu, parameters and weight decays of all leaves.
      step: numbers of the update.
    """
    b1, b2 = step.betas
    for group, mu, nu, p, decays in _groups(columns):
        mean = [m.to(v.dtype) for m, v in zip(mu, nu, strict=True)]
        torch._foreach_mul_(mean, b1)
        torch._foreach_add_(mean, group, alpha=1 - b1)
        torch._foreach_mul_(nu, b2)
        torch._foreach_addcmul_(nu, group, group, value=1 - b2)
        root = torch._foreach_div(nu, step.c2)
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, step.eps)
        torch._foreach_copy_(group, mean)
        torch._foreach_copy_(mu, mean)
        torch._foreach_div_(group, step.c1)
        torch._foreach_div_(group, root)
        decayed = [i for i, decay in enumerate(decays) if decay]
        if decayed:
            torch._foreach_add_([group[i] for i in decayed], [p[i] for i in decayed], alpha=decays[decayed[0]])
        torch._foreach_mul_(group, -step.rate)


def update_by_kernel(columns: Sequence[list], updates: Sequence[Tensor], step: AdamStep) -> None:
    """`update_by_torch` by one Triton kernel a leaf, which reads and writes each number once.

    Args:
      columns: gradients of any floating-point dtype, mu, nu, parameters and weight decays of all leaves.
      updates: take the updates; they may be the gradients' memory.
      step: numbers of the update.
    """
    from funrl.compiled_kernels.gpu_kernels.adamw_kernel import AdamLeaf, adamw_leaf

    facts_3 = torch.stack([step.c1.float(), step.c2.float(), torch.zeros_like(step.c1).float() + step.rate])
    for grad, mu, nu, param, decay, update in zip(*columns, updates, strict=True):
        adamw_leaf(AdamLeaf(grad, mu, nu, param, update), facts_3, step.betas, eps=step.eps, weight_decay=decay)


def kernel_takes(grads: Sequence[Tensor], leaves: Sequence[list]) -> bool:
    """True if the kernel updates these leaves: on CUDA and ROCm, with nu in float32, and all tensors end to end.

    Args:
      grads: of all leaves.
      leaves: mu, nu, parameters and weight decays of all leaves.
    """
    mu, nu, params, _ = leaves
    if not all(v.is_cuda and v.dtype == torch.float32 for v in nu):
        return False
    return all(x.is_contiguous() for x in (*grads, *mu, *nu, *params)) and kernels_run(adamw_error)


def adamw_error(device: str) -> float:
    """Largest error of a small update by the kernel, on a device."""
    generator = torch.Generator().manual_seed(0)
    grad, mu, nu, param = (torch.randn(70, generator=generator, dtype=torch.float64) for _ in range(4))
    nu = nu.square()
    columns = [[x.float().to(device)] for x in (grad, mu, nu, param)]
    numbers = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.02, dtype=torch.float64)
    update_by_torch([[grad], [mu], [nu], [param], [0.1]], AdamStep(*numbers, rate=0.5, betas=(0.9, 0.99), eps=1e-3))
    step = AdamStep(*(x.to(device) for x in numbers), rate=0.5, betas=(0.9, 0.99), eps=1e-3)
    update_by_kernel([*columns, [0.1]], columns[0], step)
    return largest_error((column[0], x) for column, x in zip(columns, (grad, mu, nu, param), strict=True))


def _groups(columns: Sequence[list]) -> Iterator[list[list]]:
    """Split the rows of the columns into runs of at most `GROUP` elements; the first column has the tensors."""
    rows = []
    size = 0
    for row in zip(*columns, strict=True):
        if rows and size + row[0].numel() > GROUP:
            yield [list(column) for column in zip(*rows, strict=True)]
            rows = []
            size = 0
        rows.append(row)
        size += row[0].numel()
    if rows:
        yield [list(column) for column in zip(*rows, strict=True)]
