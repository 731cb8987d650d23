"""An engine on other ranks, as the trainer ranks see it: it takes weights, and proves that it holds them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from funrl.mesh.collectives import from_first_rank
from funrl.mesh.pools.channel import Requests
from funrl.mesh.pools.transfer import SentWeights, WeightSender
from funrl.models.deployed import DeviceWeights
from funrl.rollout.elsewhere import Greedy
from funrl.rollout.engine import WeightSpec
from funrl.rollout.remote.digests import EngineDigests, RemoteDigests, trained_digests


class LoadRequest(NamedTuple):
    """Take weights by the engine's plan, rank to rank. They follow its answer, which is None.

    Attributes:
      version: of the weights.
      base: whether they are the base weights of adapters.
      model: name of the agents' model whose weights they are; "": they are the policy's.
    """

    version: int
    base: bool
    model: str = ""


class DigestsRequest(NamedTuple):
    """Add up the digests of the weights of a version, held or on their way. Its answer is `EngineDigests`.

    Attributes:
      version: of the weights.
      base: whether they are the base weights of adapters.
      model: as in `LoadRequest`.
    """

    version: int
    base: bool
    model: str = ""


class GreedyRequest(NamedTuple):
    """Complete a text greedily. Its answer is `Greedy`.

    Attributes:
      prompts: token ids.
      new_tokens: of each completion.
      version: of the weights.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    version: int


class RemoteEngine:
    """An engine of the generating ranks.

    Attributes:
      weights: the form in which it takes weights; its mesh is that of the generating ranks.
      version: version of the weights that it was sent last; None: none were.
      requests: the way to those ranks.
      sender: sends all weights but the first in the background.
      held: version -> whether all generators hold it, before their proof is asked for; asked on the first rank that
        trains. By default the proof waits for them.
      ahead: whether these ranks generate while others train, so that all weights come at once.
    """

    def __init__(self, weights: WeightSpec, requests: Requests, *, base: bool = False, model: str = "") -> None:
        """Make the engine without weights.

        Args:
          weights, requests: its attributes.
          model: name of the agents' model that it has; "": the policy.
          base: whether it has the weights that adapters stand on.
        """
        self.weights = weights
        self.version: int | None = None
        self.requests = requests
        self.base = base
        self.model = model
        self.sender: WeightSender | None = None
        self.held: Callable[[int], bool] = lambda version: True
        self.ahead = False

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Send weights. Collective over the trainer ranks.

        Args:
          named_weights: sends this rank's shards to the engine's ranks while it is iterated, and yields nothing.
          version: of the weights.
        """
        # A message from rank to rank waits no longer than --timeout, and rows that are being generated may take longer.
        self.requests.ask(LoadRequest(version, self.base, self.model), "the generators' rows before new weights")
        collections.deque(named_weights, maxlen=0)
        self.version = version

    def of_model(self, name: str) -> RemoteEngine:
        """The engine of another model of agents on the same ranks."""
        return RemoteEngine(self.weights, self.requests, model=name)

    @property
    def in_background(self) -> bool:
        """True if the next weights are sent while the engine continues with the present ones."""
        return self.sender is not None and self.version is not None

    def send(self, models: Mapping[str, SentWeights]) -> None:
        """Begin to send weights in the background. Collective over the trainer ranks.

        Args:
          models: weights of this engine as "", and of other engines of these ranks by the names of their models.
        """
        if self.sender is None:
            raise RuntimeError("nothing sends weights in the background")
        self.sender.begin(models)
        self.version = models[""].version

    def sync_digests(self, source: DeviceWeights, version: int) -> RemoteDigests:
        """Digests of this rank's parts of the trainer's weights, to compare with those of the engine's ranks.

        Args:
          source: the weights that were sent.
          version: that the engine should have.
        """
        own = trained_digests(source, self.weights)
        mesh = source.mesh

        def theirs() -> EngineDigests:
            return self.requests.ask(
                DigestsRequest(version, self.base, self.model), f"the generators' weights {version}"
            )

        def held() -> bool:
            return from_first_rank(self.held(version) if mesh.rank == 0 else None, mesh)

        return RemoteDigests(version, mesh, source.stored, self.weights, own_N2=own, engine=theirs, ready=held)

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
        """Greedy completions of the engine's first replica. Collective over the trainer ranks."""
        request = GreedyRequest(prompts, new_tokens, self.version or 0)
        tokens_BS, logp_BS, spread = self.requests.ask(request, "the generators' probe")
        device = self.requests.mesh.device
        return Greedy(tokens_BS.to(device), logp_BS.to(device), spread)
