"""AdamW in place on trees that the caller gives up: few kernels, little memory, the numbers of `adamw`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.gpu_kernels.trials import kernels_take, largest_error
from funrl.models.weight_dtypes import copy_to_write, mark_written
from funrl.optim.adam import correction
from funrl.optim.base import Transformation, apply_updates_, scale_, stateful
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
    than the moments get other memory for them. On CUDA and ROCm one Triton kernel makes one pass over all leaves, and
    `step_` includes clipping, the new parameters and their copies in it. Elsewhere torch's operators make several over
    many leaves, with one temporary of about 64 million elements, or of the largest leaf if that is larger. With `step_`
    and `apply_updates_` the parameters are donated as well.

    Args: those of `adamw`.
    """
    init = adamw(learning_rate, b1, b2, eps=eps, weight_decay=weight_decay, mask=mask, mu_dtype=mu_dtype).init

    def advanced(state: trees.Tree) -> tuple[AdamStep, trees.Tree]:
        count = state["adam"].count + 1
        timer = state["learning_rate"]
        rate = learning_rate
        if callable(rate):
            rate = rate(timer.count)
            timer = ScheduleState(timer.count + 1)
        step = AdamStep(correction(b1, count), correction(b2, count), rate, betas=(b1, b2), eps=eps)
        return step, state | {"adam": state["adam"]._replace(count=count), "learning_rate": timer}

    def columns(state: trees.Tree, params: trees.Tree) -> list[list]:
        decays = trees.map(lambda on: weight_decay if on else 0.0, mask_of(mask, params))
        return [trees.leaves(tree) for tree in (state["adam"].mu, state["adam"].nu, params, decays)]

    def update(grads: trees.Tree, state: trees.Tree, params: trees.Tree) -> tuple[trees.Tree, trees.Tree]:
        step, state = advanced(state)
        leaves = columns(state, params)
        nu = state["adam"].nu
        if kernel_takes(trees.leaves(grads), leaves):
            updates = trees.map(lambda grad, v: grad if grad.dtype == v.dtype else torch.empty_like(v), grads, nu)
            update_by_kernel([trees.leaves(grads), *leaves], trees.leaves(updates), step)
        else:
            updates = trees.map(lambda grad, v: grad.to(v.dtype), grads, nu)
            update_by_torch([trees.leaves(updates), *leaves], step)
        return updates, state

    def in_place(grads: trees.Tree, state: trees.Tree, params: trees.Tree, factor: Tensor | None) -> trees.Tree:
        leaves = columns(state, params)
        if kernel_takes(trees.leaves(grads), leaves):
            step, state = advanced(state)
            update_by_kernel([trees.leaves(grads), *leaves], None, step._replace(factor=factor))
            return state
        updates, state = update(grads if factor is None else scale_(grads, factor), state, params)
        apply_updates_(params, updates)
        return state

    return stateful("adamw", init, update)._replace(in_place=in_place)


class AdamStep(NamedTuple):
    """Scalars of an update that all leaves share.

    Attributes:
      c1, c2: corrections of the two moments, scalars on the device.
      rate: learning rate, a number or a scalar on the device.
      betas: decays of the moments.
      eps: added to the root.
      factor: of the gradients, a scalar on the device; None: 1.
    """

    c1: Tensor
    c2: Tensor
    rate: float | Tensor
    betas: tuple[float, float]
    eps: float
    factor: Tensor | None = None


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


