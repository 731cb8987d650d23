"""Compiled programs: functions of trees of torch's tensors that run in JAX.

A call traces, lowers and compiles the function where its arguments have new shapes, and runs it otherwise. Tensors go
to JAX and come back without a copy where both are on the CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch
from torch import Tensor

from funrl import trees
from funrl.xla.interpret import lowered
from funrl.xla.operators.result import JAX_DTYPES
from funrl.xla.trace import Program, trace_program

_log = logging.getLogger(__name__)
_DTYPES = {own: dtype for dtype, own in JAX_DTYPES.items()}


class Timed(NamedTuple):
    """Seconds that it took to make a program.

    Attributes:
      name: of the program.
      nodes: operators of its graph; a layer is one.
      trace, compile: seconds in torch, and in XLA.
    """

    name: str
    nodes: int
    trace: float
    compile: float

    @property
    def text(self) -> str:
        """A line for people."""
        times = f"traced in {self.trace:.1f} s, compiled in {self.compile:.1f} s"
        return f"XLA, {self.name}: {self.nodes} operators, {times}"


class Compiled:
    """A function of trees of tensors, in JAX; the results are new tensors.

    Attributes:
      made: of every program so far, how long it took.
    """

    def __init__(
        self,
        fn: Callable[..., trees.Tree],
        name: str,
        note: Callable[[str], None] = _log.info,
        donated: Sequence[int] = (),
    ) -> None:
        """Take a pure function; see `trace_program` for what it may do.

        Args:
          fn: the function.
          name: for messages.
          note: receives how long programs took.
          donated: numbers of the arguments whose memory the results may take over; their arrays are JAX's own.
        """
        self.fn = fn
        self.name = name
        self.note = note
        self.donated = tuple(donated)
        self.made: list[Timed] = []
        self._programs: dict[Any, tuple[Program, Callable]] = {}

    def __call__(self, *args: trees.Tree) -> trees.Tree:
        """The results for these trees of tensors.

        Raises:
          XlaError: the function cannot be lowered.
        """
        results = self.arrays(*args)
        with jax.enable_x64(True):
            return trees.map(to_torch, results)

    def arrays(self, *args: trees.Tree) -> trees.Tree:
        """The results as arrays of JAX, for trees of tensors or of such arrays, which stay where they are.

        Raises:
          XlaError: the function cannot be lowered.
        """
        leaves = trees.leaves(args)
        key = signature(args)
        with jax.enable_x64(True):
            arrays = [to_jax(x) for x in leaves]
            if key not in self._programs:
                self._programs[key] = self._make(args, arrays)
            program, run = self._programs[key]
            return trees.fill(program.results, run(*arrays))

    def _make(self, args: tuple[trees.Tree, ...], arrays: list[jax.Array]) -> tuple[Program, Callable]:
        start = time.perf_counter()
        program = trace_program(self.fn, *trees.map(example_of, args), name=self.name)
        counts = [len(trees.leaves(x)) for x in args]
        donated = [i for n in self.donated for i in range(sum(counts[:n]), sum(counts[: n + 1]))]
        traced = time.perf_counter()
        run = jax.jit(lowered(program), donate_argnums=tuple(donated)).lower(*arrays).compile()
        took = Timed(self.name, len(program.graph.graph.nodes), traced - start, time.perf_counter() - traced)
        self.made.append(took)
        self.note(took.text)
        return program, run


def signature(args: trees.Tree) -> Any:
    """Structure, shapes and dtypes of a tree of tensors: trees of one signature have one program."""
    return str(trees.map(lambda _: 0, args)), tuple((tuple(x.shape), x.dtype) for x in trees.leaves(args))


def example_of(x: Tensor | jax.Array) -> Tensor:
    """A tensor of the shape and dtype of an array, with any numbers; a tensor is its own."""
    return x if isinstance(x, Tensor) else torch.empty(x.shape, dtype=torch_dtype(x.dtype))


def torch_dtype(dtype: Any) -> torch.dtype:
    """A dtype of JAX as torch calls it."""
    return _DTYPES[dtype]


def to_jax(x: Tensor | jax.Array) -> jax.Array:
    """A tensor as an array of JAX, which shares its memory where it can; an array as it is."""
    if isinstance(x, jax.Array):
        return x
    return jax.dlpack.from_dlpack(x.detach().contiguous())


def to_torch(x: jax.Array) -> Tensor:
    """An array as a tensor, which shares its memory; it waits until the array is there."""
    return torch.from_dlpack(x)
