"""Programs on a mesh of devices: one program for all of them; each computes with its shards.

A program is traced as the rank at the origin of the mesh sees it. Where it stands is an argument, one number an axis,
which `shard_map` gives each device; its collectives name the axes they go over. A `Layout` is a `PartitionSpec`. One
device is a mesh whose axes all have size 1.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from funrl.xla.copies import HostCopies
from funrl.xla.errors import XlaError
from funrl.xla.interpret import lowered
from funrl.xla.operators import GROUP_SEPARATOR, HOST_DTYPES
from funrl.xla.trace import Program, trace_program

_log = logging.getLogger(__name__)
# XLA on a CPU starts what is independent at the same time, on as many threads as there are cores. Where devices wait
# for each other in different collectives no thread is left; so each runs its program in one order there.
IN_ORDER = "xla_cpu_enable_concurrency_optimized_scheduler"


def traced_mesh(sizes: Mapping[str, int], indices: Mapping[str, Tensor] | None = None) -> Mesh:
    """The mesh that a program sees: its groups are named by their axes, and its place is an argument.

    Args:
      sizes: of `AXES`.
      indices: place on each axis; None: at the origin.
    """
    sizes = dict(sizes)
    indices = indices or {axis: torch.zeros((), dtype=torch.int64) for axis in sizes}
    groups = {axes: GROUP_SEPARATOR.join(axes) for axes in combinations(sizes)}
    return Mesh(sizes, rank=0, groups=groups, indices=dict(indices))


def spec_of(layout: Layout) -> PartitionSpec:
    """A layout as JAX writes it.

    Raises:
      XlaError: a dim does not divide over the devices that split it.
    """
    spec = PartitionSpec(*(axes or None for axes in layout.spec))
    shard_shape(layout.shape, spec, dict(zip(AXES, layout.sizes, strict=True)))
    return spec


def shard_shape(shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a device's part of an array.

    Raises:
      XlaError: a dim does not divide over the devices that split it.
    """
    shard = list(shape)
    for dim, axes in enumerate(spec):
        over = (axes,) if isinstance(axes, str) else tuple(axes or ())
        parts = math.prod(sizes[axis] for axis in over)
        if shard[dim] % parts:
            raise XlaError(
                f"dim {dim} of shape {list(shape)} does not divide over {parts} devices of {', '.join(over)}"
            )
        shard[dim] //= parts
    return tuple(shard)


def devices_of_mesh(sizes: Mapping[str, int]) -> jax.sharding.Mesh:
    """The first devices of this process as a mesh.

    Where JAX has not begun, a CPU gets as many devices as the mesh has, and XLA_FLAGS of this process the flag
    `IN_ORDER` if they are several.

    Raises:
      XlaError: there are fewer.
    """
    shape = tuple(sizes[axis] for axis in AXES)
    count = math.prod(shape)
    flags = os.environ.get("XLA_FLAGS", "")
    if count > 1 and IN_ORDER not in flags:  # which XLA reads once, when JAX begins
        os.environ["XLA_FLAGS"] = f"{flags} --{IN_ORDER}=false"
    if "xla_force_host_platform_device_count" not in flags:
        with contextlib.suppress(RuntimeError):  # JAX has begun, with a number of devices that stays
            before: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
            jax.config.update("jax_num_cpu_devices", max(count, before))
    if len(jax.devices()) < count:
        devices = f"{len(jax.devices())} {jax.devices()[0].platform} devices"
        raise XlaError(
            f"the mesh has {count} devices, and JAX had begun with {devices} before; on a CPU "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} gives it as many"
        )
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(shape), AXES)