def update_by_kernel(columns: Sequence[list], updates: Sequence[Tensor] | None, step: AdamStep) -> None:
    """`update_by_torch` by one Triton kernel for all leaves of the same dtypes; each number is read and written once.

    Args:
      columns: gradients of any floating-point dtype, mu, nu, parameters and weight decays of all leaves.
      updates: take the updates; they may be the gradients' memory. None: parameters are updated in place, and their
        copies in the dtype to compute in with them.
      step: numbers of the update.
    """
    factor = torch.ones_like(step.c1) if step.factor is None else step.factor
    numbers = (step.c1, step.c2, torch.zeros_like(step.c1) + step.rate, factor)
    facts_4 = torch.stack([x.float() for x in numbers])
    *tensors, decays = columns
    params = tensors[3]
    room = {i: copy for i, x in enumerate(params) if updates is None and (copy := copy_to_write(x)) is not None}
    tensors += [params if updates is None else updates, list(room.values())]
    scalars = (list(room), decays, facts_4, *step.betas, step.eps)
    _adamw_leaves(*tensors, *scalars, updates is None)
    if updates is None:
        torch.autograd.graph.increment_version(params)
        mark_written([params[i] for i in room], room.values())


# Flat arguments: torch.library takes tensors and numbers, no records.
@operator("funrl::adamw_leaves", mutates_args=("mu", "nu", "targets", "copies"))
def _adamw_leaves(
    grads: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    params: Sequence[Tensor],
    targets: Sequence[Tensor],
    copies: Sequence[Tensor],
    copied: Sequence[int],
    decays: Sequence[float],
    facts_4: Tensor,
    b1: float,
    b2: float,
    eps: float,
    in_place: bool,
) -> None:
    from funrl.compiled_kernels.gpu_kernels.adamw_kernel import AdamLeaf, adamw_leaves

    copy_of = dict(zip(copied, copies, strict=True))
    columns = zip(grads, mu, nu, params, targets, strict=True)
    leaves = [AdamLeaf(*row, copy_of.get(i)) for i, row in enumerate(columns)]
    adamw_leaves(leaves, decays, facts_4, (b1, b2), eps, in_place=in_place)


def kernel_takes(grads: Sequence[Tensor], leaves: Sequence[list]) -> bool:
    """True if the kernel updates these leaves: with nu in float32, and where `kernels_take` all tensors.

    Args:
      grads: of all leaves.
      leaves: mu, nu, parameters and weight decays of all leaves.
    """
    mu, nu, params, _ = leaves
    return all(v.dtype == torch.float32 for v in nu) and kernels_take((*grads, *mu, *nu, *params), adamw_error)


def adamw_error(device: str) -> float:
    """Largest error of small updates by the kernel, on a device: of whole vectors and others, in two dtypes at once."""
    generator = torch.Generator().manual_seed(0)
    sizes = 70, 4096, 48
    grads, mus, nus, params = (
        [torch.randn(n, generator=generator, dtype=torch.float64) for n in sizes] for _ in range(4)
    )
    grads[2] = grads[2].bfloat16().double()
    nus = [x.square() for x in nus]
    columns = [[x.float().to(device) for x in column] for column in (grads, mus, nus, params)]
    columns[0][2] = columns[0][2].bfloat16()
    decays = [0.1, 0.0, 0.1]
    numbers = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.02, dtype=torch.float64)
    update_by_torch([grads, mus, nus, params, decays], AdamStep(*numbers, rate=0.5, betas=(0.9, 0.99), eps=1e-3))
    step = AdamStep(*(x.to(device) for x in numbers), rate=0.5, betas=(0.9, 0.99), eps=1e-3)
    applied = [[x.clone() for x in column] for column in columns]
    updates = [torch.empty_like(x) for x in columns[2]]
    update_by_kernel([*columns, decays], updates, step)
    for grad in applied[0]:
        grad *= 4
    copies = [torch.empty_like(x, dtype=torch.float16) for x in applied[3]]
    mark_written(applied[3], copies)
    update_by_kernel([*applied, decays], None, step._replace(factor=torch.tensor(0.25, device=device)))
    after = [param + update for param, update in zip(params, grads, strict=True)]
    expected = [*grads, *mus, *nus, *mus, *nus, *after, *(x.half().cpu().double() for x in applied[3])]
    computed = [*updates, *columns[1], *columns[2], *applied[1], *applied[2], *applied[3], *copies]
    return largest_error(zip(computed, expected, strict=True))


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
