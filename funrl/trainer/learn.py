"""Learning: several passes over a batch in mini-batches, one update of every role that has a loss in each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch
from funrl.trainer.clock import Clock
from funrl.trainer.micro import mini_batches, own_micro_batches
from funrl.trainer.roles import Role, RoleState
from funrl.trainer.step import train_step


def learn(
    roles: Mapping[str, Role],
    states: Mapping[str, RoleState],
    batch: Batch,
    step: int = 1,
    epochs: int = 1,
    minibatches: int = 1,
    seed: int = 0,
    token_budget: int = 16384,
    clock: Clock | None = None,
    frozen: Mapping[str, trees.Tree] | None = None,
) -> tuple[dict[str, RoleState], dict[str, float]]:
    """Update every role that has a loss, in the order of `roles`, on each mini-batch; the same rows on every mesh.

    Args:
      roles: those without a loss, and those whose first step is a later one, are passed over.
      states: of the roles that learn; donated.
      batch: scored rows with advantages; the same on every rank.
      step, seed: they choose the mini-batches.
      epochs: passes over the batch.
      minibatches: optimizer steps a pass.
      token_budget: padded tokens in one forward pass of one device.
      clock: told the phases, "update_policy" and so on.
      frozen: weights of the companions, where roles have some.

    Returns: the states after it, and the metrics' means over the updates.

    Raises:
      NotFiniteError: naming step and role; that update was not made.
    """
    clock, states, told = clock or Clock(), dict(states), dict[str, list[Tensor]]()
    learning = {name: role for name, role in roles.items() if role.loss is not None and step >= role.first_step}
    for epoch in range(epochs):
        for rows in mini_batches(batch, minibatches, seed, step, epoch):
            for name, role in learning.items():
                with clock.phase(f"update_{name}"):
                    states[name], metrics = update(
                        role, states[name], rows, token_budget, f"step {step}, {name}", frozen
                    )
                for key, value in metrics.items():
                    told.setdefault(key, []).append(value)
    return states, means(told)


def update(
    role: Role,
    state: RoleState,
    rows: Batch,
    token_budget: int,
    what: str = "update",
    frozen: Mapping[str, trees.Tree] | None = None,
) -> tuple[RoleState, dict[str, Tensor]]:
    """One update of one role on a mini-batch; see `train_step` and `learn`."""
    assert role.loss is not None
    rows = rows._replace(mask=getattr(rows, role.mask))
    denominators = role.loss.denominators(rows)
    pieces = [piece for _, piece in own_micro_batches(rows, role.placed.mesh, token_budget)]
    beside = (frozen or {})[role.companion.name] if role.companion is not None else None
    return train_step(role, state, pieces, denominators, rows.mask.count_nonzero(), what, beside)


def means(told: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """The mean of each metric's values; they leave the device together."""
    if not told:
        return {}
    values = torch.stack([torch.stack([x.double() for x in values]).mean() for values in told.values()])
    return {name: value.item() for name, value in zip(told, values.cpu(), strict=True)}
