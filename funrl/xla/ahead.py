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

from funrl.mesh.mesh import AXES
from funrl.xla.errors import XlaError
from funrl.xla.operators.result import JAX_DTYPES

# libtpu asks no machine of a cloud, and waits for no other process, for it opens no chip.
COMPILE_ONLY = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
ACCELERATORS = {"v5e": "v5litepod", "v6e": "v6e", "v5p": "v5p"}  # as libtpu calls them
COLLECTIVES = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}


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
      flops: of matrix products on a chip.
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
    sent: tuple[Sent, ...]

    @property
    def beside_arguments(self) -> int:
        """Bytes that it takes while it runs, beside its arguments."""
        return self.results - self.aliased + self.temporary


def libtpu_problem() -> str | None:
    """Reason why nothing can be compiled for a TPU here; None: it can."""
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install libtpu"
    return None


def topology_mesh(target: str, sizes: Mapping[str, int]) -> jax.sharding.Mesh:
    """The chips of a target as a mesh.

    Args:
      target: such as "v5e:4x4".
      sizes: of the mesh's axes.

    Raises:
      XlaError: libtpu is absent or does not know the target, or the mesh has another number of chips.
    """
    if (problem := libtpu_problem()) is not None:
        raise XlaError(problem)
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


def compiled_ahead(
    run: Callable[..., Any],
    leaves: Sequence[Tensor],
    specs: Sequence[PartitionSpec],
    mesh: jax.sharding.Mesh,
    *,
    name: str,
    donated: Sequence[int] = (),
) -> tuple[AheadProgram, list[jax.ShapeDtypeStruct]]:
    """Compile a function of whole arrays for the chips of a mesh.

    Args:
      run: the function; it calls `shard_map`.
      leaves: of the shapes and dtypes of its arguments.
      specs: of the arguments.
      mesh: of the chips.
      name: of the program.
      donated: numbers of the arguments whose memory the results may take over.

    Returns: the program, and the shapes and dtypes of its results.
    """
    structs = [
        jax.ShapeDtypeStruct(tuple(x.shape), JAX_DTYPES[x.dtype], sharding=NamedSharding(mesh, spec))
        for x, spec in zip(leaves, specs, strict=True)
    ]
    start = time.perf_counter()
    traced = jax.jit(run, donate_argnums=tuple(donated)).trace(*structs)
    compiled = traced.lower().compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None
    counts = list(equations_of(traced.jaxpr.jaxpr))
    program = AheadProgram(
        name=name,
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=sum(product_flops(equation) * turns for equation, turns in counts),
        sent=sent_by(counts),
    )
    return program, jax.tree.leaves(traced.out_info)


def equations_of(jaxpr: Any, turns: int = 1) -> Iterator[tuple[Any, int]]:
    """The equations of a program and of the functions that it calls, each with how often it is computed."""
    for equation in jaxpr.eqns:
        yield equation, turns
        inside = turns * _repetitions(equation)
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from equations_of(inner, inside)


def _repetitions(equation: Any) -> int:
    """Times that an equation computes the functions that it calls.

    Of splash attention those are the blocks on and below the diagonal; with a window it skips more.
    """
    if equation.primitive.name == "scan":
        return equation.params["length"]
    if equation.primitive.name != "pallas_call":
        return 1
    grid = equation.params["grid_mapping"].grid
    if not equation.params["name"].startswith("splash"):
        return math.prod(grid)
    heads, rows, columns = grid
    return heads * rows * (columns + 1) // 2


def product_flops(equation: Any) -> int:
    """FLOPs of a matrix product; 0 of another equation."""
    if equation.primitive.name == "ragged_dot_general":
        rows, groups = (x.aval.shape for x in equation.invars[:2])
        return 2 * rows[0] * math.prod(groups[1:])
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
