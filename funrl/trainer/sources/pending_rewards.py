"""Rewards of a rollout's rows, computed while further rows are still being written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from funrl.processes.heartbeat import beat
from funrl.rewards.call import CompletedRow, Failure, RewardError, RewardOutcome, Score
from funrl.rewards.pool import Pool, RowRewards
from funrl.rollout.requests import Completion

Totals = Mapping[str, tuple[float, int]]  # of further numbers that reward functions returned: sum and count
OWN_METRICS = frozenset({"mean", "max", "min", "equal_groups", "failed"})  # names reward/NAME that the run uses itself
_Part = tuple[Future[list[RewardOutcome]], int]  # of one function: its outcomes, and the row's index among them


class Rewarded(NamedTuple):
    """Rewards of rows, in the order of their numbers.

    Attributes:
      scores: for each row, the score of each function; NaN where it does not apply, 0 where it failed.
      failed: for each row, whether a function failed on it or none applies to it.
      problem: message of the first failure; "" where there is none.
      entries: totals of the further numbers in dicts that functions returned.
    """

    scores: list[list[float]]
    failed: list[bool]
    problem: str
    entries: Totals = {}  # noqa: RUF012  (never mutated)


def add_totals(*totals: Totals) -> Totals:
    """Add the totals of several sets of rows."""
    joined: dict[str, tuple[float, int]] = {}
    for part in totals:
        for name, (value, count) in part.items():
            before = joined.get(name, (0.0, 0))
            joined[name] = (before[0] + value, before[1] + count)
    return joined


def entry_metrics(totals: Totals, group: str = "reward") -> dict[str, float]:
    """Means of the further numbers in dicts that reward functions returned, over the rows that have them."""
    means = {name: value / count for name, (value, count) in sorted(totals.items())}
    return {f"{group}/{name}" + "_entry" * (name in OWN_METRICS): mean for name, mean in means.items()}


class PendingRewards:
    """Rewards of rows whose completions finish in any order.

    Workers begin to reward a row when it is added. A batched function gets all rows of a prompt in one call, once the
    last of them is added. Without workers, this process rewards all rows at the end, in their order.
    """

    def __init__(self, pool: Pool, completed: Callable[[Completion], CompletedRow], samples: int = 1):
        """Begin without rows.

        Args:
          pool: runs the reward functions.
          completed: completion -> arguments of the reward functions.
          samples: rows of a prompt, which have neighbouring numbers.
        """
        self._pool = pool
        self._completed = completed
        self._samples = samples
        self._rows: dict[int, CompletedRow] = {}
        self._parts: dict[tuple[int, int], _Part] = {}  # by row and function
        self._groups: defaultdict[int, list[int]] = defaultdict(list)  # rows that batched functions wait for

    def add(self, done: Completion) -> None:
        """Add a completion that has finished, unless its number is there."""
        if done.number in self._rows:
            return
        self._rows[done.number] = self._completed(done)
        if not self._pool.workers:
            return
        self._begin([done.number], batched=False)
        group = self._groups[done.number // self._samples]
        group.append(done.number)
        if len(group) == self._samples:
            self._begin(sorted(self._groups.pop(done.number // self._samples)), batched=True)

    def ready(self) -> bool:
        """True if `collect` need not wait for workers, once all rows have been added."""
        return all(future.done() for future, _ in self._parts.values())

    def collect(self, numbers: Sequence[int], on_error: str = "stop") -> Rewarded:
        """Wait for the rewards of some rows.

        Args:
          numbers: of the rows, ascending; all rows of their prompts.
          on_error: "stop" raises the first failure; otherwise the result marks failures.

        Raises:
          RewardError: a function failed, shown for the first such row; or the pool has ended.
        """
        if not self._pool.workers:
            fresh = [number for number in numbers if (number, 0) not in self._parts]
            for number in fresh:
                self._begin([number], batched=False)
                beat()
                if on_error == "stop":
                    self._check(number)
            self._begin(fresh, batched=True)
        rewarded = Rewarded([], [], "")
        for number in numbers:
            rewards = RowRewards(self._rows[number], tuple(self._parts[number, k] for k in self._functions()))
            outcomes = list[RewardOutcome](rewards.result()) if on_error == "stop" else rewards.outcomes()
            beat()
            failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
            rewarded.scores.append([0.0 if isinstance(outcome, Failure) else outcome for outcome in outcomes])
            rewarded.failed.append(bool(failures))
            entries = [
                {name: (x, 1) for name, x in outcome.entries.items()}
                for outcome in outcomes
                if isinstance(outcome, Score)
            ]
            rewarded = rewarded._replace(entries=add_totals(rewarded.entries, *entries)) if entries else rewarded
            if failures and not rewarded.problem:
                rewarded = rewarded._replace(problem=failures[0].message)
        return rewarded

    def keep(self, prompts: Container[int]) -> None:
        """Forget the rows of all prompts but some."""
        self._rows = {number: row for number, row in self._rows.items() if number // self._samples in prompts}
        self._parts = {key: part for key, part in self._parts.items() if key[0] in self._rows}

    def _functions(self) -> range:
        return range(len(self._pool.functions))

    def _begin(self, numbers: list[int], batched: bool) -> None:
        """Begin to reward rows with the batched functions, or with the others.

        Where this process runs the functions, awaited ones count as batched, so that their calls run concurrently.
        """
        for k, function in enumerate(self._pool.functions):
            if batched == (function.batched or (function.awaited and not self._pool.workers)) and numbers:
                future = self._pool.begin(k, [self._rows[number] for number in numbers])
                self._parts |= {(number, k): (future, place) for place, number in enumerate(numbers)}

    def _check(self, number: int) -> None:
        """Raise RewardError if a function that has been called failed on a row."""
        for k in self._functions():
            future, place = self._parts.get((number, k), (None, 0))
            if future is not None and isinstance(outcome := future.result()[place], Failure):
                raise RewardError(*outcome)
