"""Programs: pure functions of trees of tensors, traced once for their shapes to operators of torch's core.

Tracing takes two passes. The first one runs the function, with its gradients, and records every operator; the second
one makes operators that write into their arguments pure and takes the others apart into those of the core.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import TorchDispatchMode

from funrl import trees
from funrl.xla.errors import XlaError
from funrl.xla.operators import LOWERINGS

_aten = torch.ops.aten
_NOT_THE_PROGRAM = ("/torch/", "/funrl/xla/")  # parts of the paths of files whose lines say nothing


class Program(NamedTuple):
    """A traced function.

    Attributes:
      graph: operators of the core; it takes the leaves of the arguments and gives those of the results.
      results: the tree of the results, with a 0 for each leaf.
    """

    graph: fx.GraphModule
    results: trees.Tree


def trace_program(fn: Callable[..., trees.Tree], *args: trees.Tree, name: str = "") -> Program:
    """Trace a function of trees of tensors; it is run once with tensors that have no numbers.

    Args:
      fn: a pure function. What it reads of numbers on the host, such as the length of a tuple, becomes constant.
      args: of the shapes, dtypes and structures that the program is for; the numbers do not matter.
      name: for messages; "": the function's own.

    Raises:
      XlaError: a shape of the program depends on numbers, it reads a number on the host, or it has an operator that
        is not in the table; the message names the operator, the function and the line.
    """
    name = name or getattr(fn, "__qualname__", str(fn))
    structure: list[trees.Tree] = []

    def of_leaves(*leaves: Tensor) -> list[Tensor]:
        results = fn(*trees.fill(args, leaves))
        structure[:] = [trees.map(lambda _: 0, results)]
        return trees.leaves(results)

    graph = core_graph(of_leaves, trees.leaves(args), name)
    return Program(graph, structure[0])


def core_graph(fn: Callable[..., Any], leaves: Sequence[Tensor], name: str) -> fx.GraphModule:
    """The operators of the core of a function of tensors that gives a list of tensors; see `trace_program`."""
    with without_numbers(name, leaves) as fakes:  # what the function makes of nothing has no numbers either
        recorded = make_fx(fn)(*fakes)
        for node in recorded.graph.nodes:  # strides mean nothing to XLA, and the second pass changes them
            if node.target in (_aten.view.default, _aten._unsafe_view.default):
                node.target = _aten.reshape.default
        recorded.graph.eliminate_dead_code()

        def again(*leaves: Tensor) -> Any:
            with preserve_node_meta():
                return fx.Interpreter(recorded).run(*leaves)

        pure = torch.func.functionalize(again, remove="mutations")
        core = make_fx(pure, decomposition_table=_decompositions())(*fakes)
        core.graph.eliminate_dead_code()
        rows = ((node, row) for node, row in operators_of(core) if not row.startswith("funrl_xla."))  # of layers
        unknown = {row: node for node, row in rows if row not in LOWERINGS}
        if unknown:
            raise XlaError(f"{name}: {_problem_of(fn, fakes, unknown)}")
        return core


@contextlib.contextmanager
def without_numbers(name: str, leaves: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Give tensors of the shapes of some, in a mode in which tensors have no numbers.

    Raises:
      XlaError: a program of this name depends on numbers; the message names the operator and the line.
    """
    mode = FakeTensorMode(shape_env=None, allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x.detach()) for x in leaves]
    try:
        with mode:
            yield fakes
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        reads = isinstance(error, DataDependentOutputException)
        reason = "the host reads a number of the device" if reads else "a shape depends on numbers,"
        line = _own_line(traceback.extract_tb(error.__traceback__))
        raise XlaError(f"{name}: {reason} by {error.func}. {line}") from error


@functools.cache
def _decompositions() -> Any:
    """The decompositions to operators of the core; torch looks through all operators to collect them."""
    return core_aten_decompositions()


def _problem_of(fn: Callable[..., Any], leaves: Sequence[Tensor], unknown: dict[str, fx.Node]) -> str:
    """Text about operators that the table lacks; the function is run once more to find the line of the first."""
    node = next(iter(unknown.values()))
    others = ", ".join([*unknown][1:])
    more = f", nor have {others}" if others else ""
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    hint = "; random numbers are arguments of a program" if random else ""
    with _LineOfCall(str(node.meta.get("original_aten", node.target))) as call:
        fn(*leaves)
    return f"{node.target} has no row in funrl.xla.operators{more}{hint}. {call.line}"


class _LineOfCall(TorchDispatchMode):
    """A mode that records the line that first calls an operator."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.line = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) == self.name:
            self.line = self.line or _own_line(traceback.extract_stack())
        return func(*args, **(kwargs or {}))


def operators_of(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, str]]:
    """The nodes of a graph that call an operator, with its name less the overload, such as "aten.add"."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            yield node, operator_name(node)


def operator_name(node: fx.Node) -> str:
    """Name of the operator that a node calls, less its overload, and less the "_copy" of a view that is copied."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    if packet is None:
        return str(target)
    name = f"{target.namespace}.{packet.__name__}"
    return name if name in LOWERINGS else name.removesuffix("_copy")


def reachable(nodes: Iterable[fx.Node], steps: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Some nodes, and all that steps from them lead to."""
    seen: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += steps(node)
    return seen


def _own_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line that is the program's."""
    own = (frame for frame in reversed(frames) if not any(part in frame.filename for part in _NOT_THE_PROGRAM))
    return next((f'File "{x.filename}", line {x.lineno}, in {x.name}' for x in own), "")
