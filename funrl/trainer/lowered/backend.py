"""The flag --backend: checks before a run, its devices, and the programs of its roles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from funrl.mesh.mesh import Mesh
from funrl.mesh.text import AXES
from funrl.models.placed import Placed
from funrl.optim import Transformation
from funrl.rollout.native.backends import MakeBackend
from funrl.trainer.lowered.programs import with_programs
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings
from funrl.trainer.steps.roles import Role


def check_backend(settings: Settings, device: str) -> None:
    """Check that the backend of the flags can run here.

    Args:
      device: type of the run's devices.

    Raises:
      SettingsError: its library is not installed, or a flag is one that the backend does not have.
    """
    devices = settings.devices
    if settings.models.backend == "torch" and devices.device != "xla":
        return
    if settings.outputs.explain_every is not None:
        raise settings.refusal("{explain_every}: gradients of rewards are taken in torch; leave {backend} out")
    hf = settings.models.model_code == "hf"
    if settings.models.backend == "xla":
        refused = {
            "--device=xla is of torch_xla, and --backend=xla is JAX: leave one of them out": devices.device == "xla",
            "--backend=xla needs jax, which is not installed: pip install 'funrl[xla]'": not find_spec("jax"),
            f"--backend=xla computes on the CPU so far, beside an engine in torch: leave out {device}": device != "cpu",
            "--backend=xla has --remat=none and --remat=full: what a layer saves is one list of results": (
                devices.remat == "selective"
            ),
            "--backend=xla lowers funrl's own layers: leave --model_code=hf out": hf,
            "--backend=xla drives all devices from one process, which generates too: "
            f"leave --place={devices.place} out": devices.place is not None,
            f"--generate_mesh={devices.generate_mesh}: with --backend=xla the engine decodes in torch, in one process; "
            "--compile=on decodes in JAX on that mesh": devices.generate is not None and not decodes_in_jax(settings),
        }
    else:
        missing = "--device=xla: torch_xla is not installed; --backend=xla computes in JAX without it"
        flags = {
            f"--mesh={devices.mesh}": any(n > 1 and axis != "data" for axis, n in devices.train.chosen.items()),
            "--fsdp": settings.sharding.fsdp,
            f"--place={devices.place}": devices.place is not None,
            f"--generate_mesh={devices.generate_mesh}": devices.generate_mesh is not None,
            f"--remat={devices.remat}": devices.remat != "none",
            "--model_code=hf": hf,
        }
        whole = "with --device=xla each rank has whole models; --backend=xla splits them in JAX"
        refused = {missing: not find_spec("torch_xla")} | {f"{flag}: {whole}": given for flag, given in flags.items()}
    for message, given in refused.items():
        if given:
            raise SettingsError(message)


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
    from funrl.trainer.lowered.decoding import XlaBackend  # it imports jax

    return functools.partial(XlaBackend, generating)


def with_devices(mesh: Mesh, settings: Settings) -> Mesh:
    """The mesh of this process with the devices that it drives, if these are several."""
    sizes = device_sizes(settings)
    return mesh if Mesh(sizes).world == 1 else dataclasses.replace(mesh, driven=sizes)


def with_backend(
    roles: Mapping[str, Role],
    settings: Settings,
    note: Callable[[str], None],
    place: Callable[[str, Mesh], Placed],
    optimize: Callable[[str, Placed], Transformation],
) -> dict[str, Role]:
    """The roles of a run, with programs where its backend is not torch.

    Args:
      note: receives how long each program took to make.
      place, optimize: as in `jax_devices`.
    """
    if computes_in_torch(settings):
        return dict(roles)
    if settings.models.backend == "torch":
        from funrl.trainer.lowered.torch_xla_steps import torch_xla_device

        return with_programs(roles, torch_xla_device(roles))
    from funrl.trainer.lowered.jax_steps import jax_devices  # it imports jax
    from funrl.xla.meshes import DeviceCopies, MeshProgram, ShardedFunction, devices_of_mesh

    copies = DeviceCopies(devices_of_mesh(device_sizes(settings)))
    remat = settings.devices.remat

    def program(purpose: str, function: ShardedFunction) -> MeshProgram:
        return MeshProgram(function, copies, note)

    return with_programs(roles, jax_devices(copies.mesh, place, optimize, remat, program))
