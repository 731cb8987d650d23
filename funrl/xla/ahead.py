"""Compilation ahead of time, for accelerators that are not here: what a program takes of a chip, and what it sends.

libtpu knows the topologies of TPUs, and compiles for them on any machine.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import AXES
from funrl.xla.errors import XlaError
from funrl.xla.meshes import ShardedFunction
from funrl.xla.operators import JAX_DTYPES

# libtpu asks no machine of a cloud, and waits for no other process, for it opens no chip.
COMPILE_ONLY = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
ACCELERATORS = {"v5e": "v5litepod", "v6e": "v6e", "v5p": "v5p"}  # as libtpu calls them
COLLECTIVES = {name: name.replace("_", "-") for name in ("all_gather", "reduce_scatter", "all_to_all")}
COLLECTIVES |= dict.fromkeys(("psum", "pmax"), "all-reduce")


class Sent(NamedTuple):
    """Collectives of one kind over the same axes, on one chip.

    Attributes:
      kind: such as "all-gather".
      axes: of the mesh.
      count: how many, those of a loop as often as it turns.
      nbytes: of the larger side of each, the argument or the result, together.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: int


class AheadProgram(NamedTuple):
    """A program that was compiled ahead of time.

    Attributes:
      name: of the program.
      seconds: of compiling it.
      arguments, results, aliased, temporary, code: bytes of a chip; results that take over arguments are aliased.
      flops: of matrix products on a chip. Rows of experts count where their experts are, evenly spread.
      attention: those of `flops` in attention's kernel. It computes whole tiles, and in a gradient the result again.
      sent: collectives as the program calls them.
    """

    name: str
    seconds: float
    arguments: int
    results: int
    aliased: int
    temporary: int
    code: int
    flops: int
    attention: int
    sent: tuple[Sent, ...]

    @property
    def beside_arguments(self) -> int:
        """Bytes that it takes while it runs, beside its arguments."""
        return self.results - self.aliased + self.temporary


def topology_mesh(target: str, sizes: Mapping[str, int]) -> jax.sharding.Mesh:
    """The chips of a target as a mesh.

    Args:
      target: such as "v5e:4x4".
      sizes: of the mesh's axes.

    Raises:
      XlaError: libtpu is absent or does not know the target, or the mesh has another number of chips.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise XlaError("libtpu is not installed: pip install libtpu")
    kind = target.partition(":")[0]
    if kind not in ACCELERATORS:
        raise XlaError(f"target {target!r} begins with none of {', '.join(ACCELERATORS)}, such as v5e:4x4")
    for name, value in COMPILE_ONLY.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{ACCELERATORS[kind]}-8")
    try:
        chips = topologies.get_topology_desc(platform="tpu", topology_name=target).devices
    except Exception as error:  # of libtpu, of any type
        raise XlaError(f"libtpu does not compile for {target}: {str(error).splitlines()[0]}") from error
    shape = tuple(sizes[axis] for axis in AXES)
    if math.prod(shape) != len(chips):
        raise XlaError(f"{target} has {len(chips)} devices, the mesh has {math.prod(shape)}")
    return jax.sharding.Mesh(np.array(chips).reshape(shape), AXES)


def struct_of(x: Tensor | jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """An array without memory, of the shape and dtype of another, which is split like this over a mesh."""
    dtype = JAX_DTYPES[x.dtype] if isinstance(x, Tensor) else x.dtype
    return jax.ShapeDtypeStruct(tuple(x.shape), dtype, sharding=NamedSharding(mesh, spec))


def compile_for_chips(
    function: ShardedFunction,
    args: tuple[trees.Tree, ...],
    mesh: jax.sharding.Mesh,
    note: Callable[[str], None],
) -> tuple[AheadProgram, trees.Tree]:
    """Compile a function of shards for the chips of a mesh.

    Args:
      function: of the shards. Chips along `expert` share the experts: each has the rows of all of them, and computes
        those of its experts.
      args: whole arguments, which need no memory.
      mesh: of the chips.
      note: receives a line about what was done.

    Returns: the program, and the shapes and dtypes of its results.
    """
    start = time.perf_counter()
    with jax.enable_x64(True):
        mapped = function.mapped(args, mesh)
        structs = [struct_of(x, spec, mesh) for x, spec in zip(trees.leaves(args), mapped.given, strict=True)]
        traced = jax.jit(mapped.run, donate_argnums=mapped.donated).trace(*structs)
        compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    counts = list(equations_of(traced.jaxpr.jaxpr))
    ranks = mesh.shape["expert"]
    program = AheadProgram(
        name=function.name,
        seconds=time.perf_counter() - start,
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=sum(product_flops(equation, ranks) * turns for equation, turns in counts),
        attention=sum(product_flops(equation) * turns for equation, turns in counts if is_attention(equation)),
        sent=sent_by(counts),
    )
    note(f"{program.name}: compiled in {program.seconds:.0f} s")
    return program, trees.fill(mapped.program.results, jax.tree.leaves(traced.out_info))


def equations_of(jaxpr: Any, turns: int = 1) -> Iterator[tuple[Any, int]]:
    """The equations of a program and of the functions that it calls, each with how often a TPU computes it.

    A kernel is one equation.
    """
    for equation in jaxpr.eqns:
        yield equation, turns
        if equation.primitive.name != "pallas_call":
            inside = turns * equation.params["length"] if equation.primitive.name == "scan" else turns
            for inner in _functions_of(equation.params):
                yield from equations_of(inner, inside)


def _functions_of(params: Mapping[str, Any]) -> Iterator[Any]:
    """The functions that an equation with these parameters calls; of those for different platforms a TPU's."""
    platforms = params.get("branches_platforms") or ()  # None among them is all others
    branch = next((i for i, names in enumerate(platforms) if names is None or "tpu" in names), None)
    for value in params.values():
        for i, part in enumerate(value if isinstance(value, tuple | list) else (value,)):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns") and branch in (None, i):
                yield inner


