"""A backend of the native engine whose passes run in JAX: weights and pages stay on the device.

Each pass is a program of static shapes. A pass that only decodes is `decode_pass`, traced. In another pass the new
tokens of each sequence are in rows of a page's length, the last filled up with tokens that write to a spare page.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.paged_attention import Paging
from funrl.mesh.mesh import Mesh
from funrl.models.lora import Adapter
from funrl.models.model import Model
from funrl.rollout.native.backends import TorchBackend
from funrl.rollout.native.device.decode_state import DecodeForm, DecodeState, RowAdapters, Spare, decode_pass
from funrl.rollout.native.passes import PassWork, SampledRows
from funrl.rollout.native.static_decode import bucket
from funrl.rollout.sampling import sample_tokens
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.lowered.stacked_layers import CacheStacks, LayerStacks, StackedCache
from funrl.xla.compiled import Compiled, to_jax, to_torch
from funrl.xla.operators.result import JAX_DTYPES

_log = logging.getLogger(__name__)
CACHE = 2  # number of the argument of `prefill_function` and `decode_function` that is donated
WITH_CACHE = ("prefill", "decode")  # kinds of programs that have it


class PassProgram(Protocol):
    """A program of a kind of passes."""

    def arrays(self, *args: trees.Tree) -> trees.Tree:
        """The results as arrays of JAX, for trees of tensors or of such arrays."""
        ...


class PassPlaces(NamedTuple):
    """Places of the new tokens of a pass, in R rows of equally many.

    Attributes:
      tokens_N: int64 ids.
      positions_N: int64, in the token's sequence.
      places_N: int64, page times page length plus offset.
      table_RP: int32 pages of each row's sequence.
      sampled_M: int64, which tokens one is sampled after.
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


class PassSizes(NamedTuple):
    """Sizes of the program of a pass.

    Attributes:
      rows: of a page's length.
      pages: of the longest sequence.
      sampled: tokens after which one is sampled.
    """

    rows: int
    pages: int
    sampled: int


