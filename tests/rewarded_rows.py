"""Rows that a test rewards by a pool, in order."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from funrl.rewards.call import CompletedRow, RewardOutcome
from funrl.rewards.pool import Pool, RowRewards


def score_rows(pool: Pool, rows: Sequence[CompletedRow]) -> list[RowRewards]:
    """Begin to reward rows, in order. A batched function gets all of them in one call.

    Returns: pending rewards of each row. `result()` waits for the scores; it raises RewardError, which shows the row,
      if a function raised (with its traceback), did not return a finite number, exceeded the pool's timeout or ended
      its process, or if the row cannot be pickled.

    Example: [pending.result() for pending in score_rows(pool, rows)] is [[1.0]] for a pool of `verifiers.exact_match`
      and rows = [Completed("1+1=", "2", {"answer": "2"})].
    """
    futures: list[list[tuple[Future[list[RewardOutcome]], int]]] = [[] for _ in rows]
    for number, reward in enumerate(pool.functions):
        together = reward.batched or (reward.awaited and not pool.workers)
        future = pool.begin(number, rows) if together and rows else None
        for place, row in enumerate(rows):
            futures[place].append((future, place) if future is not None else (pool.begin(number, [row]), 0))
    return [RowRewards(row, tuple(parts)) for row, parts in zip(rows, futures, strict=True)]
