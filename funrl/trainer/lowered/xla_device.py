"""The steps of a role on a device of torch_xla: gradient, update and scores, by the same functions as in torch.

Nothing is traced here: torch_xla records operators and compiles them at its own time. The host keeps torch's tensors,
so that the engine, files and sums over ranks are those of a run on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from funrl import trees
from funrl.batch import Batch, as_dict, schema_of
from funrl.models.placed import Placed
from funrl.trainer.lowered.static_rows import static_rows
from funrl.trainer.steps.roles import Role, RoleState
from funrl.trainer.steps.router_losses import Choices
from funrl.trainer.steps.score import outputs
from funrl.trainer.steps.step import objective, updated


class TorchXlaPrograms:
    """The steps of all roles on this process's device; see `StepPrograms`."""

    def __init__(self) -> None:
        """Take the device."""
        import torch_xla  # type: ignore[import-not-found]

        self._sync = torch_xla.sync
        self._device: torch.device = torch_xla.device()
        torch.ones(2, device=self._device).sum().item()  # autograd counts devices before its first backward pass
        self._copies: Any = WeakTensorKeyDictionary()

    @property
    def lanes(self) -> int:
        return 1

    def value_and_grad(
        self,
        params: trees.Tree,
        role: Role,
        group: Sequence[Batch],
        denominators: Sequence[Tensor],
        frozen: Mapping[str, trees.Tree] | None = None,
        chosen: Choices | None = None,
    ) -> tuple[Any, trees.Tree]:
        """`trees.value_and_grad(objective)` on one micro-batch."""
        (rows,) = group
        needed = {role.base, *(() if role.companion is None else (role.companion.name, role.companion.base))}
        used = {name: self._kept(tree) for name, tree in (frozen or {}).items() if name in needed}
        given = self._sent((tuple(denominators), chosen))
        differentiate = trees.value_and_grad(objective)
        result = differentiate(self._kept(params), self._inside(role), self._rows(rows), given[0], used, given[1])
        return self._fetched(result)

    def update(self, role: Role, grads: trees.Tree, state: RoleState, norm: Tensor) -> RoleState:
        """The state after an update by a gradient of this norm."""
        inside = self._kept(state)
        for x in trees.leaves(state):
            self._copies.pop(x, None)  # the update writes to the copies
        after = updated(role, self._sent(grads), inside, self._sent(norm))
        return self._fetched(after, keep=True)

    @torch.no_grad()
    def outputs(self, role: Role, params: trees.Tree, group: Sequence[Batch]) -> Sequence[Sequence[Tensor]]:
        """`score.outputs` on one micro-batch."""
        (rows,) = group
        return [self._fetched(tuple(outputs(self._inside(role), self._kept(params), self._rows(rows))))]

    def _rows(self, rows: Batch) -> Batch:
        return Batch(schema_of(rows), **self._sent(as_dict(static_rows(rows))))

    def _inside(self, role: Role) -> Role:
        """The role with models on the device, its companion's too."""
        companion = role.companion
        if companion is not None:
            companion = companion._replace(placed=self._placed(companion.placed))
        return role._replace(placed=self._placed(role.placed), companion=companion, programs=None)

    def _placed(self, placed: Placed) -> Placed:
        return dataclasses.replace(placed, mesh=dataclasses.replace(placed.mesh, device=self._device))

    def _sent(self, tree: trees.Tree) -> trees.Tree:
        return trees.map(lambda x: x.to(self._device), tree)

    def _kept(self, tree: trees.Tree) -> trees.Tree:
        """Copies on the device, which stay as long as the host's tensors do and do not change."""
        return trees.map(self._copy, tree)

    def _copy(self, x: Tensor) -> Tensor:
        known = self._copies.get(x)
        if known is None or known[0] != x._version:
            known = (x._version, x.to(self._device))
            self._copies[x] = known
        return known[1]

    def _fetched(self, tree: trees.Tree, keep: bool = False) -> trees.Tree:
        """Tensors of the host with the numbers of the device's, which become their copies if they are kept."""
        self._sync()

        def fetch(copy: Tensor) -> Tensor:
            x = copy.detach().cpu()
            if keep:
                self._copies[x] = (x._version, copy)
            return x

        return trees.map(fetch, tree)