class XlaBackend(TorchBackend):
    """The training model in JAX; see `Backend`."""

    def __init__(
        self, model: Model, mesh: Mesh, dtype: torch.dtype, page_tokens: int, note: Callable[[str], None] = _log.info
    ):
        """Begin without weights; `note` receives how long programs took to be made."""
        super().__init__(model, mesh, dtype, None, page_tokens)
        self._note = note
        self._stacks = LayerStacks(model)
        self._weights: trees.Tree = None
        self._factors: dict[int, trees.Tree] = {}
        self._programs: dict[Any, PassProgram] = {}
        self._spare = Spare(0)

    def load(self, params: trees.Tree) -> None:
        super().load(params)
        with jax.enable_x64(True):
            self._weights = self._weights_on_devices(params)

    def _weights_on_devices(self, params: trees.Tree) -> trees.Tree:
        stacked = self._stacks.stack(params, torch.stack)
        self._params = self._stacks.unstack(stacked)  # which shares the memory of JAX's arrays
        return trees.map(to_jax, stacked)

    def _factors_on_devices(self, factors: trees.Tree) -> trees.Tree:
        return trees.map(to_jax, factors)

    def drop(self) -> None:
        super().drop()
        self._weights = None

    def load_adapter(self, number: int, adapter: Adapter | None) -> None:
        super().load_adapter(number, adapter)
        self._factors.pop(number, None)
        if adapter is not None:
            with jax.enable_x64(True):
                self._factors[number] = self._factors_on_devices(adapter.factors)

    def resize(self, pages: int, cells: int = 0) -> None:
        self._cache = None
        self._spare = Spare(pages, cells or None)
        if pages:
            assert self.model.init_cache is not None
            sizes = pages + self.spare, self.page_tokens, self._dtype, torch.device("meta")
            meta = self.model.init_cache(self.mesh, *sizes, cells + self.spare if cells else 0)
            with jax.enable_x64(True):
                self._cache = trees.map(zeros, self._stacks.stack_cache(meta))

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert isinstance(self._cache, CacheStacks)
        places = _filled((sources, targets), self._spare.page)
        self._cache = self._cache._replace(pages=self._copied(self._cache.pages, *places))

    def copy_cells(self, copies: Sequence[tuple[int, int]]) -> None:
        assert isinstance(self._cache, CacheStacks) and self._spare.cell is not None
        places = _filled(tuple(zip(*copies, strict=True)), self._spare.cell)
        self._cache = self._cache._replace(cells=self._copied(self._cache.cells, *places))

    def _copied(self, stacks: trees.Tree, from_P: np.ndarray, to_P: np.ndarray) -> trees.Tree:
        with jax.enable_x64(True):
            return _copied(stacks, jnp.asarray(from_P), jnp.asarray(to_P))

    def forward(self, work: PassWork) -> Tensor:
        used = (-1,) if work.adapters is None else tuple(np.unique(work.adapters).tolist())
        places = pass_places(work, self.page_tokens, self._spare)
        key = ("prefill", self._scales(used))
        program = self._program(key, lambda backend: backend.prefill_function(used))
        hidden_MD, self._cache = program.arrays(self._weights, self._used(used), self._cache, places)
        return to_torch(hidden_MD)[: len(work.sampled_positions)]

    def prefill_function(self, used: tuple[int, ...]) -> Callable[..., trees.Tree]:
        """The pure function of `forward`: (weights, factors, cache, places) -> (hidden states [M, D], cache).

        Args:
          used: numbers of the adapters, as in `RowAdapters`.
        """

        def run(params, factors, cache, places):
            inner, stacked = self._traced(params, factors, cache)
            empty = places.tokens_N.new_zeros(0)
            paging = Paging(places.places_N, places.positions_N, places.table_RP, empty, empty, empty)
            hidden_ND = inner.hidden(places.tokens_N, paging, RowAdapters(used, places.adapters_N), places.cells_R)
            return hidden_ND[places.sampled_M], stacked.written()

        return run

    def decode(
        self, state: DecodeState, rows_B: Tensor, form: DecodeForm, spare: Spare
    ) -> tuple[Tensor, Tensor, Tensor]:
        key = ("decode", form, spare, self._scales(form.adapters))
        program = self._program(key, lambda backend: backend.decode_function(form, spare))
        given = (self._weights, self._used(form.adapters), self._cache, state, rows_B)
        sampled, self._cache, after = program.arrays(*given)
        for x, new in zip(state, after, strict=True):
            x.copy_(to_torch(new))
        token_B, sampling_logp_B, raw_logp_B = map(to_torch, sampled)
        return token_B, sampling_logp_B, raw_logp_B

    def decode_function(self, form: DecodeForm, spare: Spare) -> Callable[..., trees.Tree]:
        """The pure function of `decode`: (weights, factors, cache, state, rows) -> (results, cache, state)."""

        def run(params, factors, cache, state, rows_B):
            inner, stacked = self._traced(params, factors, cache)
            state = trees.map(torch.clone, state)
            sampled = decode_pass(inner, state, rows_B, form=form, spare=spare)
            return sampled, stacked.written(), state

        return run

    def sample(
        self, output_M: Tensor, source_R: Tensor, noise_R: Tensor | None, sampling: Sampling, seen_RV: Tensor | None
    ) -> SampledRows:
        rows = len(source_R)
        more = self._rows_of_program(rows) - rows

        def filled(x: Tensor) -> Tensor:
            return torch.cat([x, x[-1:].expand(more, *x.shape[1:])])

        key = ("sample", sampling, noise_R is None, seen_RV is None)
        program = self._program(key, lambda backend: backend.sample_function(sampling))
        numbers = [None if x is None else filled(x) for x in (output_M[source_R], noise_R, seen_RV)]
        sampled = program.arrays(self._weights, *numbers)
        token_R, sampling_logp_R, raw_logp_R = (self._to_host(x)[:rows] for x in sampled)
        return token_R, sampling_logp_R, raw_logp_R

    def _rows_of_program(self, rows: int) -> int:
        """Rows of a program that samples at least so many."""
        return bucket(rows)

    def _to_host(self, x: jax.Array) -> Tensor:
        return to_torch(x)

    def sample_function(self, sampling: Sampling) -> Callable[..., trees.Tree]:
        """The pure function of `sample`: (weights, hidden states [R, D], noise [R], seen [R, V]) -> results."""

        def run(params, hidden_RD, noise_R, seen_RV):
            inner, _ = self._traced(params, {}, CacheStacks((), ()))
            return sample_tokens(inner.logits(hidden_RD), noise_R, sampling, seen_RV=seen_RV, static=True)

        return run

    def _used(self, adapters: Sequence[int]) -> dict[str, trees.Tree]:
        """The factors of some adapters, by their numbers."""
        return {str(number): self._factors[number] for number in adapters if number >= 0}

    def _scales(self, adapters: Sequence[int]) -> tuple[tuple[int, float | None], ...]:
        """Adapters of a program with their scales, which are constants of it."""
        return tuple((number, self._adapters[number].scale if number >= 0 else None) for number in adapters)

    def _program(self, key: Any, function_of: FunctionOf) -> PassProgram:
        """The program of a key, which begins with its kind."""
        if key not in self._programs:
            donated = (CACHE,) if key[0] in WITH_CACHE else ()
            self._programs[key] = self._made(key[0], function_of, donated)
        return self._programs[key]

    def _made(self, kind: str, function_of: FunctionOf, donated: tuple[int, ...]) -> PassProgram:
        return Compiled(function_of(self), f"{kind} of the engine", self._note, donated)

    def _traced(
        self, params: trees.Tree, factors: dict[str, trees.Tree], cache: CacheStacks
    ) -> tuple[TorchBackend, StackedCache]:
        """The backend in torch with the weights and the cache of a program that is traced, and that cache."""
        assert self.model.unembed is not None
        stacked = StackedCache(self._stacks, cache)
        inner = copy.copy(self)
        inner._params = self._stacks.unstack(params)
        inner._unembed_VD = self.model.unembed(params)
        inner._cache = stacked.numbers
        inner._layer = stacked.layer
        inner._adapted = {}
        inner._adapters = {int(n): Adapter(tree, self._adapters[int(n)].scale) for n, tree in factors.items()}
        return inner, stacked


