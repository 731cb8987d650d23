"""Two backends that compute a forward pass over the new tokens of many sequences.

`TorchBackend` runs the training model itself on any device and mesh; `PackedBackend` makes one call into compiled code
on a CPU. The scheduler knows neither.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels import decode_step
from funrl.compiled_kernels.arguments import BITS, real_of
from funrl.compiled_kernels.decode_slots import PassForm
from funrl.compiled_kernels.decode_step import StepSizes
from funrl.compiled_kernels.exact.adapters import PackedAdapter, TokenAdapters
from funrl.compiled_kernels.exact.dispatch import kernels_work
from funrl.compiled_kernels.exact.packs import forget
from funrl.compiled_kernels.fused_decode import FusedDecoder, fused_problem
from funrl.compiled_kernels.kernel_library import KernelError, library, library_problem
from funrl.compiled_kernels.linear_logprob import filled_columns, project, token_rows
from funrl.compiled_kernels.paged_attention import Paging, kernel_for, paging_of
from funrl.mesh.collectives import all_gather
from funrl.mesh.mesh import Mesh
from funrl.models.decoder.experts import stack_gate_up
from funrl.models.equivalent_layer import computes_as
from funrl.models.lora import Adapter, factor_of, factors_of_layers, with_adapters
from funrl.models.model import Inputs, Layer, Model, ModelCache
from funrl.rollout.kept_tokens import keep_tokens
from funrl.rollout.native.cache_sizes import page_tokens
from funrl.rollout.native.device.decode_state import (
    DecodeForm,
    DecodeState,
    RowAdapters,
    Spare,
    decode_pass,
    fused_pass,
)
from funrl.rollout.native.device.host_copy import device_copy
from funrl.rollout.native.lanes import LaneRows
from funrl.rollout.native.owned_prompts import OwnedPrompts
from funrl.rollout.native.passes import Backend, PassWork, SampledRows
from funrl.rollout.sampling import VocabularyPart, sample_shared_tokens, sample_tokens
from funrl.rollout.sampling_parameters import Sampling

ROUTE = torch.int16  # dtype of recorded ids of experts
log = logging.getLogger(__name__)
LOGITS = 1 << 26  # logits computed at a time at most
NO_ADAPTER = -1  # number of the weights that adapters stand on


class TorchBackend:
    """The training model itself.

    Attributes:
      spare: number of unused pages, and of cells where there are some, after those of `resize`.
    """

    lanes = 1

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        dtype: torch.dtype,
        layer: Layer | None,
        page_tokens: int,
        record_routes: bool = False,
    ):
        self.page_tokens = page_tokens
        self.vocab = model.config.vocab
        self.model = model
        self.mesh = mesh
        self.page_bytes = model.page_bytes(mesh, page_tokens, dtype)
        self.cell_bytes = model.cell_bytes(mesh, dtype)
        self._choices = model.abilities.choices if record_routes else 0
        self.page_bytes += page_tokens * self._choices * ROUTE.itemsize
        self._routes = torch.zeros(0, page_tokens, self._choices, dtype=ROUTE)  # experts of the tokens of each page
        self._dtype = dtype
        self._layer = layer
        self._cache: ModelCache | None = None
        self._params: trees.Tree = None
        self._unembed_VD = torch.empty(0)
        self._adapters: dict[int, Adapter] = {}
        self._adapted: dict[int, trees.Tree] = {}  # weights with one adapter for all tokens
        self._fused: FusedDecoder | None = None
        self._with_stacks: trees.Tree = None  # weights with those of experts that one product reads
        self._stacks: bool | None = None  # whether `load` stacks weights; None: until the first pass
        self._owned = OwnedPrompts(model)
        self._fixed: set[int] = set()  # adapters, or `NO_ADAPTER`, whose memory is no caller's
        self.spare = 0

    def load(self, params: trees.Tree) -> None:
        self._take(params)
        self._fused = self._with_stacks = None
        if self._stacks:
            self._stack()

    def _take(self, params: trees.Tree) -> None:
        self._fixed.discard(NO_ADAPTER)
        unembed_VD = self.model.unembedding(params)
        forget(*trees.leaves(params))
        if unembed_VD.element_size() == 2 and not unembed_VD.is_cuda and not kernels_work():
            unembed_VD = unembed_VD.float()  # `project` would convert it at every step
        self._params = params
        self._unembed_VD = unembed_VD

    @property
    def _computed(self) -> trees.Tree:
        """The weights that passes compute with."""
        return self._params if self._with_stacks is None else self._with_stacks

    @property
    def load_bytes(self) -> int:
        """Bytes that `overwrite` needs beside the weights before it."""
        return trees.nbytes(self._params)

    def overwrite(self, params: trees.Tree) -> bool:
        """Copy weights into the memory of those before, which captured passes read; False: they have new memory.

        Tensors that came by `load` may be the caller's. They are not written to, but replaced by copies once.
        """
        if NO_ADAPTER not in self._fixed:
            self.drop()
            self.load(trees.map(_own_copy, params))
            self._fixed.add(NO_ADAPTER)
            return False
        held = self._params, self._unembed_VD  # stacked weights of fused kernels are the memory of these
        self._take(params)
        copy_into(held, (self._params, self._unembed_VD))
        self._params, self._unembed_VD = held
        self._fixed.add(NO_ADAPTER)
        return True

    def overwrite_adapter(self, number: int, adapter: Adapter) -> bool:
        """`overwrite` for the factors of an adapter; the scale is a constant of captured passes."""
        held = self._adapters.get(number)
        forms = [x and (x.scale, [(name, y.shape) for name, y in trees.named(x.factors)]) for x in (held, adapter)]
        if held is None or number not in self._fixed or forms[0] != forms[1]:
            self.load_adapter(number, Adapter(trees.map(_own_copy, adapter.factors), adapter.scale))
            self._fixed.add(number)
            return False
        copy_into(held.factors, adapter.factors)
        return True

    def drop(self) -> None:
        self._params = self._fused = self._with_stacks = None
        self._unembed_VD = torch.empty(0)
        self._adapted.clear()
        self._owned.clear()

    def rest(self) -> None:
        self._owned.clear()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        yield from trees.named(self._params)

    def load_adapter(self, number: int, adapter: Adapter | None) -> None:
        self._adapted.pop(number, None)
        self._fixed.discard(number)
        if adapter is None:
            del self._adapters[number]
        else:
            forget(*trees.leaves(adapter.factors))
            self._adapters[number] = adapter

    def held_adapter(self, number: int) -> Iterator[tuple[str, Tensor]]:
        yield from trees.named(self._adapters[number].factors)

    def resize(self, pages: int, cells: int = 0) -> None:
        self._cache = None
        pages += self.spare if pages else 0
        cells += self.spare if cells else 0
        shape = pages, self.page_tokens, self._choices
        self._routes = torch.full(shape, -1, dtype=ROUTE, device=self.mesh.device)
        if pages:
            sizes = pages, self.page_tokens, self._dtype, self.mesh.device
            self._cache = self.model.empty_cache(self.mesh, *sizes, cells=cells)

    def routes(self, pages: Sequence[int], tokens: int) -> Tensor:
        """Experts of the first tokens of a sequence, on the CPU: [tokens, choices], layer by layer.

        They are stored by page, like keys and values. -1: the token is in no page.
        """
        ids_TC = self._routes[list(pages)].flatten(0, 1)[:tokens].cpu()
        return torch.nn.functional.pad(ids_TC, (0, 0, 0, tokens - len(ids_TC)), value=-1)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        from_P, to_P = (device_copy(np.asarray(x, dtype=np.int64), self.mesh.device) for x in (sources, targets))
        for x in [*trees.leaves(self._cache and self._cache.pages), self._routes]:
            x.index_copy_(0, to_P, x[from_P])

    def copy_cells(self, copies: Sequence[tuple[int, int]]) -> None:
        from_C, to_C = device_copy(np.array(copies, dtype=np.int64).T, self.mesh.device)
        for x in trees.leaves(self._cache and self._cache.cells):
            x.index_copy_(0, to_C, x[from_C])

    def forward(self, work: PassWork) -> Tensor:
        """Hidden states [M, D]."""
        device = work.tokens_N.device
        paging = paging_of(work.counts, work.ends, work.table_SP, page_tokens=self.page_tokens, device=device)
        sampled_M = device_copy(np.asarray(work.sampled_positions, dtype=np.int64), device)
        adapters = None
        if work.adapters is not None:
            number_N = device_copy(np.repeat(work.adapters, work.counts), device)
            adapters = RowAdapters(tuple(np.unique(work.adapters).tolist()), number_N)
        cells_S = None if work.cells is None else device_copy(work.cells, device)
        owned = {}
        if work.requests is not None:
            numbers = np.asarray(work.counts), np.asarray(work.ends)
            owned = self._owned.inputs(work.requests, *numbers, params=self._params)
        return self.hidden(work.tokens_N, paging, adapters, cells_S, owned)[sampled_M]

    def hidden(
        self,
        tokens_N: Tensor,
        paging: Paging,
        adapters: RowAdapters | None = None,
        cells_S: Tensor | None = None,
        owned: Mapping[str, Any] = {},
    ) -> Tensor:
        """Hidden states [N, D] of new tokens, whose keys and values are written, and their states.

        Args:
          owned: further inputs of prompts that own values.
        """
        inputs = Inputs(tokens_N.unsqueeze(0), paging=paging, cells_S=cells_S, **owned)
        params = self._computed if adapters is None else self._weights_with(adapters)
        hidden_1ND, self._cache, aux = self.model.apply(params, inputs, self.mesh, self._cache, self._layer)
        if self._choices:  # ids [L, N, k]
            self._routes.flatten(0, 1)[paging.places_N] = aux["ids_TK"].movedim(0, 1).flatten(1).to(ROUTE)
        return hidden_1ND[0]

    def _weights_with(self, adapters: RowAdapters) -> trees.Tree:
        """The weights with adapters beside them, each for its tokens."""
        first, *others = adapters.used
        if others:
            tokens = {number: (adapters.number_N == number).unsqueeze(-1) for number in adapters.used if number >= 0}
            return with_adapters(self._computed, [(self._adapters[number], mask) for number, mask in tokens.items()])
        if first < 0:
            return self._computed
        if first not in self._adapted:
            self._adapted[first] = with_adapters(self._computed, [(self._adapters[first], None)])
        return self._adapted[first]

    def decode(
        self, state: DecodeState, rows_B: Tensor, form: DecodeForm, spare: Spare
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`decode_pass` with these weights and this cache; on a GPU by fused kernels, where they compute the model."""
        self.stack_weights()
        if self._cache is not None and self._fused is not None and form.adapters == (-1,):
            hidden = functools.partial(
                self._fused.hidden, pages=self._cache.pages, form=PassForm(self.page_tokens, form.pages, spare.page)
            )
            return fused_pass(self, hidden, state, rows_B, groups=form.sampling_groups)
        return decode_pass(self, state, rows_B, form=form, spare=spare)

    def lane_rows(self, lane_R: np.ndarray) -> LaneRows | None:
        """Rows of a pass, by their lanes, as this rank computes them; None: it computes all of them."""
        return None

    def own_pages(self, pages: np.ndarray) -> np.ndarray:
        """Numbers of pages in the cache of this rank."""
        return pages

    def own_cells(self, cells_R: np.ndarray | None) -> np.ndarray | None:
        """Numbers of cells likewise."""
        return cells_R

    def stack_weights(self) -> None:
        """Stack weights for fused kernels, where these compute the model, or of experts, as `load` does from then on.

        Weights get other memory: it is called before each pass that may be captured, and does nothing after the first.
        With adapters, whose passes have no fused kernels, the weights stay, as they may be the trainer's.
        """
        if self._stacks is None:
            on_gpu = self.mesh.device.type == "cuda"
            self._stacks = (on_gpu or self._fused_sizes is not None) and not self._adapters
            if self._stacks:
                self._stack()

    def _stack(self) -> None:
        if self._fused_sizes is not None:
            self._fused = FusedDecoder(self._fused_sizes, self._computed)
        elif not self._replaced:
            self._with_stacks = stack_gate_up(self._params)

    @property
    def _replaced(self) -> bool:
        """True if a layer is not the model's own, compiled or not."""
        return self._layer is not None and not computes_as(self._layer, self.model.layer)

    @functools.cached_property
    def _fused_sizes(self) -> StepSizes | None:
        """Sizes of the model if fused kernels compute passes that only decode."""
        sizes = self.model.abilities.compiled_step
        device = self.mesh.device
        if self.mesh.size("tensor") > 1 or self._replaced or device.type != "cuda":
            return None
        problem = fused_problem(sizes, self._dtype, device, self.page_tokens)
        if isinstance(sizes, str) or problem is not None:
            log.info("decoding takes the model's own operators: %s", problem)
            return None
        return sizes

    @property
    def part(self) -> VocabularyPart:
        """The part of the vocabulary whose logits this tensor rank computes."""
        return VocabularyPart(self.mesh, len(self._unembed_VD), self.vocab)

    def own_logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits [R, C] of this tensor rank's part of the vocabulary."""
        unembed_CD = token_rows(self._unembed_VD, self.mesh, self.vocab)
        logits_RC = project(hidden_RD, unembed_CD, self.model.abilities.logit_cap)
        if self.model.abilities.unsampled:
            token_C1 = self.part.first + torch.arange(len(unembed_CD), device=hidden_RD.device).unsqueeze(1)
            never_C = (token_C1 == self._unsampled_U).any(1)
            logits_RC = logits_RC.masked_fill_(never_C, -torch.inf)
        return logits_RC

    @functools.cached_property
    def _unsampled_U(self) -> Tensor:
        """Tokens that are never sampled; a captured pass may not copy them to the device."""
        return torch.tensor(self.model.abilities.unsampled, device=self.mesh.device)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits [R, V] of the whole vocabulary."""
        logits_RC = filled_columns(self.own_logits(hidden_RD), self.part.columns)
        return all_gather(logits_RC, self.mesh, "tensor", dim=1)[:, : self.vocab].contiguous()

    @property
    def by_kernel(self) -> bool:
        """True if the attention kernel stops at the end of each sequence, for any number of pages."""
        heads = self.model.abilities.paged_kernel
        device = self.mesh.device.type
        if heads is None:
            return False
        return kernel_for(device, self._dtype, heads.head, self.page_tokens, plain=heads.plain) is not None

    @property
    def mixes(self) -> bool:
        """True if a pass with prompts may have a static shape: attention takes lengths from the device."""
        exact = self.mesh.device.type == "cpu" and self._dtype in BITS and kernels_work()
        return self.lanes == 1 and not self.cell_bytes and (exact or self.by_kernel)

    @property
    def rows_at_once(self) -> int:
        """Bound on the rows whose logits are computed together."""
        return max(1, LOGITS // self.model.config.vocab)

    def sample(
        self, output_M: Tensor, source_R: Tensor, noise_R: Tensor | None, sampling: Sampling, seen_RV: Tensor | None
    ) -> SampledRows:
        parts = []
        for low in range(0, len(source_R), self.rows_at_once):
            rows = slice(low, low + self.rows_at_once)
            logits_RC = self.own_logits(output_M[source_R[rows]])
            noise_here, seen_here = (None if x is None else x[rows] for x in (noise_R, seen_RV))
            parts.append(sample_shared_tokens(logits_RC, noise_here, sampling, self.part, seen_RV=seen_here))
        token_R, sampling_logp_R, raw_logp_R = (torch.cat(x) for x in zip(*parts, strict=True))
        return token_R, sampling_logp_R, raw_logp_R

    def keep(self, output_M: Tensor, source_R: Tensor, token_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        parts = [
            keep_tokens(self.logits(output_M[source]), token, sampling)
            for source, token in zip(source_R.split(self.rows_at_once), token_R.split(self.rows_at_once), strict=True)
        ]
        logp_R, bits_RB = (torch.cat(x) for x in zip(*parts, strict=True))
        return logp_R, bits_RB


def _own_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def copy_into(held: trees.Tree, new: trees.Tree) -> None:
    """Copy the numbers of tensors into others of the same shapes."""
    for x, source in zip(trees.leaves(held), trees.leaves(new), strict=True):
        x.copy_(source)
    forget(*trees.leaves(held))


class PackedBackend:
    """A dense decoder on one tensor rank of a CPU, with one call into compiled code per pass.

    A completion's bits do not depend on other unfinished requests.
    """

    page_tokens = decode_step.PAGE
    cell_bytes = 0
    lanes = 1

    def __init__(self, model: Model, dtype: torch.dtype):
        sizes = model.abilities.compiled_step
        assert not isinstance(sizes, str), sizes
        self.vocab = model.config.vocab
        self._sizes = sizes
        self._dtype = dtype
        self.page_bytes = decode_step.page_bytes(sizes, dtype)
        self._decoder: decode_step.PackedDecoder | None = None
        self._cache: decode_step.PagedKeyValues | None = None
        self._logits = torch.empty(0, self.vocab, dtype=real_of(dtype))  # of the last pass; overwritten by the next
        self._adapters: dict[int, PackedAdapter] = {}
        self._factor_names: dict[int, list[str]] = {}

    def load(self, params: trees.Tree) -> None:
        if self._decoder is None:
            self._decoder = decode_step.packed_decoder(self._sizes, params, self._dtype)
        else:
            self._decoder.load(params)

    @property
    def _packed(self) -> decode_step.PackedDecoder:
        if self._decoder is None:
            raise RuntimeError("no weights have been loaded")
        return self._decoder

    @property
    def _pages(self) -> decode_step.PagedKeyValues:
        if self._cache is None:
            raise RuntimeError("the cache has no pages")
        return self._cache

    def drop(self) -> None:
        """Keep the memory of the packed weights, which the next ones reuse."""

    def rest(self) -> None:
        """There is nothing beside weights and cache."""

    def held(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._packed.weights()

    def load_adapter(self, number: int, adapter: Adapter | None) -> None:
        if adapter is None:
            del self._adapters[number], self._factor_names[number]
        else:
            self._adapters[number] = self._packed.adapter(factors_of_layers(adapter.factors), adapter.scale)
            self._factor_names[number] = [name for name, _ in trees.named(adapter.factors)]

    def held_adapter(self, number: int) -> Iterator[tuple[str, Tensor]]:
        layers = list(self._adapters[number].factors())
        yield from ((name, factor_of(layers, name)) for name in self._factor_names[number])

    def resize(self, pages: int, cells: int = 0) -> None:
        self._cache = None
        self._logits = self._logits[:0].clone()
        if pages:
            self._cache = self._packed.init_cache(pages)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._packed.copy_pages(self._pages, sources, targets)

    def copy_cells(self, copies: Sequence[tuple[int, int]]) -> None:
        """There are none."""

    def forward(self, work: PassWork) -> Tensor:
        """Logits [M, V], valid until the next pass."""
        counts_S = np.asarray(work.counts)
        ends_S = np.asarray(work.ends)
        sequence_N = np.repeat(np.arange(len(counts_S)), counts_S)
        offset_S = ends_S - np.cumsum(counts_S)  # position of a token minus its index in the pass
        positions_N = np.arange(len(sequence_N)) + offset_S[sequence_N]
        positions, sequence, sampled_M = (
            torch.from_numpy(x) for x in (positions_N, sequence_N, np.asarray(work.sampled_positions, dtype=np.int64))
        )
        if len(self._logits) < len(sampled_M):
            self._logits = self._logits.new_empty(len(sampled_M), self.vocab)
        logits_MV = self._logits[: len(sampled_M)]
        adapters = None
        if work.adapters is not None and (work.adapters >= 0).any():
            used, index_S = np.unique(work.adapters, return_inverse=True)
            numbers_N = torch.from_numpy((index_S - (used[0] < 0))[sequence_N])
            adapters = TokenAdapters([self._adapters[number] for number in used.tolist() if number >= 0], numbers_N)
        given = work.tokens_N, positions, sequence, work.table_SP, sampled_M
        return self._packed.forward(self._pages, *given, logits_MV, adapters)

    def sample(
        self, output_M: Tensor, source_R: Tensor, noise_R: Tensor | None, sampling: Sampling, seen_RV: Tensor | None
    ) -> SampledRows:
        if sampling.truncated or seen_RV is not None:
            return sample_tokens(output_M[source_R], noise_R, sampling, seen_RV=seen_RV)
        return self._packed.sample(output_M, source_R, noise_R, sampling.temperature)

    def keep(self, output_M: Tensor, source_R: Tensor, token_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        return keep_tokens(output_M[source_R], token_R, sampling)


def packed_problem(model: Model, mesh: Mesh, dtype: torch.dtype) -> str | None:
    """Reason why `PackedBackend` cannot run a model; None: it can."""
    if mesh.device.type != "cpu":
        return f"the C++ decoding step is for a CPU, not for {mesh.device.type}"
    if mesh.size("tensor") > 1:
        return f"the C++ decoding step is for one tensor rank, the mesh is {mesh}"
    problem = decode_step.kernel_problem(model.abilities.compiled_step, dtype)
    if problem is None:
        try:
            library()
        except KernelError as error:
            return str(error)
    return problem


class BackendOptions(Protocol):
    """Options of an engine that choose its backend; see `NativeOptions`."""

    @property
    def packed(self) -> bool: ...

    @property
    def record_routes(self) -> bool: ...

    @property
    def make_backend(self) -> MakeBackend | None: ...


MakeBackend = Callable[[Model, Mesh, torch.dtype, int], Backend]


def backend_of(
    model: Model,
    mesh: Mesh,
    dtype: torch.dtype,
    options: BackendOptions,
    layer: Layer | None,
    note: Callable[[str], None],
) -> Backend:
    """The backend that is given; else the compiled decoding step where it can run a model, or the training model.

    Args:
      layer: a replacement of `model.layer`; None: that one.
      note: receives the reason why the compiled decoding step is not used.
    """
    tokens = page_tokens(mesh.device.type)
    if options.make_backend is not None:
        return options.make_backend(model, mesh, dtype, tokens)
    problem = packed_problem(model, mesh, dtype) if options.packed else "it was not asked for"
    if layer not in (None, model.layer):
        problem = "the layer is replaced"
    if problem is None:
        return PackedBackend(model, dtype)
    # Only a missing compiler or processor feature is worth a remark to every user; other reasons are intended.
    (note if options.packed and library_problem() and mesh.device.type == "cpu" else log.info)(
        f"generation runs in torch: {problem}"
    )
    return TorchBackend(model, mesh, dtype, layer=layer, page_tokens=tokens, record_routes=options.record_routes)


def bytes_of_page(model: Model, mesh: Mesh, dtype: torch.dtype, packed: bool = True) -> int:
    """Bytes of a page of keys and values on a rank, in an engine made by `native_engine`."""
    if packed and packed_problem(model, mesh, dtype) is None:
        return PackedBackend(model, dtype).page_bytes
    return model.page_bytes(mesh, page_tokens(mesh.device.type), dtype)
