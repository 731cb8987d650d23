"""The engine that computes with the training model: continuous batching over pages of keys and values.

A pass computes one token of every decoding request, together with chunks of prompts. When a request ends, the next one
takes its place at once. Requests of one prompt share its prefill and its whole pages; a prefix that is still in the
cache is not computed again. When pages run out, the latest request is preempted: it keeps its sampled tokens, and its
keys and values are recomputed later.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.collectives import begin_one_shot_sums
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.errors import ModelError
from funrl.models.float8_weights import float8_model_problem
from funrl.models.lora import Adapter, scale_of
from funrl.models.model import Layer, Lora, Model
from funrl.rollout.adapter_engine import LoadedAdapter
from funrl.rollout.certificate import wait_for_digests
from funrl.rollout.engine import EngineCost, WeightSpec
from funrl.rollout.load_digest import LoadDigest
from funrl.rollout.native.backends import MakeBackend, TorchBackend, backend_of
from funrl.rollout.native.cache_sizes import FREE_SHARE, NO_CACHE, CacheRoom, CacheSizes, page_tokens, pass_tokens
from funrl.rollout.native.cells import options_without_states
from funrl.rollout.native.control_rows import ControlRows
from funrl.rollout.native.device.decode_state import Spare
from funrl.rollout.native.expert_lanes import ExpertLanesBackend
from funrl.rollout.native.float8_backend import Float8Backend
from funrl.rollout.native.loading import native_weights, own_parts, shards, spec_of_adapter
from funrl.rollout.native.passes import Backend, run_plan
from funrl.rollout.native.scheduler import Scheduler
from funrl.rollout.native.sequence import RunningSequence
from funrl.rollout.native.sequences import RunningSequences
from funrl.rollout.native.static_decode import StaticDecode, drafts_problem, static_problem
from funrl.rollout.requests import Completion, Request, check_requests

POLL_EVERY = {"cpu": 1}  # passes between polls; polling a GPU (every 8 passes) makes the host wait for it
PASSES_AHEAD = 4  # of static shape, whose tokens the host has not read, where no row needs it to
DRAFTED_ROWS = {"cpu": 16}  # tokens of a pass up to which drafts pay; a GPU computes 128 in about the time of one
log = logging.getLogger(__name__)


class NativeOptions(NamedTuple):
    """Options of an engine.

    Attributes:
      max_rows: bound on the completions that are decoded together, for each rank of "expert".
      cache_bytes: bound on the keys and values of one rank; 0: half of the free memory, or a share of it.
      decode: token ids -> text, for stop strings.
      packed: use the compiled decoding step where there is one.
      speculate: bound on the drafted tokens of a request, which continue an earlier occurrence of its last tokens
        (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding) and are sampled in one pass where few rows
        are decoded; 0: no drafts. A draft changes no completion.
      record_routes: let completions have the experts that their tokens went to.
      record_kept: let completions have the tokens that truncated sampling could take; their `sampling_logp` is that of
        the trainer's replay.
      record_digests: let completions have the digests of the weights that sampled their tokens.
      engines: number of engines that share the free memory for their caches.
      snapshot_tokens: tokens between two snapshots of states, by which a known prefix is reused in a model that has
        some; they share `cache_bytes`. 0: there are none.
      static: decode by passes of static shape where possible, which are CUDA graphs on a GPU; None: on a GPU only. On a
        CPU it is for tests, and samples the same tokens.
      float8: multiply by the projections of layers in 8 bits, with a scale for each row of a weight and each token; see
        `compiled_kernels.float8`. Keys, values and the unembedding stay as they are.
      control_every: with float8, one of so many requests is scored by the weights as they were loaded when it ends; see
        `control_rows`. 0: none.
      make_backend: (model, mesh, dtype, tokens of a page) -> what computes passes; None: the best of `backends.py`.
    """

    max_rows: int = 512
    cache_bytes: int = 0
    decode: Callable[[list[int]], str] | None = None
    packed: bool = True
    speculate: int = 0
    record_routes: bool = False
    record_kept: bool = False
    record_digests: bool = False
    engines: int = 1
    snapshot_tokens: int = 0
    static: bool | None = None
    float8: bool = False
    control_every: int = 0
    make_backend: MakeBackend | None = None


NATIVE_DEFAULTS = NativeOptions()


class NativeEngine:
    """An `Engine` over a `Model`; made by `native_engine`.

    Attributes:
      weights, version, paused: as in `Engine`.
      model: the model that it runs.
      adapters: by name.
      loaded: digest of the weights; None: it is not recorded.
      control: of its completions in 8 bits; None: none is scored again.
    """

    def __init__(
        self,
        model: Model,
        weights: WeightSpec,
        backend: Backend,
        options: NativeOptions = NATIVE_DEFAULTS,
        static: bool = False,
    ):
        """Make an engine without weights; `native_engine` describes the other arguments.

        Args:
          model: as in `native_engine`.
          weights: the form in which it takes weights.
          backend: computes the passes.
          options: of the engine; the fields that choose the backend are not read.
          static: decode by passes of static shape; see `static_decode`.
        """
        speculate = options.speculate
        self._ranks = backend.lanes if isinstance(backend, ExpertLanesBackend) else 1  # that share rows and cache
        max_rows = options.max_rows * self._ranks
        device = weights.mesh.device
        self.weights = weights
        self.version = None
        self.paused = False
        self.model = model
        self.adapters: dict[str, LoadedAdapter] = {}
        self.loaded: LoadDigest | None = None
        self._records_digests = options.record_digests
        self._numbers = itertools.count()  # of adapters, each used once
        self._backend = backend
        self._spare = backend.lanes * (static or self._ranks > 1)  # unused pages and cells
        spare = CacheSizes(self._spare, self._spare)
        self._room = CacheRoom(weights.mesh, backend, options.cache_bytes, FREE_SHARE / options.engines, spare)
        self._sequences = RunningSequences(device, weights.dtype, options.decode, slots=max_rows + 1 if static else 0)
        few_rows = DRAFTED_ROWS.get(device.type, 128)
        self._scheduler = Scheduler(
            self._sequences,
            max_rows,
            backend.page_tokens,
            pass_tokens=pass_tokens(device.type),
            speculate=speculate,
            few_rows=few_rows,
        )
        self._scheduler.lanes = self._scheduler.demand.lanes = backend.lanes
        self._static: StaticDecode | None = None
        if static:
            assert isinstance(backend, TorchBackend)
            backend.spare = 1
            self._static = StaticDecode(backend, self._sequences, self._scheduler)
        self.control: ControlRows | None = None
        if options.control_every and isinstance(backend, Float8Backend) and not backend.cell_bytes:
            self.control = ControlRows(backend, options.control_every)
            self._room.beside = 1
            self._sequences.ended = self.control.add
        self._scheduler.demand.snapshot_tokens = options.snapshot_tokens
        self._poll_every = 1 if speculate else POLL_EVERY.get(device.type, 8)
        self._passes = 0
        self._sizes = NO_CACHE

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Replace this rank's shards of all weights; see `Engine`.

        Tensors that already have the engine's dtype and device are not copied, unless passes are captured as CUDA
        graphs: those outlive the load, if there is memory for the new weights beside the old ones and the cache.

        Raises:
          KeyError: a name is missing, unknown, or given twice.
          ModelError: a shape is not that of this rank's shard.
        """
        wait_for_digests(self.weights.mesh.device)
        static = self._keep_captured(0 if self._static is None else self._static.load_bytes)
        self.version = None
        if static is None:
            self._backend.drop()
        params = shards(self.weights, named_weights)
        (static or self._backend).load(params)
        _keep_until_copied(params)
        self.version = version
        if self._records_digests:
            damage = self._backend.changed_roundings if isinstance(self._backend, Float8Backend) else None
            self.loaded = LoadDigest(self.weights, self.held_weights, damage=damage)
        self._sequences.of_version(version, digest=self.loaded)
        for name, adapter in self.adapters.items():
            self._began_adapter(name, adapter)

    def adapter_weights(self, lora: Lora) -> WeightSpec:
        """The form in which `load_adapter` takes the factors of an adapter."""
        return spec_of_adapter(self.model, self.weights, lora)

    def load_adapter(
        self, name: str, lora: Lora, named_weights: Iterable[tuple[str, Tensor]], version: int = 0
    ) -> None:
        """Give an adapter to requests that name it, or replace its factors.

        It is computed beside the base, W x + scale B (A x), and a pass may mix adapters. Unfinished requests continue:
        their tokens stay, and their keys and values are recomputed. A base that is loaded later keeps the adapters.

        Args:
          name: as in `Request.adapter`.
          lora: rank, alpha and targets.
          named_weights: this rank's shards of every factor exactly once, in the form `adapter_weights(lora)`.
          version: number of these factors, which completions have beside their tokens.

        Raises:
          RuntimeError: the base has not been loaded.
          KeyError: a name of a factor is missing, unknown, or given twice.
          ModelError: a shape is not that of this rank's shard, or the model takes no such adapter.
        """
        if self.version is None:
            raise RuntimeError("the engine has no weights: load the base before its adapters")
        wait_for_digests(self.weights.mesh.device)
        spec = self.adapter_weights(lora)
        numbers = sum(math.prod(shape) for _, shape in spec.names.values())
        static = self._keep_captured(numbers * spec.dtype.itemsize)
        known = self.adapters.get(name)
        number = next(self._numbers) if known is None else known.number
        adapter = Adapter(shards(spec, named_weights), scale_of(lora))
        (static or self._backend).load_adapter(number, adapter)
        _keep_until_copied(adapter.factors)
        self._began_adapter(name, LoadedAdapter(number, lora, spec, version))

    def _began_adapter(self, name: str, adapter: LoadedAdapter) -> None:
        """Sample with an adapter from now on, on the base of now."""
        if self.loaded is not None:
            held = functools.partial(self.held_adapter, name)
            adapter = adapter._replace(loaded=LoadDigest(adapter.weights, held, base=self.loaded))
        self.adapters[name] = adapter
        self._sequences.of_version(adapter.version, adapter.number, adapter.loaded)

    def drop_adapter(self, name: str) -> None:
        """Remove an adapter.

        Raises:
          KeyError: no adapter has this name.
          ValueError: an unfinished request names it.
        """
        adapter = self.adapters[name]
        for sequence in self._sequences.all():
            if sequence.adapter == adapter.number:
                raise ValueError(f"request {sequence.request.number} is unfinished and names the adapter {name!r}")
        del self.adapters[name]
        if self._static is not None:
            self._static.drop_adapter(adapter.number)
        self._backend.load_adapter(adapter.number, None)

    def held_adapter(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """This rank's shards of an adapter's factors, as `held_weights` gives those of the base."""
        adapter = self.adapters[name]
        return own_parts(adapter.weights, self._backend.held_adapter(adapter.number))

    def record_routes(self, routes: Callable[[Sequence[int], int], Tensor]) -> None:
        """Record routes in completions: (pages, tokens) -> the experts of a sequence's first tokens."""
        self._sequences.routes = routes

    def record_kept(self, wanted: bool) -> None:
        """Record in completions the tokens that truncated sampling could take, or do not."""
        self._sequences.records_kept = wanted

    def held_weights(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's shards of all weights; see `Engine`.

        Raises:
          RuntimeError: no weights have been loaded.
        """
        if self.version is None:
            raise RuntimeError("the engine has no weights: call load first")
        return own_parts(self.weights, self._backend.held())

    def take_digests(self, digests: Mapping[str, Tensor]) -> None:
        """Take digests of the weights; see `Engine`."""
        if self.loaded is not None:
            self.loaded.take(digests)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if this engine could never complete one of the requests."""
        check_requests(self.model.config, requests, self._sequences.by_number, self.adapters)
        size = self._backend.page_tokens
        limit = self._room.longest_pages()
        limit_bytes = limit * self._ranks * self._backend.page_bytes
        for request in requests:
            tokens = len(request.prompt) + request.sampling.max_new_tokens
            if -(-tokens // size) > limit:
                raise ValueError(
                    f"prompt {request.number} may have {tokens} tokens, {-(-tokens // size)} pages of keys and values; "
                    f"the cache of {limit_bytes / 1e9:.3g} GB has {limit}: give it more "
                    "(--kv_cache_gb), or let prompts and completions be shorter"
                )
            if request.owned is not None and self.model.owned is None:
                raise ValueError(f"prompt {request.number} has pictures, and the model reads text only")
            if request.owned is not None and self.model.owned is not None:
                self.model.owned.check(request.prompt, request.owned)
            if request.sampling.stop_strings and self._sequences.decode is None:
                raise ValueError("stop_strings need a tokenizer: this engine was made without `decode`")

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; see `Engine`."""
        self.check(requests)
        self._scheduler.take([self._begin(request) for request in requests])

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Run one pass; see `Engine`. Collective over "expert" and "tensor"."""
        if self.paused or not self._sequences.count:
            return self._sequences.take_ended()
        if self.version is None:
            raise RuntimeError("the engine has no weights: call load first")
        for loaded in (self.loaded, *(adapter.loaded for adapter in self.adapters.values())):
            if loaded is not None:
                loaded.read()
        if self._sequences.damaged:  # no mask hides a NaN in the cache
            self._sequences.damaged = False
            self._drop_cache()
        self._make_room()
        if self._scheduler.short_of_pages:  # the choice of rows to preempt depends on what has been sampled
            self._poll()
        if not self._decoded_by_static_pass():
            self._run_planned_pass()
        return self._sequences.take_ended()

    def unfinished(self) -> int:
        """Number of requests that are unfinished, or whose completion has not been returned yet."""
        return self._sequences.count

    def sampled(self, number: int, begin: int = 0) -> list[int]:
        """Token ids of a completion so far that the host has read; see `Engine`."""
        sequence = self._sequences.by_number.get(number)
        return [] if sequence is None else self._sequences.read(sequence, begin)

    def room(self) -> int:
        """Number of further requests that would begin at once: free rows, or 0 while requests wait."""
        return 0 if self._scheduler.waiting else self._scheduler.max_rows - len(self._sequences.by_number)

    def reserve(self, tokens: int) -> None:
        """Keep room in the cache for ended requests too; see `Engine`."""
        self._scheduler.demand.reserved = tokens

    def cancel(self, numbers: Iterable[int]) -> list[Completion]:
        """Cancel requests; see `Engine`."""
        wanted = set(numbers)
        try:
            self._poll()
        finally:  # they are cancelled even if polling fails
            done = [self._sequences.finish(x, "cancelled") for x in self._sequences.all() if x.request.number in wanted]
            self._scheduler.release(self._sequences.take_released())
        return self._sequences.take_ended_of(wanted) + done

    def pause(self) -> None:
        """Make `step` do nothing, and free the memory of keys and values, which are recomputed after `resume`.

        CUDA graphs hold the addresses of this memory, and are captured anew after `resume`.
        """
        self._drop_cache()
        self._backend.rest()
        self._room.forget()
        self.paused = True

    def resume(self) -> None:
        """Allow `step` again after `pause`."""
        self.paused = False

    def cost(self) -> EngineCost:
        """Memory of its cache, and counts of its work."""
        s = self._scheduler
        backend = self._backend
        pages, cells = self._sizes
        spare = self._spare if pages else 0
        return EngineCost(
            cache_bytes=(pages + spare) * backend.page_bytes + (cells + spare) * backend.cell_bytes,
            page_tokens=backend.page_tokens,
            pages=pages,
            cells=cells,
            used_pages=s.pool.used,
            peak_pages=s.peak_pages,
            rows=s.max_rows,
            passes=self._passes,
            prefilled=s.prefilled,
            cached=s.cached,
            decoded=self._sequences.decoded,
            preempted=s.preempted,
            drafted=self._sequences.drafted,
            accepted=self._sequences.accepted,
            recomputed=s.recomputed,
            uncaptured=0 if self._static is None else self._static.uncaptured,
        )

    def _begin(self, request: Request) -> RunningSequence:
        if request.adapter is None:
            sequence = self._sequences.begin(request, self.version, digest=self.loaded)
        else:
            adapter = self.adapters[request.adapter]
            sequence = self._sequences.begin(request, adapter.version, adapter.number, digest=adapter.loaded)
        if request.owned is not None and self.model.owned is not None:
            sequence.contents = self.model.owned.contents(request.prompt, request.owned)
            sequence.whole = () if self.model.owned.whole is None else self.model.owned.whole(request.prompt)
        return sequence

    def _decoded_by_static_pass(self) -> bool:
        """Run a pass of static shape if the next pass only decodes. The host then waits for an earlier one only."""
        slots = None if self._static is None else self._scheduler.only_decoding()
        if self._static is None or slots is None:
            return False
        if not len(slots):
            self._poll()
            return True
        groups = self._static.sampling_groups(slots)
        if groups is None:
            return False
        pages, cells = (size // self._ranks for size in self._sizes)
        sampled = self._static.run(slots, groups, Spare(pages, cells or None))
        self._sequences.append(slots, sampled)
        self._scheduler.decoded(slots)
        self._passes += 1
        self._poll(self._unread_passes)
        return True

    def _run_planned_pass(self) -> None:
        """Plan a pass, which may compute prompts, and run it in static shape if it has one."""
        if self._sizes.cells:  # a state cannot take back a token behind the end of a sequence
            self._poll()
        plan = self._scheduler.plan()
        if plan is None:
            self._poll()
            return
        self._passes += 1
        sampled = None if self._static is None else self._static.run_plan(plan, Spare(self._sizes.pages))
        if sampled is None:
            output = run_plan(self._backend, plan)
            self._sequences.sample(self._backend, output, plan.sampling_slots, plan.sources, plan.ahead)
        else:
            self._sequences.append(plan.sampling_slots, sampled)
        self._scheduler.settle()
        if self._static is not None and not self._sequences.needs_sync:
            self._poll(self._unread_passes)
        elif self._sequences.needs_sync or self._time_to_poll():
            self._poll()

    def _time_to_poll(self) -> bool:
        return self._passes % self._poll_every == 0 or self._sequences.any_at_limit

    @property
    def _unread_passes(self) -> int:
        """Number of the latest passes of static shape whose tokens the host need not read yet."""
        return PASSES_AHEAD if self._scheduler.steady(PASSES_AHEAD) else 1

    def _poll(self, *keep: int) -> None:
        """Poll all but the last `keep` passes, and release the pages and rows of ended requests."""
        try:
            self._sequences.poll(*keep)
        finally:
            self._scheduler.release(self._sequences.take_released())

    def _make_room(self) -> None:
        """Grow the cache to what is wanted, which recomputes what it held."""
        demand = self._scheduler.demand
        sizes = self._room.grown(self._sizes, demand.sizes(), demand.longest_pages)
        if sizes == self._sizes:
            return
        self._drop_cache()
        self._sizes = sizes
        self._backend.resize(*sizes)
        self._scheduler.resize(*sizes)

    def _keep_captured(self, nbytes: int) -> StaticDecode | None:
        """Preempt all requests before new weights of some bytes come, and forget what the cache holds.

        Returns: the passes of static shape if some are captured and stay so, and with them the cache's memory; else
          None, and this memory is free.
        """
        static = self._static
        if static is None or not static.captured or not self._room.takes(nbytes):
            self._drop_cache()
            return None
        self._poll()
        self._scheduler.restart()
        self._scheduler.resize(*self._sizes)
        return static

    def _drop_cache(self) -> None:
        """Preempt all requests and free the memory of keys and values."""
        self._poll()
        self._scheduler.restart()
        self._sizes = NO_CACHE
        if self._static is not None:
            self._static.drop()
        self._backend.resize(*NO_CACHE)
        self._scheduler.resize(*NO_CACHE)


def _keep_until_copied(tree: trees.Tree) -> None:
    """Keep the memory of tensors, which another stream may have received, until this stream's copies of them end."""
    for x in trees.leaves(tree):
        if x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))


def native_engine(
    model: Model,
    mesh: Mesh = SINGLE,
    dtype: torch.dtype = torch.float32,
    options: NativeOptions = NATIVE_DEFAULTS,
    layer: Layer | None = None,
    note: Callable[[str], None] = log.info,
) -> NativeEngine:
    """An engine without weights yet.

    Args:
      model: a model with an unembedding.
      mesh: weights, heads and logits are split over "tensor"; experts and rows over "expert", whose ranks are one
        replica and make the same calls too; its other axes are the caller's.
      dtype: of weights and cache.
      options: bounds and choices of the engine.
      layer: a replacement of `model.layer`, such as a compiled one.
      note: receives the reason why the compiled decoding step is not used.

    Raises:
      ModelError: the model has a value head instead of an unembedding, or keeps states that an option cannot go with;
        there are drafts of several rows on a GPU; or products cannot be taken in 8 bits here.
    """
    if not model.generates:
        raise ModelError("a model with a value head cannot generate: it has no unembedding")
    if not model.pages:
        name = f"{model.abilities.code} is transformers' own code," if model.abilities.code else "the model is"
        raise ModelError(f"{name} without pages: use hf_engine")
    for name, reason in options_without_states(model).items():
        if given := getattr(options, name):
            raise ModelError(f"{name} is {getattr(given, '__name__', given)}: {reason}; leave it out")
    if options.speculate and (problem := drafts_problem(mesh.device.type, options.max_rows)):
        raise ModelError(
            f"speculate is {options.speculate} and max_rows {options.max_rows}: {problem}; leave speculate out, or let "
            "max_rows be 1"
        )
    backend = _backend_of(model, mesh, dtype, options, layer, note)
    if mesh.device.type == "cuda" and mesh.size("tensor") > 1:
        problem = begin_one_shot_sums(mesh, "tensor")
        log.info("sums over tensor ranks while decoding: %s", f"by NCCL, as {problem}" if problem else "in one kernel")
    by_static = mesh.device.type == "cuda" if options.static is None else options.static
    problem = static_problem(model, backend, options.speculate, options.record_kept) if by_static else None
    if problem is not None:
        log.info("decoding is not by passes of static shape: %s", problem)
    weights = dataclasses.replace(native_weights(model, mesh, dtype), float8=options.float8)
    engine = NativeEngine(model, weights, backend, options=options, static=by_static and problem is None)
    if options.record_routes and isinstance(backend, TorchBackend):
        engine.record_routes(backend.routes)
    engine.record_kept(options.record_kept)
    return engine


def _backend_of(
    model: Model,
    mesh: Mesh,
    dtype: torch.dtype,
    options: NativeOptions,
    layer: Layer | None,
    note: Callable[[str], None],
) -> Backend:
    """Backend of an engine; the arguments are those of `native_engine`."""
    given = model, mesh, dtype, layer, page_tokens(mesh.device.type)
    if options.float8:
        if problem := float8_model_problem(model, mesh, dtype):
            raise ModelError(f"float8 is True: {problem}; leave it out")
        return Float8Backend(*given, record_routes=options.record_routes)
    if mesh.size("expert") > 1 and options.make_backend is None:
        return ExpertLanesBackend(*given, record_routes=options.record_routes)
    return backend_of(model, mesh, dtype, options, layer=layer, note=note)
