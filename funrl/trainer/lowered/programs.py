"""The programs of a role's steps on devices of another library, which one process drives: gradient, update, scores.

They are the functions of `steps/`. The host sees one rank: all rows and whole weights. A program is what a rank of the
mesh of devices computes in torch, on the shards that the layouts of its role give it; a call takes a micro-batch for
every device that has rows of its own. One device is a mesh whose axes all have size 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.metrics import Max
from funrl.batch import Batch, as_dict, kind_of, schema_of
from funrl.mesh.collectives import pmax
from funrl.mesh.mesh import ROW_AXES, Mesh
from funrl.mesh.sums import sum_rest
from funrl.models.placed import Placed
from funrl.optim import Transformation
from funrl.trainer.steps.roles import Role, RoleState
from funrl.trainer.steps.router_losses import Choices
from funrl.trainer.steps.score import outputs
from funrl.trainer.steps.step import fields_of, objective, updated
from funrl.xla.errors import XlaError

TRAINED_PARTS = 4  # of a row: the number of trained tokens is filled up to a multiple of a part
StepProgram = Callable[..., trees.Tree]
MakeRankFunction = Callable[
    [Role, Mesh], Callable[..., trees.Tree]
]  # (role there, mesh) -> function of a rank's shards


class StepDevices(NamedTuple):
    """Devices that compute steps, and the roles of a run on them.

    Attributes:
      sizes: of the devices' mesh.
      place: (name of a role, mesh) -> its model there, as programs run it.
      optimize: (name of a role that learns, its model) -> its optimizer.
      program: (purpose, its name for people, role, function of a rank) -> the program. A purpose is "gradient",
        "update", whose first two arguments are donated, or "scores".
    """

    sizes: Mapping[str, int]
    place: Callable[[str, Mesh], Placed]
    optimize: Callable[[str, Placed], Transformation]
    program: Callable[[str, str, Callable[[Mesh], Role], MakeRankFunction], StepProgram]


class RolePrograms:
    """The programs of one role; see `StepPrograms`.

    Attributes:
      programs: by purpose.
    """

    def __init__(self, devices: StepDevices, role: Role, name: str) -> None:
        """Describe the programs of a role, which the host has under a name."""
        self._devices = devices
        self._role = role
        self._name = name
        self.programs: dict[str, StepProgram] = {}

    @property
    def lanes(self) -> int:
        return math.prod(self._devices.sizes[axis] for axis in ROW_AXES)

    def value_and_grad(
        self,
        params: trees.Tree,
        role: Role,
        group: Sequence[Batch],
        denominators: Sequence[Tensor],
        frozen: Mapping[str, trees.Tree] | None = None,
        chosen: Choices | None = None,
    ) -> tuple[Any, trees.Tree]:
        """`trees.value_and_grad(objective)` on a micro-batch of each device, summed over the devices."""
        assert role.loss is not None
        fields_of(role.loss)  # runs the loss on example rows, which is not to be a part of the program
        schema = schema_of(group[0])

        def make(own: Role, mesh: Mesh) -> Callable[..., trees.Tree]:
            def run(params, fields, denominators, frozen, chosen):
                rows = Batch(schema, **fields)
                result = trees.value_and_grad(objective)(params, own, rows, denominators, frozen, chosen)
                (value, (numerators, metrics)), grads = result
                sums = {name: tuple(x) for name, x in metrics.items() if not isinstance(x, Max)}
                sums = (numerators, sums)
                grads, (numerators, sums) = sum_rest(grads, sums, own.stored, own.compute, mesh, own.partial)
                peaks = {name: pmax(x.value, mesh, ROW_AXES) for name, x in metrics.items() if isinstance(x, Max)}
                whole = {n: Max(peaks[n]) if n in peaks else type(x)(*sums[n]) for n, x in metrics.items()}
                return (value.reshape(1), (numerators, whole)), grads

            return run

        needed = {role.base, *(() if role.companion is None else (role.companion.name, role.companion.base))}
        used = {name: tree for name, tree in (frozen or {}).items() if name in needed}
        program = self._program("gradient", role.prefix, make)
        return program(params, self._stacked(group), tuple(denominators), used, chosen)

    def update(self, role: Role, grads: trees.Tree, state: RoleState, norm: Tensor) -> RoleState:
        """The state after an update by a gradient of this norm."""

        def make(own: Role, mesh: Mesh) -> Callable[..., trees.Tree]:
            return lambda grads, state, norm: updated(own, grads, state, norm)

        return self._program("update", role.prefix, make)(grads, state, norm)

    def outputs(self, role: Role, params: trees.Tree, group: Sequence[Batch]) -> Sequence[Sequence[Tensor]]:
        """`score.outputs` on a micro-batch of each device."""
        schema = schema_of(group[0])

        def make(own: Role, mesh: Mesh) -> Callable[..., trees.Tree]:
            @torch.no_grad()
            def run(params, fields):
                return tuple(outputs(own, params, Batch(schema, **fields)))

            return run

        whole = self._program("scores", ", ".join(role.writes), make)(params, self._stacked(group))
        return list(zip(*(x.split(1) for x in whole), strict=True))

    def role_on(self, mesh: Mesh) -> Role:
        """The role as a rank of a mesh has it."""
        place, optimize = self._devices.place, self._devices.optimize
        placed = place(self._name, mesh)
        companion = self._role.companion
        if companion is not None:
            companion = companion._replace(placed=place(companion.name, mesh))
        optimizer = None if self._role.loss is None else optimize(self._name, placed)
        return self._role._replace(placed=placed, companion=companion, optimizer=optimizer, programs=None)

    def _program(self, purpose: str, subject: str, make: MakeRankFunction) -> StepProgram:
        """The program of the role for a purpose."""
        if purpose not in self.programs:
            self.programs[purpose] = self._devices.program(purpose, f"{purpose} of {subject}", self.role_on, make)
        return self.programs[purpose]

    def _stacked(self, group: Sequence[Batch]) -> dict[str, Tensor]:
        """The fields of a micro-batch of each device, one after the other; they have one size.

        Raises:
          XlaError: there are several devices, and a field belongs to rows and not to tokens.
        """
        first = group[0]
        if math.prod(self._devices.sizes.values()) > 1:
            for name in first.names():
                if name not in ("offsets", "trained") and not kind_of(first, name).per_token:
                    raise XlaError(
                        f"the field {name} of rows has no static shape: --backend=xla takes it on one device"
                    )
        fields = [as_dict(rows) for rows in group]
        whole = {name: torch.cat([values[name] for values in fields]) for name in fields[0] if name != "trained"}
        if "trained" in fields[0]:
            whole["trained"] = trained_places(whole["mask"], self._devices.sizes["sequence"])
        return whole


def trained_places(mask_RN: Tensor, parts: int) -> Tensor:
    """Places before the tokens of a mask, of each row's parts by themselves; every part has as many.

    Places before other tokens fill them up; no mask counts their numbers.

    Args:
      parts: devices that share a row's tokens.

    Returns: [R parts n], each part's numbers beginning at 0. n is a multiple of a quarter of the part's tokens.
    """
    next_RN = torch.cat([mask_RN[:, 1:], torch.zeros_like(mask_RN[:, :1])], 1)
    next_Pt = next_RN.reshape(len(mask_RN) * parts, -1)
    tokens = next_Pt.shape[1]
    quarter = -(-tokens // TRAINED_PARTS)
    count = min(max(1, -(-int(next_Pt.sum(1).max()) // quarter)) * quarter, tokens)
    return next_Pt.int().argsort(dim=1, descending=True, stable=True)[:, :count].reshape(-1)


def with_programs(roles: Mapping[str, Role], devices: StepDevices) -> dict[str, Role]:
    """Roles whose steps programs compute on some devices."""
    return {name: role._replace(programs=RolePrograms(devices, role, name)) for name, role in roles.items()}