def is_attention(equation: Any) -> bool:
    """True of splash attention's kernels."""
    return equation.primitive.name == "pallas_call" and (equation.params["name"] or "").startswith("splash")


def _kernel_flops(equation: Any, expert_ranks: int) -> int:
    """FLOPs of a kernel.

    Of splash attention those are the blocks on and below the diagonal; with a window it skips more.
    """
    mapping = equation.params["grid_mapping"]
    if mapping.num_dynamic_grid_bounds:  # sums by group, over tiles of the rows of groups
        return equation.params["cost_estimate"].flops // expert_ranks
    turns = math.prod(mapping.grid)
    if is_attention(equation):
        heads, rows, columns = mapping.grid
        turns = heads * rows * (columns + 1) // 2
    return turns * sum(product_flops(x) * n for x, n in equations_of(equation.params["jaxpr"]))


def product_flops(equation: Any, expert_ranks: int = 1) -> int:
    """FLOPs of a matrix product, or of a kernel's; 0 of another equation.

    Args:
      expert_ranks: chips that share the experts.
    """
    if equation.primitive.name == "pallas_call":
        return _kernel_flops(equation, expert_ranks)
    if equation.primitive.name == "ragged_dot_general":
        rows, columns = equation.invars[0].aval.shape[0], equation.invars[1].aval.shape[-1]
        weights = equation.invars[0].aval.shape[1] * columns
        summed = equation.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
        groups = 1 if summed else equation.invars[2].aval.shape[0]  # XLA multiplies all rows for each group's sum
        return 2 * rows * weights * groups // (expert_ranks if summed else 1)
    if equation.primitive.name != "dot_general":
        return 0
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def sent_by(counts: Sequence[tuple[Any, int]]) -> tuple[Sent, ...]:
    """The collectives among equations, by kind and axes of more than one device."""
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for equation, turns in counts:
        kind = COLLECTIVES.get(equation.primitive.name)
        if kind is not None:
            axes = equation.params.get("axes", equation.params.get("axis_name"))
            key = kind, (axes,) if isinstance(axes, str) else tuple(axes)
            sides = ([x.aval for x in side] for side in (equation.invars, equation.outvars))
            nbytes = max(sum(math.prod(x.shape) * x.dtype.itemsize for x in side) for side in sides)
            count, total = totals.get(key, (0, 0))
            totals[key] = count + turns, total + turns * nbytes
    return tuple(Sent(*key, *total) for key, total in sorted(totals.items()))
