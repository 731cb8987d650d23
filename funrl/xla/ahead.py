"""Compilation ahead of time, for accelerators that are not here: the memory that a program takes of a chip.

libtpu knows the topologies of TPUs, and compiles for them on any machine.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

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


class AheadProgram(NamedTuple):
    """A program that was compiled ahead of time.

    Attributes:
      name: of the program.
      seconds: of compiling it.
      arguments, results, aliased, temporary, code: bytes of a chip; results that take over arguments are aliased.
    """

    name: str
    seconds: float
    arguments: int
    results: int
    aliased: int
    temporary: int
    code: int

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
        traced, results = trace_for_chips(function, args, mesh)
        memory = traced.lower().compile().memory_analysis()
    assert memory is not None
    program = AheadProgram(
        name=function.name,
        seconds=time.perf_counter() - start,
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
    )
    note(f"{program.name}: compiled in {program.seconds:.0f} s")
    return program, results


def trace_for_chips(
    function: ShardedFunction, args: tuple[trees.Tree, ...], mesh: jax.sharding.Mesh
) -> tuple[jax.stages.Traced, trees.Tree]:
    """Trace a function of shards for the chips of a mesh.

    Args: as of `compile_for_chips`.

    Returns: the traced function, and the shapes and dtypes of its results.
    """
    mapped = function.mapped(args, mesh)
    structs = [struct_of(x, spec, mesh) for x, spec in zip(trees.leaves(args), mapped.given, strict=True)]
    traced = jax.jit(mapped.run, donate_argnums=mapped.donated).trace(*structs)
    return traced, trees.fill(mapped.program.results, jax.tree.leaves(traced.out_info))
