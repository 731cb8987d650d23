"""Programs in JAX: the operators of a traced graph, one after the other, by the rows of the table.

Layers that follow one another run as one `lax.scan` over their stacked weights, whose body is compiled once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from torch import Tensor, fx

from funrl.xla.chains import LAYER, Chain, OperandPlace, chains_of, changes_nothing, is_layer, operands_of
from funrl.xla.errors import XlaError
from funrl.xla.layers import PROGRAMS
from funrl.xla.operators import JAX_DTYPES, LOWERINGS, WITHOUT_MEANING, JaxArray, OperatorResult
from funrl.xla.trace import Program, operator_name

Leaves = tuple[JaxArray, ...]


def lowered(program: Program) -> Callable[..., Leaves]:
    """A function of JAX arrays, the leaves of a program's arguments, that gives the leaves of its results."""
    chains = chains_of(program.graph)

    def run(*leaves: JaxArray) -> Leaves:
        return _Run(program.graph, chains).results(leaves)

    return run


def run_graph(graph: fx.GraphModule, leaves: Sequence[JaxArray]) -> Leaves:
    """The results of a graph of core operators, in order."""
    return _Run(graph, {}).results(leaves)


class _Part(NamedTuple):
    """One of the values of a stack, an argument or a loop's result; it is taken out where it is used by itself."""

    stack: JaxArray
    index: int


