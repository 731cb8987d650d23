"""Layers that follow one another in a program, so that they run as one loop.

Calls of one layer program form a chain where each takes a result of the one before. The other operands of a call are
the same for all of them, such as rotations, or its own, such as weights.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import fx

from funrl.xla.trace import operator_name

LAYER = "funrl_xla.layer"
BACKWARD = "funrl_xla.layer_backward"
_SAME = ("aten.alias", "aten.detach")


class Chain(NamedTuple):
    """Calls of one layer program, one after the other.

    Attributes:
      calls: the nodes, in order.
      carried: (place among the operands, number of the result of the call before).
      shared: places of the operands that all calls have in common.
      own: places of those that each call has for itself.
    """

    calls: tuple[fx.Node, ...]
    carried: tuple[int, int]
    shared: tuple[int, ...]
    own: tuple[int, ...]


def is_layer(node: fx.Node) -> bool:
    """True of a call of a layer program."""
    return node.op == "call_function" and node.target in (
        torch.ops.funrl_xla.layer.default,
        torch.ops.funrl_xla.layer_backward.default,
    )


def chains_of(graph: fx.GraphModule) -> dict[fx.Node, Chain]:
    """The chains of a graph of at least two calls, by their first call."""
    calls = [node for node in graph.graph.nodes if is_layer(node)]
    chains = {}
    taken: set[fx.Node] = set()
    for first in calls:
        if first in taken:
            continue
        chain = _longest(first, [node for node in calls if node not in taken])
        if chain is not None:
            chains[first] = chain
            taken |= set(chain.calls)
    return chains


def _longest(first: fx.Node, calls: list[fx.Node]) -> Chain | None:
    """The chain that begins with a call; None: nothing follows on it."""
    chain = [first]
    carried = None
    dependents = _made_of(first)
    while True:
        following = [(node, _carried(chain[-1], node)) for node in calls if _is_alike(first, node)]
        following = [(node, place) for node, place in following if place is not None and node not in chain]
        if len(following) != 1 or carried not in (None, following[0][1]):
            break
        node, place = following[0]
        others = [x for i, x in enumerate(operands_of(node)) if i != place[0]]
        if any(x in dependents for x in others):
            break
        carried = place
        chain.append(node)
    if carried is None:
        return None
    columns = list(zip(*(operands_of(node) for node in chain), strict=True))
    rest = [place for place in range(len(columns)) if place != carried[0]]
    shared = tuple(place for place in rest if len(set(columns[place])) == 1)
    return Chain(tuple(chain), carried, shared, tuple(place for place in rest if place not in shared))


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Operands of a call of a layer program."""
    return [source(x) for x in node.args[1]]  # type: ignore[union-attr, arg-type]


def source(node: fx.Node) -> fx.Node:
    """The node that a value is from, less operators that change nothing."""
    while node.op == "call_function" and node.target is not operator.getitem and operator_name(node) in _SAME:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_alike(first: fx.Node, node: fx.Node) -> bool:
    return node.target is first.target and str(node.args[0]) == str(first.args[0]) and node is not first


def _carried(before: fx.Node, node: fx.Node) -> tuple[int, int] | None:
    """Place of the one operand that the call before made, and which of its results it is."""
    places = [
        (i, x.args[1])
        for i, x in enumerate(operands_of(node))
        if x.op == "call_function" and x.target is operator.getitem and x.args[0] is before
    ]
    return places[0] if len(places) == 1 else None  # type: ignore[return-value]


def _made_of(node: fx.Node) -> set[fx.Node]:
    """Nodes that depend on a node."""
    dependents: set[fx.Node] = set()
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user not in dependents:
            dependents.add(user)
            waiting += user.users
    return dependents
