"""The flag --backend: checks before a run, and the programs of its roles."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

from funrl.mesh.text import text as mesh_text
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings
from funrl.trainer.steps.roles import Role


def check_backend(settings: Settings, sizes: Mapping[str, int], device: str) -> None:
    """Check that the backend of the flags can run here.

    Args:
      sizes: of the mesh's axes.
      device: type of the run's devices.

    Raises:
      SettingsError: jax is not installed, or a flag is one that the backend does not have.
    """
    if settings.models.backend == "torch":
        return
    if importlib.util.find_spec("jax") is None:
        raise SettingsError("--backend=xla needs jax, which is not installed: pip install 'funrl[xla]'")
    if any(size > 1 for size in sizes.values()):
        raise SettingsError(f"--backend=xla computes on one device so far: leave --mesh={mesh_text(dict(sizes))} out")
    if device != "cpu":
        raise SettingsError(f"--backend=xla computes on the CPU so far, beside an engine in torch: leave out {device}")
    if settings.devices.remat == "selective":
        raise SettingsError(
            "--backend=xla has --remat=none and --remat=full: what a layer saves is one list of results"
        )
    if settings.models.model_code == "hf":
        raise SettingsError("--backend=xla lowers funrl's own layers: leave --model_code=hf out")


def with_backend(roles: Mapping[str, Role], settings: Settings, note: Callable[[str], None]) -> dict[str, Role]:
    """The roles of a run, with programs where its backend is not torch; `note` receives how long each took to make."""
    if settings.models.backend == "torch":
        return dict(roles)
    from funrl.trainer.lowered.programs import XlaPrograms  # it imports jax

    programs = XlaPrograms(settings.devices.remat, note)
    return {name: role._replace(programs=programs) for name, role in roles.items()}
