"""Properties of terms, losses and reductions, each a function of the piece that raises AssertionError."""

from __future__ import annotations

import torch

from funrl.algos.core import reduce
from funrl.algos.losses.reductions import token_mean
from funrl.algos.metrics import Max, Mean, Sum, merge
from funrl.batch import schema_of, select
from funrl.testing.awkward_rows import nearby_logp, packed_batch, poisoned, token_rewards_like
from funrl.testing.subjects import (
    Subject,
    demand,
    demand_close,
    demand_equal,
    demand_same_numbers,
    gradient_by,
    loss_parts,
    numbers,
    reduction_parts,
    term_output,
)

CONSTANTS = ("advantage", "weight", "old_logp", "ref_logp", "rollout_logp", "teacher_logp", "value", "returns", "label")
SPLITS = ([slice(0, 1), slice(1, 5), slice(5, 7)], [slice(0, None, 2), slice(1, None, 2)])  # micro-batches; ranks


def per_token(subject: Subject) -> None:
    """A term gives a finite loss per token and metrics per token, or typed ones."""
    batch = subject.batch()
    reduce(subject.piece, token_mean()).numerators(nearby_logp(batch), batch)  # which checks the shapes
    loss_BT, metrics = term_output(subject.piece, nearby_logp(batch), batch)
    demand(loss_BT[batch.mask].isfinite().all(), "the loss is not finite on sampled tokens")
    for name, value in metrics.items():
        x = value.value if isinstance(value, (Mean, Max, Sum)) else value[batch.mask].double()
        demand(x.isfinite().all(), f"metric {name!r} is not finite on sampled tokens")


def typed_metrics(subject: Subject) -> None:
    """A loss is the sum of its parts, and its metrics are typed."""
    batch = subject.batch()
    logp = nearby_logp(batch)
    parts, metrics = loss_parts(subject.piece, logp, batch)
    for name, value in metrics.items():
        demand(isinstance(value, (Mean, Max, Sum)), f"metric {name!r} is a {type(value).__name__}: Mean, Max or Sum")
    demand_close(subject.piece(logp, batch)[0], torch.stack([part.value for part in parts]).sum(), "the loss")


def outside_the_mask(subject: Subject) -> None:
    """NaN in everything that is outside the mask changes no bit of values, metrics and gradients."""
    batch = subject.batch()
    logp = nearby_logp(batch)
    for loss in subject.losses():
        results = []
        for x, given in ((logp, batch), (torch.where(batch.mask, logp, torch.nan), poisoned(batch))):
            leaf = x.clone().requires_grad_()
            parts, metrics = loss_parts(loss, leaf, given)
            gradient = gradient_by(leaf, torch.stack([f.num for f in parts]).sum())
            named = {f"numerator {i}": f.num.detach() for i, f in enumerate(parts, 1)} | {"the gradient": gradient}
            results.append(named | {f"metric {name!r}": m.value for name, m in metrics.items()})
        demand_equal(results[1], results[0], "where NaN is outside the mask")
        for name, x in results[0].items():
            demand(x.isfinite().all(), f"{name} is not finite")


def packing(subject: Subject) -> None:
    """Rows that are packed end to end give what rows one below the other give."""
    batch = subject.batch()
    logp = nearby_logp(batch)
    if subject.kind == "reduction":
        values = token_rewards_like(batch)
        short, short_values = packed_batch(batch, values)
        packed = reduction_parts(subject.piece, short_values, short.mask, short.segments)
        for part, other in zip(reduction_parts(subject.piece, values, batch.mask), packed, strict=True):
            demand_close(other.num, part.num, "the numerator of packed rows")
            demand_close(other.den, part.den, "the denominator of packed rows")
        return
    for loss in subject.losses():
        demand_same_numbers(loss, (batch, logp), packed_batch(batch, logp), "of packed rows (batch.get('segments'))")


def parts_add_up(subject: Subject) -> None:
    """Parts of a batch, as micro-batches and data ranks have them, add up to the whole; their gradients too."""
    batch = subject.batch()
    logp = nearby_logp(batch)
    if subject.kind == "reduction":
        losses = [lambda x, b: (tuple(reduction_parts(subject.piece, x, b.mask)), {})]
    else:
        losses = [lambda x, b, loss=loss: loss_parts(loss, x, b) for loss in subject.losses()]
    for loss in losses:
        leaf = logp.clone().requires_grad_()
        whole = loss(leaf, batch)
        gradient = gradient_by(leaf, torch.stack([f.num for f in whole[0]]).sum())
        for parts in SPLITS:
            leaf = logp.clone().requires_grad_()
            outs = [loss(leaf[part], select(batch, part)) for part in parts]
            merged = outs[0]
            for more in outs[1:]:
                sums = tuple(a + b for a, b in zip(merged[0], more[0], strict=True))
                merged = (sums, {k: merge(merged[1][k], more[1][k]) for k in merged[1]})
            for number, (got, want) in enumerate(zip(numbers(merged), numbers(whole), strict=True), 1):
                demand_close(got, want, f"number {number} of the loss, added over {len(parts)} parts of the batch,")
            total = torch.stack([f.num for fractions, _ in outs for f in fractions]).sum()
            demand_close(gradient_by(leaf, total), gradient, f"the gradient over {len(parts)} parts")


def denominators_before_step(subject: Subject) -> None:
    """Denominators need nothing that only the step writes."""
    batch = subject.batch()
    for loss in subject.losses():
        before = loss.denominators(batch._replace(**dict.fromkeys(schema_of(batch).by("step"))))
        demand(before == loss.denominators(batch), "its denominators depend on what only the step writes")


def constants(subject: Subject) -> None:
    """No gradient reaches what the batch holds constant."""
    batch = subject.batch()
    held = {k: getattr(batch, k).clone().requires_grad_() for k in CONSTANTS}
    parts, _ = loss_parts(subject.losses()[0], nearby_logp(batch).requires_grad_(), batch._replace(**held))
    total = torch.stack([f.num for f in parts]).sum()
    if total.requires_grad:
        grads = torch.autograd.grad(total, list(held.values()), allow_unused=True)
        reached = [
            k for k, gradient in zip(held, grads, strict=True) if gradient is not None and gradient.abs().max() > 0
        ]
        demand(not reached, f"a gradient goes through batch.{', batch.'.join(reached)}: detach it")


def finite_gradient(subject: Subject) -> None:
    """The gradient is finite, and there is one: by log-probabilities, or by what else the step writes."""
    batch = subject.batch()
    moving = {k: x.clone().requires_grad_() for k in schema_of(batch).by("step") if (x := batch.get(k)) is not None}
    for where, x_BT in (("", nearby_logp(batch)), (" at a ratio of 1", batch.old_logp)):
        leaf = x_BT.clone().requires_grad_()
        for loss in subject.losses():
            parts, _ = loss_parts(loss, leaf, batch._replace(**moving))
            total = torch.stack([f.num for f in parts]).sum()
            demand(total.requires_grad, "it depends on nothing that is trained: it has no gradient")
            grads = torch.autograd.grad(total, [leaf, *moving.values()], allow_unused=True)
            for name, gradient in zip(("log-probabilities", *moving), grads, strict=True):
                demand(gradient is None or gradient.isfinite().all(), f"its gradient by {name} is not finite{where}")
