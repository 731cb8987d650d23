"""The steps of a job, compiled ahead of time for chips that are not here.

The roles' steps run on rows of the job with programs that compile and compute nothing. Weights have no memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import torch

from funrl import trees
from funrl.mesh.mesh import AXES, single
from funrl.optim import layouts_of
from funrl.trainer.jobs.build import Parts, build, on_mesh
from funrl.trainer.jobs.job import Job
from funrl.trainer.lowered.jax_steps import jax_devices, origin_of, stored_layouts
from funrl.trainer.lowered.programs import Program, RolePrograms
from funrl.trainer.steps.advantage_phase import advantages
from funrl.trainer.steps.learn import denominators
from funrl.trainer.steps.micro import own_micro_batches, row_cost
from funrl.trainer.steps.roles import Role, RoleState, row_fields_of, weights_of
from funrl.trainer.steps.router_losses import Choices, token_count
from funrl.trainer.steps.score import score
from funrl.trainer.steps.step_rows import Rows
from funrl.xla.ahead import AheadProgram, compile_ahead
from funrl.xla.meshes import ShardedFunction
from funrl.xla.operators import TORCH_DTYPES


class CompiledSteps(NamedTuple):
    """Steps of a job, compiled for the chips of a mesh.

    Attributes:
      phases: programs by the dry run's names of phases: "score_reference", or "update_policy" with two.
      resident: bytes of a chip that weights and optimizer states of all roles take.
    """

    phases: dict[str, tuple[AheadProgram, ...]]
    resident: int


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
    compiled: dict[Program, AheadProgram] = {}

    def program(purpose: str, function: ShardedFunction) -> Program:
        """Compile at a call; the results have no meaning."""

        def run(*args: trees.Tree) -> trees.Tree:
            compiled[run], results = compile_ahead(function, args, mesh, note)
            device = "cpu" if purpose == "scores" else "meta"
            return trees.map(lambda x: torch.zeros(x.shape, dtype=TORCH_DTYPES[x.dtype], device=device), results)

        return run

    alone = dict.fromkeys(AXES, 1)
    host = dataclasses.replace(job, sizes=alone, generate_sizes=alone)
    parts = build(host, dataclasses.replace(single(), driven=dict(mesh.shape)), note)
    place, optimize = on_mesh(job, parts.roles)
    devices = jax_devices(mesh, place, optimize, job.settings.devices.remat, program)
    programs = {name: RolePrograms(devices, role, name) for name, role in parts.roles.items()}
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
    resident = 0
    for name, weights in own.items():
        stored = stored_layouts(place(name, origin_of(dict(mesh.shape))))
        pairs = [(weights, stored)]
        if name in states:
            pairs.append((states[name].opt_state, layouts_of(states[name].opt_state, stored)))
        for x, layout in (pair for trees_ in pairs for pair in zip(*map(trees.leaves, trees_), strict=True)):
            resident += math.prod(layout.local_shape()) * x.dtype.itemsize
    kinds = {"score": ("scores",), "update": ("gradient", "update")}
    phases = {
        f"{kind}_{name}": tuple(compiled[role.programs[purpose]] for purpose in purposes)
        for kind, purposes in kinds.items()
        for name, role in programs.items()
        if purposes[0] in role.programs
    }
    return CompiledSteps(phases, resident)


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
