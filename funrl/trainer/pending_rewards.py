"""Rewards of one rollout's rows, under way while others are still being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from funrl.rewards.pool import Completed, Pool, score_rows


class PendingRewards:
    """Rewards of rows, asked for as their completions finish, in any order and by any number at once.

    Workers begin with a row when it is added. Without workers this process rewards all rows at the end, in their order.
    """

    def __init__(self, pool: Pool, completed: Callable[[int, Sequence[int]], Completed]):
        """
        Args:
          pool: runs the reward functions.
          completed: (number of a row, its token ids without the stop token) -> what the functions are given.
        """
        self._pool, self._completed = pool, completed
        self._rows: dict[int, Completed] = {}
        self._futures: dict[int, Future[list[float]]] = {}

    def add(self, numbers: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Take rows that are complete; an engine's `on_done`."""
        rows = {number: self._completed(number, ids) for number, ids in zip(numbers, tokens, strict=True)}
        if self._pool.workers:
            self._futures |= dict(zip(rows, score_rows(self._pool, list(rows.values())), strict=True))
        else:
            self._rows |= rows

    def collect(self) -> list[list[float]]:
        """Wait for all rewards; one number of each function a row, rows by their numbers.

        Raises:
          RewardError: a function failed; of the first row of which one did.
        """
        rewarded = {number: score_rows(self._pool, [self._rows[number]])[0].result() for number in sorted(self._rows)}
        rewarded |= {number: future.result() for number, future in sorted(self._futures.items())}
        return [rewarded[number] for number in sorted(rewarded)]
