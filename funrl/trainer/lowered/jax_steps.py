"""Steps of roles on a mesh of JAX's devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import ROW_AXES, Mesh
from funrl.models.lora import trained_part
from funrl.models.placed import Placed
from funrl.optim import Transformation, layouts_of
from funrl.trainer.lowered.programs import MakeRankFunction, StepDevices, StepProgram
from funrl.trainer.steps.roles import Role, RoleState
from funrl.xla.layers import as_one_operator
from funrl.xla.meshes import ShardedFunction, spec_of, traced_mesh, whole_on_all

OWN_ROWS = PartitionSpec(ROW_AXES)
SPLIT_ROWS = PartitionSpec((*ROW_AXES, "sequence"))


def jax_devices(
    mesh: jax.sharding.Mesh,
    place: Callable[[str, Mesh], Placed],
    optimize: Callable[[str, Placed], Transformation],
    remat: str,
    program: Callable[[str, ShardedFunction], StepProgram],
) -> StepDevices:
    """A mesh of JAX's devices for the steps of a run.

    Args:
      mesh: of the devices.
      place: (name of a role, mesh) -> its model there.
      optimize: (name of a role that learns, its model) -> its optimizer.
      remat: what a backward pass computes again; see `as_one_operator`.
      program: (purpose, function of the shards) -> the program.
    """
    sizes: dict[str, int] = dict(mesh.shape)
    kernels = mesh.devices.flat[0].platform == "tpu"

    def place_layers(name: str, rank_mesh: Mesh) -> Placed:
        placed = place(name, rank_mesh)
        return dataclasses.replace(placed, layer=as_one_operator(placed.model.layer, remat, kernels))

    def make_program(purpose: str, name: str, role_on: Callable[[Mesh], Role], make: MakeRankFunction) -> StepProgram:
        origin = traced_mesh(sizes)
        role = role_on(origin)
        own = trees.map(spec_of, role.stored)

        def arguments(params: trees.Tree, *rest: Any) -> Sequence[trees.Tree]:
            if purpose == "scores":
                return trees.map(spec_of, role.placed.stored), specs_of_rows(rest[0])
            if purpose == "update":
                states = layouts_of(rest[0].opt_state, role.stored)
                return own, RoleState(own, trees.map(spec_of, states)), *whole_on_all(rest[1])
            fields, denominators, frozen, chosen = rest
            layouts = {name: stored_layouts(place(name, origin)) for name in frozen}
            whole, choices = whole_on_all(denominators, chosen)
            return own, specs_of_rows(fields), whole, trees.map(spec_of, layouts), choices

        def results(tree: Any, given: Sequence[trees.Tree]) -> trees.Tree:
            if purpose == "scores":
                return trees.map(lambda _: OWN_ROWS, tree)
            if purpose == "update":
                return given[1]
            (_, sums), _ = tree
            return (OWN_ROWS, *whole_on_all(sums)), own

        donated = (0, 1) if purpose == "update" else ()
        function = ShardedFunction(name, lambda mesh: make(role_on(mesh), mesh), arguments, results, donated)
        return program(purpose, function)

    return StepDevices(sizes, place_layers, optimize, make_program)


def stored_layouts(placed: Placed) -> trees.Tree:
    """Layouts of the weights that a role has of its own."""
    return trained_part(placed.model, placed.stored)


def specs_of_rows(fields: Mapping[str, Tensor]) -> dict[str, PartitionSpec]:
    """PartitionSpecs of the fields of micro-batches, one of each device after the other."""
    return {name: SPLIT_ROWS if name == "trained" else OWN_ROWS for name in fields}
