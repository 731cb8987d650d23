"""Rule tables that store each role's weights, and the mesh to generate on."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Mapping

import torch

from funrl import trees
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import Mesh, MeshError
from funrl.mesh.rules import (
    COMPUTE,
    GENERATE,
    STORED,
    WHOLE_EXPERTS,
    Leading,
    Outermost,
    Rules,
    Uneven,
    fully_sharded,
    layouts,
)
from funrl.mesh.text import AXES, SHORT, TOKEN_AXES
from funrl.models import Model
from funrl.models.decoder.sequence_parallel import is_ring
from funrl.models.lora import decoder_of
from funrl.models.placed import Placed
from funrl.role_kinds import ROLES
from funrl.rollout.engine_abilities import engines_that
from funrl.trainer.lowered.backend import decodes_in_jax, device_sizes
from funrl.trainer.settings.declaration import SettingsError, blaming, parts
from funrl.trainer.settings.settings import TOKEN_MULTIPLE, Settings, check_needs


def stored_rules(settings: Settings, role: str) -> Rules:
    """The rule table by which a role's weights are stored."""
    if not settings.sharding.fsdp or not is_sharded(settings, role):
        return STORED
    named = {SHORT[short] for short in parts(settings.sharding.fsdp_axes)} or set(TOKEN_AXES)
    over = tuple(axis for axis in AXES if axis in named)
    kind = Leading if settings.models.backend == "torch" else Outermost  # in JAX an axis splits one dim
    return fully_sharded(STORED, over, kind if settings.adapters.lora_rank is None else Uneven)


def is_sharded(settings: Settings, role: str) -> bool:
    """True if --fsdp shards the weights of a role: without --fsdp_models, those of every role."""
    return role in (parts(settings.sharding.fsdp_models) or (role,))


def learns_sharded(settings: Settings, learning: Collection[str]) -> bool:
    """True if --fsdp shards the weights of some of the roles that learn."""
    return settings.sharding.fsdp and any(is_sharded(settings, role) for role in learning)


def check_experts(settings: Settings, models: Collection[Model]) -> None:
    """Check that the flags of routers have a router to speak of, and that what runs the models takes experts.

    Raises:
      SettingsError: they do not.
    """
    routers = [model.abilities.routers for model in models if model.abilities.routers is not None]
    check_needs(settings, experts=routers, expert_biases=any(router.biased for router in routers))
    if routers and not settings.engines.abilities.routes:
        engines = engines_that("routes")
        raise settings.refusal("{engine}: the policy has experts; give --engine={engines}", engines=engines)


def check_layouts(
    models: Mapping[str, Model], settings: Settings, sizes: Mapping[str, int], generate_sizes: Mapping[str, int]
) -> None:
    """Check that the models of a run can be laid out on its meshes.

    Args:
      models: of every role.

    Raises:
      MeshError: a size that does not divide, or an axis over which there is nothing to split.
    """
    experts = settings.sharding.fsdp or any(model.abilities.routers is not None for model in models.values())
    for mesh in (sizes, generate_sizes):
        if mesh["expert"] > 1 and not experts:
            shape = meshes.text(dict(mesh))
            raise MeshError(f"{shape}: a dense decoder has nothing to split over the expert axis; use dp and tp")
    for role, model in models.items():
        for mesh in (sizes, generate_sizes):
            split = [short for short in ("sp", "tp") if mesh[SHORT[short]] > 1]
            if model.abilities.code and split:
                raise MeshError(
                    f"{meshes.text(dict(mesh))}: the {role} is {model.abilities.code}, transformers' own code, "
                    f"which is not split over {split[0]}; use dp, with --fsdp where memory is short"
                )
        if sizes["sequence"] > 1 and not model.abilities.splits_rows:
            raise MeshError(
                f"{meshes.text(dict(sizes))}: the {role} is a {model.config.source.family}, whose tokens of a picture "
                "see one another, so that its tokens are not split over sp; use dp and tp"
            )
        layouts(model.shapes, model.axes, stored_rules(settings, role), sizes)
    role = ROLES.generating(models)
    if role is not None:
        layouts(models[role].shapes, models[role].axes, GENERATE, generate_sizes)


