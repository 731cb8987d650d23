"""Layers of a model as operators of a program: each is traced once, and called wherever the model calls it.

A model calls the function of one layer for every depth. `as_one_operator` gives a function whose calls are a single
operator in the program of the whole model, `funrl_xla::layer`, and another one going back. What these compute are
programs of their own, which depend on the layer's sizes and not on its weights: so a deep model is traced and compiled
in the time of a shallow one (`chains.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from funrl import trees
from funrl.autograd import AutogradFunction
from funrl.mesh.mesh import Mesh
from funrl.models.model import Layer
from funrl.xla.errors import XlaError
from funrl.xla.trace import core_graph, operator_name, reachable, without_numbers

REMAT = ("none", "full")
# Operators that cost nothing: what they make is made again instead of saved.
_FREE = {"_to_copy", "alias", "clone", "detach", "expand", "permute", "reshape", "squeeze", "unsqueeze", "view"}
_FREE |= {"select", "slice", "arange", "full", "full_like", "scalar_tensor"}


class LayerProgram(NamedTuple):
    """The programs of one layer, forward and back.

    Attributes:
      forward: operands -> results, and what is saved of the way.
      backward: operands, saved, gradients of the differentiable results -> gradients of the operands that need one.
      results: the tree of the results, with a 0 for each leaf.
      differentiable: which results have gradients.
      needs: which operands need gradients.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    results: trees.Tree
    differentiable: tuple[bool, ...]
    needs: tuple[bool, ...]


PROGRAMS: dict[str, LayerProgram] = {}  # by the name that is an argument of the operators
_NAMES: dict[Any, str] = {}
_NUMBERS = itertools.count()


def _operator(name: str, graph_of: Callable[[LayerProgram], fx.GraphModule]) -> Callable[..., list[Tensor]]:
    """An operator that stands for one of the graphs of a layer program."""

    def call(program: str, operands: Sequence[Tensor]) -> list[Tensor]:
        raise XlaError(f"{program} is part of a traced program and runs only there")

    def results(program: str, operands: Sequence[Tensor]) -> list[Tensor]:
        (outputs,) = graph_of(PROGRAMS[program]).graph.output_node().args
        values = [node.meta["val"] for node in outputs]  # type: ignore[union-attr]
        return [operands[0].new_empty(x.shape, dtype=x.dtype) for x in values]

    declared = torch.library.custom_op(f"funrl_xla::{name}", call, mutates_args=())
    declared.register_fake(results)
    return declared


_layer = _operator("layer", lambda program: program.forward)
_layer_backward = _operator("layer_backward", lambda program: program.backward)


class _LayerCall(AutogradFunction):
    @staticmethod
    def forward(ctx, name, *operands):
        ctx.name = name
        ctx.layer = layer = PROGRAMS[name]
        outputs = _layer(name, operands)
        count = len(layer.differentiable)
        ctx.save_for_backward(*operands, *outputs[count:])
        results = outputs[:count]
        fixed = [x for x, has_gradient in zip(results, layer.differentiable, strict=True) if not has_gradient]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads):
        layer = ctx.layer
        given = itertools.compress(grads, layer.differentiable)
        with torch.no_grad():
            own = iter(_layer_backward(ctx.name, [*ctx.saved_tensors, *given]))
        return None, *(next(own) if needed else None for needed in layer.needs)


