"""Layers of an engine in stacks: weights and caches of layers that a program computes in one loop are one array each.

A program then takes a layer's weights from the stack where it needs them, and all layers write to one cache, whose
pages and cells of a layer follow those of the layer before. So nothing is copied into a stack in a pass, and depth
costs no time to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.models.model import Layer, Model
from funrl.xla.interpret import repeats
from funrl.xla.layers import as_one_operator


class CacheStacks(NamedTuple):
    """The cache of all layers.

    Attributes:
      pages: of each stack, tensors [layers, pages, ...].
      cells: of each stack, tensors [layers, cells, ...].
    """

    pages: tuple[tuple[Any, ...], ...]
    cells: tuple[tuple[Any, ...], ...]


class LayerNumbers(NamedTuple):
    """A cache as `Model.apply` takes it, which has the number of each layer instead of its tensors."""

    pages: tuple[tuple[int], ...]
    cells: tuple[tuple[()], ...]


class LayerStacks:
    """The stacks of a model's layers.

    Attributes:
      numbers: of the layers of each stack, in the order of a loop.
    """

    def __init__(self, model: Model) -> None:
        """Stack layers whose kinds come again and again."""
        self.numbers = stacks_of(model.abilities.layer_kinds or tuple(range(model.config.layers)))
        self._places = {n: (i, k) for i, numbers in enumerate(self.numbers) for k, n in enumerate(numbers)}
        self._layer = as_one_operator(_in_stack(model.layer))

    def stack(self, params: trees.Tree, join: Callable[[tuple[Any, ...]], Any]) -> trees.Tree:
        """Weights whose part "layers" has a tree for each stack.

        Args:
          params: weights, or anything in a tree of their structure.
          join: leaves of a stack's layers -> one.
        """
        layers = params["layers"]
        stacks = (tuple(layers[n] for n in numbers) for numbers in self.numbers)
        return {**params, "layers": tuple(trees.map(lambda *xs: join(xs), *stack) for stack in stacks)}

    def unstack(self, stacked: trees.Tree) -> trees.Tree:
        """The weights again, each layer's a view of a stack."""
        places = (self._places[n] for n in range(len(self._places)))
        layers = tuple(trees.map(lambda x, k=k: x[k], stacked["layers"][i]) for i, k in places)
        return {**stacked, "layers": layers}

    def stack_cache(self, cache: Any) -> CacheStacks:
        """The form of a cache in stacks, without memory, of that of `Model.init_cache`."""

        def stacked(layers: Sequence[tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], ...]:
            firsts = ((len(numbers), layers[numbers[0]]) for numbers in self.numbers)
            return tuple(tuple(x.new_empty(count, *x.shape, device="meta") for x in xs) for count, xs in firsts)

        return CacheStacks(stacked(cache.pages), stacked(cache.cells))


class StackedCache:
    """The cache of a program that is traced, and the layers that write to it."""

    def __init__(self, stacks: LayerStacks, cache: CacheStacks) -> None:
        """Begin with a cache, which stays unchanged."""
        self._stacks = stacks
        self._form = cache
        self._flat = [trees.map(lambda x: x.flatten(0, 1), pair) for pair in zip(*cache, strict=True)]

    @property
    def numbers(self) -> LayerNumbers:
        """The cache for `Model.apply`, beside `layer`."""
        layers = range(len(self._stacks._places))
        return LayerNumbers(tuple((n,) for n in layers), ((),) * len(layers))

    def layer(self, config: Any, mesh: Mesh, params: trees.Tree, x_BTD: Tensor, context: Any) -> Any:
        """A layer of the model, as one operator: `Model.layer`."""
        (number,) = context.kv_cache
        stack, index = self._stacks._places[number]
        shifts = tuple(self._shift(part[stack], index) for part in self._form)
        context = context._replace(kv_cache=self._flat[stack], paging=_without_groups(context.paging))
        result, self._flat[stack] = self._stacks._layer(config, mesh, (params, shifts), x_BTD, context)
        return result

    def written(self) -> CacheStacks:
        """The cache with what layers have written."""
        flat = CacheStacks(*(tuple(pair[i] for pair in self._flat) for i in (0, 1)))
        return trees.map(lambda x, form: x.view(form.shape), flat, self._form)

    @staticmethod
    def _shift(xs: tuple[Tensor, ...], index: int) -> Tensor:
        """The number of the first page, or cell, of a layer of a stack."""
        return torch.full((), index * xs[0].shape[1] if xs else 0, dtype=torch.int64)


def stacks_of(kinds: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """The numbers of the layers of each stack: of each kind in a turn of a loop, or of one layer."""
    stacks: list[tuple[int, ...]] = []
    begin = 0
    while begin < len(kinds):
        size, turns = next(repeats(kinds[begin:]), (1, 1))
        end = begin + size * turns
        stacks += [tuple(range(first, end, size)) for first in range(begin, begin + size)]
        begin = end
    return tuple(stacks)


def _in_stack(layer: Layer) -> Layer:
    """A layer whose pages and cells are those of a stack from a number on; it gives these too, with what it writes."""

    def run(config: Any, mesh: Mesh, own: tuple[trees.Tree, tuple[Tensor, Tensor]], x_BTD: Tensor, context: Any) -> Any:
        params, (page, cell) = own
        pages, cells = cache = trees.map(torch.clone, context.kv_cache)
        paging = context.paging
        table_SP = paging.table_SP + page
        places_N = paging.places_N + page * (pages[0].shape[1] if pages else 0)
        cells_S = None if context.cells_S is None else context.cells_S + cell
        own_paging = paging._replace(table_SP=table_SP, places_N=places_N)
        context = context._replace(kv_cache=pages + cells, paging=own_paging, cells_S=cells_S)
        return layer(config, mesh, params, x_BTD, context), cache

    return run


def _without_groups(paging: Any) -> Any:
    """A paging without what attention of static shapes does not read, some of which is the host's."""
    empty = paging.places_N.new_zeros(0)
    return paging._replace(offsets_S1=empty, ends_S=empty, groups_G5=empty)
