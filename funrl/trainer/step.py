"""The trainer's two verbs: `score` rows under a model, and `update` a model on a mini-batch.

Both take the whole batch, the same on every rank, and let each data rank work on its own rows. Gradients are exact
whatever the split: the denominators of the loss depend on masks alone, so they are taken over the whole mini-batch
first, and every micro-batch's numerators are divided by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Fraction, Loss, needs_of, token_fraction, where_masked
from funrl.batch import Batch, select
from funrl.data.packing import balance, micro_batches
from funrl.mesh.collectives import pmax
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import Layout
from funrl.mesh.sums import psum_tree, sum_rest
from funrl.models import fsdp, value
from funrl.models.config import Config
from funrl.models.scores import token_scores
from funrl.optim import Transformation, apply_updates_

Aux = tuple[tuple[Fraction, ...], dict[str, Any]]  # metrics are fractions, or tensors of which the largest counts
Objective = Callable[[trees.Tree, Batch, Sequence[Tensor]], tuple[Tensor, Aux]]
Forward = Callable[[trees.Tree, Batch], Sequence[Tensor]]


class Divergence(ArithmeticError):
    """A loss or a gradient that is not finite. It was not applied."""


class Learner(NamedTuple):
    """One model that learns: its weights as this rank holds them, and its optimizer's state."""

    params: trees.Tree
    opt_state: Any


def score(forward: Forward, params: trees.Tree, batch: Batch, mesh: Mesh, token_budget: int) -> list[Tensor]:
    """Per-token quantities of all rows, computed once over the data ranks and known to all of them.

    Args:
      forward: (params, rows) -> tensors [rows, width, ...].
      batch: all rows; the same on every rank.
      token_budget: padded tokens in one forward pass.

    Returns: the tensors of `forward` for all rows, [B, T, ...], without gradient.
    """
    whole: list[Tensor] = []
    with torch.no_grad():
        for rows, piece in _own_micro_batches(batch, mesh, token_budget):
            outs = forward(params, piece)
            if not whole:
                whole = [out.new_zeros(*batch.tokens.shape, *out.shape[2:]) for out in outs]
            for all_rows, out in zip(whole, outs, strict=True):
                all_rows[rows, : out.shape[1]] = out[: len(rows)]
    # Every row was computed by one data rank and is zero on the others: the sum is the union.
    return psum_tree(whole, mesh, mesh.row_axes)


def gradient(
    objective: Objective,
    loss: Loss,
    params: trees.Tree,
    batch: Batch,
    old: Tensor,
    mesh: Mesh,
    token_budget: int,
    layouts: trees.Tree = None,
) -> tuple[trees.Tree, dict[str, Tensor], Tensor]:
    """The gradient of a loss over the rows of a mini-batch, summed over micro-batches and data ranks.

    Args:
      objective: (params, rows, denominators) -> (scalar, fractions and metrics).
      loss: what the objective computes; asked once, on `old`, for the denominators of the whole mini-batch.
      batch: the mini-batch's rows; the same on every rank.
      old: [B, T] any finite argument for `loss`; it stands for the old log-probabilities where the batch has none.
      layouts: of `params`, which `objective` gathers; None: the data ranks hold copies of all of them.

    Returns: the gradient tree, the metrics' means, and the loss.
    """
    said = old if batch.old_logp is None else batch.old_logp
    probe = batch._replace(entropy=torch.zeros_like(old), old_logp=said, student_top_logp=batch.teacher_top_logp)
    fractions, _ = loss(old, probe)
    dens = [f.den for f in fractions]
    grads: trees.Tree = None
    total: Any = None
    peaks: dict[str, Tensor] = {}
    for _, piece in _own_micro_batches(batch, mesh, token_budget):
        (_, (parts, metrics)), grad = trees.value_and_grad(objective)(params, piece, dens)
        grads = grad if grads is None else _accumulate(grads, grad)
        mine = (tuple(p.num for p in parts), {k: tuple(v) for k, v in metrics.items() if isinstance(v, Fraction)})
        total = mine if total is None else trees.map(torch.add, total, mine)
        most = {k: v for k, v in metrics.items() if not isinstance(v, Fraction)}
        peaks = trees.map(torch.maximum, peaks, most) if peaks else most
    grads, (nums, metrics) = _sum_over_rows(grads, total, layouts, mesh)
    peaks = {k: pmax(v, mesh, mesh.token_axes) for k, v in peaks.items()}
    value = sum((Fraction(n, d).value for n, d in zip(nums, dens, strict=True)), torch.zeros_like(nums[0]))
    return grads, {k: Fraction(*v).value for k, v in metrics.items()} | peaks, value


