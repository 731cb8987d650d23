"""Programs on a mesh: one program for all devices, each of which computes with its shards.

A program is traced as the rank at the origin of the mesh sees it. Where it stands is an argument, one number an axis,
which `shard_map` gives each device; its collectives name the axes they go over. A `Layout` is a `PartitionSpec`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import AXES, Mesh, combinations
from funrl.mesh.rules import Layout
from funrl.xla.compiled import to_jax
from funrl.xla.errors import XlaError
from funrl.xla.interpret import lowered
from funrl.xla.operators.collectives import GROUP_SEPARATOR
from funrl.xla.trace import trace_program


def traced_mesh(sizes: Mapping[str, int], indices: Mapping[str, Tensor]) -> Mesh:
    """The mesh that a program sees: its groups are named by their axes, and its place is an argument.

    Args:
      sizes: of `AXES`.
      indices: place on each axis.
    """
    sizes = dict(sizes)
    groups = {axes: GROUP_SEPARATOR.join(axes) for axes in combinations(sizes)}
    return Mesh(sizes, rank=0, groups=groups, indices=dict(indices))


def spec_of(layout: Layout) -> PartitionSpec:
    """A layout as JAX writes it.

    Raises:
      XlaError: a dim does not divide over the devices that split it.
    """
    sizes = dict(zip(AXES, layout.sizes, strict=True))
    for length, axes in zip(layout.shape, layout.spec, strict=True):
        parts = math.prod(sizes[axis] for axis in axes)
        if length % parts:
            raise XlaError(f"a dim of size {length} does not divide over {parts} devices of {', '.join(axes)}")
    return PartitionSpec(*(axes or None for axes in layout.spec))


def devices_of_mesh(sizes: Mapping[str, int]) -> jax.sharding.Mesh:
    """The first devices of this process as a mesh.

    Raises:
      XlaError: there are fewer.
    """
    shape = tuple(sizes[axis] for axis in AXES)
    count = math.prod(shape)
    if len(jax.devices()) < count:
        devices = f"{len(jax.devices())} {jax.devices()[0].platform} devices"
        raise XlaError(f"the mesh has {count} devices, JAX has {devices}; on a CPU XLA_FLAGS may ask for more")
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(shape), AXES)


class MeshProgram:
    """A function of shards, compiled for all devices of a mesh.

    Attributes:
      text: of the compiled program.
    """

    def __init__(
        self,
        make: Callable[[Mesh], Callable[..., trees.Tree]],
        sizes: Mapping[str, int],
        args: Sequence[trees.Tree],
        given: Sequence[trees.Tree],
        results: Callable[[trees.Tree], trees.Tree],
    ) -> None:
        """Trace and compile.

        Args:
          make: mesh -> the function of a rank's shards.
          sizes: of the mesh's axes.
          args: examples of the whole arguments.
          given: their PartitionSpecs, in trees of the same structure.
          results: tree of the results, with a 0 for each leaf -> their PartitionSpecs.

        Raises:
          XlaError: the function cannot be lowered, or an argument does not divide.
        """
        specs = [spec for _, spec in trees.named(tuple(given))]
        leaves = trees.leaves(tuple(args))
        local = [
            torch.empty(_shard_shape(x, spec, sizes), dtype=x.dtype) for x, spec in zip(leaves, specs, strict=True)
        ]
        place = {axis: torch.zeros((), dtype=torch.int64) for axis in AXES}

        def run(indices: Mapping[str, Tensor], *shards: Any) -> trees.Tree:
            return make(traced_mesh(sizes, indices))(*shards)

        program = trace_program(run, place, *trees.fill(tuple(args), local), name="a program on a mesh")
        self._results = program.results
        body = lowered(program)
        self._specs = specs
        self._mesh = devices_of_mesh(sizes)
        axes = sorted(AXES)  # as a tree has its names

        def on_device(*shards: jax.Array) -> tuple[jax.Array, ...]:
            return body(*(lax.axis_index(axis).astype(jnp.int64) for axis in axes), *shards)

        out = tuple(spec for _, spec in trees.named(results(program.results)))
        with jax.enable_x64(True):
            mapped = jax.shard_map(on_device, mesh=self._mesh, in_specs=tuple(specs), out_specs=out, check_vma=False)
            self._run = jax.jit(mapped).lower(*self._placed(leaves)).compile()
        self.text = self._run.as_text()

    def __call__(self, *args: trees.Tree) -> trees.Tree:
        """The whole results for these whole arguments."""
        with jax.enable_x64(True):
            results = self._run(*self._placed(trees.leaves(args)))
            return trees.fill(self._results, [torch.from_numpy(np.array(x)) for x in results])

    def _placed(self, leaves: Sequence[Tensor]) -> list[jax.Array]:
        shardings = [NamedSharding(self._mesh, spec) for spec in self._specs]
        return [jax.device_put(to_jax(x), sharding) for x, sharding in zip(leaves, shardings, strict=True)]


def _shard_shape(x: Tensor, spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a device's part of a tensor."""
    shape = list(x.shape)
    for dim, axes in enumerate(spec):
        over = (axes,) if isinstance(axes, str) else tuple(axes or ())
        parts = math.prod(sizes[axis] for axis in over)
        if shape[dim] % parts:
            raise XlaError(f"an argument of shape {list(x.shape)} does not divide over {parts} devices in dim {dim}")
        shape[dim] //= parts
    return tuple(shape)
