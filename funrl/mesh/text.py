"""Sizes of a mesh's axes, and how a command line writes them: "dp4,tp2". It imports no torch.

The axes are, outermost first, `data`, `expert`, `sequence` and `tensor`. An axis that is not named has size 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

SHORT = {"dp": "data", "ep": "expert", "sp": "sequence", "tp": "tensor"}
AXES = tuple(SHORT.values())
AUTOMATIC = "auto"  # what a text begins with that leaves the mesh to the run
ROW_AXES = ("data", "expert")  # axes that split a batch's rows
REPLICA_AXES = ("expert", "tensor")  # axes whose ranks are one replica of an engine that shares experts
TOKEN_AXES = (*ROW_AXES, "sequence")  # axes that split its tokens


class MeshError(ValueError):
    """A mesh that cannot be built; the message says which part and what would be right."""


class MeshFlag(NamedTuple):
    """The value of a flag that gives a mesh.

    Attributes:
      flag, text: its name and its text.
      sizes: of all four axes; of auto:N, which is not chosen yet, N over data. Not to be changed.
      wanted: N of auto:N, the devices over which the mesh is to be chosen; None: the flag gives the mesh.
    """

    flag: str
    text: str
    sizes: dict[str, int]
    wanted: int | None = None

    @property
    def chosen(self) -> dict[str, int]:
        """`sizes` of a mesh that is not to be chosen. Raises: MeshError."""
        if self.wanted is not None:
            raise MeshError(f"--{self.flag}={self.text}: no mesh is chosen here; write one such as dp4,tp2")
        return self.sizes


def read_mesh(text: str, flag: str = "mesh", automatic: bool = True) -> MeshFlag:
    """Parse the text of a flag.

    Args:
      automatic: whether auto:N is allowed.

    Raises:
      MeshError: the text is not a mesh.
    """
    wanted = wanted_devices(text, flag) if automatic else None
    return MeshFlag(flag, text, parse(text if wanted is None else f"dp{wanted}", flag), wanted=wanted)


def devices(sizes: Mapping[str, int], axes: Iterable[str] = AXES) -> int:
    """Number of devices along some axes, by default all of them."""
    return math.prod(sizes[axis] for axis in axes)


def parse(text: str, flag: str = "mesh") -> dict[str, int]:
    """Sizes of all four axes from text such as "dp4,tp2"; the order is free, "" is one device.

    Args:
      text: the mesh.
      flag: name of the flag that gave it, for the message of an error.

    Raises:
      MeshError: an unknown axis, one given twice, or a size below 1.
    """
    sizes = dict.fromkeys(AXES, 1)
    seen = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"([a-z]+)(\d+)", part)
        if match is None or match[1] not in SHORT:
            raise MeshError(
                f"--{flag}={text}: {part!r} is not an axis; write dp, tp, ep or sp and a size, such as dp4,tp2"
            )
        if match[1] in seen:
            raise MeshError(f"--{flag}={text}: axis {match[1]!r} is given twice")
        if int(match[2]) < 1:
            raise MeshError(f"--{flag}={text}: the size of {match[1]!r} is {match[2]}, it must be at least 1")
        seen.add(match[1])
        sizes[SHORT[match[1]]] = int(match[2])
    return sizes


def wanted_devices(text: str, flag: str = "mesh") -> int | None:
    """The number of devices in "auto:64", over which the mesh is to be chosen; None: the text is a mesh.

    Raises:
      MeshError: it begins with "auto" and has no such number.
    """
    if not text.startswith(AUTOMATIC):
        return None
    match = re.fullmatch(AUTOMATIC + r":(\d{1,6})", text)
    if match is None or int(match[1]) < 1:
        raise MeshError(f"--{flag}={text}: write auto and the number of devices, such as auto:8")
    return int(match[1])


def text(sizes: Mapping[str, int]) -> str:
    """The inverse of `parse`: "dp4,tp2"; a mesh of one device is "dp1"."""
    named = [f"{short}{sizes[axis]}" for short, axis in SHORT.items() if sizes[axis] > 1]
    return ",".join(named) or "dp1"
