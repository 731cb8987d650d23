"""Learning: several passes over a batch in mini-batches, one update of every role that has a loss in each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch, with_rows_spread
from funrl.compiled_kernels.exact.packs import forget
from funrl.data.packing import Packing
from funrl.mesh.collectives import psum
from funrl.models.weight_dtypes import narrow_weights
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.engine_gap import ENGINE_GAPS, worst_gaps
from funrl.trainer.steps.micro import own_places, packed, plan_epoch, row_cost, sizes_of, token_ranks
from funrl.trainer.steps.roles import Role, RoleState, row_fields_of, sums_over_episodes
from funrl.trainer.steps.skipped import Skips, odd_term
from funrl.trainer.steps.step import LossTotals, NotFiniteError, train_step
from funrl.trainer.steps.step_rows import (
    SINGLE_ROWS,
    Epoch,
    Rows,
    RowUnits,
    UpdatePlan,
    counted_by,
    moved,
    own_batch,
    rows_of_agents,
)


class UpdateMonitor(NamedTuple):
    """Records of what updates take and leave out.

    Attributes:
      clock: measures the phases, "update_policy" and so on.
      skips: takes note of updates whose loss or gradient is not finite, which are left out; None: that is an error.
    """

    clock: Clock
    skips: Skips | None = None


def learn(
    roles: Mapping[str, Role],
    states: Mapping[str, RoleState],
    rows: Rows,
    plan: UpdatePlan = UpdatePlan(),  # noqa: B008  (immutable)
    *,
    frozen: Mapping[str, trees.Tree] | None = None,
    monitor: UpdateMonitor | None = None,
) -> tuple[dict[str, RoleState], dict[str, float]]:
    """Update every role that has a loss, in the order of `roles`, on each mini-batch; the same rows on every mesh.

    Args:
      roles: those without a loss, and those whose first step is a later one, are passed over.
      states: of the roles that learn; donated.
      rows: scored, with advantages. They move where another assignment to ranks is better balanced, once a pass.
      plan: division of the rows into updates.
      frozen: weights of the base and of the companions, where roles have some.
      monitor: clock of the phases, and guard of updates that are not finite.

    Returns: the states after it, and the metrics' means over the updates that were made.

    Raises:
      NotFiniteError: naming step and role, where no `monitor.skips` is given; that update was not made.
    """
    monitor = monitor or UpdateMonitor(Clock(rows.mesh.device))
    states = dict(states)
    learning = {name: role for name, role in roles.items() if role.loss is not None and plan.step >= role.first_step}
    if not learning:
        return states, {}
    if plan.cost is None:
        plan = plan._replace(cost=row_cost(next(reversed(learning.values())).placed))
    values: dict[str, list[Tensor]] = {}
    first = True  # later updates compute with other weights than the engine's
    whole = sums_over_episodes([role.training_loss for role in learning.values()])
    units = rows.units(whole)
    for number in range(plan.epochs):
        epoch = epoch_of(rows, plan, number, units)
        rows = moved(rows, epoch.to, rows.mesh)
        totals = denominators(learning, rows, epoch.parts)
        most_rows = sizes_of(rows.lengths, plan.token_budget, token_ranks(rows.mesh), together=units.together)[1]
        for part, packing, total in zip(epoch.parts, epoch.packings, totals, strict=True):
            for name, role in learning.items():
                update = RoleUpdate(f"step {plan.step}, {name}", name, role, rows, part, packing, most_rows=most_rows)
                for _ in range(role.updates):
                    states[name], metrics = _updated(update, states[name], total[name], frozen, monitor)
                    if not metrics:  # left out; the same update would be left out again
                        break
                    for key, value in metrics.items():
                        if first or key not in ENGINE_GAPS:
                            values.setdefault(key, []).append(value)
            first = False
    return states, means(values)


def learn_per_agent(
    roles: Mapping[str, Role],
    states: Mapping[str, RoleState],
    rows: Rows,
    plan: UpdatePlan,
    agents: Mapping[str, Collection[int]],
    **options: Any,
) -> tuple[dict[str, RoleState], dict[str, float]]:
    """Update each role by itself, on mini-batches of the rows that its agents wrote.

    A role whose agents have no row stays as it is. Of metrics that several roles have by one name, gaps are the worst
    ones, and others are those of the first role.

    Args:
      roles, states, rows, plan, **options: as in `learn`.
      agents: of each such role, the numbers of its agents.
    """
    if not agents:
        return learn(roles, states, rows, plan, **options)
    states = dict(states)
    metrics: dict[str, float] = {}
    for name, role in roles.items():
        seen = rows_of_agents(rows, agents.get(name))
        if role.loss is None or not len(seen.owner):
            continue
        examples = len(seen.owner) if seen.examples is None else len(np.unique(seen.examples))
        own_plan = plan._replace(minibatches=min(plan.minibatches, examples))
        learned, own_metrics = learn({name: role}, {name: states[name]}, seen, own_plan, **options)
        states |= learned
        metrics = own_metrics | metrics | worst_gaps(metrics, own_metrics)
    return states, metrics


def epoch_of(rows: Rows, plan: UpdatePlan, number: int, units: RowUnits = SINGLE_ROWS) -> Epoch:
    """The assignment of one pass: that by which the rows were placed, where it is of this division; else a new one.

    Args:
      units: what the rows belong to, which was the same when they were placed.
    """
    placed = rows.epoch
    if placed is not None and placed.number == number and placed.plan == plan:
        return placed
    return plan_epoch(rows.lengths, rows.mesh, plan, number, units=units)


class RoleUpdate(NamedTuple):
    """One update of a role on some rows of a step.

    Attributes:
      what: name of the update, in messages.
      name, role: that learns.
      rows: all rows of the step.
      part: numbers of those of the update.
      packing: of these, into micro-batches.
      most_rows: that a micro-batch can have.
    """

    what: str
    name: str
    role: Role
    rows: Rows
    part: np.ndarray
    packing: Packing
    most_rows: int


@dataclass(frozen=True)
class MicroBatches:
    """This rank's micro-batches of an update with what the role's loss reads, made anew whenever they are taken."""

    update: RoleUpdate

    def __iter__(self) -> Iterator[Batch]:
        """Make them one by one."""
        _, _, role, rows, part, packing, most_rows = self.update
        for piece in packed(rows, packing, part, most_rows, role.mask, row_fields_of(role.training_loss)):
            yield piece.batch


def _updated(
    update: RoleUpdate,
    state: RoleState,
    total: LossTotals,
    frozen: Mapping[str, trees.Tree] | None,
    monitor: UpdateMonitor,
) -> tuple[RoleState, dict[str, Tensor]]:
    """The state after an update, and its metrics; the same state and no metrics where the update is left out."""
    role = update.role
    with monitor.clock.phase(f"update_{update.name}"):
        try:
            state, metrics = train_step(role, state, MicroBatches(update), total, update.what, frozen)
        except NotFiniteError as error:
            if monitor.skips is None:
                raise
            term = odd_term(role, state.params, MicroBatches(update), frozen)
            own = own_places(update.packing, update.rows)
            numbers = [number for i in error.suspects for number in update.part[own[i]].tolist()]
            monitor.skips.add(error, update.name, update.rows, update.part, term or numbers)
            return state, {}
    for params in (state.params, narrow_weights(state.params, role.placed.dtype)):
        forget(*trees.leaves(params))  # packed copies of the old weights: generation may need the memory
    if monitor.skips is not None:
        monitor.skips.made(update.name)
    return state, metrics


def denominators(roles: Mapping[str, Role], rows: Rows, parts: Sequence[np.ndarray]) -> list[dict[str, LossTotals]]:
    """LossTotals of each mini-batch for each role. Collective.

    Args:
      parts: numbers of the rows of each mini-batch.
    """
    mine: list[Tensor] = []
    counts: list[int] = []
    counted = {role.mask: counted_by(rows, role.mask) for role in roles.values()}
    for part in parts:
        own = part[rows.owner[part] == rows.index]
        spread = {mask: with_rows_spread(own_batch(some, own)) for mask, some in counted.items()}
        for role in roles.values():
            here = spread[role.mask]
            masked = here._replace(mask=getattr(here, role.mask))
            sums = [*role.training_loss.denominators(masked), masked.mask.count_nonzero()]
            mine += [x.double().reshape(()) for x in sums]
            counts.append(len(sums))
    summed = psum(torch.stack(mine).to(rows.mesh.device), rows.mesh, rows.mesh.row_axes).split(counts)
    each = iter([LossTotals(tuple(part[:-1].unbind()), part[-1]) for part in summed])
    return [{name: next(each) for name in roles} for _ in parts]


def means(values: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """The mean of each metric's values; they leave the device together."""
    if not values:
        return {}
    averages = torch.stack([torch.stack([x.double() for x in numbers]).mean() for numbers in values.values()])
    return {name: value.item() for name, value in zip(values, averages.cpu(), strict=True)}
