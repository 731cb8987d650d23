"""Learning: several passes over a batch in mini-batches, one update of every role that has a loss in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.data.packing import Packing, RowCost
from funrl.mesh.collectives import psum
from funrl.trainer.clock import Clock
from funrl.trainer.micro import packed, plan_epoch, row_cost, sizes_of, token_ranks
from funrl.trainer.roles import Role, RoleState
from funrl.trainer.skipped import Skips
from funrl.trainer.step import NotFiniteError, train_step
from funrl.trainer.step_rows import Rows, moved, own_batch


def learn(
    roles: Mapping[str, Role],
    states: Mapping[str, RoleState],
    rows: Rows,
    step: int = 1,
    epochs: int = 1,
    minibatches: int = 1,
    seed: int = 0,
    token_budget: int = 16384,
    clock: Clock | None = None,
    frozen: Mapping[str, trees.Tree] | None = None,
    cost: RowCost | None = None,
    skips: Skips | None = None,
) -> tuple[dict[str, RoleState], dict[str, float]]:
    """Update every role that has a loss, in the order of `roles`, on each mini-batch; the same rows on every mesh.

    Args:
      roles: those without a loss, and those whose first step is a later one, are passed over.
      states: of the roles that learn; donated.
      rows: scored, with advantages. They move where another assignment to ranks is better balanced, once a pass.
      step, seed: they choose the mini-batches.
      epochs: passes over the batch.
      minibatches: optimizer steps a pass.
      token_budget: tokens in one forward pass of one device.
      clock: told the phases, "update_policy" and so on.
      frozen: weights of the base and of the companions, where roles have some.
      cost: how the work of a row grows with its length; None: as in the model that learns last.
      skips: told the updates whose loss or gradient is not finite, which are left out; None: that is an error.

    Returns: the states after it, and the metrics' means over the updates that were made.

    Raises:
      NotFiniteError: naming step and role, where no `skips` are given; that update was not made.
    """
    clock, states, told = clock or Clock(), dict(states), dict[str, list[Tensor]]()
    learning = {name: role for name, role in roles.items() if role.loss is not None and step >= role.first_step}
    if not learning:
        return states, {}
    mesh, cost = rows.mesh, cost or row_cost(next(reversed(learning.values())).placed)
    for epoch in range(epochs):
        ranks, split = mesh.size(mesh.row_axes), token_ranks(mesh)
        plan = plan_epoch(rows.lengths, ranks, minibatches, seed, step, epoch, token_budget, cost, split)
        rows, most = moved(rows, plan.to, mesh), sizes_of(rows.lengths, token_budget, split)[1]
        totals = denominators(learning, rows, plan.parts)
        for part, packing, total in zip(plan.parts, plan.packings, totals, strict=True):
            for name, role in learning.items():
                pieces = (piece.batch for piece in packed(rows, packing, part, most, role.mask))
                what = f"step {step}, {name}"
                with clock.phase(f"update_{name}"):
                    dens, tokens = total[name]
                    try:
                        states[name], metrics = train_step(role, states[name], pieces, dens, tokens, what, frozen)
                    except NotFiniteError as error:
                        if skips is None:
                            raise
                        skips.add(
                            error, what, name, rows, part, rows_of_micro_batches(error.suspects, packing, part, rows)
                        )
                        continue
                if skips is not None:
                    skips.made(name)
                for key, value in metrics.items():
                    told.setdefault(key, []).append(value)
    return states, means(told)


def rows_of_micro_batches(which: Sequence[int], packing: Packing, part: np.ndarray, rows: Rows) -> np.ndarray:
    """Numbers of the rows of some of this rank's micro-batches."""
    own = [places for places, _ in packing.own(rows.index)]
    return np.concatenate([part[:0], *(part[own[i]] for i in which)])


def denominators(
    roles: Mapping[str, Role], rows: Rows, parts: Sequence[np.ndarray]
) -> list[dict[str, tuple[tuple[Tensor, ...], Tensor]]]:
    """Of each mini-batch and role, the denominators of its loss and the number of tokens that it trains on.

    They are sums over the rows of all ranks, in one collective.

    Args:
      parts: numbers of the rows of each mini-batch.
    """
    mine, counts = [], []
    for part in parts:
        here = own_batch(rows, part[rows.owner[part] == rows.index])
        for role in roles.values():
            assert role.loss is not None
            masked = here._replace(mask=getattr(here, role.mask))
            found = [*role.loss.denominators(masked), masked.mask.count_nonzero()]
            mine += [x.double().reshape(()) for x in found]
            counts.append(len(found))
    summed = psum(torch.stack(mine).to(rows.mesh.device), rows.mesh, rows.mesh.row_axes).split(counts)
    each = iter([(tuple(part[:-1].unbind()), part[-1]) for part in summed])
    return [{name: next(each) for name in roles} for _ in parts]


def means(told: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """The mean of each metric's values; they leave the device together."""
    if not told:
        return {}
    values = torch.stack([torch.stack([x.double() for x in values]).mean() for values in told.values()])
    return {name: value.item() for name, value in zip(told, values.cpu(), strict=True)}