FunctionOf = Callable[[XlaBackend], Callable[..., trees.Tree]]


def pass_sizes(work: PassWork, page_tokens: int) -> PassSizes:
    """Sizes of the program of a pass, of which few occur."""
    rows = sum(-(-int(count) // page_tokens) for count in work.counts)
    pages = -(-int(max(work.ends, default=0)) // page_tokens)
    return PassSizes(*map(bucket, (rows, pages, len(work.sampled_positions))))


def pass_places(work: PassWork, page_tokens: int, spare: Spare, sizes: PassSizes | None = None) -> PassPlaces:
    """Places of a pass in rows of a page's length.

    Args:
      work: of the pass.
      page_tokens: tokens of a page.
      spare: page and cell that the filling writes to.
      sizes: of the program; None: `pass_sizes`.
    """
    rows, pages, samples = sizes or pass_sizes(work, page_tokens)
    counts_S = np.asarray(work.counts, dtype=np.int64)
    ends_S = np.asarray(work.ends, dtype=np.int64)
    rows_S = -(-counts_S // page_tokens)
    sequence_N = np.repeat(np.arange(len(counts_S)), counts_S)
    index_N = np.arange(len(sequence_N)) - (np.cumsum(counts_S) - counts_S)[sequence_N]
    at_N = (np.cumsum(rows_S) - rows_S)[sequence_N] * page_tokens + index_N
    position_N = (ends_S - counts_S)[sequence_N] + index_N
    table_SP = np.zeros((len(counts_S), pages), dtype=np.int32)
    given = work.table_SP.numpy()[:, :pages]
    table_SP[:, : given.shape[1]] = given
    place_N = table_SP[sequence_N, position_N // page_tokens].astype(np.int64) * page_tokens + position_N % page_tokens
    adapters_S = np.full(len(counts_S), -1) if work.adapters is None else work.adapters

    def laid(x_N: np.ndarray, filling: int) -> Tensor:
        whole = np.full(rows * page_tokens, filling, dtype=np.int64)
        whole[at_N] = x_N
        return torch.from_numpy(whole)

    table_RP = np.zeros((rows, pages), dtype=np.int32)
    table_RP[: rows_S.sum()] = np.repeat(table_SP, rows_S, axis=0)
    sampled_M = at_N[np.asarray(work.sampled_positions, dtype=np.int64)]
    filling = np.zeros(samples - len(sampled_M), dtype=np.int64)
    return PassPlaces(
        laid(work.tokens_N.numpy(), 0),
        laid(position_N, 0),
        laid(place_N, spare.page * page_tokens),
        torch.from_numpy(table_RP),
        torch.from_numpy(np.concatenate([sampled_M, filling])),
        laid(adapters_S[sequence_N], int(adapters_S[0]) if len(adapters_S) else -1),
        cells_R=None if spare.cell is None else torch.from_numpy(_cells_of_rows(work, rows_S, rows, spare.cell)),
    )


def _cells_of_rows(work: PassWork, rows_S: np.ndarray, rows: int, spare: int) -> np.ndarray:
    """The cell of each row's sequence; rows that fill a pass up have the spare one."""
    assert work.cells is not None
    cells_R = np.full(rows, spare)
    cells_R[: rows_S.sum()] = np.repeat(work.cells, rows_S)
    return cells_R


def _filled(places: Sequence[Sequence[int]], spare: int) -> list[np.ndarray]:
    """Numbers to copy from and to, filled up with a spare one, as programs have few sizes."""
    count = len(places[0])
    return [np.asarray([*numbers, *[spare] * (bucket(count) - count)], dtype=np.int64) for numbers in places]


def zeros(x: Tensor, sharding: NamedSharding | None = None) -> jax.Array:
    """An array of zeros of the shape and dtype of a tensor, on one device or split over several."""
    return jnp.zeros(tuple(x.shape), JAX_DTYPES[x.dtype], device=sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _copied(stacks: trees.Tree, from_P: jax.Array, to_P: jax.Array) -> trees.Tree:
    """Pages or cells of all layers after a copy of some."""
    return jax.tree.map(lambda x: x.at[:, to_P].set(x[:, from_P]), stacks)
