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

from funrl.xla.chains import LAYER, Chain, chains_of, is_layer, operands_of
from funrl.xla.errors import XlaError
from funrl.xla.layers import PROGRAMS
from funrl.xla.operators.result import JAX_DTYPES, JaxArray, OperatorResult
from funrl.xla.operators.table import LOWERINGS, WITHOUT_MEANING
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
    """One of the values that a loop has stacked; it is taken out where it is used by itself."""

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
        columns = list(zip(*(operands_of(call) for call in chain.calls), strict=True))
        self.compute_first(columns[place][i] for place in chain.own for i in range(len(chain.calls)))
        graph = _graph_of(chain.calls[0])
        place, number = chain.carried
        own = [self.stacked(columns[i]) for i in chain.own]
        backwards = any(is_reversed for _, is_reversed in own)
        stacks = tuple(x if is_reversed == backwards else jnp.flip(x, 0) for x, is_reversed in own)
        shared = {i: self.value(columns[i][0]) for i in chain.shared}

        def body(carried: JaxArray, rows: tuple[JaxArray, ...]) -> tuple[JaxArray, Leaves]:
            operands = shared | {place: carried} | dict(zip(chain.own, rows, strict=True))
            outputs = run_graph(graph, [operands[i] for i in range(len(columns))])
            return outputs[number], outputs

        count = len(chain.calls)
        _, outputs = lax.scan(body, self.value(columns[place][0]), stacks, count, reverse=backwards)
        for i, call_node in enumerate(chain.calls):
            index = count - 1 - i if backwards else i
            self.values[call_node] = tuple(_Part(x, index) for x in outputs)

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
    graph = layer.forward if operator_name(node) == LAYER else layer.backward
    assert graph is not None
    return graph


def _fitted(x: JaxArray, want: OperatorResult, node: fx.Node) -> JaxArray:
    """A result in the dtype that the graph has; its shape must be the graph's already."""
    if x.shape != want.shape:
        shapes = f"{list(x.shape)}, torch makes {list(want.shape)}"
        raise XlaError(f"the row of {node.target} makes {shapes}")
    return x.astype(want.dtype)


def _constant(value: Any) -> Any:
    return jnp.asarray(value.detach().numpy()) if isinstance(value, Tensor) else value
