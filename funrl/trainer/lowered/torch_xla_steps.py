"""Steps of roles on a device of torch_xla, by the same functions as in torch.

Nothing is traced here: torch_xla records operators and compiles them at its own time. The host keeps torch's tensors,
so that the engine, files and sums over ranks are those of a run on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from funrl import trees
from funrl.mesh.mesh import AXES, Mesh
from funrl.models.placed import Placed
from funrl.trainer.lowered.programs import MakeRankFunction, StepDevices, StepProgram
from funrl.trainer.steps.roles import Role
from funrl.xla.copies import HostCopies


def torch_xla_device(roles: Mapping[str, Role]) -> StepDevices:
    """This process's device of torch_xla for the steps of roles, whose whole models it has."""
    import torch_xla  # type: ignore[import-not-found]

    device: torch.device = torch_xla.device()
    torch.ones(2, device=device).sum().item()  # autograd counts devices before its first backward pass
    copies = HostCopies(lambda x, _: x.to(device), lambda copy: copy.detach().cpu())

    def place(name: str, mesh: Mesh) -> Placed:
        placed = roles[name].placed
        return dataclasses.replace(placed, mesh=dataclasses.replace(placed.mesh, device=device))

    def make_program(purpose: str, name: str, role_on: Callable[[Mesh], Role], make: MakeRankFunction) -> StepProgram:
        mesh = Mesh(device=device)
        function = make(role_on(mesh), mesh)

        def run(*args: trees.Tree) -> trees.Tree:
            changed = 2 if purpose == "update" else 0  # the first arguments, whose copies it writes to
            sent = [trees.map(lambda x, keep=n >= changed: copies.sent(x, keep=keep), x) for n, x in enumerate(args)]
            results = function(*sent)
            torch_xla.sync()
            return trees.map(copies.fetched, results)

        return run

    return StepDevices(dict.fromkeys(AXES, 1), place, lambda name, _: roles[name].optimizer, make_program)  # type: ignore[return-value]
