"""The interface between `VLLMEngine` and vLLM: requests, sampled tokens, and the calls of a core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from funrl.kinds import OwnedLines
from funrl.models.model import Lora
from funrl.rollout.sampling_parameters import Sampling


class VLLMOptions(NamedTuple):
    """Options of an engine.

    Attributes:
      max_rows: bound on the completions that are decoded together.
      cache_bytes: bound on the keys and values of one rank; 0: see `start_vllm`.
      compiled: use vLLM's compiler.
      decode: token ids -> text, for stop strings.
      lora: adapters that it adds to its weights; None: none.
      adapters: versions of them that it computes with at once.
      record_kept: as in `NativeOptions`.
    """

    max_rows: int = 512
    cache_bytes: int = 0
    compiled: bool = False
    decode: Callable[[list[int]], str] | None = None
    lora: Lora | None = None
    adapters: int = 1
    record_kept: bool = False


VLLM_DEFAULTS = VLLMOptions()


class CoreRequest(NamedTuple):
    """Tokens to continue.

    Attributes:
      number: of the request.
      tokens: of the prompt and of the completion so far.
      written: number of tokens of the completion so far.
      count: bound on the tokens to sample.
      sampling, seed, owned: as in `Request`.
      adapter: number of the one that is added to the weights; 0: none.
    """

    number: int
    tokens: list[int]
    written: int
    count: int
    sampling: Sampling
    seed: int
    owned: OwnedLines | None = None
    adapter: int = 0


class SampledTokens(NamedTuple):
    """Tokens of one request that a step sampled.

    Attributes:
      number: of the request.
      tokens: token ids.
      raw_logp, sampling_logp: nats of each.
      cached: tokens of `CoreRequest.tokens` that were found in the cache.
      kept: ids that could be sampled at each token; None: they are not recorded.
    """

    number: int
    tokens: list[int]
    raw_logp: list[float]
    sampling_logp: list[float]
    cached: int
    kept: list[list[int]] | None = None


class CacheCounts(NamedTuple):
    """Counts of pages of keys and values, and of preempted requests."""

    page_tokens: int
    page_bytes: int
    pages: int
    used_pages: int
    preempted: int


class Core(Protocol):
    """The interface to vLLM that `VLLMEngine` uses, in this process or in a server.

    Attributes:
      generation: changes when all requests have been lost and must be added again.
    """

    @property
    def generation(self) -> int: ...

    def add(self, requests: Sequence[CoreRequest]) -> None:
        """Begin requests."""

    def step(self) -> list[SampledTokens]:
        """One pass."""
        ...

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget requests; unknown numbers are ignored."""

    def forget(self) -> None:
        """Forget all requests."""

    def reload(self, named_weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, and forget adapters and what the old ones computed. No request is unfinished."""

    def load_adapter(self, number: int, scale: float, factors: Mapping[str, Tensor]) -> None:
        """Add an adapter, or replace the one of that number.

        Args:
          number: above 0, by which requests name it.
          scale: of the product of the factors.
          factors: by PEFT's names.
        """

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter. No request has it."""

    def held_adapter(self, number: int) -> Iterable[tuple[str, Tensor | None]]:
        """Factors that vLLM computes with, by PEFT's names, as they were given; others where they differ."""
        ...

    def held(self) -> Iterable[tuple[str, Tensor | int | None]]:
        """Weights by their Hugging Face names, as `Engine.held_weights`."""
        ...

    def sleep(self) -> None:
        """Free the memory of keys and values. No request is unfinished."""

    def wake(self) -> bool:
        """Allocate it again. Returns: whether the weights were moved since they were last read."""
        ...

    def counts(self) -> CacheCounts:
        """Pages of its cache."""
        ...
