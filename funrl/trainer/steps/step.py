"""One update of one model: a pure function of static shapes.

Gradients are exact whatever the split: the denominators of a loss depend on masks alone, so they are taken over the
whole mini-batch first, and the numerators of every micro-batch are divided by them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Loss
from funrl.algos.metrics import Max, Metric, token_mean_of, value_of
from funrl.algos.reading import reads
from funrl.batch import Batch
from funrl.mesh.collectives import pmax, psum
from funrl.mesh.rules import rest_axes
from funrl.mesh.sums import RestSums, psum_tree, sum_rest
from funrl.models.vision.model import VISION
from funrl.models.weight_dtypes import cast_weights, renew_copies
from funrl.optim import global_norm, step_
from funrl.optim.gradients import add_gradients, widened
from funrl.processes.heartbeat import beat
from funrl.trainer.steps.engine_gap import engine_gap, gap_metrics
from funrl.trainer.steps.optimizer import is_constant
from funrl.trainer.steps.roles import Role, RoleState
from funrl.trainer.steps.router_losses import (
    ROUTER_COUNTS,
    Choices,
    counts_metric,
    load_metrics,
    move_biases_,
    router_numerators,
    token_count,
)


class NotFiniteError(ArithmeticError):
    """A loss or a gradient that is not finite. It was not applied.

    Attributes:
      suspects: this rank's micro-batches whose own loss is not finite, by their numbers in the update.
    """

    def __init__(self, message: str, suspects: Sequence[int] = ()):
        super().__init__(message)
        self.suspects = tuple(suspects)


class LossTotals(NamedTuple):
    """Sums over the rows of a mini-batch on all ranks, taken before its gradient.

    Attributes:
      denominators: of a role's loss.
      tokens: number of tokens that it trains on.
    """

    denominators: tuple[Tensor, ...]
    tokens: Tensor


class Gradient(NamedTuple):
    """Gradient of a role's loss over a mini-batch.

    Attributes:
      tree: the gradient, as the role's own weights are stored.
      metrics: values by name.
      loss: of the mini-batch.
      micro_losses: of each of this rank's micro-batches.
      load: choices of each expert over all ranks, a tensor [L, E]; empty where there are no experts.
    """

    tree: trees.Tree
    metrics: dict[str, Tensor]
    loss: Tensor
    micro_losses: Sequence[Tensor] = ()
    load: Sequence[Tensor] = ()


def train_step(
    role: Role,
    state: RoleState,
    micro_batches: Iterable[Batch],
    totals: LossTotals,
    what: str = "update",
    frozen: Mapping[str, trees.Tree] | None = None,
) -> tuple[RoleState, dict[str, Tensor]]:
    """One optimizer step on a mini-batch, in place: the state is donated.

    Args:
      role: one that learns.
      micro_batches: this rank's rows of the mini-batch, packed. Where `expert_rows` of the role's model are bounded,
        they may be taken several times.
      totals: of the mini-batch. Where it has no tokens to train on, nothing moves, not even the optimizer's momentum.
      what: name of the update, for the message of an error.
      frozen: this rank's weights that do not learn, by name: the base and the companion of the role, if it has them.

    Returns: the state after it, and the metrics' values, which are still on the device.

    Raises:
      NotFiniteError: the loss or the gradient's norm is not finite, on every rank. The state has not changed.
    """
    expert_rows = role.placed.expert_rows
    while True:
        with expert_rows.bounded():
            grads, metrics, loss, micro_losses, load = gradient(
                role, state.params, micro_batches, totals.denominators, frozen
            )
        norm = global_norm(grads, role.stored, role.placed.mesh)
        peak = [expert_rows.peak()] if expert_rows.limited else []
        numbers = [loss, norm, totals.tokens, *peak]
        on_host = torch.stack([x.double() for x in numbers]).cpu()  # the host waits once an update
        # Before the bound of rows: routers with NaNs send all tokens to one rank, for which no later pass should have
        # room. A pass that lacks rows is finite by itself, since slots without a row count 0.
        if not (math.isfinite(on_host[0].item()) and math.isfinite(on_host[1].item())):
            text = f"{what}: the gradient's norm is {on_host[1].item():.4g} and the loss {on_host[0].item():.4g}"
            raise NotFiniteError(text, [i for i, value in enumerate(micro_losses) if not math.isfinite(value.item())])
        if not peak or not expert_rows.exceeded(on_host[3].item()):
            break
        del grads, metrics  # before the same update with more rows
    metrics |= {role.metric: loss, f"{role.prefix}/grad_norm": norm}
    if load and peak:
        metrics["router/peak_rows"] = peak[0]
    if on_host[2].item() == 0:
        return state, metrics
    state = (
        updated(role, grads, state, norm) if role.programs is None else role.programs.update(role, grads, state, norm)
    )
    if load and role.router.bias_rate:
        move_biases_(state.params, load[0], role.router.bias_rate)
    return state, metrics


@torch.no_grad()
def updated(role: Role, grads: trees.Tree, state: RoleState, norm: Tensor) -> RoleState:
    """The state after an update by a gradient of this norm, in place; all arguments are donated."""
    if role.optimizer is None:
        raise TypeError("a frozen role has no optimizer")
    params, opt_state = step_(role.optimizer, grads, state.opt_state, state.params, norm)
    renew_copies(params, role.placed.dtype)
    return RoleState(params, opt_state)


def gradient(
    role: Role,
    params: trees.Tree,
    micro_batches: Iterable[Batch],
    denominators: Sequence[Tensor],
    frozen: Mapping[str, trees.Tree] | None = None,
) -> Gradient:
    """The gradient of a role's loss by its own weights over a mini-batch, summed over micro-batches and ranks."""
    micro_losses = []
    grads = None
    sums_so_far = None
    chosen = None
    if role.router.wanted:
        micro_batches = list(micro_batches)
        chosen = _choices(role, params, micro_batches, frozen)
    lanes = 1 if role.programs is None else role.programs.lanes
    weights = params if role.programs is not None else weights_to_learn(role, params)
    ahead = iter(micro_batches)
    begins_sums = role.programs is None and not _is_gathered(role) and role.placed.mesh.world > 1
    last = None
    group = tuple(itertools.islice(ahead, lanes))
    while group:
        following = tuple(itertools.islice(ahead, lanes)) if begins_sums else ()
        given = (denominators, frozen, chosen)
        if role.programs is not None:
            (value, sums), grad = role.programs.value_and_grad(params, role, group, *given)
        elif begins_sums and not following:
            last = LastMicroBatch(role, params, grads, sums_so_far)
            grads = None
            (value, sums), grad = trees.value_and_grad(last.objective, last.add)(weights, role, *group, *given)
        else:
            (value, sums), grad = trees.value_and_grad(objective)(weights, role, *group, *given)
        numerators, metrics = sums
        grads = grad if grads is None else add_gradients(grads, grad, params)
        del grad  # before the next one is made
        micro_losses += value.detach().reshape(-1).unbind()
        beat()
        sums_so_far = _joined(sums_so_far, numerators, metrics) if last is None else last.joined
        group = following if begins_sums else tuple(itertools.islice(ahead, lanes))  # zip would hold one more
    if sums_so_far is None:
        raise ValueError("a mini-batch has no micro-batch")
    if last is not None:
        grads, sums = last.finish(grads)
    else:
        grads = widened(grads, params)
        grads, sums = sum_rest(grads, sums_so_far[0], role.stored, role.compute, role.placed.mesh, role.partial)
    denominators = (*denominators, *(() if chosen is None else chosen.denominators))
    load = sums[1].get(ROUTER_COUNTS, ())
    values, loss = _values(role, sums, sums_so_far[1], metrics, denominators)
    return Gradient(grads, values, loss, micro_losses, load)


