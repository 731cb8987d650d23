"""Sharding groups of --fsdp on several nodes: one group per node, if a device has room for its shard.

Inside a node gathers are an order of magnitude faster than between nodes, and the only traffic between nodes is then
one sum of gradients per step. Shards are larger: each node holds all weights. This needs no new axis: `ep` of a model
without experts splits rows as `dp` does, within it. The choice depends only on flags, the model's config.json and the
table of hardware, so all ranks make the same choice.
"""

from __future__ import annotations

from collections.abc import Callable

from funrl.algos.core import Algorithm
from funrl.cost.dry_run import check_width, plain_job, tokens_of
from funrl.cost.search.closed_form import closed_form
from funrl.cost.search.mesh_search import has_experts
from funrl.cost.tracing.hardware import USABLE, Hardware
from funrl.mesh import mesh as meshes
from funrl.mesh.text import SHORT, TOKEN_AXES, devices
from funrl.trainer.settings.settings import Settings, with_flags


def with_groups(
    settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware, node: int | None
) -> tuple[Settings, str | None]:
    """Settings that shard inside each node if a shard of that size fits, and a line on the choice.

    A given --fsdp_axes, and a mesh chosen by --mesh=auto:N, are not changed.

    Args:
      node: ranks of each node; None: all are on one node.
    """
    if (
        not settings.sharding.fsdp
        or settings.sharding.fsdp_axes is not None
        or node is None
        or settings.devices.train.wanted is not None
    ):
        return settings, None
    sizes = settings.devices.train.chosen
    world = devices(sizes)
    over = devices(sizes, TOKEN_AXES)
    if world <= node or world % node:
        return settings, None
    everywhere = f"--fsdp: weights are sharded over all {over} ranks that have other tokens"
    try:
        algorithm = compose()
        job = plain_job(settings, algorithm, hardware.memory)
        inside = node_mesh(sizes, node, has_experts(job.models))
        if inside is None:
            return settings, f"{everywhere}: on {settings.devices.mesh} no axis ends with a node of {node}"
        short = {axis: name for name, axis in SHORT.items()}
        axes = ",".join(short[axis] for axis in TOKEN_AXES[1:] if inside[axis] > 1)
        changed = with_flags(settings, mesh=meshes.text(inside), fsdp_axes=axes)
        job = plain_job(changed, algorithm, hardware.memory)
        held = closed_form(job, check_width(job, tokens_of(changed, algorithm)), hardware).nbytes
    except ValueError:
        return settings, None  # a flag cannot work; the run reports it
    needs = f"about {held / 1e9:.3g} GB of a device's {hardware.memory * USABLE / 1e9:.3g} GB"
    if held > hardware.memory * USABLE:
        return settings, f"{everywhere}: inside of nodes of {node} they would need {needs}"
    return changed, (
        f"--fsdp: weights are sharded inside of each node of {node} and copied to {world // node} nodes, which needs "
        f"{needs}: --mesh={changed.devices.mesh} --fsdp_axes={axes}; --fsdp_axes=dp,ep,sp shards over all"
    )


def node_mesh(sizes: dict[str, int], node: int, experts: bool) -> dict[str, int] | None:
    """The mesh with `data` across nodes and all other token axes inside a node; None: there is none.

    Args:
      node: ranks of a node, which divide those of the mesh.
      experts: whether the expert axis splits experts and so must stay unchanged.
    """
    near = sizes["tensor"] * sizes["sequence"]
    group, rest = divmod(node, near)
    if experts or sizes["expert"] > 1:
        return sizes if group == sizes["expert"] > 1 and not rest else None
    if rest or sizes["data"] % group or group * sizes["sequence"] == 1:
        return None
    return sizes | {"data": sizes["data"] // group, "expert": group}