def check_driven(settings: Settings, models: Mapping[str, Model]) -> None:
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
    generating = dict.fromkeys(AXES, 1)
    writer = ROLES.generating(models)
    if writer is not None and decodes_in_jax(settings):
        generating = driven_generate_sizes(settings, models[writer])
    with blaming(mesh):
        check_layouts(models, settings, sizes, generating)
    if writer is not None:
        check_divided(f"generation on {meshes.text(generating)}", writer, models[writer], WHOLE_EXPERTS, generating)
    for role, model in models.items():
        heads = -(-model.abilities.heads // sizes["tensor"])
        if is_ring(settings.devices.sequence_parallel, heads, sizes):
            raise SettingsError(
                f"--backend=xla with --{mesh}: the steps of ring attention depend on numbers; give an sp that divides "
                f"the {heads} query heads of the {role} on a device, and no ring"
            )
        check_divided(f"--{mesh}", role, model, stored_rules(settings, role), sizes)


def check_divided(where: str, role: str, model: Model, rules: Rules, sizes: Mapping[str, int]) -> None:
    """Check that all devices have parts of equal sizes.

    Args:
      where: the mesh, for the message.
      role: of the model.
      model: whose weights are split.
      rules: by which they are split.
      sizes: of the mesh.

    Raises:
      SettingsError: a dim does not divide.
    """
    for name, layout in trees.named(layouts(model.shapes, model.axes, rules, sizes)):
        for length, axes in zip(layout.shape, layout.spec, strict=True):
            parts = math.prod(sizes[axis] for axis in axes)
            if length % parts:
                raise SettingsError(
                    f"--backend=xla with {where}: {name} of the {role} has a dim of {length}, which does not "
                    f"divide over {parts} devices of {', '.join(axes)}; choose sizes that divide it"
                )


def replace_layouts(settings: Settings, placed: Placed, role: str, mesh: Mesh, part: bool = False) -> Placed:
    """A model on another mesh, in the layouts of the flags.

    Args:
      role: by whose rule tables.
      part: whether it is the part of a decoder that adapters stand on.
    """
    model = placed.model
    tables = stored_rules(settings, role), COMPUTE
    stored, compute = (layouts(model.shapes, model.axes, table, mesh.sizes) for table in tables)
    if part:
        stored, compute = ({name: decoder_of(tree)[name] for name in placed.stored} for tree in (stored, compute))
    split = splits_residual(settings, mesh.sizes, mesh.device.type != "cpu")
    return dataclasses.replace(placed, mesh=mesh, stored=stored, compute=compute, splits=split)


def splits_residual(settings: Settings, sizes: Mapping[str, int], accelerator: bool) -> bool:
    """True if tensor ranks share the residual stream of packed rows.

    By default on accelerators. There it takes no longer: what is sent is what the sums that it replaces send, and norms
    are computed once. Gloo, on a CPU, takes as long for a scattered sum as for a whole one, and the gather is more.
    """
    form = settings.devices.split_residual
    tensor = sizes["tensor"]
    wanted = form == "on" or (form == "auto" and accelerator)
    return wanted and tensor > 1 and TOKEN_MULTIPLE % tensor == 0


def generate_sizes(settings: Settings, sizes: dict[str, int], model: Model, memory: float) -> dict[str, int]:
    """Sizes of the mesh to generate on: those of a flag, or `sizes_on_trainers`; the arguments are of that."""
    if settings.models.backend != "torch" and Mesh(sizes).world == 1:
        return sizes  # of the one process that drives all devices
    given = settings.devices.generate
    return sizes_on_trainers(settings, sizes, model, memory) if given is None else given.sizes


def replica_sizes(settings: Settings, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the mesh to generate on as replicas see it: the ranks of one, which make the same calls, are "tensor".

    Args:
      sizes: of the mesh to generate on.
    """
    if not settings.engines.abilities.shares_experts:
        return dict(sizes)
    return dict(sizes) | {"expert": 1, "tensor": sizes["expert"] * sizes["tensor"]}


def sizes_on_trainers(settings: Settings, sizes: dict[str, int], model: Model, memory: float) -> dict[str, int]:
    """Sizes of a mesh to generate on, over the trainer ranks.

    Every device decodes alone, which needs no collective at all, as long as the whole model fits a quarter
    of its memory and there is a prompt for each. Otherwise it is the train mesh, with its sp as dp: ranks that share
    the tokens of a row generate different rows.

    Args:
      sizes: of the train mesh.
      memory: bytes that one rank may use.
    """
    world = Mesh(sizes).world
    item = 8 if settings.models.dtype == "float64" else 4
    fits = trees.count(model.shapes) * item <= memory / 4
    alone = dict.fromkeys(AXES, 1) | {"data": world}
    apart = sizes | {"data": sizes["data"] * sizes["sequence"], "sequence": 1}
    return alone if fits and settings.run.batch_prompts >= world else apart


def driven_generate_sizes(settings: Settings, model: Model) -> dict[str, int]:
    """Sizes of the mesh to generate on, over the devices that one process drives; all 1 if it has one."""
    sizes = device_sizes(settings)
    return generate_sizes(settings, sizes, model, rank_memory("cpu", Mesh(sizes).world))


def rank_memory(device: str, world: int) -> float:
    """Bytes that one rank of this machine may use."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / world
