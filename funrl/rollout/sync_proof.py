"""The proof of a sync while generation begins: the engine does not wait for the digests of its weights."""

from __future__ import annotations

from funrl.rollout.certificate import Digests

READ_AFTER = 32  # iterations of the engine, the same on the ranks of a replica, that digests may take


class SyncProof:
    """The newest sync's digests, compared once the engine has begun to generate with its weights.

    The comparison is collective: every rank reads it after `READ_AFTER` iterations of its engine on completions to
    train on, or when it has none left; after an evaluation or episodes when these are written. In any case that is
    before rows of these weights are used.
    """

    def __init__(self) -> None:
        """Begin without a sync to prove."""
        self._digests: Digests | None = None
        self._iterations = 0
        self._metrics: dict[str, float] = {}

    def begin(self, digests: Digests) -> None:
        """Take the digests of a sync, which are being computed."""
        self._digests = digests
        self._iterations = 0

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

        Raises:
          SyncError: the engine does not hold the trainer's weights; raised on every rank.
        """
        digests = self._digests
        if digests is not None and digests.ready():
            self._digests = None
            self._metrics = {"sync/verified": float(digests.compare())}

    def take(self) -> dict[str, float]:
        """Metrics of the comparisons since the last call."""
        metrics = self._metrics
        self._metrics = {}
        return metrics
