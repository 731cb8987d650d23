"""A backend of the native engine whose passes run in JAX on all devices of a mesh, which one process drives.

The devices of a row index, those that differ on `tensor` alone, are a lane: they split the weights and heads, and have
pages and sequences of their own. One program computes a pass of all lanes.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import AXES, ROW_AXES, Mesh
from funrl.mesh.rules import GENERATE, layouts
from funrl.models.lora import FIRST, trained_part, with_lora
from funrl.models.model import Lora, Model
from funrl.rollout.native.device.decode_state import CELL, STOP, DecodeForm, DecodeState, Spare, empty_state
from funrl.rollout.native.passes import PassWork
from funrl.rollout.native.static_decode import bucket
from funrl.trainer.lowered.decoding import (
    FunctionOf,
    PassPlaces,
    PassProgram,
    PassSizes,
    XlaBackend,
    pass_places,
    pass_sizes,
    zeros,
)
from funrl.trainer.lowered.mesh_programs import OWN_ROWS
from funrl.trainer.lowered.stacked_layers import CacheStacks, LayerStacks
from funrl.xla.meshes import DeviceCopies, MeshProgram, copies_on, devices_of_mesh, spec_of, to_host

_log = logging.getLogger(__name__)
ON_EACH = PartitionSpec(None, AXES)  # pages of a stack of layers, of which each device has its own
STATE_SPECS = (OWN_ROWS, PartitionSpec(None, ROW_AXES), OWN_ROWS)  # of `DecodeState`


class EngineDevices(NamedTuple):
    """Meshes over the devices of this process.

    Attributes:
      trained: sizes of the mesh to train on, whose devices have copies of weights.
      generating: sizes of the mesh to generate on, over the same devices.
    """

    trained: Mapping[str, int]
    generating: Mapping[str, int]


class PassSpecs(NamedTuple):
    """PartitionSpecs of the programs of an engine.

    Attributes:
      weights: of its weights, whose layers are stacked.
      factors: of its adapters, by number.
    """

    weights: trees.Tree
    factors: Mapping[str, trees.Tree] = {}

    def given(self, kind: str, args: Sequence[trees.Tree]) -> tuple[trees.Tree, ...]:
        """Of the arguments of a program of a kind: "prefill", "decode" or "sample"."""
        if kind == "sample":
            return (self.weights, *trees.map(lambda _: OWN_ROWS, tuple(args[1:])))
        _, used, cache, *rows = args
        factors = {number: self.factors[number] for number in used}
        return (self.weights, factors, _on_each(cache), *self._of_rows(kind, rows))

    def results(self, kind: str, tree: trees.Tree) -> trees.Tree:
        """Of the tree of its results."""
        if kind == "sample":
            return trees.map(lambda _: OWN_ROWS, tree)
        result, cache, *state = tree
        return (trees.map(lambda _: OWN_ROWS, result), _on_each(cache), *self._of_rows(kind, state))

    def _of_rows(self, kind: str, rows: Sequence[trees.Tree]) -> list[trees.Tree]:
        if kind == "prefill" or not rows:
            return [trees.map(lambda _: OWN_ROWS, x) for x in rows]
        return [trees.fill(rows[0], STATE_SPECS), *[OWN_ROWS] * (len(rows) - 1)]


def _on_each(cache: trees.Tree) -> trees.Tree:
    return trees.map(lambda _: ON_EACH, cache)


class MeshBackend(XlaBackend):
    """The training model in JAX on the devices of a mesh; see `Backend`."""

    def __init__(
        self,
        devices: EngineDevices,
        model: Model,
        mesh: Mesh,
        dtype: torch.dtype,
        page_tokens: int,
        note: Callable[[str], None] = _log.info,
    ):
        """Begin without weights; JAX starts when they come.

        Args:
          devices: meshes of them.
          model, mesh, dtype, page_tokens: as in `XlaBackend`; the mesh has this process alone.
          note: receives how long programs took to be made.
        """
        super().__init__(model, mesh, dtype, page_tokens, note)
        self._devices = devices
        self._chips = Mesh(dict(devices.generating))
        self._specs = PassSpecs(specs_of_stacks(self._stacks, self._specs_of(model)))
        self.lanes = self._chips.size(ROW_AXES)

    @functools.cached_property
    def _mesh(self) -> jax.sharding.Mesh:
        """The devices to generate on."""
        return devices_of_mesh(self._devices.generating)

    @functools.cached_property
    def _copies(self) -> DeviceCopies:
        """Copies of a pass's arguments on these devices."""
        return DeviceCopies(self._mesh)

    def resize(self, pages: int, cells: int = 0) -> None:
        self._cache = None
        cells //= self.lanes
        self._spare = Spare(pages // self.lanes, cells or None)  # the page and the cell after those of a lane
        if not pages:
            return
        assert self.model.init_cache is not None
        sizes = self._spare.page + 1, self.page_tokens, self._dtype, torch.device("meta")
        own = self.model.init_cache(self._chips, *sizes, cells + 1 if cells else 0)
        form = cache_of_chips(self._stacks, own, self._chips)
        sharding = NamedSharding(self._mesh, ON_EACH)
        with jax.enable_x64(True):
            self._cache = trees.map(lambda x: zeros(x, sharding), form)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert isinstance(self._cache, CacheStacks)
        whole = self._filled_lanes((sources, targets), self._spare.page)
        self._cache = self._cache._replace(pages=self._copied(self._cache.pages, *whole))

    def copy_cells(self, copies: Sequence[tuple[int, int]]) -> None:
        assert isinstance(self._cache, CacheStacks) and self._spare.cell is not None
        whole = self._filled_lanes(tuple(zip(*copies, strict=True)), self._spare.cell)
        self._cache = self._cache._replace(cells=self._copied(self._cache.cells, *whole))

    def _filled_lanes(self, places: Sequence[Sequence[int]], each: int) -> np.ndarray:
        """Numbers in each lane to copy from and to, [2, lanes times n], filled up with the spare one.

        Args:
          places: numbers to copy from and to, both of one lane.
          each: pages or cells of a lane, and the number of its spare one.
        """
        from_P, to_P = np.asarray(places, dtype=np.int64)
        lane_P = from_P // each
        most = bucket(int(np.bincount(lane_P).max()))
        whole = np.full((2, self.lanes * most), each)
        whole[:, places_in_lanes(lane_P, most)] = from_P % each, to_P % each
        return whole

    def _copied(self, stacks: trees.Tree, from_P: np.ndarray, to_P: np.ndarray) -> trees.Tree:
        with jax.enable_x64(True):
            return _copied(self._mesh, stacks, from_P, to_P)

    def forward(self, work: PassWork) -> Tensor:
        used = (-1,) if work.adapters is None else tuple(np.unique(work.adapters).tolist())
        places, at_M = lane_places(work, self.page_tokens, self._spare, self.lanes)
        key = ("prefill", self._scales(used))
        program = self._program(key, lambda backend: backend.prefill_function(used))
        hidden_MD, self._cache = program.arrays(self._weights, self._used(used), self._cache, places)
        return to_host(hidden_MD)[at_M]

    def decode(
        self, state: DecodeState, rows_B: Tensor, form: DecodeForm, spare: Spare
    ) -> tuple[Tensor, Tensor, Tensor]:
        held_B = rows_B != len(state.tokens_S) - 1  # the last slot is spare
        slots_N = rows_B[held_B]
        lane_N = state.table_SP[slots_N, 0].numpy() // self._spare.page
        rows = bucket(int(np.bincount(lane_N).max()))
        at_N = torch.from_numpy(places_in_lanes(lane_N, rows))
        own = empty_state(rows_B.new_zeros(self.lanes * rows), state.numbers_CS.shape[0] - STOP, form.pages)
        own.tokens_S[at_N] = state.tokens_S[slots_N]
        own.numbers_CS[:, at_N] = state.numbers_CS[:, slots_N]
        own.table_SP[at_N] = state.table_SP[slots_N, : form.pages] % self._spare.page
        own.numbers_CS[CELL] %= self._spare.cell or 1
        form = form._replace(rows=rows)
        program = self._program(
            ("decode", form, self._spare, self._scales(form.adapters)),
            lambda backend: backend.decode_function(form, self._spare),
        )
        every = torch.arange(rows).repeat(self.lanes)
        given = (self._weights, self._used(form.adapters), self._cache, own, every)
        sampled, self._cache, after = program.arrays(*given)
        state.tokens_S[slots_N] = to_host(after.tokens_S)[at_N]
        state.numbers_CS[:CELL, slots_N] = to_host(after.numbers_CS)[:CELL, at_N]  # a cell's number is of all lanes
        token_B, *logps = (_spread(to_host(x)[at_N], held_B) for x in sampled)
        return token_B, logps[0], logps[1]

    def _rows_of_program(self, rows: int) -> int:
        return self.lanes * bucket(-(-rows // self.lanes))

    def _to_host(self, x: jax.Array) -> Tensor:
        return to_host(x)

    def _weights_on_devices(self, params: trees.Tree) -> trees.Tree:
        trained = copies_on(tuple(self._devices.trained.items()))
        whole = trained.laid_out(params, self._mesh, self._specs_of(self.model))
        return self._stacks.stack(whole, _stacked)

    def _factors_on_devices(self, factors: trees.Tree) -> trees.Tree:
        return self._copies.laid_out(factors, self._mesh, self._specs_of_factors(factors))

    def _specs_of(self, model: Model) -> trees.Tree:
        return trees.map(spec_of, layouts(model.shapes, model.axes, GENERATE, self._chips.sizes))

    def _specs_of_factors(self, factors: trees.Tree) -> trees.Tree:
        """PartitionSpecs of the factors of an adapter."""
        firsts = {name: x for name, x in trees.named(factors) if name.endswith(FIRST)}
        targets = {name.removesuffix(FIRST).rsplit("/", 1)[-1] for name in firsts}
        rank = len(next(iter(firsts.values())))
        adapted = with_lora(self.model, Lora(rank, alpha=1.0, targets=tuple(sorted(targets))))
        return trained_part(adapted, self._specs_of(adapted))

    def _made(self, kind: str, function_of: FunctionOf, donated: tuple[int, ...]) -> PassProgram:
        def make(place: Mesh) -> Callable[..., trees.Tree]:
            inner = copy.copy(self)
            inner.mesh = place
            return function_of(inner)

        def given(*args: trees.Tree) -> tuple[trees.Tree, ...]:
            factors = {number: self._specs_of_factors(tree) for number, tree in self._factors_of(kind, args).items()}
            return self._specs._replace(factors=factors).given(kind, args)

        program = MeshProgram(
            make,
            self._copies,
            given,
            functools.partial(self._specs.results, kind),
            name=f"{kind} of the engine",
            note=self._note,
        )
        program.donated = donated
        return program

    def _factors_of(self, kind: str, args: Sequence[trees.Tree]) -> dict[str, trees.Tree]:
        """The factors among the arguments of a program."""
        return {} if kind == "sample" else args[1]


def lane_places(work: PassWork, page_tokens: int, spare: Spare, lanes: int) -> tuple[PassPlaces, Tensor]:
    """Places of a pass in each lane, one after the other, and where each sampled token of the pass is among theirs.

    Args:
      work: of all lanes.
      page_tokens: tokens of a page.
      spare: page and cell after those of a lane.
      lanes: number of lanes.
    """
    lane_S = work.table_SP[:, 0].numpy() // spare.page
    lane_N = np.repeat(lane_S, np.asarray(work.counts))
    parts = [of_lane(work, lane_S == lane, spare) for lane in range(lanes)]
    most = PassSizes(*map(max, zip(*(pass_sizes(part, page_tokens) for part in parts), strict=True)))
    places = [pass_places(part, page_tokens, spare, most) for part in parts]
    sampled_M = np.asarray(work.sampled_positions, dtype=np.int64)
    at_M = places_in_lanes(lane_N[sampled_M], most.sampled)
    return trees.map(lambda *x: torch.cat(x), *places), torch.from_numpy(at_M)


def of_lane(work: PassWork, own_S: np.ndarray, spare: Spare) -> PassWork:
    """The work of the sequences of a lane, whose pages and cells are numbered from 0, as the spare ones are."""
    counts_S = np.asarray(work.counts, dtype=np.int64)
    own_N = np.repeat(own_S, counts_S)
    sampled_M = np.asarray(work.sampled_positions, dtype=np.int64)
    index_N = np.cumsum(own_N) - 1
    return PassWork(
        work.tokens_N[torch.from_numpy(own_N)],
        counts_S[own_S],
        np.asarray(work.ends)[own_S],
        work.table_SP[torch.from_numpy(own_S)] % spare.page,
        index_N[sampled_M[own_N[sampled_M]]],
        adapters=None if work.adapters is None else work.adapters[own_S],
        cells=None if work.cells is None or spare.cell is None else work.cells[own_S] % spare.cell,
    )


def places_in_lanes(lane_N: np.ndarray, rows: int) -> np.ndarray:
    """Places of things in lanes of so many rows each, one lane after the other; those of a lane stay in order."""
    order_N = np.argsort(lane_N, kind="stable")
    starts_L = np.concatenate([[0], np.cumsum(np.bincount(lane_N))])
    at_N = np.empty(len(lane_N), dtype=np.int64)
    at_N[order_N] = np.arange(len(lane_N)) - starts_L[lane_N[order_N]] + lane_N[order_N].astype(np.int64) * rows
    return at_N


def _spread(x_N: Tensor, held_B: Tensor) -> Tensor:
    """Numbers of some rows among all, of which the others have 0."""
    return x_N.new_zeros(len(held_B)).masked_scatter_(held_B, x_N)


def specs_of_stacks(stacks: LayerStacks, specs: trees.Tree) -> trees.Tree:
    """PartitionSpecs of weights whose layers are stacked, of those of each layer."""
    return stacks.stack(specs, lambda some: PartitionSpec(None, *some[0]))


def cache_of_chips(stacks: LayerStacks, own: Any, chips: Mesh) -> CacheStacks:
    """The form of the caches of all chips of a mesh, one after the other, of that of one."""
    return trees.map(lambda x: x.new_empty(x.shape[0], x.shape[1] * chips.world, *x.shape[2:]), stacks.stack_cache(own))


def _stacked(layers: Sequence[jax.Array]) -> jax.Array:
    """Weights of layers that lie on the devices, in one array that is split as they are."""
    sharding = layers[0].sharding
    assert isinstance(sharding, NamedSharding)
    return _join_to(NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec)))(*layers)


@functools.cache
def _join_to(sharding: NamedSharding) -> Callable[..., jax.Array]:
    """The function that stacks arrays, with its result split like this."""
    return jax.jit(lambda *xs: jnp.stack(xs), out_shardings=sharding)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _copied(mesh: jax.sharding.Mesh, stacks: trees.Tree, from_P: jax.Array, to_P: jax.Array) -> trees.Tree:
    """Pages or cells of all layers after a copy of some, by their numbers in each lane."""

    def copied(stacks: trees.Tree, from_P: jax.Array, to_P: jax.Array) -> Any:
        return jax.tree.map(lambda x: x.at[:, to_P].set(x[:, from_P]), stacks)

    specs = (ON_EACH, OWN_ROWS, OWN_ROWS)
    return jax.shard_map(copied, mesh=mesh, in_specs=specs, out_specs=ON_EACH, check_vma=False)(stacks, from_P, to_P)
