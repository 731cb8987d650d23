"""Phases of a rank that does a part of a run, of those of a rank that does all of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from funrl import trees
from funrl.cost.tracing.costs import Costs, plus
from funrl.cost.tracing.estimate import MOVES
from funrl.models.weight_dtypes import weight_dtypes
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.roles import Role


def pool_phases(
    phases: Mapping[str, Costs],
    parts: Parts,
    dtype: torch.dtype,
    *,
    rests: Mapping[str, float],
    pool: str,
    apart: Collection[str],
) -> dict[str, Costs]:
    """Phases of the ranks of one pool.

    Args:
      phases: of a rank with all roles.
      parts: on its mesh.
      dtype: of the weights of roles that do not learn.
      rests: bytes by kind that it holds between phases.
      pool: what the rank does: "train", "generate" or the name of a role.
      apart: roles, or the judge, on ranks of their own.
    """
    if pool == "train":
        others = sum(stored_bytes(role, dtype) for name, role in parts.roles.items() if name in apart)
        gone = {MOVES[0], *(f"score_{name}" for name in apart)}  # rows come from the other ranks
        return {name: plus(costs, {"weights": -others}) for name, costs in phases.items() if name not in gone}
    own = {kind: -nbytes for kind, nbytes in rests.items()}
    if pool == "generate":
        return {pool: plus(phases[pool], own)}
    own["weights"] += stored_bytes(parts.roles[pool], dtype)
    name = f"score_{pool}"
    return {name: plus(phases[name], own)}


def stored_bytes(role: Role, dtype: torch.dtype) -> float:
    """Bytes of a role's weights that a rank stores, where they do not learn."""
    dtypes = trees.leaves(weight_dtypes(role.placed.stored, dtype))
    layouts = trees.leaves(role.placed.stored)
    return float(sum(math.prod(x.local_shape()) * item.itemsize for x, item in zip(layouts, dtypes, strict=True)))