class _Run:
    """One run through a graph.

    Attributes:
      values: of the nodes that have been computed.
    """

    def __init__(self, graph: fx.GraphModule, chains: dict[fx.Node, Chain]) -> None:
        self.graph = graph
        self.chains = chains
        self.values: dict[fx.Node, Any] = {}
        self.places = {node: place for place, node in enumerate(graph.graph.nodes)}

    def results(self, leaves: Sequence[JaxArray]) -> Leaves:
        """The results of the graph for these leaves."""
        nodes = list(self.graph.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self.values |= dict(zip(inputs, leaves, strict=True))
        for node in nodes[:-1]:
            self.compute(node)
        return tuple(self.whole(nodes[-1].args[0]))

    def whole(self, args: Any) -> Any:
        """Arguments with the values of nodes in their place."""
        return fx.map_arg(args, self.value)

    def value(self, node: fx.Node) -> Any:
        """The value of a node, by itself."""
        value = self.values[node]
        return value.stack[value.index] if isinstance(value, _Part) else value

    def compute(self, node: fx.Node) -> None:
        """Compute a node, unless that was done with others."""
        if node in self.values:
            return
        if node.op == "get_attr":
            self.values[node] = _constant(getattr(self.graph, str(node.target)))
        elif changes_nothing(node):
            self.values[node] = self.values[node.args[0]]  # type: ignore[index]
        elif (index := _index_of_argument(node)) is not None:
            stack = self.value(node.args[0])  # type: ignore[arg-type]
            self.values[node] = _Part(stack, index % len(stack))
        elif node.target is operator.getitem:
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        elif node in self.chains:
            self.loop(self.chains[node])
        elif is_layer(node):
            self.values[node] = run_graph(_graph_of(node), self.whole(node.args[1]))
        else:
            self.values[node] = call_node(node, self.whole(node.args), self.whole(node.kwargs))

    def loop(self, chain: Chain) -> None:
        """Compute all calls of a chain."""
        turns = [[operands_of(call) for call in turn] for turn in chain.turns]
        given = [[operands[i][k] for operands in turns] for i, k in chain.own]
        first = {place: turns[0][place[0]][place[1]] for place in (*chain.shared, *chain.carried)}
        self.compute_first([*(node for column in given for node in column), *first.values()])
        own = [self.stacked(column) for column in given]
        backwards = any(is_reversed for _, is_reversed in own)
        stacks = tuple(x if is_reversed == backwards else jnp.flip(x, 0) for x, is_reversed in own)
        shared = {place: self.value(first[place]) for place in chain.shared}
        graphs = [_graph_of(call) for call in chain.turns[0]]

        def body(carried: Leaves, rows: Leaves) -> tuple[Leaves, Leaves]:
            operands = shared | dict(zip(chain.carried, carried, strict=True)) | dict(zip(chain.own, rows, strict=True))
            results: list[Leaves] = []
            for i, graph in enumerate(graphs):
                operands |= {place: results[j][n] for place, (j, n) in chain.inner.items() if place[0] == i}
                results.append(run_graph(graph, _operands_of_call(operands, i)))
            return tuple(results[i][n] for i, n in chain.carried.values()), tuple(
                results[i][n] for i, n in chain.outputs
            )

        count = len(chain.turns)
        begin = tuple(self.value(first[place]) for place in chain.carried)
        end, outputs = lax.scan(body, begin, stacks, count, reverse=backwards)
        for turn, calls in enumerate(chain.turns):
            index = count - 1 - turn if backwards else turn
            parts = {result: _Part(x, index) for result, x in zip(chain.outputs, outputs, strict=True)}
            if turn == count - 1:
                parts |= dict(zip(chain.carried.values(), end, strict=True))
            for i, call in enumerate(calls):
                self.values[call] = tuple(parts.get((i, n)) for n in range(len(call.meta["val"])))

    def compute_first(self, nodes: Any) -> None:
        """Compute nodes that come later in the graph, with what they are made of."""
        needed: set[fx.Node] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in self.values and node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        for node in sorted(needed, key=self.places.__getitem__):
            self.compute(node)

    def stacked(self, nodes: Sequence[fx.Node]) -> tuple[JaxArray, bool]:
        """Values of all calls in one array, and whether the last call's is the first."""
        values = [self.values[node] for node in nodes]
        if all(isinstance(x, _Part) and x.stack is values[0].stack for x in values):
            indices = [x.index for x in values]
            order = list(range(len(values[0].stack)))
            if indices in (order, order[::-1]):
                return values[0].stack, indices != order
        return jnp.stack([self.value(node) for node in nodes]), False


def _operands_of_call(operands: dict[OperandPlace, JaxArray], call: int) -> list[JaxArray]:
    """Operands of one call of a turn, in order."""
    return [operands[call, k] for k in sorted(k for i, k in operands if i == call)]


def _index_of_argument(node: fx.Node) -> int | None:
    """The number in its first dim by which a node takes a part of an argument; None: it does something else."""
    if node.op != "call_function" or node.target is operator.getitem or operator_name(node) != "aten.select":
        return None
    x, dim, index = node.args
    return index if isinstance(x, fx.Node) and x.op == "placeholder" and dim == 0 else None  # type: ignore[return-value]


def call_node(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a node's operator for these arguments, in the shapes and dtypes that the graph says."""
    name = operator_name(node)
    result = result_of(node.meta["val"])
    kwargs = {key: value for key, value in kwargs.items() if key not in WITHOUT_MEANING}
    with jax.named_scope(name.partition(".")[2]):
        out = LOWERINGS[name](result, *args, **kwargs)
        if isinstance(node.meta["val"], Tensor):
            return _fitted(out, result, node)
        return tuple(_fitted(x, want, node) for x, want in zip(out, (result, *result.more), strict=True))


def result_of(value: Any) -> OperatorResult:
    """Shapes and dtypes of what an operator gives, by its example."""
    if isinstance(value, Tensor):
        return OperatorResult(tuple(value.shape), JAX_DTYPES[value.dtype])
    first, *more = (result_of(x) for x in value)
    return first._replace(more=tuple(more))


def _graph_of(node: fx.Node) -> fx.GraphModule:
    """The graph that a call of a layer program computes."""
    layer = PROGRAMS[str(node.args[0])]
    return layer.forward if operator_name(node) == LAYER else layer.backward


def _fitted(x: JaxArray, want: OperatorResult, node: fx.Node) -> JaxArray:
    """A result in the dtype that the graph has; its shape must be the graph's already."""
    if x.shape != want.shape:
        shapes = f"{list(x.shape)}, torch makes {list(want.shape)}"
        raise XlaError(f"the row of {node.target} makes {shapes}")
    return x.astype(want.dtype)


def _constant(value: Any) -> Any:
    return jnp.asarray(value.detach().numpy()) if isinstance(value, Tensor) else value
