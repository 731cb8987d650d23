"""The term of a loss that gives a number that is not finite, found by running the loss once more, term by term."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.guarding import defined_at, name_of
from funrl.algos.masks import where_masked
from funrl.algos.metrics import PieceError
from funrl.batch import Batch, recording
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.step import present_scores

FAR = 20.0  # nats from the old policy; a ratio of it is 5e8
USUAL = (
    "the numbers that go into it are of usual size, so its formula does it: a root, a logarithm or a division at 0, "
    "such as a ratio of 1 that is subtracted from 1; clamp its argument above 0. A lower --lr does not prevent it"
)
STEEP = (
    "no number that went in is odd: a lower --lr or --max_grad_norm, or a warm-up (--lr_warmup_steps), may prevent it"
)


def odd_term(
    role: Role, params: trees.Tree, micro_batches: Iterable[Batch], frozen: Mapping[str, trees.Tree] | None = None
) -> str | None:
    """Words for the first term whose loss, or its derivative by what the model gives, is not finite here; None: none.

    Collective: all ranks run all micro-batches, without a gradient through the model.

    Args:
      params, micro_batches, frozen: as in `train_step`.
    """
    text = None
    for rows in micro_batches:
        with torch.no_grad():
            present = present_scores(params, role, rows, frozen)
        text = text or _odd_term_of(role, present.x, present.rows)
    return text


def _odd_term_of(role: Role, x_BT: Tensor, rows: Batch) -> str | None:
    """Words for the first odd term of a loss on one micro-batch."""
    if not where_masked(x_BT, rows.mask).isfinite().all():
        return f"the {role.prefix}'s own numbers are not finite before any term of its loss: {STEEP}"
    x_BT = x_BT.detach().requires_grad_()
    written = {name: x.detach() for name in ("entropy", "topk_logp", "divergence") if (x := rows.get(name)) is not None}
    leaves = [x_BT, *(x.requires_grad_() for x in written.values() if x.is_floating_point())]
    watched, seen = recording(rows._replace(**written))
    try:
        with torch.enable_grad():
            role.training_loss.numerators(x_BT, watched)
    except PieceError:
        return None
    for term, place, _, loss_BT in seen.terms:
        odd_BT = ~where_masked(loss_BT, rows.mask).isfinite()
        what = "loss"
        if not odd_BT.any() and loss_BT.requires_grad:
            total = where_masked(loss_BT, rows.mask).sum()
            grads = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
            odd = [~grad.isfinite() for grad in grads if grad is not None]
            odd_BT = torch.stack([x if x.dim() == 2 else x.any(-1) for x in odd]).any(0)
            what = "derivative, where its loss is finite,"
        if odd_BT.any():
            of = f", {place} that are added" if place else ""
            advice = _advice(x_BT.detach()[odd_BT], rows, odd_BT)
            count = int(odd_BT.sum())
            where = f"{count} token{'s' * (count > 1)}"
            return f"term {name_of(term)}{of}{defined_at(term)}: its {what} is not finite on {where}; {advice}"
    return None


def _advice(x_N: Tensor, rows: Batch, odd_BT: Tensor) -> str:
    """The cause by the size of what went in, on the odd tokens."""
    old_BT = rows.get("old_logp")
    far = old_BT is not None and bool(((x_N - old_BT[odd_BT]).abs() > FAR).any())
    return STEEP if far else USUAL