def check_finite(loss: Tensor, norm: Tensor, what: str) -> None:
    """Raises Divergence, on every rank alike, where a loss or its gradient's norm over the mesh is not finite."""
    if not torch.isfinite(norm) & torch.isfinite(loss):
        raise Divergence(
            f"{what}: the gradient's norm is {norm.item()} and the loss {loss.item():.4g}; the update was not made. A "
            "lower --lr or --max_grad_norm, or a warm-up (--lr_warmup_steps), may prevent it"
        )


def update(optimizer: Transformation, learner: Learner, grads: trees.Tree) -> Learner:
    """One optimizer step, in place: the learner and the gradient are given up."""
    with torch.no_grad():
        updates, state = optimizer.update(grads, learner.opt_state, learner.params)
        return Learner(apply_updates_(learner.params, updates), state)


def policy_objective(
    config: Config,
    loss: Loss,
    mesh: Mesh,
    temperature: float,
    layer: Any,
    dtype: torch.dtype,
    layouts: trees.Tree = None,
    watch_entropy: bool = False,
) -> Objective:
    """The algorithm's loss of a policy. Weights are cast to `dtype` to compute, gradients come back in their own.

    `layouts` are the weights'; those that are split over data ranks are gathered as they are needed. None: none are.
    Where sampled rows have no old log-probabilities, this is the only update on them: what the policy says now is what
    it said. `watch_entropy` adds the policy's mean entropy to the metrics, whether or not the loss reads it.
    """
    want = ("logp", "entropy") if watch_entropy or "entropy" in needs_of(loss) else ("logp",)

    def objective(params: trees.Tree, rows: Batch, dens: Sequence[Tensor]) -> tuple[Tensor, Aux]:
        weights = gathered(params, layouts, mesh, dtype)
        scores = token_scores(
            config, weights, rows.tokens, rows.positions, rows.segments, mesh, temperature, want,
            rows.mask, layer, rows.teacher_top,
        )  # fmt: skip
        assert scores.logp is not None
        seen = {}
        if watch_entropy and scores.entropy is not None:
            seen["actor/entropy"] = token_fraction(scores.entropy.detach(), rows.mask)
        if rows.old_logp is None and rows.rollout_logp is not None:
            rows = rows._replace(old_logp=scores.logp.detach())
            seen |= engine_gap(rows)
        fractions, metrics = loss(
            scores.logp, rows._replace(entropy=scores.entropy, student_top_logp=scores.among_logp)
        )
        return _divide((fractions, metrics | seen), dens)

    return objective


def value_objective(
    config: Config, loss: Loss, mesh: Mesh, layer: Any, dtype: torch.dtype, layouts: trees.Tree = None
) -> Objective:
    """The algorithm's loss of a critic; the arguments are those of `policy_objective`."""

    def objective(params: trees.Tree, rows: Batch, dens: Sequence[Tensor]) -> tuple[Tensor, Aux]:
        values = value.apply(
            config, gathered(params, layouts, mesh, dtype), rows.tokens, rows.positions, rows.segments, mesh, layer
        )
        return _divide(loss(values, rows), dens)

    return objective


