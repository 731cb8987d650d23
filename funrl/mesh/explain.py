"""What a pair of layouts costs, before anything is started.

    python -m funrl.mesh.explain --model=DIR_OR_CONFIG --mesh=dp4,tp2 --generate_mesh=dp2,tp4

prints a row for every kind of tensor: how it lies in training and in generation, its bytes on a device in both, and
what moves from one to the other by which way; then the totals. It starts no process and loads no weight.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from absl import flags

from funrl import trees
from funrl.mesh import mesh as meshes
from funrl.mesh import rules
from funrl.mesh.mesh import SHORT, MeshError, parse
from funrl.mesh.picture import draw
from funrl.mesh.plan import RANKS_PER_NODE, Plan, Route, lower_bound_bytes, plan, received_bytes, sent_bytes, volume
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


def kinds(made: Plan, axes: dict[str, tuple[str, ...]]) -> list[Kind]:
    """The kinds of tensors of a plan, in the order of the tree; `axes` are the logical axes by leaf name."""
    groups: dict[tuple[str, Layout, Layout], list[int]] = {}
    for leaf, name in enumerate(made.names):
        route = made.route(leaf)
        groups.setdefault((re.sub(r"(?<![^/])\d+(?![^/])", "*", name), route.src, route.dst), []).append(leaf)
    found = []
    for (name, src, dst), leaves in groups.items():
        itemsize = sum(made.dtypes[leaf].itemsize for leaf in leaves)
        held = volume(src.box(0)) * itemsize, volume(dst.box(0)) * itemsize  # no part is larger than the first
        logical = axes[made.names[leaves[0]]]
        moved = sum(received_bytes(made, leaves))
        found.append(Kind(name, logical, len(leaves), leaves[0], made.route(leaves[0]), held, moved))
    return found


def explain(made: Plan, axes: dict[str, tuple[str, ...]]) -> str:
    """The table of a plan and its totals as text. Bytes on a device are those of the device that holds most."""
    head = ("tensor", "shape", "train", "generate", "train/device", "generate/device", "moved", "way")
    found = kinds(made, axes)
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
        for kind in found
    ]
    train, generate = (sum(kind.held[phase] for kind in found) for phase in (0, 1))
    shared = sum(kind.held[0] for kind in found if kind.route.way == "alias")
    received, sent, least = received_bytes(made), sent_bytes(made), lower_bound_bytes(made)
    routes = [made.route(leaf) for leaf in range(len(made.names))]
    everything = sum(math.prod(route.src.shape) * d.itemsize for route, d in zip(routes, made.dtypes, strict=True))
    totals = [
        f"a device holds {size(train)} in training and {size(generate)} in generation, {size(shared)} of it shared",
        f"moved {size(sum(received))}; the least possible is {size(sum(least))}; "
        f"gathering everything everywhere would move {size(made.world * (everything - train))}",
        f"a device receives at most {size(max(received))} and sends at most {size(max(sent))}, "
        f"on average {size(sum(received) / made.world)}",
    ]
    return "\n".join([*table(head, rows), "", *totals])


def placement(logical: tuple[str, ...], layout: Layout) -> str:
    """The logical axes, each with the mesh axes that split it: "vocab/tp2 embed/dp4"."""
    sizes = dict(zip(meshes.AXES, layout.sizes, strict=True))
    over = ["".join(f"/{_SHORTS[axis]}{sizes[axis]}" for axis in axes) for axes in layout.spec]
    return " ".join(axis + split for axis, split in zip(logical, over, strict=True)) or "-"


def way(route: Route) -> str:
    """How it goes: "alias", "local", "gather dp4" or "pieces"."""
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


def define_flags(table: flags.FlagValues) -> None:
    model = "Hugging Face directory or config.json, of which only config.json is read; it must be given"
    flags.DEFINE_string("model", None, model, table)
    flags.DEFINE_string("mesh", "dp1", "devices in training, such as dp4,tp2", table)
    flags.DEFINE_string("generate_mesh", None, "the same devices in generation; the default is --mesh", table)
    flags.DEFINE_bool("fsdp", False, "training shards every weight over data too", table)
    flags.DEFINE_enum("dtype", None, ["float64", "float32", "bfloat16", "float16"], "default: the model's", table)
    near = "neighbouring ranks that are near each other"
    flags.DEFINE_integer("ranks_per_node", RANKS_PER_NODE, near, lower_bound=1, flag_values=table)
    flags.DEFINE_string("picture", None, "an SVG file to draw what moves into, for at most 16 devices", table)


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns the exit status: 2 where it asks for what cannot be."""
    values = flags.FlagValues()
    define_flags(values)
    if any(a in ("--help", "-h", "-help", "--helpfull", "--helpshort") for a in argv[1:]):
        print(f"{__doc__}{values.module_help(values.find_module_defining_flag('model'))}")
        return 0
    try:
        rest = values(list(argv))[1:]
        if rest:
            raise ValueError(f"{rest[0]!r} is not a flag; flags are written --name=value, see --help")
        if values.model is None:
            raise ValueError("--model=DIR_OR_CONFIG is needed; --help lists all flags")
        print(report(values.model, values.mesh, values.generate_mesh or values.mesh, values.fsdp, values.dtype,
                     values.ranks_per_node, values.picture))  # fmt: skip
    except flags.UnrecognizedFlagError as error:
        return _refuse(f"--{error.flagname} is not a flag; --help lists all flags")
    except (MeshError, ValueError, OSError, flags.Error) as error:
        return _refuse(str(error).removeprefix("flag "))
    return 0


def _refuse(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return 2


def report(
    model: str, mesh: str, generate_mesh: str, fsdp: bool, dtype: str | None, near: int, picture: str | None
) -> str:
    """Everything that the command prints.

    Raises:
      ModelError: the model cannot be read. MeshError: a mesh cannot be built, or a tensor does not lie on it.
    """
    from funrl.models import decoder
    from funrl.models.config import ModelError, config_from_hf

    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        raise ModelError(f"--model={model}: there is no {path}")
    try:
        config = config_from_hf(json.loads(path.read_text()))
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    shapes, logical = decoder.shapes(config), decoder.axes(config)
    start = time.perf_counter()
    train_rules = rules.fully_sharded(rules.STORED) if fsdp else rules.STORED
    src = rules.layouts(shapes, logical, train_rules, parse(mesh))
    dst = rules.layouts(shapes, logical, rules.GENERATE, parse(generate_mesh))
    made = plan(src, dst, getattr(torch, dtype or config.dtype), near)
    seconds = time.perf_counter() - start
    axes: dict[str, tuple[str, ...]] = {}
    trees.map_named(lambda name, _, its: axes.setdefault(name, its), shapes, logical)
    millions = trees.count(shapes) / 1e6
    train = meshes.text(parse(mesh)) + (" fully sharded" if fsdp else "")
    title = f"{config.family}, {millions:,.1f} M parameters in {dtype or config.dtype}, {made.world} devices: "
    title += f"train {train}, generate {meshes.text(parse(generate_mesh))}"
    lines = [title, "", explain(made, axes), f"planned in {seconds:.2f} s"]
    if picture is not None:
        moving = [kind for kind in kinds(made, axes) if kind.route.way != "alias"]
        Path(picture).write_text(draw(made, [kind.leaf for kind in moving], [kind.name for kind in moving]))
        lines.append(f"picture in {picture}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
