"""The steps of a job, compiled ahead of time for chips that are not here.

The roles' steps run on rows of the job with programs that compile and compute nothing. Weights have no memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from funrl import trees
from funrl.mesh.mesh import AXES, single
from funrl.optim import layouts_of
from funrl.trainer.jobs.build import build, on_mesh
from funrl.trainer.jobs.job import Job
from funrl.trainer.lowered.mesh_programs import DONATED, MeshPlace, MeshPrograms
from funrl.trainer.steps.advantage_phase import advantages
from funrl.trainer.steps.learn import denominators
from funrl.trainer.steps.micro import own_micro_batches, row_cost
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.roles import Role, RoleState, row_fields_of, weights_of
from funrl.trainer.steps.router_losses import Choices, token_count
from funrl.trainer.steps.score import score
from funrl.trainer.steps.step_rows import Rows
from funrl.xla.ahead import AheadProgram, compiled_ahead, structs_of
from funrl.xla.compiled import torch_dtype
from funrl.xla.meshes import DeviceCopies, MeshProgram


class AheadPrograms(MeshPrograms):
    """The programs of one role, compiled for the chips of a mesh; their results have no meaning.

    Attributes:
      compiled: programs by what they are for.
    """

    def __init__(self, place: MeshPlace, name: str) -> None:
        """Compile the programs of the role of this name."""
        super().__init__(place, name)
        self.compiled: dict[str, AheadProgram] = {}

    def _program(self, what: str, subject: str, make: Any, given: Any, results: Any) -> Any:
        program = MeshProgram(make, self.place.copies, given, results, name=f"{what} of {subject}")

        def run(*args: trees.Tree) -> trees.Tree:
            compiled, results = compile_program(
                program, args, DONATED.get(what, ()), self.place.note, expert_ranks=self.place.sizes["expert"]
            )
            self.compiled[what] = compiled
            device = "cpu" if what == "scores" else "meta"
            return trees.map(lambda x: torch.zeros(x.shape, dtype=torch_dtype(x.dtype), device=device), results)

        return run


def compile_program(
    program: MeshProgram,
    args: tuple[trees.Tree, ...],
    donated: Sequence[int],
    note: Callable[[str], None],
    *,
    expert_ranks: int = 1,
) -> tuple[AheadProgram, trees.Tree]:
    """Compile a program for arguments of these shapes.

    Args:
      program: of the chips of a mesh.
      args: whole arguments, which need no memory.
      donated: numbers of the arguments whose memory the results may take over.
      note: receives a line about what was done.
      expert_ranks: as in `compiled_ahead`.

    Returns: the program, and the shapes and dtypes of its results.
    """
    counts = [len(trees.leaves(x)) for x in args]
    places = [i for n in donated for i in range(sum(counts[:n]), sum(counts[: n + 1]))]
    with jax.enable_x64(True):
        mapped = program.mapped(args)
        arguments = structs_of(trees.leaves(args), mapped.given, program.copies.mesh)
        compiled, structs = compiled_ahead(
            mapped.run, arguments, name=program.name, donated=places, expert_ranks=expert_ranks
        )
    note(f"{compiled.name}: compiled in {compiled.seconds:.0f} s")
    return compiled, trees.fill(mapped.results, structs)


class CompiledSteps(NamedTuple):
    """Steps of a job, compiled for the chips of a mesh.

    Attributes:
      scores, gradients, updates: programs by the names of roles.
      resident: bytes of a chip that weights and optimizer states of all roles take.
    """

    scores: dict[str, AheadProgram]
    gradients: dict[str, AheadProgram]
    updates: dict[str, AheadProgram]
    resident: int

    @property
    def programs(self) -> list[AheadProgram]:
        """All programs, in the order of a step."""
        return [*self.scores.values(), *self.gradients.values(), *self.updates.values()]


def compile_steps(
    job: Job, mesh: jax.sharding.Mesh, rows_of: Callable[[Job, Parts], Rows], note: Callable[[str], None]
) -> CompiledSteps:
    """Compile scores, gradients and updates of the roles of a job.

    Args:
      job: of the flags, for the mesh.
      mesh: of the chips; its axes have the sizes of the job's.
      rows_of: (job of one process, its parts) -> rows of which each chip has a micro-batch.
      note: receives lines about what was done.
    """
    alone = dict.fromkeys(AXES, 1)
    host = dataclasses.replace(job, sizes=alone, generate_sizes=alone)
    parts = build(host, dataclasses.replace(single(), driven=dict(mesh.shape)), note)
    place = MeshPlace(on_mesh(job, parts.roles), parts.roles, DeviceCopies(mesh), note)
    programs = {name: AheadPrograms(place, name) for name in parts.roles}
    roles = {name: role._replace(programs=programs[name]) for name, role in parts.roles.items()}
    own = {name: _weights(job, role) for name, role in roles.items() if role.base is None or role.loss is not None}
    states = {n: RoleState(own[n], r.optimizer.init(own[n])) for n, r in roles.items() if r.optimizer is not None}
    frozen = {name: tree for name, tree in own.items() if name not in states}
    budget = job.settings.updates.token_budget
    rows = score(roles, weights_of(roles, states, frozen), rows_of(host, parts), budget)
    chain = job.algorithm.advantage
    if chain is not None:
        rows, _, _ = advantages(chain, chain.init(), rows, host.reward_names)
    for name, state in states.items():
        _compile_update(roles[name], state, rows, frozen, budget)
    resident = sum(_bytes_of_chip(place, name, states.get(name, own[name])) for name in own)
    scores, gradients, updates = (
        {name: x.compiled[what] for name, x in programs.items() if what in x.compiled}
        for what in ("scores", "gradient", "update")
    )
    return CompiledSteps(scores, gradients, updates, resident)


def _bytes_of_chip(place: MeshPlace, name: str, held: RoleState | trees.Tree) -> int:
    """Bytes of a chip of a role's weights, and of its optimizer's state where it learns."""
    stored = place.at_origin(name).stored
    layouts = RoleState(stored, layouts_of(held.opt_state, stored)) if isinstance(held, RoleState) else stored
    pairs = zip(trees.leaves(held), trees.leaves(layouts), strict=True)
    return sum(math.prod(layout.local_shape()) * x.dtype.itemsize for x, layout in pairs)


def _compile_update(role: Role, state: RoleState, rows: Rows, frozen: dict[str, trees.Tree], budget: int) -> None:
    """Compile the gradient and the update of a role."""
    assert role.loss is not None and role.programs is not None
    total = denominators({"": role}, rows, [np.arange(len(rows.owner))])[0][""].denominators
    fields = row_fields_of(role.loss)
    pieces = own_micro_batches(rows, budget, row_cost(role.placed), mask=role.mask, row_fields=fields)
    group = [next(pieces).batch for _ in range(role.programs.lanes)]
    chosen = Choices(None, token_count(group, role.placed.mesh)) if role.router.wanted else None
    _, grads = role.programs.value_and_grad(state.params, role, group, total, frozen, chosen)
    role.programs.update(role, grads, state, torch.zeros(()))


def _weights(job: Job, role: Role) -> trees.Tree:
    """Weights of a role without memory: those that it has of its own."""
    dtype = job.dtype if role.loss is None else job.master
    return trees.map(lambda layout: torch.empty(layout.shape, dtype=dtype, device="meta"), role.stored)
