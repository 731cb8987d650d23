"""Rewards of one rollout's rows, under way while others are still being written."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from funrl.mesh.heartbeat import beat
from funrl.rewards.pool import Completed, Pool, score_rows
from funrl.rollout.requests import Completion


class PendingRewards:
    """Rewards of rows, asked for as their completions finish, in any order and by any number at once.

    Workers begin with a row when it is added. Without workers this process rewards all rows at the end, in their order.
    """

    def __init__(self, pool: Pool, completed: Callable[[Completion], Completed]):
        """
        Args:
          pool: runs the reward functions.
          completed: a completion -> what the functions are given.
        """
        self._pool, self._completed = pool, completed
        self._rows: dict[int, Completed] = {}
        self._futures: dict[int, Future[list[float]]] = {}

    def add(self, done: Completion) -> None:
        """Take a row as its completion finishes; one that is only paused has no reward yet."""
        if done.finish == "paused":
            return
        row = self._completed(done)
        if self._pool.workers:
            self._futures[done.number] = score_rows(self._pool, [row])[0]
        else:
            self._rows[done.number] = row

    def collect(self) -> list[list[float]]:
        """Wait for all rewards; one number of each function a row, rows in the order of their numbers.

        Raises:
          RewardError: a function failed; of the first row of which one did.
        """
        rewarded = {}
        for number in sorted(self._rows):
            rewarded[number] = score_rows(self._pool, [self._rows[number]])[0].result()
            beat()
        for number, future in sorted(self._futures.items()):
            rewarded[number] = future.result()
            beat()
        return [rewarded[number] for number in sorted(rewarded)]
