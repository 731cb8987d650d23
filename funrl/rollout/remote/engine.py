"""An engine on other ranks, as the trainer ranks see it: it takes weights, and proves that it holds them.

For the proof each side adds up digests of its own parts, those of `certificate`. Three numbers cross for each weight.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.collectives import from_first_rank, pmax, psum
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.pools.channel import MethodCall, Requests
from funrl.mesh.pools.transfer import SentWeights, WeightSender
from funrl.mesh.rules import Layout
from funrl.models.deployed import DeviceWeights
from funrl.models.weight_dtypes import weight_dtype
from funrl.rollout.certificate import (
    SyncError,
    differing_weights,
    digest,
    digest_parts,
    faults_everywhere,
    first_copy,
    first_fault,
    largest_gap,
)
from funrl.rollout.elsewhere import Compared, Greedy
from funrl.rollout.engine import Engine, WeightSpec


class EngineDigests(NamedTuple):
    """Sums over the engine's ranks.

    Attributes:
      version: of the engine's weights.
      digests: of each weight: of its first copies, and of all copies; weights that cannot be read are left out.
      faults: a missing or unknown name, or a wrong shape or dtype, on some rank.
    """

    version: int | None
    digests: Mapping[str, tuple[int, int]]
    faults: tuple[str, ...]


class RemoteDigests(NamedTuple):
    """Digests of this rank's parts of the trainer's weights, before they are compared; as `SyncDigests`.

    Attributes:
      version: of the sync.
      mesh: of the trainer.
      trained: layout of each weight in the trainer, by name.
      weights: the engine's.
      own_N2: of each weight of `weights`, the digests of the trainer's first copies and of all its copies.
      engine: waits for the digests of the engine's ranks. Collective.
      ready: whether the engine's ranks hold that version. Collective.
    """

    version: int
    mesh: Mesh
    trained: Mapping[str, Layout]
    weights: WeightSpec
    own_N2: Tensor
    engine: Callable[[], EngineDigests]
    ready: Callable[[], bool]

    def whole_digests(self) -> dict[str, int]:
        """Digests of the trainer's whole weights, by name. Collective over its ranks."""
        names = [name for name, _ in trees.named(self.weights.layouts)]
        return dict(zip(names, psum(self.own_N2, self.mesh, AXES)[:, 0].tolist(), strict=True))

    def compare(self) -> Compared:
        """Wait for the digests of both sides and compare them. Collective.

        Raises:
          SyncError: a weight differs or is missing; raised on every rank.
        """
        placed = self.weights.held_layouts
        ours = dict(zip(placed, psum(self.own_N2, self.mesh, AXES).tolist(), strict=True))
        version, digests, faults = self.engine()
        before = f"after the sync of version {self.version} the generators do not hold the trainer's weights: "
        if version != self.version:
            faults = (f"the version is {version}", *faults)
        if faults:
            raise SyncError(before + first_fault(faults))
        wrong = differing_weights(self.trained, placed, {name: (*ours[name], *x) for name, x in digests.items()})
        if wrong:
            raise SyncError(f"{before}{wrong[0]} differs; {len(wrong)} of {len(digests)} weights differ")
        return Compared(len(digests) == len(placed), {name: ours[name][0] for name in digests})


def trained_digests(source: DeviceWeights, weights: WeightSpec) -> Tensor:
    """[N, 2] digests of this rank's parts of the trainer's weights, in the engine's dtypes."""
    rows = []
    for name, _ in trees.named(weights.layouts):
        dtype = weight_dtype(name, weights.dtype)
        layout = source.stored[name]
        own = digest(source.weight(name), layout, source.mesh.rank, dtype, signed_zeros=weights.signed_zeros)
        own = own.to(source.mesh.device)
        rows.append(torch.stack([own * first_copy(source.stored[name], source.mesh), own]))
    return torch.stack(rows)


def engine_digests(engine: Engine) -> EngineDigests:
    """Sums of the digests of the engine's weights, on each of its ranks. Collective over its mesh."""
    spec = engine.weights
    mesh = spec.mesh
    placed = spec.held_layouts
    faults = list[str]()
    parts = {name: x.to(mesh.device) for name, x in digest_parts(spec, engine.held_weights(), faults).items()}
    engine.take_digests(parts)
    none = torch.zeros((), dtype=torch.int64, device=mesh.device)
    own = {name: torch.stack([x * first_copy(placed[name], mesh), x, none]) for name, x in parts.items()}
    unread = torch.stack([none, none, none + 1])
    sums = psum(torch.stack([own.get(name, unread) for name in placed]), mesh, AXES).tolist()
    digests = {name: (once, every) for name, (once, every, unread) in zip(placed, sums, strict=True) if not unread}
    return EngineDigests(engine.version, digests, tuple(faults_everywhere(faults, mesh)))


def compared_greedy(own: Greedy, mesh: Mesh) -> Greedy:
    """Greedy completions of the first replica, with the gap to the others. Collective over the engine's mesh.

    Args:
      own: of this rank's replica.
      mesh: of the engine.
    """
    tokens_BS, logp_BS, _ = own
    first = mesh.rank == 0
    first_BS = psum(tokens_BS if first else torch.zeros_like(tokens_BS), mesh, AXES)
    first_logp_BS = psum(logp_BS if first else torch.zeros_like(logp_BS), mesh, AXES)
    gap = pmax(largest_gap(logp_BS, first_logp_BS, tokens_BS != first_BS), mesh, AXES)
    return Greedy(first_BS.cpu(), first_logp_BS.cpu(), gap.item())


@dataclasses.dataclass(eq=False)
class RemoteEngine:
    """An engine of the generating ranks.

    Attributes:
      weights: the form in which it takes weights; its mesh is that of the generating ranks.
      requests: the way to those ranks.
      base: whether it has the weights that adapters stand on.
      model: name of the agents' model that it has; "": the policy.
      version: version of the weights that it was sent last; None: none were.
      sender: sends all weights but the first in the background.
      held: version -> whether all generators hold it, before their proof is asked for; asked on the first rank that
        trains. By default the proof waits for them.
      ahead: whether these ranks generate while others train, so that all weights come at once.
    """

    weights: WeightSpec
    requests: Requests
    base: bool = False
    model: str = ""
    version: int | None = None
    sender: WeightSender | None = None
    held: Callable[[int], bool] = lambda version: True
    ahead: bool = False

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Send weights. Collective over the trainer ranks.

        Args:
          named_weights: sends this rank's shards to the engine's ranks while it is iterated, and yields nothing.
          version: of the weights.
        """
        # A message from rank to rank waits no longer than --timeout, and rows that are being generated may take longer.
        request = MethodCall("load", (version, self.base, self.model))
        self.requests.ask(request, "the generators' rows before new weights")
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

        request = MethodCall("digests", (version, self.base, self.model))
        return RemoteDigests(
            version,
            mesh,
            source.stored,
            self.weights,
            own_N2=own,
            engine=lambda: self.requests.ask(request, f"the generators' weights {version}"),
            ready=lambda: from_first_rank(self.held(version) if mesh.rank == 0 else None, mesh),
        )

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
        """Greedy completions of the engine's first replica. Collective over the trainer ranks."""
        request = MethodCall("greedy", (self.version or 0, prompts, new_tokens))
        tokens_BS, logp_BS, spread = self.requests.ask(request, "the generators' probe")
        device = self.requests.mesh.device
        return Greedy(tokens_BS.to(device), logp_BS.to(device), spread)
