"""The proof of a sync while generation begins: the engine does not wait for the digests of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from funrl.rollout.elsewhere import Digests
from funrl.rollout.engine import WeightSpec
from funrl.rollout.load_digest import adapted_digest, tree_digest

READ_AFTER = 32  # iterations of the engine, the same on the ranks of a replica, that digests may take
PUBLISHED = 1024  # newest versions of a policy whose digests are kept; older tokens are foreign


class PolicyProof(NamedTuple):
    """Digests of a policy after a sync, and of what.

    Attributes:
      digests: to be compared.
      weights: the form in which its engine takes weights.
      version: of the sync.
    """

    digests: Digests
    weights: WeightSpec
    version: int


class SyncProof:
    """The newest sync's digests, compared once the engine has begun to generate with its weights.

    The comparison is collective: every rank reads it after `READ_AFTER` iterations of its engine on completions to
    train on, or when it has none left; after an evaluation or episodes when these are written. In any case that is
    before rows of these weights are used.

    Attributes:
      version: of the newest sync whose proof has begun; None: of none.
      base: digest of the weights that the policy's adapters stand on, once they have been compared.
      published: of each policy, (digest, version) pairs of the weights that engines were given, the oldest first. Two
        versions have one digest if an update changed no bit.
    """

    def __init__(self) -> None:
        """Begin without a sync to prove."""
        self.version: int | None = None
        self.base: int | None = None
        self.published: dict[str, dict[tuple[int, int], None]] = {}
        self._proofs: Mapping[str, PolicyProof] = {}
        self._readable: dict[str, list[str]] = {}  # of each policy, the weights that its engine can show
        self._iterations = 0
        self._early = False  # whether the newest digests are published, and are not compared yet
        self._metrics: dict[str, float] = {}

    def begin(self, proofs: Mapping[str, PolicyProof]) -> None:
        """Take the digests of a sync by the names of the policies, which are being computed."""
        self._proofs = proofs
        self._iterations = 0
        self._early = False
        self.version = max(proof.version for proof in proofs.values())

    def iterated(self) -> None:
        """Count an iteration of the engine.

        Raises:
          SyncError: as `settle`, once there were enough.
        """
        self._iterations += 1
        if self._iterations >= READ_AFTER:
            self.settle()

    def settle(self) -> None:
        """Compare the digests, unless that has been done or the engine does not hold the weights yet. Collective.

        The first digests of a policy are waited for: only their comparison shows which weights the engine can show.

        Raises:
          SyncError: the engine does not hold the trainer's weights; raised on every rank.
        """
        if self._proofs and (
            not self._readable.keys() >= self._proofs.keys()
            or all(proof.digests.ready() for proof in self._proofs.values())
        ):
            self.complete()
        elif not self._early:  # some replicas may sample by these weights already
            self._early = True
            for name, proof in self._proofs.items():
                own = proof.digests.whole_digests()
                self._publish(name, proof, {weight: own[weight] for weight in self._readable[name]})

    def complete(self) -> bool:
        """Wait for the digests and compare them; returns whether all weights could be read. As `settle`."""
        proofs, self._proofs = self._proofs, {}
        whole = True
        for name, proof in proofs.items():
            compared = proof.digests.compare()
            whole &= compared.whole
            self._readable[name] = list(compared.digests)
            self._publish(name, proof, compared.digests)
        self._metrics = {"sync/verified": float(whole)}
        return whole

    def _publish(self, name: str, proof: PolicyProof, digests: Mapping[str, int]) -> None:
        number = tree_digest(digests, proof.weights)
        if proof.weights.adapters:
            assert self.base is not None, "adapters are published after their base"
            number = adapted_digest(self.base, number)
        known = self.published.setdefault(name, {})
        pair = number, proof.version
        known.pop(pair, None)  # the order is that of the versions
        known[pair] = None
        if len(known) > PUBLISHED:
            del known[next(iter(known))]

    def published_lists(self) -> dict[str, list[tuple[int, int]]]:
        """`published` as JSON has it: (digest, version) pairs."""
        return {name: list(known) for name, known in self.published.items()}

    def restore(self, lists: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Take what a run had published, of `published_lists`."""
        self.published = published_of(lists)

    def take(self) -> dict[str, float]:
        """Metrics of the comparisons since the last call."""
        metrics = self._metrics
        self._metrics = {}
        return metrics


def published_of(lists: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, dict[tuple[int, int], None]]:
    """`SyncProof.published`, of `SyncProof.published_lists`."""
    return {name: dict.fromkeys((digest, version) for digest, version in pairs) for name, pairs in lists.items()}
