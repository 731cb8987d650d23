"""Layers of a model as operators of a program: each is traced once, and called wherever the model calls it.

A model calls the function of one layer for every depth. `as_one_operator` gives a function whose calls are a single
operator in the program of the whole model, `funrl_xla::layer`, and another one going back. What these compute are
programs of their own, which depend on the layer's sizes and not on its weights: so a deep model is traced and compiled
in the time of a shallow one (`chains.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from funrl import trees
from funrl.autograd import AutogradFunction
from funrl.mesh.mesh import Mesh
from funrl.models.model import Layer
from funrl.xla.errors import XlaError
from funrl.xla.split import split_at_gradients
from funrl.xla.trace import core_graph, results_without_numbers

REMAT = ("none", "full")


class Spec(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class LayerProgram(NamedTuple):
    """The programs of one layer, forward and back.

    Attributes:
      forward: operands -> results, and what is saved of the way.
      backward: operands, saved, gradients of the differentiable results -> gradients of the operands that need one;
        None: none needs one.
      outputs: of `forward`.
      results: the tree of the results, with a 0 for each leaf.
      differentiable: which results have gradients.
      needs: which operands need gradients.
      operands: of both.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    outputs: tuple[Spec, ...]
    results: trees.Tree
    differentiable: tuple[bool, ...]
    needs: tuple[bool, ...]
    operands: tuple[Spec, ...]


PROGRAMS: dict[str, LayerProgram] = {}  # by the name that is an argument of the operators
_NAMES: dict[Any, str] = {}
_NUMBERS = itertools.count()


@torch.library.custom_op("funrl_xla::layer", mutates_args=())
def _layer(program: str, operands: Sequence[Tensor]) -> list[Tensor]:
    raise XlaError(f"{program} is part of a traced program and runs only there")


@_layer.register_fake
def _(program, operands):
    return [operands[0].new_empty(spec.shape, dtype=spec.dtype) for spec in PROGRAMS[program].outputs]


@torch.library.custom_op("funrl_xla::layer_backward", mutates_args=())
def _layer_backward(program: str, operands: Sequence[Tensor]) -> list[Tensor]:
    raise XlaError(f"{program} is part of a traced program and runs only there")


@_layer_backward.register_fake
def _(program, operands):
    layer = PROGRAMS[program]
    wanted = itertools.compress(layer.operands, layer.needs)
    return [operands[0].new_empty(spec.shape, dtype=spec.dtype) for spec in wanted]


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
        specs = tuple(Spec(tuple(x.shape), x.dtype) for x in operands)
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


def _traced(run: Any, specs: Sequence[Spec], needs: Sequence[bool], remat: str) -> LayerProgram:
    """The programs of a layer, as a function of its operands."""
    examples = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    structure: list[trees.Tree] = []

    def results_of(*operands: Tensor) -> list[Tensor]:
        results = run(*operands)
        structure[:] = [trees.map(lambda _: 0, results)]
        return trees.leaves(results)

    if not any(needs):
        with torch.no_grad():
            forward = core_graph(results_of, examples, "a layer")
        outputs = output_specs(forward)
        differentiable = tuple(spec.dtype.is_floating_point for spec in outputs)
        facts = {"differentiable": differentiable, "needs": tuple(needs), "operands": tuple(specs)}
        return LayerProgram(forward, None, outputs, structure[0], **facts)
    with torch.no_grad():
        results = results_without_numbers(results_of, examples, "a layer")
    differentiable = tuple(x.is_floating_point() for x in results)
    grads = [torch.empty(x.shape, dtype=x.dtype) for x in itertools.compress(results, differentiable)]
    joint = functools.partial(_joint, results_of, needs, differentiable)
    graph = core_graph(joint, [*examples, *grads], "a layer and its gradient")
    forward, backward = split_at_gradients(graph, len(results), len(grads), saves=remat == "none")
    parts = (forward, backward, output_specs(forward))
    return LayerProgram(*parts, structure[0], differentiable, tuple(needs), tuple(specs))


def _joint(run: Any, needs: Sequence[bool], differentiable: Sequence[bool], *leaves: Tensor) -> list[Tensor]:
    """Results of a layer, and the gradients of the operands that need one."""
    operands = [x.detach().requires_grad_(needed) for x, needed in zip(leaves, needs, strict=False)]
    grads = leaves[len(needs) :]
    with torch.enable_grad():
        results = run(*operands)
    outs = [x for x, has_gradient in zip(results, differentiable, strict=True) if has_gradient]
    used = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
    wanted = list(itertools.compress(operands, needs))
    gradients = torch.autograd.grad([x for x, _ in used], wanted, [grad for _, grad in used], allow_unused=True)
    filled = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(wanted, gradients, strict=True)]
    return [*(x.detach() for x in results), *filled]


def output_specs(graph: fx.GraphModule) -> tuple[Spec, ...]:
    """Shapes and dtypes of what a graph gives."""
    (outputs,) = graph.graph.output_node().args
    assert isinstance(outputs, Sequence)
    values = [node.meta["val"] for node in outputs if isinstance(node, fx.Node)]
    return tuple(Spec(tuple(x.shape), x.dtype) for x in values)