def as_one_operator(layer: Layer, remat: str = "none", kernels: bool = False) -> Layer:
    """A layer whose calls are one operator in a program that is traced; attention is computed by blocks.

    Args:
      layer: `Model.layer`.
      remat: what the backward pass computes again: "none", or "full", which saves what enters the layer.
      kernels: attention of packed rows is by a kernel of Pallas, for TPUs.

    Raises:
      ValueError: `remat` is another word.
    """
    if remat not in REMAT:
        raise ValueError(f"remat is {remat!r}, on XLA it is one of {', '.join(REMAT)}")

    def call(config: Any, mesh: Mesh, params: trees.Tree, x_BTD: Tensor, context: Any) -> Any:
        context = context._replace(blockwise="kernel" if kernels else True)
        fields = {name: value for name, value in context._asdict().items() if _holds_tensors(value)}
        indices = {axis: index for axis, index in (mesh.indices or {}).items() if isinstance(index, Tensor)}
        tree = (params, x_BTD, fields, indices)
        leaves = trees.leaves(tree)
        numbers = tuple(None if isinstance(x, Tensor) else x for x in leaves)  # such as scales of adapters

        def run(*operands: Tensor) -> Any:
            rest = iter(operands)
            filled = (next(rest) if number is None else number for number in numbers)
            params, x_BTD, fields, indices = trees.fill(tree, filled)
            here = dataclasses.replace(mesh, indices={**(mesh.indices or {}), **indices}) if indices else mesh
            return layer(config, here, params, x_BTD, context._replace(**fields))

        operands = [x for x in leaves if isinstance(x, Tensor)]
        needs = tuple(torch.is_grad_enabled() and x.requires_grad for x in operands)
        specs = tuple((tuple(x.shape), x.dtype) for x in operands)
        constant = tuple((name, value) for name, value in context._asdict().items() if name not in fields)
        structure = str(trees.map(lambda _: 0, tree))
        key = (layer, config, _facts_of(mesh, indices), constant, structure, numbers, specs, needs, remat)
        if key not in _NAMES:
            with _disable_current_modes():
                program = _traced(run, specs, needs, remat)
            _NAMES[key] = f"{getattr(layer, '__name__', 'layer')}_{next(_NUMBERS)}"
            PROGRAMS[_NAMES[key]] = program
        name = _NAMES[key]
        return trees.fill(PROGRAMS[name].results, _LayerCall.apply(name, *operands))

    return call


def _facts_of(mesh: Mesh, indices: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Facts of a mesh that a program depends on; its `indices` are operands."""
    fixed = {axis: index for axis, index in (mesh.indices or {}).items() if axis not in indices}
    return (*(tuple(sorted(facts.items())) for facts in (mesh.sizes, mesh.groups, fixed)), tuple(sorted(indices)))


def _holds_tensors(value: Any) -> bool:
    """True of a tree of tensors that has some; a record may lack others, as None."""
    leaves = trees.leaves(value)
    return bool(leaves) and all(isinstance(x, Tensor) for x in leaves)


def _traced(
    run: Callable[..., trees.Tree], specs: Sequence[tuple[Any, torch.dtype]], needs: tuple[bool, ...], remat: str
) -> LayerProgram:
    """The programs of a layer, as a function of its operands."""
    examples = [torch.empty(shape, dtype=dtype) for shape, dtype in specs]
    with torch.no_grad(), without_numbers("a layer", examples) as fakes:
        results = run(*fakes)
    differentiable = tuple(x.is_floating_point() for x in trees.leaves(results))
    wanted = [x for x in itertools.compress(trees.leaves(results), differentiable) if any(needs)]
    grads = [torch.empty(x.shape, dtype=x.dtype) for x in wanted]

    def joint(*leaves: Tensor) -> list[Tensor]:
        """Results of the layer, and the gradients of the operands that need one."""
        operands = [x.detach().requires_grad_(needed) for x, needed in zip(leaves, needs, strict=False)]
        with torch.enable_grad():
            results = trees.leaves(run(*operands))
        pairs = zip(itertools.compress(results, differentiable), leaves[len(needs) :], strict=False)
        used = [(out, grad) for out, grad in pairs if out.requires_grad]
        learning = list(itertools.compress(operands, needs))
        gradients: Sequence[Tensor | None] = [None] * len(learning)
        if used:
            outs, out_grads = zip(*used, strict=True)
            gradients = torch.autograd.grad(outs, learning, out_grads, allow_unused=True)
        filled = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(learning, gradients, strict=True)]
        return [*(x.detach() for x in results), *filled]

    graph = core_graph(joint, [*examples, *grads], "a layer and its gradient")
    forward, backward = split_at_gradients(graph, len(differentiable), len(grads), saves=remat == "none")
    return LayerProgram(forward, backward, trees.map(lambda _: 0, results), differentiable, needs)


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
    return node.target is operator.getitem or operator_name(node).removeprefix("aten.") not in _FREE


def _ancestors(nodes: Sequence[Any], ends: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Some nodes and what they depend on; the walk stops at `ends`."""
    begin = (node for node in nodes if isinstance(node, fx.Node))
    return frozenset(reachable(begin, lambda node: [] if node in ends else node.all_input_nodes))


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
