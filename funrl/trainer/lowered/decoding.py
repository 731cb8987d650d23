"""A backend of the native engine whose passes run in JAX, on all devices of a mesh, which one process drives.

The devices of a row index, which differ on `tensor` alone, are a lane: they split the weights and heads, and have
pages and sequences of their own. Weights and pages stay on the devices. One program of static shapes computes a pass of
all lanes. A pass that only decodes is `decode_pass`, traced. In another pass the new tokens of each sequence are in
rows of a page's length, and torch samples what follows them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.paged_attention import Paging
from funrl.mesh.mesh import AXES, ROW_AXES, Mesh
from funrl.mesh.rules import WHOLE_EXPERTS, layouts
from funrl.models.lora import FIRST, Adapter, trained_part, with_lora
from funrl.models.model import Layer, Lora, Model
from funrl.rollout.native.backends import TorchBackend
from funrl.rollout.native.device.decode_state import CELL, DecodeForm, DecodeState, RowAdapters, Spare, decode_pass
from funrl.rollout.native.lanes import bucket, places_in_lanes
from funrl.rollout.native.passes import PassWork
from funrl.trainer.lowered.jax_steps import OWN_ROWS
from funrl.xla.interpret import repeats
from funrl.xla.layers import as_one_operator
from funrl.xla.meshes import DeviceCopies, MeshProgram, ShardedFunction, devices_of_mesh, spec_of, split_over, to_host
from funrl.xla.operators import JAX_DTYPES

_log = logging.getLogger(__name__)
CACHE = 2  # number of the argument of a pass that is donated
ON_EACH = PartitionSpec(None, AXES)  # pages of a stack of layers; each device has its own
Scales = tuple[tuple[int, float | None], ...]  # adapters of a pass, ascending, with their scales; -1 is none


class PassPlaces(NamedTuple):
    """Places of the new tokens of a pass, in R rows of equally many for each lane, one lane after the other.

    Attributes:
      tokens_N: int64 ids.
      positions_N: int64, in the token's sequence.
      places_N: int64, page of the lane times page length plus offset.
      table_RP: int32 pages of each row's sequence.
      sampled_M: int64, which tokens of its lane one is sampled after.
      adapters_N: int64, number of each token's adapter.
      cells_R: int64, cell of each row's sequence; None: the cache has none.
    """

    tokens_N: Tensor
    positions_N: Tensor
    places_N: Tensor
    table_RP: Tensor
    sampled_M: Tensor
    adapters_N: Tensor
    cells_R: Tensor | None = None


class CacheStacks(NamedTuple):
    """The cache of all layers.

    Attributes:
      pages: of each stack, tensors [layers, pages, ...].
      cells: of each stack, tensors [layers, cells, ...].
    """

    pages: tuple[tuple[Any, ...], ...]
    cells: tuple[tuple[Any, ...], ...]


EMPTY_STACKS = CacheStacks((), ())


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


class StackedCache:
    """The cache of a program that is traced, and the layers that write to it."""

    def __init__(self, stacks: LayerStacks, cache: CacheStacks) -> None:
        """Begin with a cache, which stays unchanged."""
        self._stacks = stacks
        self._form = cache
        self._flat = [trees.map(lambda x: x.flatten(0, 1), pair) for pair in zip(*cache, strict=True)]

    @property
    def numbers(self) -> CacheStacks:
        """The cache for `Model.apply`, beside `layer`: the number of each layer instead of its tensors."""
        layers = range(len(self._stacks._places))
        return CacheStacks(tuple((n,) for n in layers), ((),) * len(layers))

    def layer(self, config: Any, mesh: Mesh, params: trees.Tree, x_BTD: Tensor, context: Any) -> Any:
        """A layer of the model, as one operator: `Model.layer`."""
        (number,) = context.kv_cache
        stack, index = self._stacks._places[number]
        sizes = (part[stack][0].shape[1] if part[stack] else 0 for part in self._form)  # of a layer: pages, cells
        shifts = tuple(torch.full((), index * size, dtype=torch.int64) for size in sizes)
        empty = context.paging.places_N.new_zeros(0)  # of what attention of static shapes does not read
        paging = context.paging._replace(offsets_S1=empty, ends_S=empty, groups_G5=empty)
        context = context._replace(kv_cache=self._flat[stack], paging=paging)
        result, self._flat[stack] = self._stacks._layer(config, mesh, (params, shifts), x_BTD, context)
        return result

    def written(self) -> CacheStacks:
        """The cache with what layers have written."""
        flat = CacheStacks(*(tuple(pair[i] for pair in self._flat) for i in (0, 1)))
        return trees.map(lambda x, form: x.view(form.shape), flat, self._form)


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


class EnginePrograms:
    """The passes of an engine as functions of what a device has. Their first arguments are weights, factors and cache.

    Attributes:
      chips: the mesh to generate on, without its devices.
      stacks: of the model's layers.
    """

    def __init__(self, model: Model, sizes: Mapping[str, int], dtype: torch.dtype, page_tokens: int) -> None:
        """Describe the passes of a model on a mesh of these sizes."""
        self.chips = Mesh(dict(sizes))
        self.stacks = LayerStacks(model)
        self._model = model
        self._dtype = dtype
        self._page_tokens = page_tokens

    def prefill(self, scales: Scales) -> ShardedFunction:
        """(weights, factors, cache, places) -> (hidden states [M, D], cache)."""
        used = tuple(number for number, _ in scales)

        def run(inner: TorchBackend, places: PassPlaces) -> tuple[trees.Tree, tuple]:
            empty = places.tokens_N.new_zeros(0)
            paging = Paging(places.places_N, places.positions_N, places.table_RP, empty, empty, empty)
            hidden_ND = inner.hidden(places.tokens_N, paging, RowAdapters(used, places.adapters_N), places.cells_R)
            return hidden_ND[places.sampled_M], ()

        return self._function("prefill", scales, run)

    def decode(self, scales: Scales, form: DecodeForm, spare: Spare) -> ShardedFunction:
        """(weights, factors, cache, columns of a state, rows) -> (results, cache, tokens and numbers of the state)."""

        def run(inner: TorchBackend, state: DecodeState, rows_B: Tensor) -> tuple[trees.Tree, tuple]:
            own = DecodeState(state.tokens_S.clone(), state.numbers_CS.T.clone(), state.table_SP)
            sampled = decode_pass(inner, own, rows_B, form=form, spare=spare)
            return sampled, (own.tokens_S, own.numbers_CS.T)

        return self._function("decode", scales, run)

    def _function(self, kind: str, scales: Scales, run: Callable[..., tuple[trees.Tree, tuple]]) -> ShardedFunction:
        """A pass as a function of shards; `run` takes the traced backend and the pass's own arguments."""

        def make(mesh: Mesh) -> Callable[..., trees.Tree]:
            def call(params: trees.Tree, factors: dict[str, trees.Tree], cache: CacheStacks, *rest: Any) -> trees.Tree:
                stacked = StackedCache(self.stacks, cache)
                inner = TorchBackend(self._model, mesh, self._dtype, stacked.layer, self._page_tokens)
                inner._params = self.stacks.unstack(params)
                inner._unembed_VD = self._model.unembedding(params)
                inner._cache = stacked.numbers
                inner._adapters = {n: Adapter(factors[str(n)], scale) for n, scale in scales if scale is not None}
                result, more = run(inner, *rest)
                return result, stacked.written(), more

            return call

        def given(*args: trees.Tree) -> Sequence[trees.Tree]:
            weights = trees.map(lambda x: x.sharding.spec, args[:CACHE])
            rows = trees.map(lambda _: OWN_ROWS, args[CACHE + 1 :])
            return *weights, trees.map(lambda _: ON_EACH, args[CACHE]), *rows

        def results(tree: Any, given: Sequence[trees.Tree]) -> trees.Tree:
            result, _, more = tree
            return trees.map(lambda _: OWN_ROWS, result), given[CACHE], trees.map(lambda _: OWN_ROWS, more)

        return ShardedFunction(f"{kind} of the engine", make, given, results, (CACHE,))

    def specs(self, model: Model) -> trees.Tree:
        """PartitionSpecs of the weights of a model."""
        return trees.map(spec_of, layouts(model.shapes, model.axes, WHOLE_EXPERTS, self.chips.sizes))

    def cache(self, spare: Spare) -> CacheStacks:
        """The form of the caches of all chips, one after the other; a lane has pages and cells up to the spare ones."""
        sizes = spare.page + 1, self._page_tokens, self._dtype, torch.device("meta")
        own = self._model.empty_cache(self.chips, *sizes, cells=0 if spare.cell is None else spare.cell + 1)
        chips = self.chips.world

        def stacked(layers: Sequence[tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], ...]:
            firsts = ((len(numbers), layers[numbers[0]]) for numbers in self.stacks.numbers)
            return tuple(tuple(x.new_empty(n, chips * len(x), *x.shape[1:]) for x in xs) for n, xs in firsts)

        return CacheStacks(stacked(own.pages), stacked(own.cells))


