"""The choice of a run's mesh: auto:N, and groups of --fsdp on several nodes."""

from __future__ import annotations

from collections.abc import Callable

from funrl.algos.core import Algorithm
from funrl.mesh.launch import check_devices, device_type
from funrl.processes.environment import ranks_of_node
from funrl.trainer.settings.settings import Settings, mesh_sizes


def choose_mesh(settings: Settings, compose: Callable[[], Algorithm]) -> tuple[Settings, str | None]:
    """Settings with auto:N replaced by a mesh and with --fsdp groups on several nodes, and a line on the choice.

    Raises:
      ValueError: this machine does not have N devices, or the run fits no mesh of them.
    """
    wanted = settings.devices.train.wanted
    node = ranks_of_node() if settings.sharding.fsdp and settings.sharding.fsdp_axes is None else None
    if wanted is None and node is None:
        return settings, None
    from funrl.cost.search import chosen_devices, with_groups  # here, as few runs choose a mesh
    from funrl.cost.tracing.hardware import hardware_of

    device = settings.devices.device or device_type()
    check_devices(mesh_sizes(settings), device)
    if wanted is None:
        return with_groups(settings, compose, hardware_of(device), node)
    return chosen_devices(settings, compose, hardware_of(device))
