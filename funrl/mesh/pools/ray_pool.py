"""Placement with generators on a Ray cluster: `train:dp2 generate:ray1-8`. It imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from funrl.mesh.pools.placement import read_placement
from funrl.mesh.text import MeshError, devices

_POOL = "generate:ray"
_REMOVED = "generate:join"  # of earlier versions
_ONE = "generate:1"  # a pool that stands for them, so that the rest is read as it is with one


class GeneratorBounds(NamedTuple):
    """Bounds on the number of generators.

    Attributes:
      least: without so many the run waits, and ends after --timeout.
      most: that are asked for.
    """

    least: int
    most: int


def generators_on_ray(flag: str | None) -> GeneratorBounds | None:
    """Bounds that the text of --place gives to generators on Ray; None: there are none.

    Raises:
      MeshError: the pool is not of this form.

    Example:
      >>> generators_on_ray("train:dp2 generate:ray1-8"), generators_on_ray("generate:ray4")
      (GeneratorBounds(least=1, most=8), GeneratorBounds(least=4, most=4))
    """
    pool = _pool(flag or "")
    if _REMOVED in (flag or "").split():
        raise MeshError(
            f"--place={flag}: generators of other jobs do not join any more; write generate:ray1-8 for one to eight "
            "generators on a Ray cluster"
        )
    if not pool:
        return None
    match = re.fullmatch(r"generate:ray(\d{1,6})(?:-(\d{1,6}))?", pool)
    bounds = GeneratorBounds(int(match[1]), int(match[2] or match[1])) if match else GeneratorBounds(0, 0)
    if not 1 <= bounds.least <= bounds.most:
        raise MeshError(
            f"--place={flag}: {pool!r} is not a number of generators on Ray; write generate:ray1-8 or generate:ray4"
        )
    return bounds


def training_sizes(flag: str, mesh: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the mesh to train on, which has all ranks of the run.

    Args:
      flag: the text of --place, with generators on Ray.
      mesh: sizes of the mesh to train on, where the text does not give it.

    Raises:
      MeshError: the text is not such a placement.
    """
    pool = _pool(flag)
    try:
        pools = read_placement(" ".join(_ONE if part == pool else part for part in flag.split()), mesh)
    except MeshError as error:
        raise MeshError(f"--place={flag}: {str(error).partition(': ')[2]}") from None
    world = devices(pools.train.sizes)
    if tuple(pools.train.ranks) != tuple(range(world)):
        raise MeshError(
            f"--place={flag}: generators on Ray are no ranks of this run, whose ranks all train: 0 to {world - 1}"
        )
    return pools.train.sizes


def _pool(flag: str) -> str:
    """The pool of generators on Ray; "" if there is none."""
    return next((part for part in flag.split() if part.startswith(_POOL)), "")
