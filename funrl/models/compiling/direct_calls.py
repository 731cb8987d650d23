"""Calls of compiled graphs past torch.compile's own dispatch, once it has dispatched an equal call.

torch.compile evaluates all guards of a graph and enters several contexts in each call, and the tensors of the call need
marks. Everything that guards read of a layer's arguments, exact sizes included, is the key of a call. A call with a
known key goes straight to the graph that torch.compile has chosen for this key before. Every other call goes through
torch.compile, which compiles it if need be: a size or a flag that is new is never taken for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard

from funrl import trees
from funrl.compiled_kernels.exact.dispatch import aligned_on

MOST_KEYS = 1024  # that are kept: prompts have many lengths
MOST_ROUTES = 16  # of one key: kinds of layers whose tensors have the same sizes
Graph = Callable[..., Sequence[Any]]


class LayerCall(NamedTuple):
    """Arguments of a layer, taken apart.

    Attributes:
      key: of the tensors and the modes of this thread; None: torch.compile has to see the call.
      others: everything that is no tensor, in order.
      tensors: the tensors, in order.
    """

    key: Hashable
    others: Sequence[object]
    tensors: Sequence[Tensor]


class GraphRoute(NamedTuple):
    """Way of a call to its graph.

    Attributes:
      others: of the call.
      settings: of torch, which guards read.
      graph: what torch.compile has run.
      arguments: of the graph: the number of a tensor of the call, or None and a constant, such as a size.
      results: for each leaf of the layer's result its number among those of the graph.
      structure: of the layer's result.
    """

    others: Sequence[object]
    settings: GlobalStateGuard
    graph: Graph
    arguments: Sequence[tuple[int | None, object]]
    results: Sequence[int]
    structure: optree.PyTreeSpec

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The layer's result for the tensors of a call."""
        results = self.graph(*[value if number is None else tensors[number] for number, value in self.arguments])
        return optree.tree_unflatten(self.structure, [results[number] for number in self.results])


class GraphRun(NamedTuple):
    """Graph that torch.compile has run, with its arguments and results."""

    graph: Graph
    arguments: Sequence[object]
    results: Sequence[object]


class DirectCalls:
    """Routes of the calls of a layer.

    Example:
      calls = DirectCalls(backend)
      compiled = torch.compile(layer, fullgraph=True, backend=calls.compile_graph)
      call = layer_call(*arguments)
      route = calls.find(call)
      result = calls.trace(call, lambda: compiled(*arguments)) if route is None else route.run(call.tensors)
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        """Begin without a route; `backend` is one of torch.compile."""
        self._backend = backend
        self._routes: dict[Hashable, list[GraphRoute]] = {}
        self._last: GraphRun | None = None

    def compile_graph(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Graph:
        """Compile a graph by the backend."""
        graph = self._backend(module, inputs)

        def run(*arguments: Any) -> Sequence[Any]:
            results = graph(*arguments)
            self._last = GraphRun(graph, arguments, results)
            return results

        return run

    def find(self, call: LayerCall) -> GraphRoute | None:
        """The route of a call; None: only torch.compile knows it."""
        for route in self._routes.get(call.key, ()):
            if route.others == call.others and route.settings.check():
                return route
        return None

    def trace(self, call: LayerCall, compute: Callable[[], trees.Tree]) -> trees.Tree:
        """Compute a layer by torch.compile, and keep the route of the call if its graph has no other tensors."""
        try:
            result = compute()
            self._add(call, result)
        finally:  # an error leaves no tensors behind, nor a graph for the next call
            self._last = None
        return result

    def _add(self, call: LayerCall, result: trees.Tree) -> None:
        last = self._last
        if call.key is None or last is None:
            return
        numbers = {id(x): number for number, x in enumerate(call.tensors)}
        arguments = [(numbers.get(id(x)), None) if isinstance(x, Tensor) else (None, x) for x in last.arguments]
        places = {id(x): place for place, x in enumerate(last.results) if isinstance(x, Tensor)}
        leaves, structure = trees.flatten(result)
        if any(pair == (None, None) for pair in arguments) or any(id(x) not in places for x in leaves):
            return
        if len(self._routes) >= MOST_KEYS:
            self._routes.clear()
        routes = self._routes.setdefault(call.key, [])
        del routes[MOST_ROUTES - 1 :]
        results = [places[id(x)] for x in leaves]
        routes.insert(0, GraphRoute(call.others, GlobalStateGuard(), last.graph, arguments, results, structure))


def layer_call(config: object, mesh: object, params: trees.Tree, x_BTD: Tensor, context: trees.Tree) -> LayerCall:
    """Take a call of a layer apart."""
    leaves, structure = trees.flatten((params, x_BTD, context))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    others = [config, mesh, *(x for x in leaves if not isinstance(x, Tensor))]
    if _is_seen() or len(set(map(id, tensors))) < len(tensors):
        return LayerCall(None, others, tensors)
    facts = [(type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_inference()) for x in tensors]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), aligned_on(x_BTD.device.type)
    key = (structure, modes, *facts)
    return LayerCall(key, others, tensors)


def _is_seen() -> bool:
    """True if torch.compile, a mode or a transform of `torch.func` has to see what is called."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )
