"""Which rule table stores each role's weights, and the mesh to generate on."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import torch

from funrl import trees
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import Mesh, MeshError
from funrl.mesh.rules import GENERATE, STORED, Rules, fully_sharded, layouts
from funrl.models.model import Model
from funrl.trainer.roles import WRITES
from funrl.trainer.settings import Settings, SettingsError

def stored_rules(settings: Settings, role: str) -> Rules:
    """The rule table by which a role's weights are stored.

    Raises:
      SettingsError: the flags name models or axes to shard over that are none, or axes that have one device.
    """
    if not settings.fsdp:
        for flag, says in (("fsdp_axes", "what --fsdp shards over"), ("fsdp_models", "which models --fsdp shards")):
            if getattr(settings, flag) is not None:
                raise SettingsError(f"--{flag}={getattr(settings, flag)} says {says}; give --fsdp too")
        return STORED
    sizes, known = meshes.parse(settings.mesh), {short: axis for short, axis in meshes.SHORT.items() if axis in meshes.ROW_AXES}
    named = list(known) if settings.fsdp_axes is None else settings.fsdp_axes.split(",")
    if unknown := [short for short in named if short not in known]:
        raise SettingsError(f"--fsdp_axes={settings.fsdp_axes}: {unknown[0]!r} is none of {', '.join(known)}")
    over = tuple(axis for short, axis in known.items() if short in named)
    if Mesh(sizes).size(over) == 1:
        raise SettingsError(
            f"--fsdp: the mesh {settings.mesh} has one device over {','.join(named)}, so none to shard over"
        )
    return fully_sharded(STORED, over) if role in sharded_roles(settings) else STORED


def sharded_roles(settings: Settings) -> Collection[str]:
    """The roles whose weights --fsdp shards."""
    if settings.fsdp_models is None:
        return tuple(WRITES)
    named = settings.fsdp_models.split(",")
    if unknown := [role for role in named if role not in WRITES]:
        raise SettingsError(f"--fsdp_models={settings.fsdp_models}: {unknown[0]!r} is not one of {', '.join(WRITES)}")
    return named


def check_roles(settings: Settings, roles: Collection[str]) -> None:
    """Whether the flags name roles that a run has.

    Args:
      roles: those that it has.

    Raises:
      SettingsError: as `stored_rules`; or a flag names a role that the run does not have.
    """
    for role in roles:
        stored_rules(settings, role)
    absent = [] if settings.fsdp_models is None else [m for m in sharded_roles(settings) if m not in roles]
    if absent:
        raise SettingsError(
            f"--fsdp_models={settings.fsdp_models}: this run has no {absent[0]}; it has {', '.join(roles)}"
        )


def check_layouts(
    models: Mapping[str, Model], settings: Settings, sizes: Mapping[str, int], generate_sizes: Mapping[str, int]
) -> None:
    """Whether the models of a run can be laid out on its meshes.

    Args:
      models: of every role.

    Raises:
      MeshError: a size that does not divide, or an axis over which there is nothing to split.
    """
    for mesh in (sizes, generate_sizes):
        for axis in ("sequence",) if settings.fsdp else ("sequence", "expert"):
            if mesh[axis] > 1:
                shape = meshes.text(dict(mesh))
                raise MeshError(f"{shape}: a dense decoder has nothing to split over the {axis} axis; use dp and tp")
    for role, model in models.items():
        layouts(model.shapes, model.axes, stored_rules(settings, role), sizes)
    if "policy" in models:
        layouts(models["policy"].shapes, models["policy"].axes, GENERATE, generate_sizes)


def generate_sizes(settings: Settings, sizes: dict[str, int], model: Model, memory: float) -> dict[str, int]:
    """The mesh to generate on. By default every device decodes alone, which needs no collective at all, as long as
    the whole model fits a quarter of its memory and there is a prompt for each; else it is the train mesh.

    Args:
      sizes: of the train mesh.
      memory: bytes that one rank may use.

    Raises:
      MeshError: it has other devices than the train mesh, or there are fewer prompts than data ranks.
    """
    world = Mesh(sizes).world
    if settings.generate_mesh is None:
        item = 8 if settings.dtype == "float64" else 4
        fits = trees.count(model.shapes) * item <= memory / 4
        alone = dict.fromkeys(meshes.AXES, 1) | {"data": world}
        chosen = alone if fits and settings.batch_prompts >= world else sizes
    else:
        chosen = meshes.parse(settings.generate_mesh)
        if Mesh(chosen).world != world:
            raise MeshError(
                f"--generate_mesh={settings.generate_mesh} has {Mesh(chosen).world} devices and --mesh={settings.mesh} "
                f"has {world}; they are two views of the same devices"
            )
    ranks = max(Mesh(sizes).size(meshes.ROW_AXES), Mesh(chosen).size(meshes.ROW_AXES))
    if settings.batch_prompts < ranks:
        raise MeshError(
            f"--batch_prompts={settings.batch_prompts}: there are {ranks} data ranks and each needs a prompt; "
            f"use at least {ranks} prompts or fewer data ranks"
        )
    return chosen


def rank_memory(device: str, world: int) -> float:
    """Bytes that one rank of this machine may use."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / world
