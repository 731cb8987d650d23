"""Groups of rows between the rank that trains and replicas that generate, through the store of the run.

This is the link between the ledger and runners of other ranks. The trainer publishes its ledger when the run begins. A
replica takes the next place by a shared counter, begins the group when the ledger's rule allows it, and delivers what
every rank needs to know of its rows. Replicas find out for themselves which weights all of them hold, so that none
waits for the trainer, which is busy in its update. Nothing here is collective, and nothing grows with the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funrl.mesh.pools.channel import read_value, remove_value, run_store, write_value
from funrl.rollout.ledger import Ledger

GROUPS_KEY = "funrl/groups"
LEDGER_KEY = f"{GROUPS_KEY}/ledger"
WORK_KEY = f"{GROUPS_KEY}/work"
FINISHED_KEY = f"{GROUPS_KEY}/finished"
AGAIN_KEY = f"{GROUPS_KEY}/again"
CHOSEN_KEY = f"{GROUPS_KEY}/chosen"
KEPT_CLAIMS = 1000  # of further groups, which the store records once a replica has taken them
KEPT_VERSIONS = 1000  # below the one that all hold, which replicas may still ask for: many more than --staleness


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
        self._read = 0  # groups that have been read here
        self._everywhere: int | None = None  # the newest version that all replicas are known to hold
        self._batch = 0  # whose first groups may begin with it
        self._oldest: int | None = None  # version with entries in the store
        self._given = 0  # batches whose prompts replicas know
        self._asked = 0  # groups that were asked for again
        self._seen = 0  # requests for groups that this replica has seen

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

    def ask_again(self, number: int) -> None:
        """Ask a replica for a group of another prompt instead of a dropped one."""
        store = run_store()
        store.set(f"{AGAIN_KEY}/{self._asked}", str(number))
        self._asked = store.add(f"{AGAIN_KEY}/asked", 1)

    def give_prompts(self, first: int, positions: Sequence[Sequence[int]]) -> None:
        """Publish the positions of the prompts of batches from `first` on, before these may begin."""
        store = run_store()
        for batch in range(max(first, self._given), first + len(positions)):
            store.set(f"{CHOSEN_KEY}/{batch}", " ".join(map(str, positions[batch - first])))
            store.delete_key(f"{CHOSEN_KEY}/{batch - KEPT_VERSIONS}")
        self._given = max(self._given, first + len(positions))

    def next_finished(self) -> int | None:
        """Number of the next group that a replica has delivered, in the order of delivery; None: there is none yet."""
        store = run_store()
        key = f"{FINISHED_KEY}/{self._read}"
        if not store.check([key]):
            return None
        self._read += 1
        number = int(store.get(key))
        store.delete_key(key)
        return number

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

    def take_again(self) -> int | None:
        """Number of a group that `ask_again` asks for, which no other replica gets; None: there is none."""
        store = run_store()
        asked = store.add(f"{AGAIN_KEY}/asked", 0)
        self._seen = max(self._seen, asked - KEPT_CLAIMS)  # others have answered those before
        while self._seen < asked:
            key = f"{AGAIN_KEY}/{self._seen}"
            self._seen += 1
            if store.add(f"{key}/taken", 1) == 1:
                store.delete_key(f"{AGAIN_KEY}/{self._seen - 1 - 2 * KEPT_CLAIMS}/taken")
                number = int(store.get(key))
                store.delete_key(key)
                return number
        return None

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

    def deliver(self, number: int, value: object) -> None:
        """Deliver a group."""
        store = run_store()
        write_value(f"{GROUPS_KEY}/{number}", value)
        place = store.add(f"{GROUPS_KEY}/delivered", 1) - 1
        store.set(f"{FINISHED_KEY}/{place}", str(number))

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
