"""The contract of an engine whose ranks differ from the ranks that send its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class Compared(NamedTuple):
    """Weights after a sync that are the same on both sides.

    Attributes:
      whole: whether all weights could be read.
      digests: of each whole weight that could be read, by name: a signed number of 64 bits.
    """

    whole: bool
    digests: Mapping[str, int]


class Digests(Protocol):
    """Digests after a sync, to be compared later."""

    def ready(self) -> bool:
        """True if the engine holds the weights by now. Collective."""
        ...

    def whole_digests(self) -> dict[str, int]:
        """Digests of the trainer's whole weights, by name. Collective over its ranks."""
        ...

    def compare(self) -> Compared:
        """Compare them. Collective; raises as `certificate.compare_weights`."""
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
