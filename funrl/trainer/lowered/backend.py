"""The flag --backend: checks before a run, its devices, and the programs of its roles."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Mapping

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import layouts
from funrl.mesh.text import AXES
from funrl.models import Model
from funrl.models.decoder.sequence_parallel import is_ring
from funrl.trainer.jobs.job import Job
from funrl.trainer.jobs.sharding import check_layouts, stored_rules
from funrl.trainer.settings.declaration import SettingsError, blaming
from funrl.trainer.settings.settings import Settings
from funrl.trainer.steps.roles import Role


def check_backend(settings: Settings, device: str) -> None:
    """Check that the backend of the flags can run here.

    Args:
      device: type of the run's devices.

    Raises:
      SettingsError: jax is not installed, or a flag is one that the backend does not have.
    """
    if settings.models.backend == "torch":
        return
    if importlib.util.find_spec("jax") is None:
        raise SettingsError("--backend=xla needs jax, which is not installed: pip install 'funrl[xla]'")
    if device != "cpu":
        raise SettingsError(f"--backend=xla computes on the CPU so far, beside an engine in torch: leave out {device}")
    if settings.devices.remat == "selective":
        raise SettingsError(
            "--backend=xla has --remat=none and --remat=full: what a layer saves is one list of results"
        )
    if settings.models.model_code == "hf":
        raise SettingsError("--backend=xla lowers funrl's own layers: leave --model_code=hf out")
    for name, value in (("place", settings.devices.place), ("generate_mesh", settings.devices.generate_mesh)):
        if value is not None:
            raise SettingsError(
                f"--backend=xla drives all devices from one process, which generates too: leave --{name}={value} out"
            )


def device_sizes(settings: Settings) -> dict[str, int]:
    """Sizes of the mesh of devices that one process drives; each is 1 where torch is the backend."""
    return dict.fromkeys(AXES, 1) if settings.models.backend == "torch" else settings.devices.train.chosen


def check_devices_of_backend(settings: Settings, models: Mapping[str, Model]) -> None:
    """Check that models can be laid out on the devices that one process drives.

    Args:
      models: of every role.

    Raises:
      SettingsError, MeshError: a dim does not divide, or attention over a split row goes round a ring.
    """
    sizes = device_sizes(settings)
    if Mesh(sizes).world == 1:
        return
    mesh = f"mesh={settings.devices.mesh}"
    with blaming(mesh):
        check_layouts(models, settings, sizes, dict.fromkeys(AXES, 1))
    for role, model in models.items():
        if is_ring(settings.devices.sequence_parallel, model.abilities.heads // sizes["tensor"], sizes):
            raise SettingsError(
                f"--backend=xla with --{mesh}: the steps of ring attention depend on numbers; give an sp that divides "
                f"the {model.abilities.heads // sizes['tensor']} query heads of the {role} on a device, and no ring"
            )
        for name, layout in trees.named(layouts(model.shapes, model.axes, stored_rules(settings, role), sizes)):
            for length, axes in zip(layout.shape, layout.spec, strict=True):
                parts = math.prod(sizes[axis] for axis in axes)
                if length % parts:
                    raise SettingsError(
                        f"--backend=xla with --{mesh}: {name} of the {role} has a dim of {length}, which does not "
                        f"divide over {parts} devices of {', '.join(axes)}; choose sizes that divide it"
                    )


def with_devices(mesh: Mesh, settings: Settings) -> Mesh:
    """The mesh of this process with the devices that it drives, if these are several."""
    sizes = device_sizes(settings)
    return mesh if Mesh(sizes).world == 1 else dataclasses.replace(mesh, driven=sizes)


def with_backend(roles: Mapping[str, Role], job: Job, note: Callable[[str], None]) -> dict[str, Role]:
    """The roles of a run, with programs where its backend is not torch; `note` receives how long each took to make."""
    settings = job.settings
    if settings.models.backend == "torch":
        return dict(roles)
    sizes = device_sizes(settings)
    if Mesh(sizes).world == 1:
        from funrl.trainer.lowered.programs import XlaPrograms  # it imports jax

        programs = XlaPrograms(settings.devices.remat, note)
        return {name: role._replace(programs=programs) for name, role in roles.items()}
    from funrl.trainer.lowered.mesh_programs import MeshPlace, MeshPrograms

    place = MeshPlace(job, roles, sizes, note)
    return {name: role._replace(programs=MeshPrograms(place, name)) for name, role in roles.items()}
