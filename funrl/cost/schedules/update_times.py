"""Seconds of an update, by the rows of its batch and the ranks that share them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from funrl.cost.schedules.engine_times import EngineTimes
from funrl.cost.schedules.simulation import UpdateLaw, rows_together


class UpdateTimes(NamedTuple):
    """Seconds of scoring and training one batch.

    Attributes:
      ranks: groups of devices that have rows of their own.
      token: of one token of a row, scoring and all epochs.
      pair: of one pair of tokens of a row.
      fixed: of a mini-batch whatever its rows: optimizer, sums of gradients.
      minibatches: updates of a batch.
    """

    ranks: int
    token: float
    pair: float = 0.0
    fixed: float = 0.0
    minibatches: int = 1

    def seconds(self, lengths: np.ndarray) -> float:
        """Seconds of a batch.

        Rows of a mini-batch are balanced over the ranks, and the ranks wait for the one with the most work: at least
        the mean, the longest row, and the two rows that must share a rank if there are more rows than ranks.

        Args:
          lengths: tokens of each row, prompts included.
        """
        total = self.fixed * self.minibatches
        for part in np.array_split(self.token * lengths + self.pair * lengths**2, self.minibatches):
            if not len(part):
                continue
            work = np.sort(part)[::-1]
            shared = work[self.ranks - 1] + work[self.ranks] if len(work) > self.ranks else 0.0
            total += max(work.sum() / self.ranks, work[0], shared)
        return float(total)


class VerdictTimes(NamedTuple):
    """Seconds of a judge's verdicts on one batch, each of full length.

    Attributes:
      engine: times of a replica of the judge.
      replicas: of it.
      slots: rows that a replica runs together at most.
      template: tokens that it reads beside a completion and its prompt.
      written: tokens of a verdict.
      share: completions that it reads, over the rows of the batch.
    """

    engine: EngineTimes
    replicas: int
    slots: int
    template: int
    written: int
    share: float = 1.0

    def seconds(self, lengths: np.ndarray) -> float:
        """Seconds of a batch, on the replica with the most rows; see `UpdateTimes`."""
        rows = math.ceil(len(lengths) * self.share / self.replicas)
        read = float(lengths.mean()) + self.template
        waves = math.ceil(rows / rows_together(self.engine, self.slots, read + self.written))
        each = rows / waves
        iteration = float(self.engine.without_context(np.array(each)))
        iteration += self.engine.token * each * (read + self.written / 2)
        return self.engine.read * rows * read + waves * self.written * iteration


class ScoredUpdate(NamedTuple):
    """Seconds of a batch that other models score, one after the other, before it is trained on.

    Attributes:
      update: of the trainer ranks.
      scoring: of each of these models.
    """

    update: UpdateLaw
    scoring: Sequence[UpdateLaw]

    def seconds(self, lengths: np.ndarray) -> float:
        """Seconds of a batch; see `UpdateTimes`."""
        return self.update.seconds(lengths) + sum(times.seconds(lengths) for times in self.scoring)
