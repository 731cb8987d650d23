"""Programs beside an engine whose requests and ends stand at fixed iterations of it."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from funrl.rollout.policy import RunEndingError

FILTER = -1  # stands for the filter of a group among the numbers of its programs


class PacedPrograms:
    """Programs of groups, each with at most one request in the engine.

    A program that has an answer computes for a given number of iterations. Only then its next request enters, or it
    ends; where it takes longer, the engine waits for it.

    Where groups are filtered, the engine waits for the filter of a group whose programs have all ended, and so for its
    rewards; the group may then begin again.

    Attributes:
      tick: iterations of the engine.
      ended: groups whose programs have all ended, until they are taken; of filtered ones, whoever filters adds them.
    """

    def __init__(self, moved: Callable[[], None], filtered: bool = False) -> None:
        """Begin without programs.

        Args:
          moved: called when a program asks or ends.
          filtered: whether groups are filtered.
        """
        self._filtered = filtered
        self.tick = 0
        self.ended: list[int] = []
        self._moved = moved
        self._due: dict[tuple[int, int], int] = {}  # of programs that compute
        self._held: dict[tuple[int, int], asyncio.Future[None]] = {}  # of programs that have asked or ended
        self._asking: set[tuple[int, int]] = set()  # in the engine
        self._left: collections.Counter[int] = collections.Counter()  # programs of each group

    def begin(self, group: int, count: int, delay: int) -> None:
        """Begin the programs of a group, whose first requests enter after `delay` iterations."""
        self._left[group] = count
        self._due |= {(group, number): self.tick + delay for number in range(count)}

    async def ask(self, group: int, number: int) -> None:
        """Wait for the iteration at which a program's request enters the engine.

        Raises:
          RunEndingError: the program has another request.
        """
        key = (group, number)
        if key in self._asking or key in self._held:
            raise RunEndingError(
                "--clock=tokens: an episode asks for a reply while it waits for another one, and their order depends "
                "on time; let the environment sample one after the other, or leave --clock=tokens out"
            )
        await self._hold(key)
        self._asking.add(key)

    def answered(self, group: int, number: int, delay: int) -> None:
        """Note that a request has been completed, and let its program compute for `delay` iterations."""
        self._asking.discard((group, number))
        if group in self._left:
            self._due[group, number] = self.tick + delay

    async def end(self, group: int, number: int) -> None:
        """Wait for the iteration at which a program ends."""
        await self._hold((group, number))
        self._left[group] -= 1
        if not self._left[group]:
            del self._left[group]
            if self._filtered:
                self._due[group, FILTER] = self.tick
            else:
                self.ended.append(group)

    async def filter(self, group: int) -> None:
        """Wait for the iteration at which a group is filtered."""
        await self._hold((group, FILTER))

    def forget(self, group: int) -> None:
        """Release the engine from the programs of a group that has failed."""
        self._left.pop(group, None)
        self._due = {key: due for key, due in self._due.items() if key[0] != group}

    @property
    def outside(self) -> int:
        """Number of programs that compute."""
        return len(self._due)

    @property
    def next_due(self) -> int | None:
        """The iteration at which the first of them asks or ends; None: none computes."""
        return min(self._due.values(), default=None)

    @property
    def settled(self) -> bool:
        """True if all programs that are due have asked or ended."""
        return all(due > self.tick or key in self._held for key, due in self._due.items())

    async def release(self) -> None:
        """Resume the programs that are due, in the order of their numbers."""
        for key in sorted(key for key, due in self._due.items() if due <= self.tick):
            del self._due[key]
            self._held.pop(key).set_result(None)
        await asyncio.sleep(0)

    async def _hold(self, key: tuple[int, int]) -> None:
        future = asyncio.get_running_loop().create_future()
        self._held[key] = future
        self._moved()
        try:
            await future
        except asyncio.CancelledError:
            self._due.setdefault(key, self.tick)  # also where it was released at the same time: its program continues
            raise
        finally:
            self._held.pop(key, None)