class LastMicroBatch:
    """The last micro-batch of an update: sums over ranks begin while its backward pass computes the other gradients.

    Args:
      role: whose weights no layer gathers.
      params: its weights.
      grads: the sum of the gradients of the micro-batches before, if there are any; donated.
      sums: numerators and metrics of these, of `_joined`.
    """

    def __init__(self, role: Role, params: trees.Tree, grads: trees.Tree | None, sums: Any) -> None:
        self.params = trees.leaves(params)
        self.before: list[Tensor | None] = [None] * len(self.params) if grads is None else trees.leaves(grads)
        self.joined = sums
        rest = rest_axes(role.stored, role.compute, role.placed.mesh, partial=role.partial)
        names = [name for name, _ in trees.named(params)]
        late = [i for i, name in enumerate(names) if name.startswith(f"{VISION}/")]  # used before all layers
        self.sums = RestSums(role.stored, rest, [x.dtype for x in self.params], role.placed.mesh, late)
        self.missing = set(range(len(self.params)))
        self.constant = [i for i, name in enumerate(names) if is_constant(name, role.placed.model, role.frozen)]

    def objective(self, *args: Any) -> tuple[Tensor, tuple[tuple[Tensor, ...], dict[str, Metric]]]:
        """The function `objective`; its numerators and metrics are summed with the first gradients."""
        value, results = objective(*args)
        detached = trees.map(lambda x: x.detach() if isinstance(x, Tensor) else x, results)
        self.joined = _joined(self.joined, *detached)
        self.sums.begin(self.joined[0])
        self._add_zeros()
        return value, results

    def _add_zeros(self) -> None:
        """Add the gradients of constant weights, so that no bucket waits for them."""
        for i in self.constant:
            if self.sums.rest[i]:  # else it is in no bucket
                weight = self.params[i]
                before = self.before[i]
                zeros = weight.new_zeros(()).expand(weight.shape)  # without memory before they are sent
                self.before[i] = None
                self.missing.remove(i)
                self.sums.add(i, zeros if before is None else widened(before, weight))

    def add(self, i: int, grad: Tensor) -> None:
        """Add the gradient of a weight to those before it."""
        if i not in self.missing:
            return  # zeros of a constant weight, which were added before
        before = self.before[i]
        self.before[i] = None
        self.missing.remove(i)
        weight = self.params[i]
        self.sums.add(i, widened(grad, weight) if before is None else add_gradients(before, grad, weight))

    def finish(self, grads: trees.Tree) -> tuple[trees.Tree, trees.Tree]:
        """The summed gradients, numerators and metrics; `grads` has the last gradient of every weight."""
        last = trees.leaves(grads)
        for i in sorted(self.missing, reverse=True):
            self.add(i, last[i])
        summed, sums = self.sums.finish()
        return trees.fill(grads, summed), sums


