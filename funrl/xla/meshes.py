"""Programs on a mesh: one program for all devices, each of which computes with its shards.

A program is traced as the rank at the origin of the mesh sees it. Where it stands is an argument, one number an axis,
which `shard_map` gives each device; its collectives name the axes they go over. A `Layout` is a `PartitionSpec`.
"""

from __future__ import annotations

import contextlib
import functools
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
from torch.utils.weak import WeakTensorKeyDictionary

from funrl import trees
from funrl.mesh.mesh import AXES, Mesh, combinations
from funrl.mesh.rules import Layout
from funrl.xla.compiled import Timed, signature, to_jax, torch_dtype
from funrl.xla.errors import XlaError
from funrl.xla.interpret import lowered
from funrl.xla.operators.collectives import GROUP_SEPARATOR
from funrl.xla.trace import Program, trace_program

_log = logging.getLogger(__name__)
# XLA on a CPU starts what is independent at the same time, on as many threads as there are cores. Where devices wait
# for each other in different collectives no thread is left; so each runs its program in one order there.
IN_ORDER = "xla_cpu_enable_concurrency_optimized_scheduler"


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

    Where JAX has not begun, a CPU gets as many devices, and XLA_FLAGS of this process the flag `IN_ORDER`.

    Raises:
      XlaError: there are fewer.
    """
    shape = tuple(sizes[axis] for axis in AXES)
    count = math.prod(shape)
    flags = os.environ.get("XLA_FLAGS", "")
    if IN_ORDER not in flags:  # which XLA reads once, when JAX begins
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


@functools.cache
def copies_on(sizes: tuple[tuple[str, int], ...]) -> DeviceCopies:
    """The copies on the devices of a mesh of these sizes; one record in a process, for all that computes there."""
    return DeviceCopies(devices_of_mesh(dict(sizes)))


class DeviceCopies:
    """Copies, on the devices of a mesh, of the host's tensors.

    A copy stays as long as its tensor, and is made anew where that has changed. So weights are sent once, and those
    that a program has made not at all. No other array shares the memory of a copy, so that a program may take it over.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        """Begin without a copy."""
        self.mesh = mesh
        self._copies: Any = WeakTensorKeyDictionary()

    def sent(self, x: Tensor, spec: PartitionSpec) -> jax.Array:
        """The copy of a tensor that is split like this."""
        known = self._copies.get(x)
        if known is None or known[:2] != (_version(x), spec):
            copy = jax.device_put(to_jax(x), NamedSharding(self.mesh, spec), may_alias=False)
            known = (_version(x), spec, copy)
            self._copies[x] = known
        return known[2]

    def donated(self, x: Tensor, spec: PartitionSpec) -> jax.Array:
        """The copy of a tensor for a program that takes over its memory; it is sent again where it is needed again."""
        copy = self.sent(x, spec)
        del self._copies[x]
        return copy

    def laid_out(self, tree: trees.Tree, mesh: jax.sharding.Mesh, specs: trees.Tree) -> trees.Tree:
        """Arrays with the numbers of a tree of tensors, split like this over a mesh of the same devices.

        Those of tensors that have copies are made of these by the devices, others are sent.
        """
        copies = {(x.data_ptr(), x.shape, x.stride()): known for x, known in self._copies.items()}

        def place(x: Tensor, spec: PartitionSpec) -> jax.Array:
            version, _, copy = copies.get((x.data_ptr(), x.shape, x.stride()), (-1, None, None))
            same = version == _version(x) and torch_dtype(copy.dtype) == x.dtype
            return jax.device_put(copy if same else to_jax(x), NamedSharding(mesh, spec), may_alias=False)

        return trees.map(place, tree, specs)

    def fetched(self, copy: jax.Array, spec: PartitionSpec) -> Tensor:
        """A tensor with the numbers of an array, which becomes its copy."""
        x = to_host(copy)
        self._copies[x] = (_version(x), spec, copy)
        return x


def _version(x: Tensor) -> int:
    """Number of changes of a tensor in place."""
    return 0 if x.is_inference() else x._version


def to_host(x: jax.Array) -> Tensor:
    """A tensor with the numbers of an array that may be split over devices."""
    whole = np.array(x)
    if x.dtype == jnp.bfloat16:  # which numpy has from JAX, and torch does not take from numpy
        return torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(whole)