def engine_gap(batch: Batch) -> dict[str, Any]:
    """How far the trainer's log-probabilities are from those of the engine that sampled, in nats: mean and largest."""
    assert batch.old_logp is not None and batch.rollout_logp is not None
    gap_BT = where_masked((batch.old_logp - batch.rollout_logp).abs(), batch.mask)
    return {"rollout/logprob_gap_mean": token_fraction(gap_BT, batch.mask), "rollout/logprob_gap_max": gap_BT.max()}


def _divide(out: Aux, dens: Sequence[Tensor]) -> tuple[Tensor, Aux]:
    fractions, _ = out
    scalar = sum((f.over(d) for f, d in zip(fractions, dens, strict=True)), torch.zeros_like(dens[0]))
    return scalar, out


def gathered(params: trees.Tree, layouts: trees.Tree, mesh: Mesh, dtype: torch.dtype) -> trees.Tree:
    """Weights to compute with; `layouts` say how they are stored, None: whole over the axes of the batch's tokens."""
    if layouts is None:
        return trees.cast(params, dtype)
    return fsdp.gathered(params, layouts, compute_layouts(layouts), mesh, dtype)


def compute_layouts(layouts: trees.Tree) -> trees.Tree:
    """The layouts in which a dense model computes: stored ones, whole over the axes of the batch's tokens."""

    def whole(layout: Layout) -> Layout:
        spec = tuple(tuple(axis for axis in axes if axis not in Mesh.token_axes) for axes in layout.spec)
        return Layout(layout.shape, spec, layout.sizes)

    return trees.map(whole, layouts)


def _sum_over_rows(grads: trees.Tree, total: trees.Tree, layouts: trees.Tree, mesh: Mesh) -> tuple[trees.Tree, Any]:
    """Sums over all ranks that had tokens of their own."""
    if layouts is None:
        return psum_tree((grads, total), mesh, mesh.token_axes)
    return sum_rest(grads, total, layouts, compute_layouts(layouts), mesh)


def _accumulate(total: trees.Tree, more: trees.Tree) -> trees.Tree:
    torch._foreach_add_(trees.leaves(total), trees.leaves(more))
    return total


def _own_micro_batches(batch: Batch, mesh: Mesh, token_budget: int) -> list[tuple[Tensor, Batch]]:
    """Row numbers and rows of each micro-batch of this data rank: equal work over ranks, similar lengths together.

    Every data rank gets the same number of them, because a forward pass may hold collectives over data. A rank that
    has fewer is given the shortest row with an empty mask: no row number, and no influence on any loss.
    """
    assert batch.length is not None
    lengths = batch.length.tolist()
    shares = balance(lengths, mesh.size(mesh.row_axes))
    plans = [micro_batches([lengths[i] for i in share], token_budget, 8) for share in shares]
    mine, plan = shares[mesh.index(mesh.row_axes)], plans[mesh.index(mesh.row_axes)]
    device = batch.tokens.device
    pieces = []
    for piece in plan:
        rows = torch.tensor([mine[i] for i in piece], device=device)
        pieces.append((rows, _trim(select(batch, rows))))
    shortest = torch.tensor([lengths.index(min(lengths))], device=device)
    idle = _trim(select(batch, shortest))
    idle = idle._replace(mask=torch.zeros_like(idle.mask))
    return pieces + [(shortest[:0], idle)] * (max(map(len, plans)) - len(pieces))


def _trim(rows: Batch) -> Batch:
    """The rows cut to the longest of them (a multiple of 8, so that few widths occur)."""
    assert rows.length is not None
    full = rows.tokens.shape[1]
    width = min(-(-int(rows.length.max()) // 8) * 8, full)
    known = {k: x for k, x in rows._asdict().items() if x is not None and k != "scores"}  # its columns are no tokens
    return rows._replace(**{k: x[:, :width] for k, x in known.items() if x.ndim >= 2 and x.shape[1] == full})
