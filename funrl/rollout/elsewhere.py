"""The contract of an engine whose ranks differ from the ranks that send its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from funrl.models.deployed import DeviceWeights


class Greedy(NamedTuple):
    """Greedy completions of P prompts, of S tokens each.

    Attributes:
      tokens, logp: [P, S] of one replica; log-probabilities are the model's own.
      spread: the largest gap in nats between replicas that are compared already.
    """

    tokens: Tensor
    logp: Tensor
    spread: float = 0.0


class Digests(Protocol):
    """Digests after a sync, to be compared later."""

    def ready(self) -> bool:
        """True if the engine holds the weights by now. Collective."""
        ...

    def compare(self) -> bool:
        """Compare them. Collective; as `certificate.compare_weights` returns and raises."""
        ...


@runtime_checkable
class OfOtherRanks(Protocol):
    """An engine of other ranks than the trainer's."""

    def sync_digests(self, source: DeviceWeights, version: int) -> Digests:
        """As `certificate.sync_digests`; the engine's ranks give the digests of its weights."""
        ...

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
        """As `certificate.greedy`; of the engine's first replica. Collective."""
        ...
