"""An engine over vLLM, in this process or in a server. It tracks requests, versions and ends; vLLM computes.

vLLM receives token ids and returns sampled tokens. A pause or new weights withdraw a request from vLLM; it is added
again with its tokens so far as part of the prompt, and its noise continues where it was.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from funrl.compiled_kernels.truncated_scores import KeptTokens
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.mesh.reshard import replicated
from funrl.mesh.rules import GENERATE, layouts
from funrl.models.huggingface.names import names_of
from funrl.models.lora import scale_of
from funrl.models.model import Lora, Model
from funrl.rollout.adapter_engine import LoadedAdapter
from funrl.rollout.certificate import wait_for_digests
from funrl.rollout.engine import EngineCost, WeightSpec
from funrl.rollout.load_digest import LoadDigest, all_digests
from funrl.rollout.requests import Completion, Finish, Request, check_requests, logits_error
from funrl.rollout.vllm.adapters import vllm_adapter_weights
from funrl.rollout.vllm.contract import VLLM_DEFAULTS, Core, CoreRequest, SampledTokens, VLLMOptions
from funrl.rollout.vllm.core import start_vllm
from funrl.rollout.vllm.weights import held_layouts


@dataclasses.dataclass(eq=False)
class PartialCompletion:
    """An unfinished request and its completion so far.

    Attributes:
      request: as it was submitted.
      tokens, sampling_logp, raw_logp, versions: as in `Completion`.
      digests: of the weights that sampled each token; empty where they are not recorded.
      inside: whether vLLM holds it.
      adapter: number of the adapter that it runs with; 0: none.
      kept: ids that could be sampled at each token, where they are recorded.
    """

    request: Request
    tokens: list[int]
    sampling_logp: list[float]
    raw_logp: list[float]
    versions: list[int]
    digests: list[LoadDigest | int] = dataclasses.field(default_factory=list)
    inside: bool = False
    adapter: int = 0
    kept: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def limit(self) -> int:
        """Tokens of the completion at which it ends."""
        count = self.request.sampling.max_new_tokens
        begun = self.request.begun
        most = self.request.most
        return count if most is None else min(count, most + (0 if begun is None else len(begun.tokens)))


class VLLMEngine:
    """An `Engine` over vLLM; made by `vllm_engine`, or by `client.vllm_client` over a server.

    Attributes:
      weights, version, paused: as in `Engine`; names and shapes are those of Hugging Face files.
      core: vLLM.
      adapters: the newest of each name.
      record_digests: whether completions have the digests of the weights that sampled their tokens.
    """

    def __init__(self, model: Model, weights: WeightSpec, core: Core, options: VLLMOptions):
        self.weights = weights
        self.core = core
        self.version = None
        self.paused = False
        self.adapters: dict[str, LoadedAdapter] = {}
        self.record_digests = False
        self._loaded = LoadDigest(weights, self.held_weights)
        self._model = model
        self._max_rows = options.max_rows
        self._decode = options.decode
        self._records_kept = options.record_kept
        self._slots = options.adapters if options.lora else 0
        self._numbers = itertools.count(1)  # of adapters, each used once, for the cache knows them by it
        self._loads: dict[int, LoadedAdapter] = {}  # the adapters that vLLM has by their numbers, the oldest first
        self._sequences: dict[int, PartialCompletion] = {}
        self._generation = core.generation
        self._passes = self._prefilled = self._cached = self._decoded = self._peak = 0

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Load whole weights into vLLM, each released once its layer is copied; see `Engine`. Adapters are forgotten.

        Raises:
          KeyError: a name is missing, unknown, or given twice.
          ValueError: a shape does not fit.
        """
        wait_for_digests(self.weights.mesh.device)
        self.version = None
        self.adapters.clear()
        self._loads.clear()
        self._withdraw()
        whole = WholeWeights(dict(self.weights.names.values()), named_weights)
        self.core.reload(whole)
        if whole.error is not None:
            raise whole.error
        self._loaded = LoadDigest(self.weights, self.held_weights)
        self.version = version

    def held_weights(self) -> Iterable[tuple[str, Tensor | int | None]]:
        """Weights that vLLM holds; of those in a server the digests. See `Engine`."""
        held = dict(self.core.held())
        return ((name, held.get(name)) for name, _ in self.weights.names.values())

    def adapter_weights(self, lora: Lora) -> WeightSpec:
        """The form in which `load_adapter` takes the factors of an adapter."""
        return vllm_adapter_weights(self._model, self.weights, lora)

    def load_adapter(
        self, name: str, lora: Lora, named_weights: Iterable[tuple[str, Tensor]], version: int = 0
    ) -> None:
        """Give an adapter to requests that name it, or replace its factors for those that begin later.

        An unfinished request ends with the factors that it began with, unless their slot is needed: then it continues
        with the new ones, and its keys and values are recomputed.

        Args:
          name: as in `Request.adapter`.
          lora: rank, alpha and targets, as the engine was made for.
          named_weights: every factor exactly once, in the form `adapter_weights(lora)`.
          version: of these factors, which completions have beside their tokens.

        Raises:
          RuntimeError: the base has not been loaded.
          KeyError: a name is missing, unknown, or given twice.
          ValueError: a shape does not fit, or all slots have adapters of other names.
        """
        if self.version is None:
            raise RuntimeError("the engine has no weights: load the base before its adapters")
        wait_for_digests(self.weights.mesh.device)
        spec = self.adapter_weights(lora)
        whole = WholeWeights(dict(spec.names.values()), named_weights)
        factors = {there: x.to(spec.dtype) for there, x in whole}
        if whole.error is not None:
            raise whole.error
        self._free_slot(name)
        number = next(self._numbers)
        self.core.load_adapter(number, scale_of(lora), factors)
        adapter = self._on_base(LoadedAdapter(number, lora, spec, version))
        self._loads[number] = adapter
        self.adapters[name] = adapter

    def _on_base(self, adapter: LoadedAdapter) -> LoadedAdapter:
        """The adapter with a digest that has not been read, on the base of now."""
        held = functools.partial(self.core.held_adapter, adapter.number)
        return adapter._replace(loaded=LoadDigest(adapter.weights, held, base=self._loaded))

    def _forget_digests(self) -> None:
        """Have weights and adapters read again before they sample a token."""
        self._loaded = LoadDigest(self.weights, self.held_weights)
        self._loads = {number: self._on_base(adapter) for number, adapter in self._loads.items()}
        self.adapters = {name: self._loads[adapter.number] for name, adapter in self.adapters.items()}

    def _read_digests(self) -> None:
        """Read the weights and adapters that tokens are sampled with next, unless that has been done."""
        if self.record_digests:
            for loaded in (self._loaded, *(adapter.loaded for adapter in self._loads.values())):
                if loaded is not None:
                    loaded.read()

    def held_adapter(self, name: str) -> Iterable[tuple[str, Tensor | None]]:
        """Factors that vLLM computes with; see `AdaptingEngine`."""
        return self.core.held_adapter(self.adapters[name].number)

    def take_digests(self, digests: Mapping[str, Tensor]) -> None:
        """Take digests of the weights; see `Engine`."""
        self._loaded.take(digests)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if this engine could never complete one of the requests."""
        check_requests(self._model.config, requests, self._sequences, self.adapters)
        for request in requests:
            if request.sampling.stop_strings and self._decode is None:
                raise ValueError("stop_strings need a tokenizer: this engine was made without `decode`")

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; see `Engine`."""
        self.check(requests)
        recorded = [all_digests(x.begun) if self.record_digests and x.begun is not None else [] for x in requests]
        for request, digests in zip(requests, recorded, strict=True):
            sequence = self._sequences[request.number] = PartialCompletion(request, [], [], [], [], digests)
            if request.begun is not None:
                sequence.tokens, sequence.sampling_logp, sequence.raw_logp, sequence.versions = (
                    x.tolist() for x in request.begun[1:5]
                )
                sequence.kept = ids_of(request.begun)

    def step(self) -> list[Completion]:
        """Run one pass of vLLM; see `Engine`. Collective over "tensor"."""
        if self.paused or not self._sequences:
            return []
        if self.version is None:
            raise RuntimeError("the engine has no weights: call load first")
        if self._generation != self.core.generation:
            self._generation = self.core.generation
            for sequence in self._sequences.values():
                sequence.inside = False
            self._forget_digests()  # a server that was started again may hold other bits
        self._read_digests()
        outside = [sequence for sequence in self._sequences.values() if not sequence.inside]
        for sequence in outside:
            if sequence.request.adapter is not None and sequence.adapter not in self._loads:
                sequence.adapter = self.adapters[sequence.request.adapter].number
        self.core.add([_core_request(sequence) for sequence in outside])
        for sequence in outside:
            sequence.inside = True
        sampled = self.core.step()
        self._passes += 1
        self._peak = max(self._peak, self.core.counts().used_pages)
        self._check_finite(sampled)
        ended: list[Completion] = []
        for sample in sampled:
            ended += self._grown(self._sequences[sample.number], sample)
        return ended

    def unfinished(self) -> int:
        """Number of unfinished requests."""
        return len(self._sequences)

    def sampled(self, number: int, begin: int = 0) -> list[int]:
        """Token ids of a completion so far; see `Engine`."""
        sequence = self._sequences.get(number)
        return [] if sequence is None else sequence.tokens[begin:]

    def room(self) -> int:
        """Number of further requests that would begin at once."""
        return max(0, self._max_rows - len(self._sequences))

    def reserve(self, tokens: int) -> None:
        """Do nothing: vLLM's cache has a fixed size."""

    def cancel(self, numbers: Iterable[int]) -> list[Completion]:
        """Cancel requests; see `Engine`."""
        gone = [number for number in dict.fromkeys(numbers) if number in self._sequences]
        self.core.drop([number for number in gone if self._sequences[number].inside])
        return [self._finished(self._sequences[number], "cancelled") for number in gone]

    def pause(self) -> None:
        """Make `step` do nothing, and free keys and values, on a GPU also weights (vLLM's sleep)."""
        self._withdraw()
        self.core.sleep()
        self.paused = True

    def resume(self) -> None:
        """Allow `step` again after `pause`."""
        if self.core.wake():
            self._forget_digests()
        self.paused = False

    def cost(self) -> EngineCost:
        """Memory of its cache, and counts of its work."""
        page_tokens, page_bytes, pages, used, preempted = self.core.counts()
        return EngineCost(
            cache_bytes=pages * page_bytes,
            page_tokens=page_tokens,
            pages=pages,
            used_pages=used,
            peak_pages=self._peak,
            rows=self._max_rows,
            passes=self._passes,
            prefilled=self._prefilled,
            cached=self._cached,
            decoded=self._decoded,
            preempted=preempted,
        )

    def _withdraw(self, adapter: int | None = None) -> None:
        """Withdraw all requests from vLLM, or those with one adapter."""
        sequences = [x for x in self._sequences.values() if x.inside and adapter in (None, x.adapter)]
        self.core.drop([sequence.request.number for sequence in sequences])
        for sequence in sequences:
            sequence.inside = False

    def _free_slot(self, name: str) -> None:
        """Forget adapters of a name that nothing runs with, and if no slot is free, the oldest one.

        Raises:
          ValueError: all slots have newest adapters of other names.
        """
        newest = {adapter.number for other, adapter in self.adapters.items() if other != name}
        running = {sequence.adapter for sequence in self._sequences.values()}
        old = [number for number in self._loads if number not in newest]
        unused = [number for number in old if number not in running]
        needed = max(0, len(self._loads) - len(unused) + 1 - self._slots)
        if needed > len(old) - len(unused):
            raise ValueError(f"an adapter {name!r} more than the {self._slots} that this engine was made for")
        for number in unused + [number for number in old if number in running][:needed]:
            self._withdraw(number)
            self.core.drop_adapter(number)
            del self._loads[number]

    def _check_finite(self, sampled: Sequence[SampledTokens]) -> None:
        failed = [
            (sample.number, len(self._sequences[sample.number].tokens))
            for sample in sampled
            if not all(map(math.isfinite, sample.raw_logp))
        ]
        if failed:
            self._withdraw()
            raise logits_error(failed)

    def _grown(self, sequence: PartialCompletion, sample: SampledTokens) -> list[Completion]:
        """Add sampled tokens; returns the completion if they end it."""
        if sequence.request.begun is None and not sequence.tokens:
            self._cached += sample.cached
            self._prefilled += len(sequence.request.prompt) - sample.cached
        sequence.kept += sample.kept or ()
        for token, sampling_logp, raw_logp in zip(sample.tokens, sample.sampling_logp, sample.raw_logp, strict=True):
            sequence.tokens.append(token)
            sequence.sampling_logp.append(sampling_logp)
            sequence.raw_logp.append(raw_logp)
            adapter = self._loads[sequence.adapter] if sequence.adapter else None
            sequence.versions.append((self.version or 0) if adapter is None else adapter.version)
            if self.record_digests:
                loaded = self._loaded if adapter is None else adapter.loaded
                assert loaded is not None
                sequence.digests.append(loaded)
            self._decoded += 1
            if finish := self._finish(sequence):
                self.core.drop(
                    [sequence.request.number]
                )  # vLLM does not know stop strings; otherwise it has dropped the request
                return [self._finished(sequence, finish)]
        return []

    def _finish(self, sequence: PartialCompletion) -> Finish | None:
        """Reason why the last token ends a completion; None: it does not."""
        sampling = sequence.request.sampling
        count = len(sequence.tokens)
        if sequence.tokens[-1] in sampling.stop:
            return "stop"
        if sampling.stop_strings and self._ends_by_string(sequence):
            return "string"
        if count >= sequence.limit:
            return "length" if count >= sampling.max_new_tokens else "paused"
        return None

    def _ends_by_string(self, sequence: PartialCompletion) -> bool:
        if self._decode is None:
            raise ValueError("stop strings need a tokenizer")
        strings = sequence.request.sampling.stop_strings
        # A token is at least one byte, a character at most four: no string needs more tokens than these.
        text = self._decode(sequence.tokens[-4 * max(map(len, strings)) - 4 :])
        return any(string in text for string in strings)

    def _finished(self, sequence: PartialCompletion, finish: Finish) -> Completion:
        del self._sequences[sequence.request.number]
        dtype = torch.promote_types(self.weights.dtype, torch.float32)
        sampling_logp, raw_logp = (torch.tensor(x, dtype=dtype) for x in (sequence.sampling_logp, sequence.raw_logp))
        tokens, versions = (torch.tensor(x, dtype=torch.int64) for x in (sequence.tokens, sequence.versions))
        done = Completion(
            sequence.request.number, tokens, sampling_logp, raw_logp=raw_logp, versions=versions, finish=finish
        )
        if self.record_digests:
            numbers = [x if isinstance(x, int) else x.number for x in sequence.digests]
            done = done._replace(digests=torch.tensor(numbers, dtype=torch.int64))
        if not self._records_kept:
            return done
        lines = sequence.kept[: len(tokens)]
        ids = torch.tensor([i for line in lines for i in line], dtype=torch.int32)
        return done._replace(kept=KeptTokens(ids, torch.tensor([len(x) for x in lines], dtype=torch.int64)))


