"""The flag --backend: checks before a run, its devices, and the programs of its roles."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping

from funrl.mesh.mesh import Mesh
from funrl.mesh.text import AXES
from funrl.rollout.native.backends import MakeBackend
from funrl.trainer.lowered.on_mesh import OnMesh
from funrl.trainer.settings.declaration import SettingsError
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
        if settings.devices.device == "xla":
            _check_torch_xla(settings)
        return
    if settings.devices.device == "xla":
        raise SettingsError("--device=xla is of torch_xla, and --backend=xla is JAX: leave one of them out")
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
    _check_generation(settings)


def _check_generation(settings: Settings) -> None:
    """Check where a run whose steps JAX computes generates. Raises: SettingsError."""
    devices = settings.devices
    if devices.place is not None:
        raise SettingsError(
            f"--backend=xla drives all devices from one process, which generates too: leave --place={devices.place} out"
        )
    if devices.generate is not None and not decodes_in_jax(settings):
        raise SettingsError(
            f"--generate_mesh={devices.generate_mesh}: with --backend=xla the engine decodes in torch, in one process; "
            "--compile=on decodes in JAX on that mesh"
        )


def _check_torch_xla(settings: Settings) -> None:
    """Check that steps can run on devices of torch_xla. Raises: SettingsError."""
    if importlib.util.find_spec("torch_xla") is None:
        raise SettingsError("--device=xla: torch_xla is not installed; --backend=xla computes in JAX without it")
    devices = settings.devices
    axes = [axis for axis, size in devices.train.chosen.items() if size > 1 and axis != "data"]
    refused = {
        f"--mesh={devices.mesh}": bool(axes),
        "--fsdp": settings.sharding.fsdp,
        f"--place={devices.place}": devices.place is not None,
        f"--generate_mesh={devices.generate_mesh}": devices.generate_mesh is not None,
        f"--remat={devices.remat}": devices.remat != "none",
        "--model_code=hf": settings.models.model_code == "hf",
    }
    for flag, given in refused.items():
        if given:
            raise SettingsError(
                f"{flag}: with --device=xla each rank has whole models; --backend=xla splits them in JAX"
            )


def computes_in_torch(settings: Settings) -> bool:
    """True if the steps of a run are torch's on the devices of its mesh."""
    return settings.models.backend == "torch" and settings.devices.device != "xla"


def device_sizes(settings: Settings) -> dict[str, int]:
    """Sizes of the mesh of devices that one process drives; each is 1 where torch is the backend."""
    return dict.fromkeys(AXES, 1) if settings.models.backend == "torch" else settings.devices.train.chosen


def decodes_in_jax(settings: Settings) -> bool:
    """True if a native engine decodes in JAX: with --compile=on. It neither drafts tokens nor records experts there."""
    wanted = settings.models.backend == "xla" and settings.models.compile == "on"
    wanted = wanted and settings.engines.abilities.own_steps
    return wanted and not settings.engines.speculate and not settings.routers.router_replay


def make_engine_backend(settings: Settings, generating: Mapping[str, int]) -> MakeBackend | None:
    """Maker of the backend of a native engine; None: its other options choose one.

    Args:
      generating: sizes of the mesh to generate on, over the devices that this process drives.
    """
    if not decodes_in_jax(settings):
        return None
    if Mesh(device_sizes(settings)).world == 1:
        from funrl.trainer.lowered.decoding import XlaBackend  # it imports jax

        return XlaBackend
    from funrl.trainer.lowered.mesh_decoding import EngineDevices, MeshBackend

    return functools.partial(MeshBackend, EngineDevices(device_sizes(settings), generating))


def with_devices(mesh: Mesh, settings: Settings) -> Mesh:
    """The mesh of this process with the devices that it drives, if these are several."""
    sizes = device_sizes(settings)
    return mesh if Mesh(sizes).world == 1 else dataclasses.replace(mesh, driven=sizes)


def with_backend(
    roles: Mapping[str, Role], settings: Settings, note: Callable[[str], None], on_mesh: OnMesh
) -> dict[str, Role]:
    """The roles of a run, with programs where its backend is not torch.

    Args:
      note: receives how long each program took to make.
      on_mesh: what the job says of the roles on a mesh of several devices.
    """
    if computes_in_torch(settings):
        return dict(roles)
    if settings.models.backend == "torch":
        from funrl.trainer.lowered.xla_device import TorchXlaPrograms

        programs = TorchXlaPrograms()
        return {name: role._replace(programs=programs) for name, role in roles.items()}
    sizes = device_sizes(settings)
    if Mesh(sizes).world == 1:
        from funrl.trainer.lowered.programs import XlaPrograms  # it imports jax

        programs = XlaPrograms(settings.devices.remat, note)
        return {name: role._replace(programs=programs) for name, role in roles.items()}
    from funrl.trainer.lowered.mesh_programs import MeshPlace, MeshPrograms
    from funrl.xla.meshes import copies_on

    place = MeshPlace(on_mesh, roles, copies_on(tuple(sizes.items())), note)
    return {name: role._replace(programs=MeshPrograms(place, name)) for name, role in roles.items()}
