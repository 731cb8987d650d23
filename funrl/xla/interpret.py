"""Programs in JAX: the operators of a traced graph, one after the other, by the rows of the table.

Layers that follow one another run as one `lax.scan` over their stacked weights, whose body is compiled once. Calls of
layer programs form such a chain where the same sequence of programs comes again and again, each time with a result of
the time before: one program for equal layers, several for a model that mixes kinds, such as windows in every other
layer. The other operands are the same for all turns of the loop, such as rotations, or a turn's own, such as weights.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from torch import Tensor, fx

from funrl.xla.errors import XlaError
from funrl.xla.layers import PROGRAMS
from funrl.xla.operators import JAX_DTYPES, LOWERINGS, WITHOUT_MEANING, JaxArray, OperatorResult
from funrl.xla.trace import Program, operator_name, reachable

LAYER = "funrl_xla.layer"
BACKWARD = "funrl_xla.layer_backward"
MOST_KINDS = 16  # calls of a turn
_SAME = ("aten.alias", "aten.detach")

OperandPlace = tuple[int, int]  # number of the call in a turn, and of its operand
CallResult = tuple[int, int]  # number of the call in a turn, and of its result
Leaves = tuple[JaxArray, ...]


def lowered(program: Program) -> Callable[..., Leaves]:
    """A function of JAX arrays, the leaves of a program's arguments, that gives the leaves of its results."""
    chains = chains_of(program.graph)
    return lambda *leaves: tuple(_Interpreter(program.graph, chains).run(*leaves))


class Chain(NamedTuple):
    """Turns of equal calls of layer programs, one after the other.

    Attributes:
      turns: the nodes of each turn, in order.
      inner: operands that an earlier call of the same turn has made.
      carried: operands that a call of the turn before has made.
      shared: operands that all turns have in common.
      own: operands that each turn has for itself.
      outputs: results that other nodes than the calls of the chain use, except those of the last turn that are carried.
    """

    turns: tuple[tuple[fx.Node, ...], ...]
    inner: dict[OperandPlace, CallResult]
    carried: dict[OperandPlace, CallResult]
    shared: tuple[OperandPlace, ...]
    own: tuple[OperandPlace, ...]
    outputs: tuple[CallResult, ...]


def is_layer(node: fx.Node) -> bool:
    """True of a call of a layer program."""
    return node.op == "call_function" and operator_name(node) in (LAYER, BACKWARD)


def changes_nothing(node: fx.Node) -> bool:
    """True of an operator that changes nothing."""
    return node.op == "call_function" and node.target is not operator.getitem and operator_name(node) in _SAME


