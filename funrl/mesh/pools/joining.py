"""Placement with generators of other jobs, which join the run: `train:dp2@0-1 generate:join`. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from funrl.mesh.pools.placement import read_placement
from funrl.mesh.text import MeshError, devices

JOIN = "generate:join"
_ONE = "generate:1"  # a pool that stands for them, so that the rest is read as it is with one


def generators_join(flag: str | None) -> bool:
    """True if the text of --place leaves generation to generators that join."""
    return flag is not None and JOIN in flag.split()


def training_sizes(flag: str, mesh: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the mesh to train on, which has all ranks of the run.

    Args:
      flag: the text of --place, with `JOIN`.
      mesh: sizes of the mesh to train on, where the text does not give it.

    Raises:
      MeshError: the text is not such a placement.
    """
    try:
        pools = read_placement(" ".join(_ONE if part == JOIN else part for part in flag.split()), mesh)
    except MeshError as error:
        raise MeshError(f"--place={flag}: {str(error).partition(': ')[2]}") from None
    world = devices(pools.train.sizes)
    if tuple(pools.train.ranks) != tuple(range(world)):
        raise MeshError(
            f"--place={flag}: generators that join are no ranks of this run, whose ranks all train: 0 to {world - 1}"
        )
    return pools.train.sizes