class DeviceCopies(HostCopies):
    """Copies of the host's tensors on the devices of a mesh of JAX, split by PartitionSpecs."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        """Begin without a copy."""
        super().__init__(lambda x, spec: split_over(x, mesh, spec), to_host)
        self.mesh = mesh


def split_over(x: Tensor, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> jax.Array:
    """A copy of a tensor, split over the devices of a mesh."""
    return jax.device_put(to_jax(x), NamedSharding(mesh, spec), may_alias=False)


def to_jax(x: Tensor) -> jax.Array:
    """A tensor as an array of JAX, which shares its memory where it can."""
    return jax.dlpack.from_dlpack(x.detach().contiguous())


def to_host(x: jax.Array) -> Tensor:
    """A tensor with the numbers of an array that may be split over devices."""
    whole = np.array(x)
    if x.dtype == jnp.bfloat16:  # which numpy has from JAX, and torch does not take from numpy
        return torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(whole)


def whole_on_all(*trees_of_tensors: trees.Tree) -> tuple[trees.Tree, ...]:
    """PartitionSpecs of trees that every device has whole."""
    return trees.map(lambda _: PartitionSpec(), trees_of_tensors)


class MappedFunction(NamedTuple):
    """A function of whole arrays, traced for arguments of some shapes.

    Attributes:
      run: the function; in a `MeshProgram` a `jax.stages.Compiled`.
      given, out: PartitionSpecs of the leaves of its arguments and results.
      donated: numbers of the leaves whose memory the results may take over.
      program: of a device; its graph has a layer as one operator.
    """

    run: Any
    given: tuple[PartitionSpec, ...]
    out: tuple[PartitionSpec, ...]
    donated: tuple[int, ...]
    program: Program


class ShardedFunction(NamedTuple):
    """A function of shards, the same for all devices of a mesh.

    Attributes:
      name: for messages.
      make: mesh -> the function of a rank's shards, pure but for its donated arguments; see `trace_program`.
      given: whole arguments -> their PartitionSpecs, in trees of the same structure.
      results: (tree of the results, with a 0 for each leaf; PartitionSpecs of the arguments) -> their PartitionSpecs.
      donated: numbers of the arguments that it may write to, and whose memory the results may take over.
    """

    name: str
    make: Callable[[Mesh], Callable[..., trees.Tree]]
    given: Callable[..., Sequence[trees.Tree]] = whole_on_all
    results: Callable[[trees.Tree, Sequence[trees.Tree]], trees.Tree] = lambda tree, _: whole_on_all(tree)[0]
    donated: tuple[int, ...] = ()

    def mapped(self, args: tuple[trees.Tree, ...], mesh: jax.sharding.Mesh) -> MappedFunction:
        """The function of whole arrays over a mesh, traced for arguments of these shapes.

        Raises:
          XlaError: the function cannot be lowered, or an argument does not divide.
        """
        sizes = dict(mesh.shape)
        specs = tuple(self.given(*args))
        given = tuple(spec for _, spec in trees.named(specs))
        shards = [
            torch.empty(shard_shape(x.shape, spec, sizes), dtype=HOST_DTYPES.get(x.dtype, x.dtype))
            for x, spec in zip(trees.leaves(args), given, strict=True)
        ]
        place = {axis: torch.zeros((), dtype=torch.int64) for axis in AXES}

        def run(indices: Mapping[str, Tensor], *shards: trees.Tree) -> trees.Tree:
            own = [trees.map(torch.clone, x) if n in self.donated else x for n, x in enumerate(shards)]
            return self.make(traced_mesh(sizes, indices))(*own)

        program = trace_program(run, place, *trees.fill(args, shards), name=self.name)
        body = lowered(program)
        out = tuple(spec for _, spec in trees.named(self.results(program.results, specs)))

        def of_device(*leaves: jax.Array) -> tuple[jax.Array, ...]:
            place = (lax.axis_index(axis).astype(jnp.int64) for axis in sorted(AXES))  # as leaves of a dict
            return body(*place, *leaves)

        mapped = jax.shard_map(of_device, mesh=mesh, in_specs=given, out_specs=out, check_vma=False)
        numbers = trees.leaves([trees.map(lambda _, n=n: n, x) for n, x in enumerate(args)])
        donated = tuple(i for i, n in enumerate(numbers) if n in self.donated)
        return MappedFunction(mapped, given, out, donated, program)


class MeshProgram:
    """A function of shards for all devices of a mesh, traced and compiled once a shape.

        program = MeshProgram(ShardedFunction("sum", lambda mesh: lambda x, y: x + y), copies)
        program(x, y)  # a tensor; `arrays` leaves it on the devices

    Attributes:
      compiled: the programs so far, by structure, shapes and dtypes of their arguments.
    """

    def __init__(
        self, function: ShardedFunction, copies: DeviceCopies, note: Callable[[str], None] = _log.info
    ) -> None:
        """Begin without a compiled program.

        Args:
          function: to compile.
          copies: on the devices to run on.
          note: receives how long programs took to be made.
        """
        self.function = function
        self.copies = copies
        self.note = note
        self.compiled: dict[Any, MappedFunction] = {}

    def __call__(self, *args: trees.Tree) -> trees.Tree:
        """The results for these whole arguments, as tensors.

        Raises:
          XlaError: the function cannot be lowered, or an argument does not divide.
        """
        return self._run(args, self.copies.fetched)

    def arrays(self, *args: trees.Tree) -> trees.Tree:
        """The results as arrays, which stay on the devices, for whole tensors or for arrays that lie there already.

        Raises:
          XlaError: as a call.
        """
        return self._run(args, lambda x, _: x)

    def _run(self, args: tuple[trees.Tree, ...], result: Callable[[jax.Array, PartitionSpec], Any]) -> trees.Tree:
        leaves = trees.leaves(args)
        key = str(trees.map(lambda _: 0, args)), tuple((tuple(x.shape), x.dtype) for x in leaves)
        with jax.enable_x64(True):
            if key not in self.compiled:
                start = time.perf_counter()
                mapped = self.function.mapped(args, self.copies.mesh)
                traced = time.perf_counter()
                arrays = self._sent(leaves, mapped.given)
                run = jax.jit(mapped.run, donate_argnums=mapped.donated).lower(*arrays).compile()
                times = f"traced in {traced - start:.1f} s, compiled in {time.perf_counter() - traced:.1f} s"
                self.note(f"XLA, {self.function.name}: {len(mapped.program.graph.graph.nodes)} operators, {times}")
                self.compiled[key] = mapped._replace(run=run)
            mapped = self.compiled[key]
            arrays = mapped.run(*self._sent(leaves, mapped.given, mapped.donated))
            return trees.fill(mapped.program.results, map(result, arrays, mapped.out))

    def _sent(
        self, leaves: Sequence[Any], specs: Sequence[PartitionSpec], donated: Sequence[int] = ()
    ) -> list[jax.Array]:
        """Leaves on the devices; the copies of donated leaves are forgotten."""
        return [
            x if isinstance(x, jax.Array) else self.copies.sent(x, spec, keep=i not in donated)
            for i, (x, spec) in enumerate(zip(leaves, specs, strict=True))
        ]
