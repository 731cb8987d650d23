"""Chains: layers of a program that follow one another, which one loop can compute.

Calls of layer programs form a chain where the same sequence of programs comes again and again, each time with a result
of the time before: one program for equal layers, several for a model that mixes kinds, such as windows in every other
layer. The other operands are the same for all turns of the loop, such as rotations, or a turn's own, such as weights.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from torch import fx

from funrl.xla.trace import operator_name

LAYER = "funrl_xla.layer"
BACKWARD = "funrl_xla.layer_backward"
MOST_KINDS = 16  # calls of a turn
_SAME = ("aten.alias", "aten.detach")

OperandPlace = tuple[int, int]  # number of the call in a turn, and of its operand
CallResult = tuple[int, int]  # number of the call in a turn, and of its result


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
    """Ways to read the begin of a sequence as turns: (kinds of a turn, at least two turns), the longest first."""
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
    """The chain of the first turns, each of which reads results of the one before; None: the second reads none."""
    columns = [{(i, k): x for i, call in enumerate(turn) for k, x in enumerate(operands_of(call))} for turn in turns]
    dependents = _made_of(turns[0])
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


def _made_of(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on some nodes."""
    dependents: set[fx.Node] = set()
    waiting = [user for node in nodes for user in node.users]
    while waiting:
        user = waiting.pop()
        if user not in dependents:
            dependents.add(user)
            waiting += user.users
    return dependents
