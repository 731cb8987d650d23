"""Digests of the weights of roles: equal where all bits are, on any mesh and in any layout.

They are those by which an engine is proven to hold the trainer's weights (`funrl.rollout.certificate`): a rank sums its
own part, and one small collective adds the parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.collectives import psum
from funrl.mesh.mesh import AXES, Mesh
from funrl.rollout.certificate import digest, first_copy
from funrl.trainer.roles import Role

UINT64 = (1 << 64) - 1


def weight_digests(params: trees.Tree, stored: trees.Tree, mesh: Mesh) -> dict[str, str]:
    """The digest of each weight by name, 16 hexadecimal digits. Collective.

    Args:
      params: this rank's shards.
      stored: their layouts.
    """
    layouts, digests = dict(trees.named(stored)), dict[str, Tensor]()
    for name, x in trees.named(params):
        own = digest(x, layouts[name], mesh.rank, x.dtype) * first_copy(layouts[name], mesh)
        digests[name] = own.to(mesh.device)
    if not digests:
        return {}
    whole = psum(torch.stack(list(digests.values())), mesh, AXES).tolist()
    return {name: f"{number & UINT64:016x}" for name, number in zip(digests, whole, strict=True)}


def role_digests(roles: Mapping[str, Role], weights: Mapping[str, trees.Tree], mesh: Mesh) -> dict[str, str]:
    """One digest of all weights of each of some roles. Collective.

    Args:
      weights: this rank's shards, by role.
    """
    found = {}
    for name, params in weights.items():
        if name not in roles:  # the base of adapters, of which a checkpoint knows each weight
            continue
        digests = weight_digests(params, roles[name].stored, mesh)
        found[name] = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]
    return found
