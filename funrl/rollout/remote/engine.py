"""An engine on other ranks, as the ranks that train see it: it takes weights, and proves that it holds them."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from funrl.mesh.pools.channel import Requests
from funrl.models.deployed import Deployed
from funrl.rollout.elsewhere import Greedy
from funrl.rollout.engine import WeightSpec
from funrl.rollout.remote.digests import EngineDigests, RemoteDigests, trained_digests


class ReadyRequest(NamedTuple):
    """Answer when all requests before this one are done. Its answer is None."""


class LoadRequest(NamedTuple):
    """Take the weights that follow by the engine's plan, rank to rank. Its answer is `EngineDigests` or None.

    Attributes:
      version: of the weights.
      base: whether they are those that adapters stand on.
      digests: whether the answer has digests of the weights.
    """

    version: int
    base: bool
    digests: bool


class GreedyRequest(NamedTuple):
    """Complete a text greedily. Its answer is `Greedy`.

    Attributes:
      prompts: token ids.
      new_tokens: of each completion.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int


class RemoteEngine:
    """An engine of the generating ranks.

    Attributes:
      weights: the form in which it takes weights; its mesh is that of the generating ranks.
      version: version of the weights that it was sent last; None: none were.
      requests: the way to those ranks.
    """

    def __init__(self, weights: WeightSpec, requests: Requests, *, base: bool = False, digests: bool = True) -> None:
        """Make the engine without weights.

        Args:
          weights, requests: its attributes.
          base: whether it has the weights that adapters stand on.
          digests: whether loads are proved.
        """
        self.weights = weights
        self.version: int | None = None
        self.requests = requests
        self.base = base
        self.digests = digests
        self.loading = -1  # number of the newest request

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Send weights. Collective over the ranks that train.

        Args:
          named_weights: sends this rank's shards to the engine's ranks while it is iterated, and yields nothing.
          version: of the weights.
        """
        if self.loading >= 0 and not self.digests:
            self.requests.forget(self.loading)  # nobody reads its answer
        # A message from rank to rank waits no longer than --timeout, and rows that are being generated may take longer.
        self.requests.ask(ReadyRequest(), "the generators' rows before new weights")
        self.loading = self.requests.post(LoadRequest(version, self.base, self.digests))
        collections.deque(named_weights, maxlen=0)
        self.version = version

    def sync_digests(self, source: Deployed, version: int) -> RemoteDigests:
        """Digests of this rank's parts of the trainer's weights, to compare with those of the engine's ranks.

        Args:
          source: the weights that were sent.
          version: that the engine should have.
        """
        own = trained_digests(source, self.weights)
        number = self.loading

        def theirs() -> EngineDigests:
            return self.requests.answer(number, f"the generators' weights {version}")

        return RemoteDigests(version, source.mesh, source.stored, self.weights, own, theirs)

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
        """Greedy completions of the engine's first replica. Collective over the ranks that train."""
        tokens_BS, logp_BS, spread = self.requests.ask(GreedyRequest(prompts, new_tokens), "the generators' probe")
        device = self.requests.mesh.device
        return Greedy(tokens_BS.to(device), logp_BS.to(device), spread)

    def resume(self) -> None:
        """Do nothing: the engine's ranks have its cache to themselves."""

    def pause(self) -> None:
        """Do nothing; see `resume`."""