def ids_of(begun: Completion) -> list[list[int]]:
    """Ids that could be sampled at each token of a completion; []: they were not recorded."""
    if begun.kept is None:
        return []
    return [x.tolist() for x in begun.kept.ids_M.split(begun.kept.counts_N.tolist())]


class WholeWeights:
    """An iterable that feeds weights to vLLM, each exactly once; vLLM itself would ignore a missing one.

    If the source fails, vLLM gets zeros for the missing weights, so that its load completes, and `error` says why.

    Args:
      shapes: shape of each weight by its name.
      source: names and weights.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], source: Iterable[tuple[str, Tensor]]):
        self.error: Exception | None = None
        self._awaited = dict(shapes)
        self._source = source

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            for name, x in self._source:
                if self._awaited.get(name) != tuple(x.shape):
                    self.error = self._fault(name, x)
                    break
                del self._awaited[name]
                yield name, x.detach()
            if self._awaited and self.error is None:
                self.error = KeyError(f"weights are missing: {', '.join(self._awaited)}")
        except Exception as error:
            self.error = error
        for name, shape in self._awaited.items():
            yield name, torch.zeros(shape)

    def _fault(self, name: str, x: Tensor) -> Exception:
        if name in self._awaited:
            return ValueError(f"{name} has shape {list(x.shape)} instead of {list(self._awaited[name])}")
        return KeyError(f"{name} is not a weight of this model, or given twice")


def vllm_engine(
    model: Model,
    mesh: Mesh = SINGLE,
    dtype: torch.dtype = torch.float32,
    options: VLLMOptions = VLLM_DEFAULTS,
) -> VLLMEngine:
    """Start vLLM in this process, without weights yet. Collective over the mesh.

    Args:
      model: a decoder.
      mesh: "tensor" splits the model, each index of the other axes is a replica.
      dtype: of weights and cache.
      options: bounds and choices of the engine.

    Raises:
      ModelError, ImportError: as in `start_vllm`.
    """
    core = start_vllm(model, mesh, dtype, options)
    weights = vllm_weights(model, mesh, dtype)
    return VLLMEngine(model, weights, core, options)


def vllm_weights(model: Model, mesh: Mesh, dtype: torch.dtype) -> WeightSpec:
    """The form in which vLLM takes weights: whole on every rank, by Hugging Face names, one by one."""
    whole = replicated(layouts(model.shapes, model.axes, GENERATE, sizes=mesh.sizes))
    held = held_layouts(model, mesh.sizes) if mesh.size("tensor") > 1 else None
    return WeightSpec(names_of(model), whole, mesh, dtype=dtype, streamed=True, signed_zeros=False, held=held)


def _core_request(sequence: PartialCompletion) -> CoreRequest:
    request = sequence.request
    written = len(sequence.tokens)
    tokens = [*request.prompt, *sequence.tokens]
    return CoreRequest(
        request.number,
        tokens,
        written,
        count=sequence.limit - written,
        sampling=request.sampling,
        seed=request.seed,
        owned=request.owned,
        adapter=sequence.adapter,
    )