class MeshProgram:
    """A function of shards for all devices of a mesh, traced and compiled once a shape.

    Attributes:
      donated: numbers of the arguments whose memory on the devices the results may take over; none at first.
      made: of every program so far, how long it took.
    """

    def __init__(
        self,
        make: Callable[[Mesh], Callable[..., trees.Tree]],
        copies: DeviceCopies,
        given: Callable[..., Sequence[trees.Tree]],
        results: Callable[[trees.Tree], trees.Tree],
        *,
        name: str = "a program on a mesh",
        note: Callable[[str], None] = _log.info,
    ) -> None:
        """Describe the program.

        Args:
          make: mesh -> the function of a rank's shards.
          copies: on the devices to run on.
          given: whole arguments -> their PartitionSpecs, in trees of the same structure.
          results: tree of the results, with a 0 for each leaf -> their PartitionSpecs.
          name: for messages.
          note: receives how long programs took.
        """
        self.make = make
        self.copies = copies
        self.given = given
        self.results = results
        self.name = name
        self.note = note
        self.donated: tuple[int, ...] = ()
        self.made: list[Timed] = []
        self._programs: dict[Any, _Executable] = {}

    @property
    def texts(self) -> list[str]:
        """The compiled programs, as XLA writes them."""
        return [program.run.as_text() or "" for program in self._programs.values()]

    def __call__(self, *args: trees.Tree) -> trees.Tree:
        """The whole results for these whole arguments.

        Raises:
          XlaError: the function cannot be lowered, or an argument does not divide.
        """
        with jax.enable_x64(True):
            program, results = self._run(args)
            whole = [self.copies.fetched(x, spec) for x, spec in zip(results, program.out, strict=True)]
            return trees.fill(program.results, whole)

    def arrays(self, *args: trees.Tree) -> trees.Tree:
        """The results as arrays, which stay on the devices, for whole tensors or for arrays that lie there already.

        Raises:
          XlaError: as a call.
        """
        with jax.enable_x64(True):
            program, results = self._run(args)
            return trees.fill(program.results, results)

    def _run(self, args: tuple[trees.Tree, ...]) -> tuple[_Executable, Sequence[jax.Array]]:
        key = signature(args)
        if key not in self._programs:
            self._programs[key] = self._made(args)
        program = self._programs[key]
        return program, program.run(*self._sent(args, program.given, self._donated_leaves(args)))

    def _sent(
        self, args: tuple[trees.Tree, ...], given: Sequence[PartitionSpec], donated: Sequence[int] = ()
    ) -> list[jax.Array]:
        """The arguments on the devices; copies of the leaves of these numbers are not kept."""
        given_away = set(donated)
        send = [self.copies.donated if i in given_away else self.copies.sent for i in range(len(given))]
        triples = zip(trees.leaves(args), given, send, strict=True)
        return [x if isinstance(x, jax.Array) else send(x, spec) for x, spec, send in triples]

    def _donated_leaves(self, args: tuple[trees.Tree, ...]) -> list[int]:
        """Numbers of the leaves of the donated arguments."""
        counts = [len(trees.leaves(x)) for x in args]
        return [i for n in self.donated for i in range(sum(counts[:n]), sum(counts[: n + 1]))]

    def _made(self, args: tuple[trees.Tree, ...]) -> _Executable:
        start = time.perf_counter()
        mapped = self.mapped(args)
        traced = time.perf_counter()
        donated = tuple(self._donated_leaves(args))
        lowering = jax.jit(mapped.run, donate_argnums=donated).lower(*self._sent(args, mapped.given))
        run = lowering.compile()
        took = Timed(self.name, mapped.nodes, traced - start, time.perf_counter() - traced)
        self.made.append(took)
        self.note(took.text)
        return mapped._replace(run=run)

    def mapped(self, args: tuple[trees.Tree, ...]) -> _Executable:
        """The function of whole arrays, traced for arguments of these shapes, and not compiled."""
        mesh = self.copies.mesh
        given = tuple(spec for _, spec in trees.named(tuple(self.given(*args))))
        program = self._traced(args, given, dict(mesh.shape))
        out = tuple(spec for _, spec in trees.named(self.results(program.results)))
        body = lowered(program)
        run = jax.shard_map(
            lambda *shards: body(*_place_on_mesh(), *shards),
            mesh=mesh,
            in_specs=given,
            out_specs=out,
            check_vma=False,
        )
        return _Executable(run, given, out, program.results, len(program.graph.graph.nodes))

    def _traced(
        self, args: tuple[trees.Tree, ...], given: Sequence[PartitionSpec], sizes: Mapping[str, int]
    ) -> Program:
        """The program as the rank at the origin sees it; its first arguments are its place on each axis."""
        leaves = trees.leaves(args)
        shards = [
            torch.empty(_shard_shape(x, spec, sizes), dtype=x.dtype if isinstance(x, Tensor) else torch_dtype(x.dtype))
            for x, spec in zip(leaves, given, strict=True)
        ]
        place = {axis: torch.zeros((), dtype=torch.int64) for axis in AXES}

        def run(indices: Mapping[str, Tensor], *shards: Any) -> trees.Tree:
            return self.make(traced_mesh(sizes, indices))(*shards)

        return trace_program(run, place, *trees.fill(args, shards), name=self.name)


class _Executable(NamedTuple):
    """A program on a mesh.

    Attributes:
      run: the function of whole arrays; once compiled, a `jax.stages.Compiled`.
      given, out: PartitionSpecs of its arguments and results.
      results: the tree of its results.
      nodes: operators of its graph.
    """

    run: Any
    given: tuple[PartitionSpec, ...]
    out: tuple[PartitionSpec, ...]
    results: trees.Tree
    nodes: int


def _place_on_mesh() -> list[jax.Array]:
    """The place of a device on each axis, in the order of a tree that has the axes' names."""
    return [lax.axis_index(axis).astype(jnp.int64) for axis in sorted(AXES)]


def _shard_shape(x: Tensor | jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a device's part of a tensor."""
    shape = list(x.shape)
    for dim, axes in enumerate(spec):
        over = (axes,) if isinstance(axes, str) else tuple(axes or ())
        parts = math.prod(sizes[axis] for axis in over)
        if shape[dim] % parts:
            raise XlaError(f"an argument of shape {list(x.shape)} does not divide over {parts} devices in dim {dim}")
        shape[dim] //= parts
    return tuple(shape)
