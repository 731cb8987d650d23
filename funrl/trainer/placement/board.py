"""Groups of rows between the first rank that trains and replicas that generate, through the store of the run.

    trainer's first rank                     store                      writer of a replica
    --------------------                     -----                      -------------------
    ask([GroupWork, ...])              --> queues of groups ----------> next_group() -> GroupWork
    next_delivery() -> WrittenGroup    <-- [b] facts of its rows ------ deliver(WrittenGroup)
    holds(version)                     <-- count of replicas ---------- hold(version)

The trainer asks for every group as soon as the ledger lets its place begin. A replica with room takes the next one that
was asked for, and begins it once all replicas hold the weights that it needs. They find that out for themselves, so
that none waits for the trainer, which is busy in its update. Nothing here is collective, and nothing grows with the
number of ranks.

Tokens are not delivered: the rows of a group, [b, T], stay with the writer under the group's number until the trainer
ranks ask for them (`GroupWriter.send_groups`). Requests come by `Answers`, and weights by a `WeightReceiver`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from funrl.mesh.pools.channel import run_store, take_values, write_value, write_values
from funrl.trainer.placement.messages import GroupWork, WrittenGroup

GROUPS_KEY = "funrl/groups"
WORK_KEY = f"{GROUPS_KEY}/work"
DELIVERED_KEY = f"{GROUPS_KEY}/delivered"
HELD_KEY = f"{GROUPS_KEY}/held"
KEPT_VERSIONS = 1000  # below the newest one, which replicas may still ask for: many more than --staleness
ANY_REPLICA = "any"  # queue of groups that any replica with room takes
READ_AT_ONCE = 256  # deliveries, at most
AGAIN = "again"  # of groups that replace dropped ones, and come before others
HELDOUT = "heldout"  # of held-out prompts, which come first


@dataclass(eq=False)
class GroupBoard:
    """The groups of a run, as one rank sees them in the store.

    Attributes:
      replicas: number of replicas that generate.
      owner: number of this rank's replica, if it generates.

    Example:
      trainer, replica = GroupBoard(replicas=1), GroupBoard(replicas=1, owner=0)
      trainer.ask([GroupWork(number=0, place=0, prompt=prompt, weights=1)])
      replica.hold(1)
      work = replica.next_group()
      replica.deliver(WrittenGroup(0, work, None, {}, (), waited_s=0.0))
      trainer.next_delivery().work
    """

    replicas: int
    owner: int = 0
    _read: int = 0  # deliveries that have been read here
    _delivered: deque[WrittenGroup] = field(default_factory=deque)  # read, and not taken
    _everywhere: int = -1  # the newest version that all replicas are known to hold
    _asked: dict[str, int] = field(default_factory=dict)  # queue -> groups that were asked for
    _claims: dict[str, int] = field(default_factory=dict)  # queue -> number of the next group that is this replica's
    _waiting: dict[str, GroupWork] = field(default_factory=dict)  # queue -> group that waits for weights

    def holds(self, version: int) -> bool:
        """True if all replicas hold a version or newer ones."""
        if version > self._everywhere and run_store().add(f"{HELD_KEY}/{version}", 0) == self.replicas:
            self._everywhere = version
        return version <= self._everywhere

    # the side that trains

    def ask(self, works: Sequence[GroupWork], queue: str = ANY_REPLICA) -> None:
        """Ask for groups, all of which replicas see at once.

        Args:
          queue: ANY_REPLICA, AGAIN, HELDOUT, or the number of the replica that writes them.
        """
        key = f"{GROUPS_KEY}/{queue}"
        first = self._asked.get(queue, 0)
        write_values([f"{key}/{number}" for number in range(first, first + len(works))], works)
        self._asked[queue] = run_store().add(f"{key}/count", len(works))

    def next_delivery(self) -> WrittenGroup | None:
        """The next group that a replica has delivered, which then leaves the store; None: there is none yet."""
        if not self._delivered:
            store = run_store()
            end = store.add(f"{DELIVERED_KEY}/count", 0)
            keys = [f"{DELIVERED_KEY}/{number}" for number in range(self._read, min(end, self._read + READ_AT_ONCE))]
            if keys and not store.check(keys):  # one is being written
                keys = [key for key in keys[:1] if store.check([key])]
            self._delivered.extend(take_values(keys) if keys else ())
            self._read += len(keys)
        return self._delivered.popleft() if self._delivered else None

    # the side that generates

    def next_group(self) -> GroupWork | None:
        """The next group that this replica may begin; None: there is none yet. It is this replica's from now on."""
        for queue in (HELDOUT, str(self.owner), AGAIN, ANY_REPLICA):
            work = self._waiting.pop(queue, None) or self._take(queue)
            if work is not None and self.holds(work.weights):
                return work
            if work is not None:
                self._waiting[queue] = work
        return None

    def evaluated(self) -> int | None:
        """Version of the weights of the held-out prompt that this replica begins next; None: it begins none."""
        work = self._waiting.get(HELDOUT) or self._take(HELDOUT)
        if work is None:
            return None
        self._waiting[HELDOUT] = work
        return work.weights

    def _take(self, queue: str) -> GroupWork | None:
        """A group of a queue, which no other replica gets; None: there is none."""
        store = run_store()
        key = f"{GROUPS_KEY}/{queue}"
        count = store.add(f"{key}/count", 0)
        if queue not in self._claims:
            if store.add(f"{key}/taken", 0) >= count:
                return None
            self._claims[queue] = store.add(f"{key}/taken", 1) - 1
        # Past the count where another replica was faster; this one then waits for the next group of the queue.
        if self._claims[queue] >= count:
            return None
        (work,) = take_values([f"{key}/{self._claims.pop(queue)}"])
        return work

    def hold(self, version: int) -> None:
        """Record that this replica generates with a version from now on. Called once for each version."""
        store = run_store()
        store.delete_key(f"{HELD_KEY}/{version - KEPT_VERSIONS}")
        store.add(f"{HELD_KEY}/{version}", 1)

    def deliver(self, group: WrittenGroup) -> None:
        """Deliver what every rank knows of a group that has ended."""
        number = run_store().add(f"{DELIVERED_KEY}/count", 1) - 1
        write_value(f"{DELIVERED_KEY}/{number}", group)

    def show_work(self) -> None:
        """Signal to waiting ranks that this replica works on groups."""
        run_store().add(WORK_KEY, 1)