@torch.no_grad()
def loss_value(
    role: Role,
    params: trees.Tree,
    micro_batches: Iterable[Batch],
    denominators: Sequence[Tensor],
    frozen: Mapping[str, trees.Tree] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """The metrics' values and the loss of a role over some rows; the arguments are those of `gradient`."""
    sums_so_far = None
    for rows in micro_batches:
        _, (numerators, metrics) = objective(params, role, rows, denominators, frozen)
        sums_so_far = _joined(sums_so_far, numerators, metrics)
    if sums_so_far is None:
        raise ValueError("there are no rows to take a loss of")
    sums = psum_tree(sums_so_far[0], role.placed.mesh, role.placed.mesh.row_axes)
    return _values(role, sums, sums_so_far[1], metrics, denominators)


def objective(
    params: trees.Tree,
    role: Role,
    rows: Batch,
    denominators: Sequence[Tensor],
    frozen: Mapping[str, trees.Tree] | None = None,
    chosen: Choices | None = None,
) -> tuple[Tensor, tuple[tuple[Tensor, ...], dict[str, Metric]]]:
    """A role's loss on some rows of a mini-batch, and its numerators and metrics.

    A role with an unembedding is asked for log-probabilities, and for what else of the present policy its loss reads,
    such as the divergence from its companion; one with a value head for values. Where sampled rows have no old
    log-probabilities, this is the only update on them: the present ones are the old ones.

    Args:
      chosen: the experts that the whole mini-batch chooses: the losses of routers are added.
    """
    loss = role.training_loss
    present = present_scores(params, role, rows, frozen)
    numerators, metrics = loss.numerators(present.x, present.rows)
    seen = dict(present.metrics)
    if present.load is not None:
        seen |= counts_metric(present.load, role.placed.mesh)
        if chosen is not None:
            router_terms, router_metrics = router_numerators(role.router, present.load, chosen, role.placed.mesh)
            numerators = (*numerators, *router_terms)
            seen |= router_metrics
            denominators = (*denominators, *chosen.denominators)
    return value_of(numerators, tuple(denominators)), (numerators, metrics | seen)


class Present(NamedTuple):
    """The numbers that a model as it is trained gives for some rows.

    Attributes:
      x: [B, T] log-probabilities or values, which its loss is a function of.
      rows: with the other fields that only the step writes.
      metrics: of these numbers.
      load: of the experts, where there are some.
    """

    x: Tensor
    rows: Batch
    metrics: dict[str, Metric]
    load: Any = None


def present_scores(
    params: trees.Tree, role: Role, rows: Batch, frozen: Mapping[str, trees.Tree] | None = None
) -> Present:
    """Run a role's model on some rows of a mini-batch; the arguments are those of `objective`."""
    loss = role.training_loss
    placed = role.placed
    frozen = frozen or {}
    params = role.whole(params, frozen)
    if placed.model.unembed is None:
        return Present(placed.values(params, rows), rows, {})
    read = fields_of(loss)
    want = ("logp", "entropy") if role.watch_entropy or "entropy" in read else ("logp",)
    ids = rows.get("teacher_topk") if "topk_logp" in read else None
    teacher = None if role.companion is None else role.companion.teacher(frozen)
    scores = placed.token_scores(params, rows, want, role.temperature, ids, teacher)
    logp_BT = scores.read("logp")
    seen = dict[str, Metric]()
    if role.watch_entropy and scores.entropy is not None:
        seen[f"{role.prefix}/entropy"] = token_mean_of(scores.entropy.detach(), rows.mask)
    if rows.get("old_logp") is None and rows.get("rollout_logp") is not None:
        rows = rows._replace(old_logp=logp_BT.detach())
        seen |= engine_gap(rows)
    rows = rows._replace(entropy=scores.entropy, topk_logp=scores.topk_logp, divergence=scores.divergence)
    return Present(logp_BT, rows, seen, scores.load)


def _choices(
    role: Role, params: trees.Tree, micro_batches: Sequence[Batch], frozen: Mapping[str, trees.Tree] | None
) -> Choices:
    """The experts that a mini-batch chooses, counted before its gradient is taken, where that takes a pass of its own.

    Every rank has as many micro-batches.
    """
    mesh = role.placed.mesh
    tokens = token_count(micro_batches, mesh)
    if len(micro_batches) == 1 or not role.router.balance:
        return Choices(None, tokens)
    whole = role.whole(params, frozen or {})
    counts_LE = sum(role.placed.choices(whole, rows) for rows in micro_batches)
    assert isinstance(counts_LE, Tensor)
    return Choices(psum(counts_LE, mesh, mesh.token_axes), tokens)


@functools.cache
def fields_of(loss: Loss) -> frozenset[str]:
    """The fields of the batch that a loss reads."""
    read = reads(loss)
    return read.required | read.optional


def _joined(joined: Any, numerators: tuple[Tensor, ...], metrics: dict[str, Metric]) -> Any:
    """Sums (numerators, parts of metrics) and largest values, with those of one more micro-batch."""
    mine = (numerators, {k: tuple(v) for k, v in metrics.items() if not isinstance(v, Max)})
    most = {k: v.value for k, v in metrics.items() if isinstance(v, Max)}
    if joined is None:
        return mine, most
    return trees.map(torch.add, joined[0], mine), trees.map(torch.maximum, joined[1], most)


def _values(
    role: Role, sums: Any, peaks: dict[str, Tensor], metrics: dict[str, Metric], denominators: Sequence[Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """The metrics' values and the loss.

    Args:
      sums, peaks: of `_joined`; the sums are over all ranks.
      metrics: of any micro-batch, for their kinds.
    """
    (numerators, parts) = sums
    mesh = role.placed.mesh
    values = {name: type(metrics[name])(*part).value for name, part in parts.items()}
    if peaks:
        names, most = zip(*peaks.items(), strict=True)
        values |= dict(zip(names, pmax(torch.stack(most), mesh, mesh.row_axes), strict=True))
    return gap_metrics(load_metrics(values)), value_of(numerators, tuple(denominators))


def weights_to_learn(role: Role, params: trees.Tree) -> trees.Tree:
    """The weights of a role that gradients are taken by.

    They are in the dtype to compute in, and so are their gradients, which are widened where they are added. Weights
    that are gathered are as they are stored: so are the sums of their gradients over ranks.
    """
    return params if _is_gathered(role) else cast_weights(params, role.placed.dtype)


def _is_gathered(role: Role) -> bool:
    """True if layers gather some of the role's weights."""
    return trees.leaves(role.stored) != trees.leaves(role.compute)
