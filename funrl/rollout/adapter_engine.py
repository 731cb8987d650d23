"""One adapter of an engine that adds adapters to a base, as an engine of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from funrl.models.model import Lora
from funrl.rollout.engine import Engine, EngineCost, WeightSpec
from funrl.rollout.load_digest import LoadDigest
from funrl.rollout.requests import Completion, Request


class LoadedAdapter(NamedTuple):
    """An adapter that an engine has.

    Attributes:
      number: in the engine's backend.
      lora: its rank, scale and targets.
      weights: the form in which its factors are taken.
      version: of its factors.
      loaded: digest of its factors and of their base; None: it is not recorded.
    """

    number: int
    lora: Lora
    weights: WeightSpec
    version: int
    loaded: LoadDigest | None = None


class AdaptingEngine(Engine, Protocol):
    """An engine that adds adapters to its weights.

    Attributes:
      adapters: by name.
    """

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]: ...

    def adapter_weights(self, lora: Lora) -> WeightSpec:
        """The form in which `load_adapter` takes the factors of an adapter."""
        ...

    def load_adapter(
        self, name: str, lora: Lora, named_weights: Iterable[tuple[str, Tensor]], version: int = 0
    ) -> None:
        """Give an adapter to requests that name it, or replace its factors."""
        ...

    def held_adapter(self, name: str) -> Iterable[tuple[str, Tensor | None]]:
        """Factors of an adapter that the engine computes with, as `held_weights` gives those of the base."""
        ...


class AdapterEngine:
    """An `Engine` whose weights are the factors of one adapter, over an engine that has the base.

    Requests that name no adapter are completed with it, and its version is theirs.

    Attributes:
      base: the engine that computes.
      name: of the adapter, as requests could name it.
      lora: rank, alpha and targets of the adapter.
      weights, version, paused: as in `Engine`.
    """

    def __init__(self, base: AdaptingEngine, name: str, lora: Lora):
        self.base = base
        self.name = name
        self.lora = lora
        self.weights: WeightSpec = base.adapter_weights(lora)

    @property
    def version(self) -> int | None:
        return self.base.adapters[self.name].version if self.name in self.base.adapters else None

    @property
    def paused(self) -> bool:
        return self.base.paused

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Replace the factors; see `AdaptingEngine.load_adapter`."""
        self.base.load_adapter(self.name, self.lora, named_weights, version)

    def held_weights(self) -> Iterable[tuple[str, Tensor | None]]:
        """This rank's shards of the factors; see `Engine`."""
        return self.base.held_adapter(self.name)

    def take_digests(self, digests: Mapping[str, Tensor]) -> None:
        """Take digests of the factors; see `Engine`."""
        loaded = self.base.adapters[self.name].loaded
        if loaded is not None:
            loaded.take(digests)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if the engine could never complete one of the requests."""
        self.base.check(requests if self.version is None else self._adapted(requests))

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; see `Engine`."""
        self.base.submit(self._adapted(requests))

    def step(self) -> list[Completion]:
        """Run one pass; see `Engine`."""
        return self.base.step()

    def unfinished(self) -> int:
        """Number of requests that are unfinished, those of other adapters included; see `Engine`."""
        return self.base.unfinished()

    def sampled(self, number: int, begin: int = 0) -> list[int]:
        """Token ids of a completion so far that the host has read; see `Engine`."""
        return self.base.sampled(number, begin)

    def room(self) -> int:
        """Number of further requests that would begin at once; see `Engine`."""
        return self.base.room()

    def reserve(self, tokens: int) -> None:
        """Keep room in the cache for ended requests too; see `Engine`."""
        self.base.reserve(tokens)

    def cancel(self, numbers: Iterable[int]) -> list[Completion]:
        """Cancel requests; see `Engine`."""
        return self.base.cancel(numbers)

    def pause(self) -> None:
        """Make `step` do nothing, and free the memory of keys and values."""
        self.base.pause()

    def resume(self) -> None:
        """Allow `step` again after `pause`."""
        self.base.resume()

    def cost(self) -> EngineCost:
        """Memory of the cache, and counts of its work."""
        return self.base.cost()

    def _adapted(self, requests: Sequence[Request]) -> list[Request]:
        return [request if request.adapter else request._replace(adapter=self.name) for request in requests]
