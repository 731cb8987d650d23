"""The programs of a role's steps on a mesh of JAX's devices, which one process drives.

The host sees one rank: all rows and whole weights. A program is what a rank of the mesh computes in torch, on the
shards that the layouts of its role give it; a call takes a micro-batch for every device that has rows of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jax.sharding import PartitionSpec
from torch import Tensor

from funrl import trees
from funrl.algos.metrics import Max
from funrl.batch import Batch, as_dict, kind_of, schema_of
from funrl.mesh.collectives import pmax
from funrl.mesh.mesh import ROW_AXES, Mesh
from funrl.mesh.sums import sum_rest
from funrl.models.placed import Placed
from funrl.optim import layouts_of
from funrl.trainer.lowered.on_mesh import OnMesh
from funrl.trainer.lowered.static_rows import static_length
from funrl.trainer.steps.roles import Role, RoleState
from funrl.trainer.steps.router_losses import Choices
from funrl.trainer.steps.score import outputs
from funrl.trainer.steps.step import fields_of, objective, updated
from funrl.xla.compiled import Timed
from funrl.xla.errors import XlaError
from funrl.xla.layers import as_one_operator
from funrl.xla.meshes import DeviceCopies, MeshProgram, spec_of, traced_mesh

OWN_ROWS = PartitionSpec(ROW_AXES)
ON_ALL = PartitionSpec()
DONATED = {"update": (0, 1)}  # arguments whose memory the results may take over: the gradient and the state


class MeshPlace:
    """The roles of a run on a mesh of devices.

    Attributes:
      sizes: of the mesh's axes.
      copies: on its devices.
      note: receives how long programs took to be made.
    """

    def __init__(
        self, on_mesh: OnMesh, roles: Mapping[str, Role], copies: DeviceCopies, note: Callable[[str], None]
    ) -> None:
        """Take the roles as the host has them."""
        self.on_mesh = on_mesh
        self.roles = roles
        self.sizes: dict[str, int] = dict(copies.mesh.shape)
        self.copies = copies
        self.note = note

    def role(self, name: str, mesh: Mesh) -> Role:
        """A role as a rank of the mesh has it, with layers that are one operator each."""
        role = self.roles[name]
        companion = role.companion
        if companion is not None:
            companion = companion._replace(placed=self.placed(companion.name, mesh))
        placed = self.placed(name, mesh)
        optimizer = None if role.loss is None else self.on_mesh.optimize(name, placed)
        return role._replace(placed=placed, companion=companion, optimizer=optimizer, programs=None)

    def placed(self, name: str, mesh: Mesh) -> Placed:
        """The model of a role on the mesh."""
        placed = self.on_mesh.place(name, mesh)
        kernels = self.copies.mesh.devices.flat[0].platform == "tpu"
        return dataclasses.replace(placed, layer=as_one_operator(placed.model.layer, self.on_mesh.remat, kernels))

    def at_origin(self, name: str) -> Role:
        """A role as the rank at the origin has it, for its layouts."""
        return self.role(
            name, traced_mesh(self.sizes, {axis: torch.zeros((), dtype=torch.int64) for axis in self.sizes})
        )

    def specs_of_frozen(self, frozen: Mapping[str, trees.Tree]) -> trees.Tree:
        """PartitionSpecs of weights that do not learn, by the names of their roles."""
        return {name: trees.map(spec_of, self.at_origin(name).stored) for name in frozen}


class MeshPrograms:
    """The programs of one role; see `StepPrograms`."""

    def __init__(self, place: MeshPlace, name: str) -> None:
        """Make programs of the role of this name."""
        self.place = place
        self.name = name
        self._programs: dict[Any, MeshProgram] = {}

    @property
    def lanes(self) -> int:
        return self.place.sizes["data"] * self.place.sizes["expert"]

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
        """`trees.value_and_grad(objective)` on a micro-batch of each device, summed over the devices."""
        assert role.loss is not None
        fields_of(role.loss)  # runs the loss on example rows, which is not to be a part of the program
        schema = schema_of(group[0])

        def make(mesh: Mesh) -> Callable[..., trees.Tree]:
            own = self.place.role(self.name, mesh)

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

        specs = trees.map(spec_of, self.place.at_origin(self.name).stored)
        needed = {role.base, *(() if role.companion is None else (role.companion.name, role.companion.base))}
        used = {name: tree for name, tree in (frozen or {}).items() if name in needed}

        def given(params, fields, denominators, frozen, chosen):
            own = (specs, specs_of_rows(fields), on_all_devices(denominators), self.place.specs_of_frozen(frozen))
            return (*own, on_all_devices(chosen))

        def results(tree):
            (_, rest), _ = tree
            return (OWN_ROWS, on_all_devices(rest)), specs

        program = self._program("gradient", role.prefix, make, given, results)
        return program(params, stacked(group, self.place.sizes), tuple(denominators), used, chosen)

    def update(self, role: Role, grads: trees.Tree, state: RoleState, norm: Tensor) -> RoleState:
        """The state after an update by a gradient of this norm."""

        def make(mesh: Mesh) -> Callable[..., trees.Tree]:
            own = self.place.role(self.name, mesh)

            def run(grads, state, norm):
                grads, state = trees.map(torch.clone, (grads, state))  # which the optimizer takes over
                return updated(own, grads, state, norm)

            return run

        stored = self.place.at_origin(self.name).stored
        specs = RoleState(stored, layouts_of(state.opt_state, stored))
        specs = trees.map(spec_of, specs)
        program = self._program("update", role.prefix, make, lambda *_: (specs.params, specs, ON_ALL), lambda _: specs)
        return program(grads, state, norm)

    def outputs(self, role: Role, params: trees.Tree, group: Sequence[Batch]) -> Sequence[Sequence[Tensor]]:
        """`score.outputs` on a micro-batch of each device."""
        schema = schema_of(group[0])

        def make(mesh: Mesh) -> Callable[..., trees.Tree]:
            own = self.place.role(self.name, mesh)

            def run(params, fields):
                with torch.no_grad():
                    return tuple(outputs(own, params, Batch(schema, **fields)))

            return run

        specs = trees.map(spec_of, self.place.at_origin(self.name).placed.stored)
        program = self._program(
            "scores",
            ", ".join(role.writes),
            make,
            lambda params, fields: (specs, specs_of_rows(fields)),
            lambda tree: trees.map(lambda _: OWN_ROWS, tree),
        )
        whole = program(params, stacked(group, self.place.sizes))
        return list(zip(*(x.split(1) for x in whole), strict=True))

    def _program(self, what: str, subject: str, make: Any, given: Any, results: Any) -> MeshProgram:
        """The program of the role for one purpose."""
        if what not in self._programs:
            name = f"{what} of {subject}"
            place = self.place
            self._programs[what] = MeshProgram(make, place.copies, given, results, name=name, note=place.note)
            self._programs[what].donated = DONATED.get(what, ())
        return self._programs[what]


def on_all_devices(tree: trees.Tree) -> trees.Tree:
    """PartitionSpecs of what every device has whole."""
    return trees.map(lambda _: ON_ALL, tree)


def specs_of_rows(fields: Mapping[str, Tensor]) -> dict[str, PartitionSpec]:
    """PartitionSpecs of the fields of `stacked`."""
    trained = PartitionSpec((*ROW_AXES, "sequence"))
    return {name: trained if name == "trained" else OWN_ROWS for name in fields}


def stacked(group: Sequence[Batch], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The fields of a micro-batch of each device, one after the other; they have one size.

    Raises:
      XlaError: a field belongs to rows and not to tokens.
    """
    first = group[0]
    for name in first.names():
        if name not in ("offsets", "trained") and not kind_of(first, name).per_token:
            raise XlaError(f"the field {name} of rows has no static shape: --backend=xla takes it on one device")
    fields = [as_dict(rows) for rows in group]
    whole = {name: torch.cat([values[name] for values in fields]) for name in fields[0] if name != "trained"}
    if "trained" in fields[0]:
        whole["trained"] = trained_places(whole["mask"], sizes["sequence"])
    return whole


def trained_places(mask_RN: Tensor, parts: int) -> Tensor:
    """Places before the tokens of a mask, of each row's parts by themselves; one number of them in every part.

    It is filled up with places before other tokens, whose numbers no mask counts.

    Args:
      parts: devices that share a row's tokens.

    Returns: [R parts n], each part's numbers beginning at 0.
    """
    next_RN = torch.cat([mask_RN[:, 1:], torch.zeros_like(mask_RN[:, :1])], 1)
    next_Pt = next_RN.reshape(len(mask_RN) * parts, -1)
    wanted = static_length(int(next_Pt.sum(1).max()), next_Pt.shape[1])
    return next_Pt.int().argsort(dim=1, descending=True, stable=True)[:, :wanted].reshape(-1)
