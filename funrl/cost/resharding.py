"""Cost of resharding from a training to a generation layout, before anything is started.

    python -m funrl.cost.resharding --model=DIR_OR_CONFIG --mesh=dp4,tp2 --generate_mesh=dp2,tp4

prints a row for every kind of tensor: its layouts in training and in generation, its bytes per device in both, and the
traffic between them by collective; then the totals. It starts no process and loads no weight.
"""

from __future__ import annotations

import json
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
from funrl.mesh.explain import explain, kinds
from funrl.mesh.mesh import MeshError, parse
from funrl.mesh.picture import plan_picture
from funrl.mesh.plan import RANKS_PER_NODE, plan
from funrl.models import decoder_model
from funrl.models.errors import ModelError
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.config import config_from_hf


def define_flags(table: flags.FlagValues) -> None:
    """Define this program's flags."""
    model = "Hugging Face directory or config.json (only config.json is read); required"
    flags.DEFINE_string("model", None, model, table)
    flags.DEFINE_string("mesh", "dp1", "devices in training, such as dp4,tp2", table)
    flags.DEFINE_string("generate_mesh", None, "the same devices in generation; the default is --mesh", table)
    flags.DEFINE_bool("fsdp", False, "training shards every weight over data too", table)
    flags.DEFINE_enum("dtype", None, ["float64", "float32", "bfloat16", "float16"], "default: the model's", table)
    near = "neighbouring ranks on one node"
    flags.DEFINE_integer("ranks_per_node", RANKS_PER_NODE, near, lower_bound=1, flag_values=table)
    flags.DEFINE_string("picture", None, "an SVG file for a picture of the moves, for at most 16 devices", table)


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit status: 2 if the request is impossible."""
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
        generate_mesh = values.generate_mesh or values.mesh
        request = ReshardingRequest(
            model=values.model,
            mesh=values.mesh,
            generate_mesh=generate_mesh,
            fsdp=values.fsdp,
            dtype=values.dtype,
            ranks_per_node=values.ranks_per_node,
            picture=values.picture,
        )
        print(resharding_report(request))
    except flags.UnrecognizedFlagError as error:
        return _refuse(f"--{error.flagname} is not a flag; --help lists all flags")
    except (MeshError, ValueError, OSError, flags.Error) as error:
        return _refuse(str(error).removeprefix("flag "))
    return 0


def _refuse(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return 2


class ReshardingRequest(NamedTuple):
    """Values of the command's flags.

    Attributes:
      model, mesh, generate_mesh: as the flags.
      fsdp: shard every weight over data in training.
      dtype: of the weights; None: the model's.
      ranks_per_node: neighboring ranks of a node.
      picture: an SVG file to write; None: none.
    """

    model: str
    mesh: str
    generate_mesh: str
    fsdp: bool = False
    dtype: str | None = None
    ranks_per_node: int = RANKS_PER_NODE
    picture: str | None = None


def resharding_report(request: ReshardingRequest) -> str:
    """Report of the moves of weights from training to generation, as the command prints it.

    Raises:
      ModelError: the model cannot be read. MeshError: a mesh cannot be built, or a tensor does not divide over it.
    """
    model, mesh, generate_mesh, fsdp, dtype, ranks_per_node, picture = request
    folder = hf.find_directory(model)
    path = folder / "config.json" if folder.is_dir() else folder
    if not path.is_file():
        raise ModelError(f"--model={model}: there is no {path}")
    try:
        config = config_from_hf(json.loads(path.read_text()))
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    built = decoder_model(config)
    shapes = built.shapes
    logical = built.axes
    start = time.perf_counter()
    train_rules = rules.fully_sharded(rules.STORED) if fsdp else rules.STORED
    src = rules.layouts(shapes, logical, train_rules, parse(mesh))
    dst = rules.layouts(shapes, logical, rules.GENERATE, parse(generate_mesh))
    transfer = plan(src, dst, getattr(torch, dtype or config.source.dtype), ranks_per_node)
    seconds = time.perf_counter() - start
    axes: dict[str, tuple[str, ...]] = {}
    trees.map_named(lambda name, _, its: axes.setdefault(name, its), shapes, logical)
    millions = trees.count(shapes) / 1e6
    train = meshes.text(parse(mesh)) + (" fully sharded" if fsdp else "")
    title = f"{config.source.family}, {millions:,.1f} M parameters in {dtype or config.source.dtype}, "
    title += f"{transfer.world} devices: train {train}, generate {meshes.text(parse(generate_mesh))}"
    lines = [title, "", explain(transfer, axes), f"planned in {seconds:.2f} s"]
    if picture is not None:
        moving = [kind for kind in kinds(transfer, axes) if kind.route.way != "alias"]
        Path(picture).write_text(plan_picture(transfer, [kind.leaf for kind in moving], [kind.name for kind in moving]))
        lines.append(f"picture in {picture}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
