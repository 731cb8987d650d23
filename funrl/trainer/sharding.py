"""How the models of a run lie on its devices: which rule table each trains with, and the mesh to generate on."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import torch

from funrl import trees
from funrl.algos.core import Algorithm, needs_of
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import Mesh, MeshError
from funrl.mesh.rules import GENERATE, STORED, Rules, fully_sharded, layouts
from funrl.models import decoder
from funrl.models.config import Config
from funrl.trainer.settings import Settings, SettingsError

MODELS = ("policy", "critic", "reference", "reward_model", "teacher")
FROZEN = ("reference", "teacher")  # held in the dtype to compute in, to which a forward pass would cast them


def models_of(algorithm: Algorithm, settings: Settings) -> tuple[str, ...]:
    """Those of `MODELS` that a run of this algorithm has."""
    has = {
        "policy": True,
        "critic": algorithm.value_loss is not None,
        "reference": "ref_logp" in needs_of(algorithm),
        "reward_model": algorithm.reward_loss is not None,
        "teacher": settings.teacher is not None,
    }
    return tuple(name for name in MODELS if has[name])


def train_rules(settings: Settings, model: str) -> Rules:
    """The rule table to train one of `MODELS` with.

    Raises:
      SettingsError: the flags name models or axes to shard over that are none, or axes that have one device.
    """
    if not settings.fsdp:
        for flag, says in (("fsdp_axes", "what --fsdp shards over"), ("fsdp_models", "which models --fsdp shards")):
            if getattr(settings, flag) is not None:
                raise SettingsError(f"--{flag}={getattr(settings, flag)} says {says}; give --fsdp too")
        return STORED
    sizes = meshes.parse(settings.mesh)
    known = {short: axis for short, axis in meshes.SHORT.items() if axis in Mesh.row_axes}
    named = list(known) if settings.fsdp_axes is None else settings.fsdp_axes.split(",")
    if unknown := [short for short in named if short not in known]:
        raise SettingsError(f"--fsdp_axes={settings.fsdp_axes}: {unknown[0]!r} is none of {', '.join(known)}")
    over = tuple(axis for short, axis in known.items() if short in named)
    if Mesh(sizes).size(over) == 1:
        raise SettingsError(
            f"--fsdp: the mesh {settings.mesh} has one device over {','.join(named)}, so none to shard over"
        )
    return fully_sharded(STORED, over) if model in sharded_models(settings) else STORED


def sharded_models(settings: Settings) -> Collection[str]:
    """The models that --fsdp shards."""
    if settings.fsdp_models is None:
        return MODELS
    named = settings.fsdp_models.split(",")
    if unknown := [model for model in named if model not in MODELS]:
        raise SettingsError(f"--fsdp_models={settings.fsdp_models}: {unknown[0]!r} is none of {', '.join(MODELS)}")
    return named


def check_models(settings: Settings, models: Collection[str]) -> None:
    """Whether the flags speak of models that a run has.

    Args:
      models: those of `MODELS` that it has.

    Raises:
      SettingsError: as `train_rules`; or a flag names a model that the run does not have.
    """
    for model in models:
        train_rules(settings, model)
    absent = [] if settings.fsdp_models is None else [m for m in sharded_models(settings) if m not in models]
    if absent:
        raise SettingsError(
            f"--fsdp_models={settings.fsdp_models}: this run has no {absent[0]}; it has {', '.join(models)}"
        )


def check_layouts(
    config: Config,
    settings: Settings,
    models: Collection[str],
    sizes: Mapping[str, int],
    generate_sizes: Mapping[str, int],
) -> None:
    """Whether models can lie on the meshes of a run.

    Args:
      config: of all models but a teacher.
      models: those of `MODELS` that the run has.

    Raises:
      MeshError: a size that does not divide, or an axis over which there is nothing to split.
    """
    tables = [train_rules(settings, model) for model in models]
    for mesh, rules in (*((sizes, table) for table in tables), (generate_sizes, GENERATE)):
        for axis in ("sequence",) if settings.fsdp else ("sequence", "expert"):
            if mesh[axis] > 1:
                shape = meshes.text(dict(mesh))
                raise MeshError(f"{shape}: a dense decoder has nothing to split over the {axis} axis; use dp and tp")
        layouts(decoder.shapes(config), decoder.axes(config), rules, mesh)


def generate_sizes(settings: Settings, sizes: dict[str, int], config: Config, memory: float) -> dict[str, int]:
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
        fits = trees.count(decoder.shapes(config)) * item <= memory / 4
        alone = dict.fromkeys(meshes.AXES, 1) | {"data": world}
        chosen = alone if fits and settings.batch_prompts >= world else sizes
    else:
        chosen = meshes.parse(settings.generate_mesh)
        if Mesh(chosen).world != world:
            raise MeshError(
                f"--generate_mesh={settings.generate_mesh} has {Mesh(chosen).world} devices and --mesh={settings.mesh} "
                f"has {world}; they are two views of the same devices"
            )
    ranks = max(Mesh(sizes).size(Mesh.row_axes), Mesh(chosen).size(Mesh.row_axes))
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
