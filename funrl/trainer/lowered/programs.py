"""The programs of a run's steps in JAX: gradient, update and scores of a role, each compiled once a shape.

They are the functions of `steps/`, traced: the same loss, the same model and the same optimizer. What is taken of them
is what the host does between programs: it goes over micro-batches, and looks whether a loss is finite.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch, as_dict, schema_of
from funrl.trainer.lowered.static_rows import static_rows
from funrl.trainer.steps.roles import Role, RoleState
from funrl.trainer.steps.router_losses import Choices
from funrl.trainer.steps.score import outputs
from funrl.trainer.steps.step import fields_of, objective, updated
from funrl.xla.compiled import Compiled, Timed
from funrl.xla.layers import as_one_operator

_log = logging.getLogger(__name__)


class XlaPrograms:
    """The programs of all roles; see `StepPrograms`."""

    def __init__(self, remat: str = "none", note: Callable[[str], None] = _log.info) -> None:
        """Make programs whose layers save or compute again as `remat` says; see `as_one_operator` and `Compiled`."""
        self._note = note
        self._remat = remat
        self._programs: dict[Any, Compiled] = {}

    @property
    def lanes(self) -> int:
        return 1

    @property
    def made(self) -> list[Timed]:
        """Seconds that each program took to be made."""
        return [timed for program in self._programs.values() for timed in program.made]

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
        assert role.loss is not None
        (rows,) = group
        fields_of(role.loss)  # runs the loss on example rows, which is not to be a part of the program
        schema = schema_of(rows)
        inside = self._lowered(role)

        def run(params, fields, denominators, frozen, chosen):
            rows = Batch(schema, **fields)
            return trees.value_and_grad(objective)(params, inside, rows, denominators, frozen, chosen)

        program = self._program("gradient", role, run)
        return program(params, as_dict(static_rows(rows)), tuple(denominators), dict(frozen or {}), chosen)

    def update(self, role: Role, grads: trees.Tree, state: RoleState, norm: Tensor) -> RoleState:
        """The state after an update by a gradient of this norm."""

        def run(grads, state, norm):
            grads, state = trees.map(torch.clone, (grads, state))  # which the optimizer takes over
            return updated(role, grads, state, norm)

        return self._program("update", role, run)(grads, state, norm)

    def outputs(self, role: Role, params: trees.Tree, group: Sequence[Batch]) -> Sequence[Sequence[Tensor]]:
        """`score.outputs` on one micro-batch."""
        (rows,) = group
        schema = schema_of(rows)
        inside = self._lowered(role)

        def run(params, fields):
            with torch.no_grad():
                return tuple(outputs(inside, params, Batch(schema, **fields)))

        return [self._program("scores", role, run)(params, as_dict(static_rows(rows)))]

    def _program(self, what: str, role: Role, run: Any) -> Compiled:
        """The program of a role for one purpose."""
        key = (what, id(role.placed), role.loss, role.temperature, tuple(role.writes.items()))
        if key not in self._programs:
            subject = ", ".join(role.writes) if what == "scores" else role.prefix
            self._programs[key] = Compiled(run, f"{what} of {subject}", self._note)
        return self._programs[key]

    def _lowered(self, role: Role) -> Role:
        """The role with layers that are one operator each, its companion's too."""
        companion = role.companion
        if companion is not None:
            companion = companion._replace(placed=self._placed(companion.placed))
        return role._replace(placed=self._placed(role.placed), companion=companion, programs=None)

    def _placed(self, placed: Any) -> Any:
        return dataclasses.replace(placed, layer=as_one_operator(placed.model.layer, self._remat))
