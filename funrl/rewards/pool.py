"""Workers of a rank that run reward functions in parallel with each other and with the rank's own work.

A worker runs one call of a function at a time; awaited functions share one worker, whose event loop runs many calls
concurrently. A worker that hangs or dies is replaced; see `worker_pool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import cloudpickle

from funrl.processes.worker_pool import AskRank, CallLostError, Lane, WorkerCall, WorkerClient, open_workers
from funrl.rewards.call import (
    CompletedRow,
    Failure,
    Reward,
    RewardError,
    RewardFunction,
    RewardOutcome,
    awaited_outcomes,
    failure_of,
    outcomes,
    picklable,
    reward_functions,
    row_text,
    too_slow,
)
from funrl.rewards.views import TEXT

IN_FLIGHT = 256  # bound on the concurrent calls of an event loop
AWAITED_GRACE_S = 5.0  # for an event loop to cancel a call itself


class Pool:
    """Reward workers of a rank, made by `open_pool`; `Pool(rewards)` has no workers.

    Attributes:
      functions: the reward functions.
      views: names of the views that they read instead of the text.
      workers: bound on the processes that run them; 0: this process does.
      timeout_s: of a call by a worker.
    """

    def __init__(
        self, rewards: Sequence[Reward], workers: int = 0, timeout_s: float = 0.0, client: WorkerClient | None = None
    ):
        self.functions = reward_functions(rewards)
        self.views = {function.view.name for function in self.functions} - {TEXT}
        self.workers = workers
        self.timeout_s = timeout_s
        self.client = client
        self.closed = False

    def begin(self, function: int, rows: Sequence[CompletedRow]) -> Future[list[RewardOutcome]]:
        """Begin to reward rows with the function of an index. A batched function gets all of them in one call.

        Returns: a future of one outcome per row, which raises RewardError only if the pool itself has ended.
        """
        if self.closed:
            raise RewardError("the pool of reward workers is closed")
        future: Future[list[RewardOutcome]] = Future()
        reward = self.functions[function]
        if self.client is None:
            future.set_result(_now(reward, rows))
            return future
        try:
            payload = _dumps((function, rows))
        except Exception as error:
            what = f"a row cannot be sent to a reward worker ({error}); use --reward_workers=0"
            future.set_result([Failure(what + row_text(row), row.prompt, row.completion) for row in rows])
            return future

        def settle(answer: Future[list[RewardOutcome]]) -> None:
            error = answer.exception()
            if error is None:
                future.set_result(answer.result())
            elif isinstance(error, CallLostError):
                what = f"ended its process ({error})" if str(error) else too_slow(self.timeout_s)
                among = f" for {len(rows)} completions, the first of which is" if len(rows) > 1 else ""
                future.set_result([failure_of(reward, rows[0], what + among)] * len(rows))
            else:
                future.set_exception(RewardError(str(error)))

        call = WorkerCall(payload=payload, lane=int(reward.awaited))
        self.client.begin(call).future.add_done_callback(settle)
        return future


@contextlib.contextmanager
def open_pool(
    rewards: Sequence[Reward], workers: int, timeout_s: float = 60.0, most: int | None = None
) -> Iterator[Pool]:
    """Open a pool of workers for the duration of the context.

    Enter it before the process has threads: before process groups, devices and torch's first parallel operation.

    Args:
      rewards: functions of any form. Each worker has a forked copy, so that a function's state, such as a cache, is
        separate in each worker.
      workers: number of workers; 0: rows are rewarded in this process when they are submitted, without a timeout.
        Awaited functions are not counted: they share one worker with an event loop.
      timeout_s: timeout of a call.
      most: bound on the workers, which are added while rows wait and workers are mostly idle; None: `workers`.
    """
    if not workers:
        yield Pool(rewards)
        return
    functions = reward_functions(rewards)
    most = max(workers, most or workers)
    awaited = functools.partial(_awaited_answer, functions, timeout_s)
    lanes = (
        Lane(functools.partial(_answer, functions), workers, most, timeout_s=timeout_s),
        Lane(awaited, 1, 1, IN_FLIGHT, timeout_s=timeout_s + AWAITED_GRACE_S),
    )
    with open_workers(lanes, "reward workers") as client:
        pool = Pool(rewards, most, timeout_s, client=client)
        try:
            yield pool
        finally:
            pool.closed = True


class RowRewards(NamedTuple):
    """Pending rewards of one row.

    Attributes:
      row: the row.
      parts: for each function, the future of its outcomes and the row's index among them.
    """

    row: CompletedRow
    parts: tuple[tuple[Future[list[RewardOutcome]], int], ...]

    def done(self) -> bool:
        """True if all outcomes are available."""
        return all(future.done() for future, _ in self.parts)

    def outcomes(self, timeout: float | None = None) -> list[RewardOutcome]:
        """Wait for the outcome of each function. If no function applies to the row, all have failed.

        Raises:
          RewardError: the pool has ended.
        """
        results = [future.result(timeout)[place] for future, place in self.parts]
        if results and all(not isinstance(outcome, Failure) and math.isnan(outcome) for outcome in results):
            message = f"none of the {len(results)} reward functions applies, one of them must{row_text(self.row)}"
            return [Failure(message, self.row.prompt, self.row.completion)] * len(results)
        return results

    def result(self, timeout: float | None = None) -> list[float]:
        """Wait for the score of each function; NaN where one of several does not apply.

        Raises:
          RewardError: a function failed, no function applies, or the pool has ended.
        """
        results = self.outcomes(timeout)
        for outcome in results:
            if isinstance(outcome, Failure):
                raise RewardError(*outcome)
        return [outcome for outcome in results if not isinstance(outcome, Failure)]


def _now(reward: RewardFunction, rows: Sequence[CompletedRow]) -> list[RewardOutcome]:
    """Compute outcomes in this process."""
    if not reward.awaited:
        return outcomes(reward, rows)
    results: list[RewardOutcome] = []
    thread = threading.Thread(target=lambda: results.extend(asyncio.run(awaited_outcomes(reward, rows))))
    thread.start()  # this thread may already run an event loop, as in a notebook
    thread.join()
    return results


def _answer(functions: Sequence[RewardFunction], payload: bytes) -> list[RewardOutcome]:
    """Outcomes of a call, in a worker."""
    function, rows = pickle.loads(payload)
    return [*map(picklable, outcomes(functions[function], rows))]


async def _awaited_answer(
    functions: Sequence[RewardFunction], timeout_s: float, payload: bytes, ask: AskRank
) -> list[RewardOutcome]:
    """Outcomes of a call of an awaited function, in a worker, which asks the rank for nothing."""
    del ask
    function, rows = pickle.loads(payload)
    return [*map(picklable, await awaited_outcomes(functions[function], rows, timeout_s))]


def _dumps(call: object) -> bytes:
    try:
        return pickle.dumps(call)
    except Exception:  # such as a field that is a lambda
        return cloudpickle.dumps(call)
