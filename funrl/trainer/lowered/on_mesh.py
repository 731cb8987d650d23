"""The roles of a job on a mesh, for programs of its backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from funrl.mesh.mesh import Mesh
from funrl.models.placed import Placed
from funrl.optim import Transformation


class OnMesh(NamedTuple):
    """Functions that make the roles of a job on a mesh.

    Attributes:
      place: (name of a role, mesh) -> its model there.
      optimize: (name of a role that learns, its model) -> its optimizer.
      remat: what a backward pass computes again; see `as_one_operator`.
    """

    place: Callable[[str, Mesh], Placed]
    optimize: Callable[[str, Placed], Transformation]
    remat: str