class XlaBackend(TorchBackend):
    """The training model in JAX; see `Backend`."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        model: Model,
        mesh: Mesh,
        dtype: torch.dtype,
        page_tokens: int,
        note: Any = _log.info,
    ):
        """Begin without weights; JAX starts when they come.

        Args:
          sizes: of the mesh to generate on, over the devices of this process.
          model, mesh, dtype, page_tokens: as in `TorchBackend`; the mesh has this process alone.
          note: receives how long programs took to be made.
        """
        super().__init__(model, mesh, dtype, None, page_tokens)
        self._sizes = sizes
        self._note = note
        self._functions = EnginePrograms(model, sizes, dtype, page_tokens)
        self.lanes = self._functions.chips.size(ROW_AXES)
        self._weights: trees.Tree = None
        self._factors: dict[int, trees.Tree] = {}
        self._programs: dict[Any, MeshProgram] = {}
        self._spare = Spare(0)
        self._arrays = EMPTY_STACKS  # the cache

    @functools.cached_property
    def _copies(self) -> DeviceCopies:
        """Copies of a pass's arguments on the devices to generate on."""
        return DeviceCopies(devices_of_mesh(self._sizes))

    def load(self, params: trees.Tree) -> None:
        super().load(params)
        functions = self._functions
        with jax.enable_x64(True):
            weights = self._split(params, functions.specs(self.model))
            self._weights = functions.stacks.stack(weights, lambda xs: _join_to(xs[0].sharding)(*xs))

    def drop(self) -> None:
        super().drop()
        self._weights = None

    @property
    def mixes(self) -> bool:
        """False: prompts have static shapes of their own, rows of a page's length."""
        return False

    def load_adapter(self, number: int, adapter: Adapter | None) -> None:
        super().load_adapter(number, adapter)
        self._factors.pop(number, None)
        if adapter is None:
            return
        firsts = {name: x for name, x in trees.named(adapter.factors) if name.endswith(FIRST)}
        targets = {name.removesuffix(FIRST).rsplit("/", 1)[-1] for name in firsts}
        rank = len(next(iter(firsts.values())))
        adapted = with_lora(self.model, Lora(rank, alpha=1.0, targets=tuple(sorted(targets))))
        specs = trained_part(adapted, self._functions.specs(adapted))
        with jax.enable_x64(True):
            self._factors[number] = self._split(adapter.factors, specs)

    def resize(self, pages: int, cells: int = 0) -> None:
        self._arrays = EMPTY_STACKS
        self._spare = Spare(pages // self.lanes, cells // self.lanes or None)
        if pages:
            sharding = NamedSharding(self._copies.mesh, ON_EACH)
            form = self._functions.cache(self._spare)
            with jax.enable_x64(True):
                self._arrays = trees.map(
                    lambda x: jnp.zeros(tuple(x.shape), JAX_DTYPES[x.dtype], device=sharding), form
                )

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        pages = self._copied(self._arrays.pages, (sources, targets), self._spare.page)
        self._arrays = self._arrays._replace(pages=pages)

    def copy_cells(self, copies: Sequence[tuple[int, int]]) -> None:
        cells = self._copied(self._arrays.cells, tuple(zip(*copies, strict=True)), self._spare.cell or 0)
        self._arrays = self._arrays._replace(cells=cells)

    def _copied(self, stacks: trees.Tree, places: Sequence[Sequence[int]], each: int) -> trees.Tree:
        """Pages or cells of all layers after a copy of some.

        Args:
          places: numbers to copy from and to, each pair of one lane.
          each: pages or cells of a lane, and the number of its spare one, which fills the numbers of a lane up.
        """
        from_P, to_P = np.asarray(places, dtype=np.int64)
        at_P, count = places_in_lanes(from_P // each, self.lanes)
        whole = np.full((2, self.lanes * count), each)
        whole[:, at_P] = from_P % each, to_P % each
        with jax.enable_x64(True):
            return _copy_in_lanes(self._copies.mesh, stacks, *whole)

    def forward(self, work: PassWork) -> Tensor:
        used = [-1] if work.adapters is None else np.unique(work.adapters).tolist()
        places, at_M = pass_places(work, self.page_tokens, self._spare, self.lanes)
        program = self._program(self._functions.prefill, self._scales(used))
        hidden_MD, _ = self._run(program, used, places)
        return to_host(hidden_MD)[at_M]

    def decode(
        self, state: DecodeState, rows_B: Tensor, form: DecodeForm, spare: Spare
    ) -> tuple[Tensor, Tensor, Tensor]:
        last = len(state.tokens_S) - 1  # the spare slot
        held_B = rows_B != last
        at_N, rows = places_in_lanes(state.table_SP[rows_B[held_B], 0].numpy() // self._spare.page, self.lanes)
        slots_L = torch.full((self.lanes * rows,), last)
        slots_L[at_N] = rows_B[held_B]
        numbers_LC = state.numbers_CS[:, slots_L].T.contiguous()
        numbers_LC[:, CELL] %= self._spare.cell or 1
        own = DecodeState(state.tokens_S[slots_L], numbers_LC, state.table_SP[slots_L, : form.pages] % self._spare.page)
        form = form._replace(rows=rows)
        program = self._program(self._functions.decode, self._scales(form.adapters), form, self._spare)
        every = torch.arange(rows).repeat(self.lanes)
        sampled, (tokens_L, numbers_LC) = self._run(program, form.adapters, own, every)
        state.tokens_S[slots_L] = to_host(tokens_L)
        state.numbers_CS[:CELL, slots_L] = to_host(numbers_LC).T[:CELL]  # a cell's number is of all lanes
        rows_of_pass = (to_host(x)[at_N] for x in sampled)
        token_B, *logps = (x.new_zeros(len(rows_B)).masked_scatter_(held_B, x) for x in rows_of_pass)
        return token_B, logps[0], logps[1]

    def _split(self, tree: trees.Tree, specs: trees.Tree) -> trees.Tree:
        """Copies of tensors, split over the devices."""
        return trees.map(lambda x, spec: split_over(x, self._copies.mesh, spec), tree, specs)

    def _scales(self, adapters: Sequence[int]) -> Scales:
        """Adapters of a program with their scales, which are constants of it."""
        return tuple((number, self._adapters[number].scale if number >= 0 else None) for number in adapters)

    def _program(self, function_of: Callable[..., ShardedFunction], *options: Hashable) -> MeshProgram:
        """The program of a function of `EnginePrograms`."""
        key = function_of, options
        if key not in self._programs:
            self._programs[key] = MeshProgram(function_of(*options), self._copies, self._note)
        return self._programs[key]

    def _run(self, program: MeshProgram, adapters: Sequence[int], *args: trees.Tree) -> tuple[trees.Tree, Any]:
        """The results of a pass with some adapters, whose cache becomes the engine's."""
        factors = {str(number): self._factors[number] for number in adapters if number >= 0}
        result, self._arrays, more = program.arrays(self._weights, factors, self._arrays, *args)
        return result, more


def pass_places(work: PassWork, page_tokens: int, spare: Spare, lanes: int = 1) -> tuple[PassPlaces, Tensor]:
    """Places of a pass in rows of a page's length, and where each sampled token of the pass is among those sampled.

    Args:
      work: of the pass.
      page_tokens: tokens of a page.
      spare: page and cell after those of a lane, which the filling writes to.
      lanes: number of lanes.
    """
    counts_S = np.asarray(work.counts, dtype=np.int64)
    ends_S = np.asarray(work.ends, dtype=np.int64)
    lane_S = work.table_SP[:, 0].numpy() // spare.page
    sequence_N = np.repeat(np.arange(len(counts_S)), counts_S)
    rows_S = -(-counts_S // page_tokens)
    sequence_R = np.repeat(np.arange(len(counts_S)), rows_S)
    at_R, rows = places_in_lanes(lane_S[sequence_R], lanes)
    index_N = np.arange(len(sequence_N)) - (np.cumsum(counts_S) - counts_S)[sequence_N]
    row_N = at_R[(np.cumsum(rows_S) - rows_S)[sequence_N] + index_N // page_tokens]
    at_N = row_N * page_tokens + index_N % page_tokens
    position_N = (ends_S - counts_S)[sequence_N] + index_N
    pages = bucket(-(-int(ends_S.max()) // page_tokens))
    table_SP = np.zeros((len(counts_S), pages), dtype=np.int32)
    given = work.table_SP.numpy()[:, :pages] % spare.page
    table_SP[:, : given.shape[1]] = given
    place_N = table_SP[sequence_N, position_N // page_tokens].astype(np.int64) * page_tokens + position_N % page_tokens
    adapters_S = np.full(len(counts_S), -1) if work.adapters is None else np.asarray(work.adapters, dtype=np.int64)
    position_M = np.asarray(work.sampled_positions, dtype=np.int64)
    lane_M = lane_S[sequence_N[position_M]].astype(np.int64)
    at_M, samples = places_in_lanes(lane_M, lanes)

    def scatter(at: np.ndarray, x: np.ndarray, count: int, filling: int) -> Tensor:
        whole = np.full((lanes * count, *x.shape[1:]), filling, dtype=x.dtype)
        whole[at] = x
        return torch.from_numpy(whole)

    tokens = rows * page_tokens
    cells_R = None
    if work.cells is not None and spare.cell is not None:
        cells_R = scatter(at_R, np.asarray(work.cells)[sequence_R] % spare.cell, rows, spare.cell)
    places = PassPlaces(
        scatter(at_N, work.tokens_N.numpy(), tokens, 0),
        scatter(at_N, position_N, tokens, 0),
        scatter(at_N, place_N, tokens, spare.page * page_tokens),
        scatter(at_R, table_SP[sequence_R], rows, 0),
        scatter(at_M, at_N[position_M] - lane_M * tokens, samples, 0),
        scatter(at_N, adapters_S[sequence_N], tokens, int(adapters_S[0])),
        cells_R=cells_R,
    )
    return places, torch.from_numpy(at_M)


@functools.cache
def _join_to(sharding: NamedSharding) -> Callable[..., jax.Array]:
    """The function that stacks weights of layers into one array, split as they are."""
    stacked = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.jit(lambda *xs: jnp.stack(xs), out_shardings=stacked)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _copy_in_lanes(mesh: jax.sharding.Mesh, stacks: trees.Tree, from_P: jax.Array, to_P: jax.Array) -> trees.Tree:
    """Pages or cells of all layers after a copy of some, by their numbers in each lane."""

    def copied(stacks: trees.Tree, from_P: jax.Array, to_P: jax.Array) -> Any:
        return jax.tree.map(lambda x: x.at[:, to_P].set(x[:, from_P]), stacks)

    specs = (ON_EACH, OWN_ROWS, OWN_ROWS)
    return jax.shard_map(copied, mesh=mesh, in_specs=specs, out_specs=ON_EACH, check_vma=False)(stacks, from_P, to_P)