def repeats(kinds: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Ways to read the start of a sequence as turns: (kinds of a turn, at least two turns), the longest first."""
    ways = []
    for size in range(1, min(MOST_KINDS, len(kinds) // 2) + 1):
        turns = 1
        while tuple(kinds[turns * size : (turns + 1) * size]) == tuple(kinds[:size]):
            turns += 1
        if turns > 1:
            ways.append((size, turns))
    yield from sorted(ways, key=lambda way: (-way[0] * way[1], way[0]))


def chains_of(graph: fx.GraphModule) -> dict[fx.Node, Chain]:
    """The chains of a graph, by their first call."""
    calls = [node for node in graph.graph.nodes if is_layer(node)]
    kinds = [(str(node.target), str(node.args[0])) for node in calls]
    chains = {}
    begin = 0
    while begin < len(calls):
        rest = calls[begin:]
        ways = ([tuple(rest[i * size : (i + 1) * size]) for i in range(n)] for size, n in repeats(kinds[begin:]))
        chain = next(filter(None, map(_linked, ways)), None)
        if chain is not None:
            chains[calls[begin]] = chain
        begin += 1 if chain is None else len(chain.turns) * len(chain.turns[0])
    return chains


def _linked(turns: Sequence[tuple[fx.Node, ...]]) -> Chain | None:
    """The chain of the first turns, each reading results of the one before; None: the second reads none."""
    columns = [{(i, k): x for i, call in enumerate(turn) for k, x in enumerate(operands_of(call))} for turn in turns]
    dependents = reachable((user for call in turns[0] for user in call.users), lambda node: node.users)
    first = _links(columns[0], (), turns[0], dependents)
    links = [_links(*linked, dependents) for linked in zip(columns[1:], turns, turns[1:], strict=False)]
    if first is None or links[0] is None or first[1] != links[0][1] or not links[0][0]:
        return None
    carried, inner = links[0]
    count = 1 + len(list(itertools.takewhile(links[0].__eq__, links)))
    others = [place for place in columns[0] if place not in inner and place not in carried]
    shared = tuple(place for place in others if len({column[place] for column in columns[:count]}) == 1)
    own = tuple(place for place in others if place not in shared)
    kept = tuple(turns[:count])
    return Chain(kept, inner, carried, shared, own, _outputs(kept, set(carried.values())))


def _links(
    column: dict[OperandPlace, fx.Node],
    before: Sequence[fx.Node],
    turn: Sequence[fx.Node],
    dependents: set[fx.Node],
) -> tuple[dict[OperandPlace, CallResult], dict[OperandPlace, CallResult]] | None:
    """Operands of a turn that the turn before has made, and that it has made itself; None: others depend on the chain.

    Args:
      column: its operands.
      before, turn: the calls.
      dependents: nodes that depend on the first turn.
    """
    carried: dict[OperandPlace, CallResult] = {}
    inner: dict[OperandPlace, CallResult] = {}
    for place, node in column.items():
        call, number = _made_by(node)
        if call in turn:
            inner[place] = turn.index(call), number
        elif call in before:
            carried[place] = before.index(call), number
        elif node in dependents:
            return None
    return carried, inner


def _outputs(turns: Sequence[tuple[fx.Node, ...]], carried: set[CallResult]) -> tuple[CallResult, ...]:
    """Results that nodes outside use, for which those of all turns are kept."""
    calls = {call for turn in turns for call in turn}
    outputs: dict[CallResult, None] = {}
    for turn in turns:
        for i, call in enumerate(turn):
            for node in call.users:
                result = i, _made_by(node)[1]
                is_last = turn is turns[-1] and result in carried
                if not is_last and any(user not in calls for user in _users(node)):
                    outputs[result] = None
    return tuple(outputs)


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that use a value, also by operators that change nothing."""
    for user in node.users:
        if changes_nothing(user):
            yield from _users(user)
        else:
            yield user


def _made_by(node: fx.Node) -> tuple[fx.Node | None, int]:
    """The call that a value is a result of, and the result's number; None: it is no such result."""
    if node.op == "call_function" and node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return None, 0


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Operands of a call of a layer program."""
    return [source(x) for x in node.args[1]]  # type: ignore[union-attr, arg-type]


def source(node: fx.Node) -> fx.Node:
    """The node that a value is from, less operators that change nothing."""
    while changes_nothing(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


class _Part(NamedTuple):
    """One of the values of a stack, an argument or a loop's result; it is taken out where it is used by itself."""

    stack: JaxArray
    index: int


class _Interpreter(fx.Interpreter):
    """One run through a graph, in JAX."""

    def __init__(self, graph: fx.GraphModule, chains: dict[fx.Node, Chain]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.chains = chains
        self.places = {node: place for place, node in enumerate(graph.graph.nodes)}

    def map_nodes_to_values(self, args: Any, n: fx.Node | None = None) -> Any:
        """Arguments with the values of nodes in their place."""
        return fx.map_arg(args, self.value)

    def value(self, node: fx.Node) -> Any:
        """The value of a node, by itself."""
        value = self.env[node]
        return value.stack[value.index] if isinstance(value, _Part) else value

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        if n.op == "get_attr":
            constant = super().run_node(n)
            return jnp.asarray(constant.detach().numpy()) if isinstance(constant, Tensor) else constant
        if n.op != "call_function":
            return super().run_node(n)
        first: Any = n.args[0] if n.args else None
        if changes_nothing(n):
            return self.env[first]
        if n.target is operator.getitem:
            return self.env[first][n.args[1]]  # type: ignore[index]
        if n in self.chains:
            self.loop(self.chains[n])
            return self.env[n]
        if is_layer(n):
            return _Interpreter(_graph_of(n), {}).run(*self.map_nodes_to_values(n.args[1]))
        if operator_name(n) == "aten.select" and first.op == "placeholder" and n.args[1] == 0:
            stack = self.value(first)
            return _Part(stack, n.args[2] % len(stack))  # type: ignore[operator]
        return call_node(n, *self.fetch_args_kwargs_from_env(n))

    def loop(self, chain: Chain) -> None:
        """Compute all calls of a chain."""
        turns = [[operands_of(call) for call in turn] for turn in chain.turns]
        given = [[operands[i][k] for operands in turns] for i, k in chain.own]
        first = {place: turns[0][place[0]][place[1]] for place in (*chain.shared, *chain.carried)}
        self.compute([*(node for column in given for node in column), *first.values()])
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
                own = [operands[place] for place in sorted(operands) if place[0] == i]
                results.append(_Interpreter(graph, {}).run(*own))
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
                self.env[call] = tuple(parts.get((i, n)) for n in range(len(call.meta["val"])))

    def compute(self, nodes: Sequence[fx.Node]) -> None:
        """Compute nodes that come later in the graph, and what they depend on."""

        def missing(nodes: Sequence[fx.Node]) -> list[fx.Node]:
            return [node for node in nodes if node not in self.env]

        needed = reachable(missing(nodes), lambda node: missing(node.all_input_nodes))
        for node in sorted(needed, key=self.places.__getitem__):
            self.env[node] = self.run_node(node)

    def stacked(self, nodes: Sequence[fx.Node]) -> tuple[JaxArray, bool]:
        """Values of all calls in one array, and whether the last call's is the first."""
        values = [self.env[node] for node in nodes]
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
    return layer.forward if operator_name(node) == LAYER else layer.backward


def _fitted(x: JaxArray, want: OperatorResult, node: fx.Node) -> JaxArray:
    """A result in the dtype that the graph has; its shape must be the graph's already."""
    if x.shape != want.shape:
        shapes = f"{list(x.shape)}, torch makes {list(want.shape)}"
        raise XlaError(f"the row of {node.target} makes {shapes}")
    return x.astype(want.dtype)
