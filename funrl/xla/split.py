"""A traced function with its gradients, cut into the way there and the way back."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from funrl.xla.trace import operator_name

# Operators that cost nothing: what they make is made again instead of saved.
_FREE = frozenset(
    f"aten.{name}"
    for names in (
        ("_to_copy", "alias", "clone", "detach", "expand", "permute", "reshape", "squeeze", "unsqueeze", "view"),
        ("select", "slice", "arange", "full", "full_like", "scalar_tensor"),
    )
    for name in names
)


def split_at_gradients(
    joint: fx.GraphModule, results: int, grads: int, saves: bool = True
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A forward and a backward graph.

    Only what the results are made of is computed forward. What a backward pass computes again by itself, as attention
    by blocks does with its weights, stays there: it is no part of the results, and is not saved.

    Args:
      joint: (operands, gradients of results) -> (results, gradients of operands).
      results: how many there are.
      grads: how many gradients of results there are.
      saves: whether what the way back needs of the way there is saved; else it is computed again from the operands.

    Returns: operands -> (results, saved), and (operands, saved, gradients of results) -> gradients of operands.
    """
    graph = joint.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    operands = inputs[: len(inputs) - grads]
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, Sequence)
    there = _ancestors(outputs[:results], frozenset())
    kept = frozenset(node for node in there if saves and _is_worth_saving(node))
    back = _ancestors(outputs[results:], kept)
    saved = [node for node in graph.nodes if node in back and node in kept]
    forward = _subgraph(joint, operands, there, [*outputs[:results], *saved])
    inside = back - frozenset(saved)
    return forward, _subgraph(joint, [*operands, *saved, *inputs[len(operands) :]], inside, outputs[results:])


def _is_worth_saving(node: fx.Node) -> bool:
    """True of a tensor that an operator has computed from others."""
    if node.op != "call_function" or not isinstance(node.meta["val"], Tensor):
        return False
    return node.target is operator.getitem or operator_name(node) not in _FREE


def _ancestors(nodes: Sequence[Any], ends: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Nodes that some are made of, themselves included; what `ends` are made of is not looked at."""
    ancestors: set[fx.Node] = set()
    waiting = [node for node in nodes if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in ancestors:
            ancestors.add(node)
            waiting += [] if node in ends else node.all_input_nodes
    return frozenset(ancestors)


def _subgraph(
    whole: fx.GraphModule, inputs: Sequence[fx.Node], inside: frozenset[fx.Node], outputs: Sequence[Any]
) -> fx.GraphModule:
    """The part of a graph that computes `outputs` of `inputs` by the nodes `inside`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]
    for node in whole.graph.nodes:
        if node in inside and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    return fx.GraphModule(whole, graph)
