"""Replicas of an engine that complete groups by continuous batching: all replicas advance together, as arrays.

Between two events a replica has the same rows, and each row gains a token an iteration. So n iterations take
n (time without context) + (time of a cached token) (n c + b n^2 / 2), for b rows that attend to c tokens together when
they begin. A row ends when the replica's count of iterations reaches the count at its beginning plus its length.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from funrl.cost.schedules.engine_times import EngineTimes

NEVER = np.inf


class SimulatedGenerators:
    """Replicas, the rows that each of them runs, and a queue of groups that wait for room.

    A group runs on one replica, the one with the fewest rows, so its prompt is read once.

    Args:
      times: of each replica.
      replicas: their number, G.
      slots: rows that a replica runs together at most, M.
      prompt: tokens of a prompt.
    """

    def __init__(self, times: EngineTimes, replicas: int, slots: int, prompt: int):
        self.times = times
        self.prompt = prompt
        self.slots = slots
        self.iterations_G = np.zeros(replicas)
        self.rows_G = np.zeros(replicas, dtype=np.int64)
        self.offset_G = np.zeros(replicas)  # tokens that rows attend to, less rows times iterations
        self.debt_G = np.zeros(replicas)  # seconds of reading prompts, or caches under new weights, still to be spent
        self.ends_GM = np.full((replicas, slots), NEVER)
        self.begins_GM = np.zeros((replicas, slots))
        self.group_GM = np.zeros((replicas, slots), dtype=np.int64)
        self.waiting: deque[tuple[int, np.ndarray]] = deque()
        self.left: dict[int, int] = {}  # rows of a group that have not ended
        self.busy = 0.0  # seconds of replicas with rows

    def submit(self, group: int, lengths: np.ndarray) -> None:
        """Queue a group whose rows will have these lengths."""
        self.left[group] = len(lengths)
        for begin in range(0, len(lengths), self.slots):
            self.waiting.append((group, lengths[begin : begin + self.slots]))

    def fill(self) -> None:
        """Give queued groups to replicas with room."""
        while self.waiting:
            group, lengths = self.waiting[0]
            count = len(lengths)
            replica = int(self.rows_G.argmin())
            if self.rows_G[replica] + count > self.slots:
                return
            self.waiting.popleft()
            free = np.flatnonzero(self.ends_GM[replica] == NEVER)[:count]
            begin = self.iterations_G[replica]
            self.ends_GM[replica, free] = begin + lengths
            self.begins_GM[replica, free] = begin
            self.group_GM[replica, free] = group
            self.rows_G[replica] += count
            self.offset_G[replica] += count * (self.prompt - begin)
            self.debt_G[replica] += self.times.read * self.prompt

    def read_again(self) -> None:
        """Compute the caches of all rows again: replicas have new weights."""
        context_G = self.offset_G + self.rows_G * self.iterations_G
        self.debt_G += self.times.read * context_G

    def next_end(self) -> float:
        """Seconds until the first row ends; infinite if no row runs."""
        running_G = self.rows_G > 0
        if not running_G.any():
            return NEVER
        count_G = self.ends_GM.min(axis=1)[running_G] - self.iterations_G[running_G]
        context_G = (self.offset_G + self.rows_G * self.iterations_G)[running_G]
        rows_G = self.rows_G[running_G]
        seconds_G = count_G * (self.times.without_context(rows_G) + self.times.token * context_G)
        seconds_G += self.times.token * rows_G * count_G**2 / 2
        return float((seconds_G + self.debt_G[running_G]).min())

    def advance(self, seconds: float) -> list[int]:
        """Let all replicas run; groups whose last row has ended."""
        running_G = self.rows_G > 0
        self.busy += seconds * int(running_G.sum())
        paid_G = np.minimum(self.debt_G, seconds)
        self.debt_G -= paid_G
        left_G = np.where(running_G, seconds - paid_G, 0.0)
        slope_G = self.times.without_context(self.rows_G)
        slope_G = slope_G + self.times.token * (self.offset_G + self.rows_G * self.iterations_G)
        bend_G = self.times.token * self.rows_G / 2
        self.iterations_G += 2 * left_G / (slope_G + np.sqrt(slope_G**2 + 4 * bend_G * left_G))
        ended_GM = self.ends_GM <= self.iterations_G[:, None] + 1e-6
        if not ended_GM.any():
            return []
        replica_N, slot_N = np.nonzero(ended_GM)
        begins_N = self.begins_GM[replica_N, slot_N]
        np.subtract.at(self.rows_G, replica_N, 1)
        np.subtract.at(self.offset_G, replica_N, self.prompt - begins_N)
        self.ends_GM[replica_N, slot_N] = NEVER
        return self._ended(self.group_GM[replica_N, slot_N])

    def _ended(self, groups_N: np.ndarray) -> list[int]:
        complete = []
        for group, count in zip(*(x.tolist() for x in np.unique(groups_N, return_counts=True)), strict=True):
            self.left[group] -= count
            if not self.left[group]:
                del self.left[group]
                complete.append(group)
        return complete
