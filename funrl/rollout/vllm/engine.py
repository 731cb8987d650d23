"""An engine over vLLM, in this process or in a server. It tracks requests, versions and ends; vLLM computes.

vLLM receives token ids and returns sampled tokens. A pause or new weights withdraw a request from vLLM; it is added
again with its tokens so far as part of the prompt, and its noise continues where it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from funrl.mesh.mesh import SINGLE, Mesh
from funrl.mesh.reshard import replicated
from funrl.mesh.rules import GENERATE, layouts
from funrl.models.huggingface.names import names_of
from funrl.models.model import Model, ModelConfig
from funrl.rollout.engine import EngineCost, WeightSpec
from funrl.rollout.load_digest import LoadDigest, all_digests
from funrl.rollout.requests import Completion, Finish, Request, check_requests, logits_error
from funrl.rollout.vllm.contract import VLLM_DEFAULTS, Core, CoreRequest, SampledTokens, VLLMOptions
from funrl.rollout.vllm.core import start_vllm


@dataclasses.dataclass(eq=False)
class PartialCompletion:
    """An unfinished request and its completion so far.

    Attributes:
      request: as it was submitted.
      tokens, sampling_logp, raw_logp, versions: as in `Completion`.
      digests: of the weights that sampled each token; empty where they are not recorded.
      inside: whether vLLM holds it.
    """

    request: Request
    tokens: list[int]
    sampling_logp: list[float]
    raw_logp: list[float]
    versions: list[int]
    digests: list[LoadDigest | int] = dataclasses.field(default_factory=list)
    inside: bool = False

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
      record_digests: whether completions have the digests of the weights that sampled their tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSpec,
        core: Core,
        max_rows: int,
        decode: Callable[[list[int]], str] | None = None,
    ):
        self.weights = weights
        self.core = core
        self.version = None
        self.paused = False
        self.record_digests = False
        self._loaded = LoadDigest(weights, self.held_weights)
        self._config = config
        self._max_rows = max_rows
        self._decode = decode
        self._sequences: dict[int, PartialCompletion] = {}
        self._generation = core.generation
        self._passes = self._prefilled = self._cached = self._decoded = self._peak = 0

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Load whole weights into vLLM, each released once its layer is copied; see `Engine`.

        Raises:
          KeyError: a name is missing, unknown, or given twice.
          ValueError: a shape does not fit.
        """
        self.version = None
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

    def take_digests(self, digests: Mapping[str, Tensor]) -> None:
        """Take digests of the weights; see `Engine`."""
        self._loaded.take(digests)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if this engine could never complete one of the requests."""
        check_requests(self._config, requests, self._sequences)
        for request in requests:
            if request.sampling.stop_strings and self._decode is None:
                raise ValueError("stop_strings need a tokenizer: this engine was made without `decode`")

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; see `Engine`."""
        self.check(requests)
        for request in requests:
            sequence = self._sequences[request.number] = PartialCompletion(request, [], [], [], [])
            if request.begun is not None:
                sequence.tokens, sequence.sampling_logp, sequence.raw_logp, sequence.versions = (
                    x.tolist() for x in request.begun[1:5]
                )
                if self.record_digests:
                    sequence.digests = all_digests(request.begun)

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
        if self.record_digests:
            self._loaded.read()
        outside = [sequence for sequence in self._sequences.values() if not sequence.inside]
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
            self._loaded = LoadDigest(self.weights, self.held_weights)
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

    def _withdraw(self) -> None:
        """Withdraw all requests from vLLM."""
        self.core.drop([number for number, sequence in self._sequences.items() if sequence.inside])
        for sequence in self._sequences.values():
            sequence.inside = False

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
        for token, sampling_logp, raw_logp in zip(sample.tokens, sample.sampling_logp, sample.raw_logp, strict=True):
            sequence.tokens.append(token)
            sequence.sampling_logp.append(sampling_logp)
            sequence.raw_logp.append(raw_logp)
            sequence.versions.append(self.version or 0)
            if self.record_digests:
                sequence.digests.append(self._loaded)
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
        if not self.record_digests:
            return done
        numbers = [x if isinstance(x, int) else x.number for x in sequence.digests]
        return done._replace(digests=torch.tensor(numbers, dtype=torch.int64))


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
    return VLLMEngine(model.config, weights, core, max_rows=options.max_rows, decode=options.decode)


def vllm_weights(model: Model, mesh: Mesh, dtype: torch.dtype) -> WeightSpec:
    """The form in which vLLM takes weights: whole on every rank, by Hugging Face names, one by one."""
    split = layouts(model.shapes, model.axes, GENERATE, sizes=mesh.sizes)
    return WeightSpec(names_of(model), replicated(split), mesh, dtype=dtype, streamed=True, signed_zeros=False)


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
    )
