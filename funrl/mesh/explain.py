"""Cost of a plan as text: a row for every kind of tensor, and the totals.

A row has the layouts in training and in generation, the bytes on a device in both, and what moves from one to the other
by which way.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import SHORT
from funrl.mesh.plan import Plan, Route, lower_bound_bytes, received_bytes, sent_bytes, volume
from funrl.mesh.rules import Layout

_SHORTS = {axis: short for short, axis in SHORT.items()}


class Kind(NamedTuple):
    """All tensors that have the same name (layer numbers apart) and the same two layouts.

    Attributes:
      name: with * for numbers.
      logical: the logical axes.
      count: how many tensors there are.
      leaf: the first of them.
      route: its route.
      held: bytes of all of them on a device in training and in generation (on the device that holds most).
      received: bytes that all devices together receive.
    """

    name: str
    logical: tuple[str, ...]
    count: int
    leaf: int
    route: Route
    held: tuple[int, int]
    received: int


def kinds(plan: Plan, axes: dict[str, tuple[str, ...]]) -> list[Kind]:
    """The kinds of tensors of a plan, in the order of the tree; `axes` are the logical axes by leaf name."""
    groups: dict[tuple[str, Layout, Layout], list[int]] = {}
    for leaf, name in enumerate(plan.names):
        route = plan.route(leaf)
        groups.setdefault((re.sub(r"(?<![^/])\d+(?![^/])", "*", name), route.src, route.dst), []).append(leaf)
    results = []
    for (name, src, dst), leaves in groups.items():
        itemsize = sum(plan.dtypes[leaf].itemsize for leaf in leaves)
        held = volume(src.box(0)) * itemsize, volume(dst.box(0)) * itemsize  # no part is larger than the first
        logical = axes[plan.names[leaves[0]]]
        moved = sum(received_bytes(plan, leaves))
        results.append(
            Kind(name, logical, len(leaves), leaf=leaves[0], route=plan.route(leaves[0]), held=held, received=moved)
        )
    return results


def explain(plan: Plan, axes: dict[str, tuple[str, ...]]) -> str:
    """The table of a plan and its totals as text. Bytes on a device are those of the device that holds most."""
    head = ("tensor", "shape", "train", "generate", "train/device", "generate/device", "moved", "way")
    tensor_kinds = kinds(plan, axes)
    rows = [
        (
            f"{kind.name} x {kind.count}" if kind.count > 1 else kind.name,
            "x".join(map(str, kind.route.src.shape)) or "scalar",
            placement(kind.logical, kind.route.src),
            placement(kind.logical, kind.route.dst),
            *map(size, kind.held),
            size(kind.received),
            way(kind.route),
        )
        for kind in tensor_kinds
    ]
    train, generate = (sum(kind.held[phase] for kind in tensor_kinds) for phase in (0, 1))
    shared = sum(kind.held[0] for kind in tensor_kinds if kind.route.way == "alias")
    received = received_bytes(plan)
    sent = sent_bytes(plan)
    least = lower_bound_bytes(plan)
    routes = [plan.route(leaf) for leaf in range(len(plan.names))]
    everything = sum(math.prod(route.src.shape) * d.itemsize for route, d in zip(routes, plan.dtypes, strict=True))
    totals = [
        f"a device holds {size(train)} in training and {size(generate)} in generation, {size(shared)} of it shared",
        f"moved {size(sum(received))}; the least possible is {size(sum(least))}; "
        f"gathering everything everywhere would move {size(plan.world * (everything - train))}",
        f"a device receives at most {size(max(received))} and sends at most {size(max(sent))}, "
        f"on average {size(sum(received) / plan.world)}",
    ]
    return "\n".join([*table(head, rows), "", *totals])


def placement(logical: tuple[str, ...], layout: Layout) -> str:
    """The logical axes, each with the mesh axes that split it: "vocab/tp2 embed/dp4"."""
    sizes = dict(zip(meshes.AXES, layout.sizes, strict=True))
    over = ["".join(f"/{_SHORTS[axis]}{sizes[axis]}" for axis in axes) for axes in layout.spec]
    return " ".join(axis + split for axis, split in zip(logical, over, strict=True)) or "-"


def way(route: Route) -> str:
    """The route in words: "alias", "local", "gather dp4" or "pieces"."""
    sizes = dict(zip(meshes.AXES, route.src.sizes, strict=True))
    return " ".join([route.way, *(f"{_SHORTS[axis]}{sizes[axis]}" for axis in route.axes)])


def size(nbytes: float) -> str:
    """Bytes with three figures and a decimal unit: "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB" if nbytes < 999.5 else f"{nbytes:.0f} TB"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table whose columns are as wide as they must be."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return [line.rstrip() for line in [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]]
