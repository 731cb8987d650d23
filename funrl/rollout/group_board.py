"""Groups of rows between the rank that trains and replicas that generate, through the store of the run.

This is the link between the ledger and runners of other ranks. The trainer publishes its ledger when the run begins. A
replica takes the next place by a shared counter, or a group that the trainer asks for. It reports what it begins, and
delivers what every rank needs to know of its rows. Replicas find out for themselves which weights all of them hold, so
that none waits for the trainer, which is busy in its update. Nothing here is collective, and nothing grows with the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from funrl.mesh.pools.channel import read_value, remove_value, run_store, write_value
from funrl.rollout.ledger import Ledger

GROUPS_KEY = "funrl/groups"
LEDGER_KEY = f"{GROUPS_KEY}/ledger"
WORK_KEY = f"{GROUPS_KEY}/work"
EVENTS_KEY = f"{GROUPS_KEY}/events"
ASKED_KEY = f"{GROUPS_KEY}/asked"
CHOSEN_KEY = f"{GROUPS_KEY}/chosen"
KEPT_VERSIONS = 1000  # below the one that all hold, which replicas may still ask for: many more than --staleness


class GroupBegin(NamedTuple):
    """Report of a replica that it has begun a group.

    Attributes:
      owner: the replica.
      place: of the group.
      attempt: how often it has begun, this time included.
      version: of the ledger, with whose weights it begins.
    """

    owner: int
    place: int
    attempt: int
    version: int


class GroupBoard:
    """The groups of a run, as one rank sees them in the store.

    Attributes:
      replicas: number of replicas that generate.
    """

    def __init__(self, replicas: int) -> None:
        """Begin before the first group.

        Args:
          replicas: its attribute.
        """
        self.replicas = replicas
        self._read = 0  # events that have been read here
        self._everywhere: int | None = None  # the newest version that all replicas are known to hold
        self._batch = 0  # whose first groups may begin with it
        self._oldest: int | None = None  # version with entries in the store
        self._given = 0  # batches whose prompts replicas know
        self._asked: dict[str, int] = {}  # queue -> groups that were asked for
        self._claim: int | None = None  # number of the next asked group that is this replica's

    @property
    def everywhere(self) -> int:
        """The newest version that all replicas are known to hold; -1: there is none."""
        return -1 if self._everywhere is None else self._everywhere

    def holds(self, version: int) -> bool:
        """True if all replicas hold a version, the newest that may be held."""
        self.batch_of_weights(version)
        return self.everywhere >= version

    # the side that trains

    def open(self, ledger: Ledger) -> None:
        """Publish the ledger as it is now, so that replicas begin."""
        write_value(LEDGER_KEY, ledger)

    def train(self, batch: int, version: int) -> None:
        """Record the version that a batch is trained with; several batches have it where some had no update."""
        store = run_store()
        store.set(f"{GROUPS_KEY}/batch/{version}", str(batch))
        store.delete_key(f"{GROUPS_KEY}/replaced/{batch - KEPT_VERSIONS}")
        oldest = version if self._oldest is None else self._oldest
        self._oldest = max(oldest, self.everywhere - KEPT_VERSIONS)
        for forgotten in range(oldest, self._oldest):
            store.delete_key(f"{GROUPS_KEY}/batch/{forgotten}")
            store.delete_key(f"{GROUPS_KEY}/held/{forgotten}")

    def ask(self, groups: Sequence[object], replica: int | None = None) -> None:
        """Ask for groups, all of which replicas see at once.

        Args:
          groups: what they need to know of each.
          replica: that writes them; None: any with room.
        """
        queue = _queue(replica)
        begin = self._asked.get(queue, 0)
        for number, group in enumerate(groups, begin):
            write_value(f"{queue}/{number}", group)
        self._asked[queue] = run_store().add(f"{queue}/count", len(groups))

    def give_prompts(self, first: int, positions: Sequence[Sequence[int]]) -> None:
        """Publish the positions of the prompts of batches from `first` on, before these may begin."""
        store = run_store()
        for batch in range(max(first, self._given), first + len(positions)):
            store.set(f"{CHOSEN_KEY}/{batch}", " ".join(map(str, positions[batch - first])))
            store.delete_key(f"{CHOSEN_KEY}/{batch - KEPT_VERSIONS}")
        self._given = max(self._given, first + len(positions))

    def next_event(self) -> list[GroupBegin] | int | None:
        """Next report of a replica in their order: groups that begin, or the number of one that it has delivered.

        None: there is none yet.
        """
        store = run_store()
        key = f"{EVENTS_KEY}/{self._read}"
        if not store.check([key]):
            return None
        self._read += 1
        fields = [[int(field) for field in line.split()] for line in store.get(key).decode().split(",")]
        store.delete_key(key)
        return fields[0][0] if len(fields[0]) == 1 else [GroupBegin(*begin) for begin in fields]

    def collect(self, number: int) -> Any:
        """Value delivered of a group, which is then removed."""
        key = f"{GROUPS_KEY}/{number}"
        value = read_value(key)
        remove_value(key)
        return value

    # the side that generates

    def opened(self) -> Ledger | None:
        """The ledger at the beginning of the run, once it is there."""
        return read_value(LEDGER_KEY) if run_store().check([LEDGER_KEY]) else None

    def take_ticket(self) -> int:
        """Number for `Ledger.place_of`, which no other replica gets."""
        return run_store().add(f"{GROUPS_KEY}/tickets", 1) - 1

    def take_asked(self, replica: int | None = None) -> Any:
        """A group that `ask` asks for, which no other replica gets; None: there is none.

        Args:
          replica: as of `ask`.
        """
        store = run_store()
        queue = _queue(replica)
        count = store.add(f"{queue}/count", 0)
        if self._claim is None:
            if store.add(f"{queue}/taken", 0) >= count:
                return None
            self._claim = store.add(f"{queue}/taken", 1) - 1  # beyond the count where others were faster: the next one
        if self._claim >= count:
            return None
        key = f"{queue}/{self._claim}"
        self._claim = None
        group = read_value(key)
        remove_value(key)
        return group

    def take_prompt(self) -> int:
        """Number for `Ledger.prompt_of`, which no other replica gets."""
        return run_store().add(f"{GROUPS_KEY}/prompts", 1) - 1

    def prompts_of(self, batch: int) -> list[int]:
        """Positions of the prompts of a batch that may begin, where the trainer ranks choose them."""
        return [int(position) for position in run_store().get(f"{CHOSEN_KEY}/{batch}").split()]

    def take_replacement(self, batch: int) -> int:
        """Number of prompts that were replaced in a batch before, by all replicas; counts another one."""
        return run_store().add(f"{GROUPS_KEY}/replaced/{batch}", 1) - 1

    def hold(self, version: int) -> None:
        """Record that this replica generates with a version from now on. Called once for each version."""
        run_store().add(f"{GROUPS_KEY}/held/{version}", 1)

    def begin(self, groups: Sequence[GroupBegin]) -> None:
        """Report groups that this replica begins."""
        self._report(",".join(" ".join(map(str, group)) for group in groups))

    def deliver(self, number: int, value: object) -> None:
        """Deliver a group."""
        write_value(f"{GROUPS_KEY}/{number}", value)
        self._report(str(number))

    def _report(self, event: str) -> None:
        store = run_store()
        store.set(f"{EVENTS_KEY}/{store.add(f'{EVENTS_KEY}/count', 1) - 1}", event)

    def show_work(self) -> None:
        """Signal to waiting ranks that this replica works on groups."""
        run_store().add(WORK_KEY, 1)

    # both

    def batch_of_weights(self, version: int) -> int | None:
        """The newest batch that is trained with weights which all replicas hold; None: there are none yet.

        Args:
          version: the newest that may be held.
        """
        store = run_store()
        first = version if self._everywhere is None else self._everywhere + 1
        for candidate in range(first, version + 1):
            if store.add(f"{GROUPS_KEY}/held/{candidate}", 0) < self.replicas:
                break
            self._everywhere = candidate
        if self._everywhere is None:
            return None
        key = f"{GROUPS_KEY}/batch/{self._everywhere}"
        if store.check([key]):
            self._batch = max(self._batch, int(store.get(key)))
        return self._batch


def _queue(replica: int | None) -> str:
    """Key of the asked groups of a replica, or of all."""
    return ASKED_KEY if replica is None else f"{ASKED_KEY}/{replica}"
