"""All that the writer of a replica knows of the trainer ranks: which groups it begins, and where they go.

    GroupWriter                         link                         trainer ranks
    -----------                         ----                         -------------
    next_group(held) -> GroupWork   <-- places, prompts, weights --  Ledger, rule and prompts
    replace(work) -> GroupWork      <-- prompts of the order ------  budget of the batch
    begin([GroupWork, ...])         --> owner, place, attempt -----> Ledger.begin
    deliver(work, WrittenGroup)     --> [b] facts of its rows -----> Ledger.deliver
    hold(version)                   --> weights of this replica ---> when later groups may begin

`GroupLink` has the calls of the writer, all of them on the first tensor rank of a replica, between two iterations of
its engine. None is collective and none waits for the trainer ranks. `BoardLink` is the one of ranks of the same run.

Tokens are not delivered: the rows of a group, [b, T], stay with the writer under the group's number until the trainer
ranks ask for them (`SendGroupsRequest`). Requests come by `Answers`, and weights by a `WeightReceiver`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from funrl.rollout.group_board import GroupBegin, GroupBoard
from funrl.rollout.ledger import Ledger, LedgerRule
from funrl.trainer.placement.group_prompts import GroupPrompt, GroupWork, prompt_of_place
from funrl.trainer.placement.messages import WrittenGroup


class GroupLink(Protocol):
    """The way from the writer of a replica to the trainer ranks and back.

    Attributes:
      owner: number of the replica, from 0 on.
      rule: of the ledger. Raises RuntimeError before `is_open`.
      filters: whether the writer filters its groups and replaces what it drops; else the trainer ranks filter.
      is_over: whether no group follows for this replica.
    """

    owner: int

    @property
    def rule(self) -> LedgerRule: ...
    @property
    def filters(self) -> bool: ...
    @property
    def is_over(self) -> bool: ...

    def is_open(self) -> bool:
        """True once the trainer ranks have opened the ledger."""
        ...

    def next_group(self, held: int) -> GroupWork | None:
        """The next group that this replica may begin; None: there is none yet. It is this replica's from now on.

        Args:
          held: the newest version of weights that this replica has reported by `hold`.
        """
        ...

    def replace(self, work: GroupWork) -> GroupWork | None:
        """The same place with another prompt; None: its batch has had as many as it may."""
        ...

    def begin(self, groups: Sequence[GroupWork]) -> None:
        """Report groups that begin."""
        ...

    def deliver(self, work: GroupWork, group: WrittenGroup) -> None:
        """Deliver what every rank knows of a group that has ended."""
        ...

    def hold(self, version: int) -> None:
        """Report that this replica generates with a version of the weights from now on. Once for each version."""
        ...

    def show_work(self) -> None:
        """Signal to waiting ranks that this replica works."""
        ...


class BoardLink:
    """A `GroupLink` through the store of the run.

    Where the rule has no staleness, the trainer ranks ask for each group of a batch, and then for the groups that
    replace dropped ones. Else a replica takes the next place of the run by a shared counter, so that it does not wait
    for the trainer ranks.

    Without replacements group i has the i-th prompt of the run then, or of the prompts that the trainer ranks choose by
    weights and publish. With them a replica takes the next prompt of the order when it begins a group, and again for
    the same place when the filter keeps no row of it: by itself, or where models reward completions when the trainer
    ranks ask. Groups b P to (b + 1) P - 1, the places of a batch, have at most as many prompts as a batch of a run by
    turns: they share the replacements. A later group that overtakes one of them brings its own to their batch.
    """

    def __init__(self, board: GroupBoard, owner: int = 0, *, weighed: bool = False, fixed: bool = False) -> None:
        """Begin before the first group.

        Args:
          board: of the run.
          owner: number of the replica.
          weighed: whether the trainer ranks choose the prompts of each batch by weights.
          fixed: whether asked groups are for one replica each, by their numbers, in a run without staleness.
        """
        self.owner = owner
        self._board = board
        self._weighed = weighed
        self._queue = owner if fixed else None
        self._ledger: Ledger | None = None
        self._next: dict[Callable[[], GroupWork | None], GroupWork | None] = {}  # that begin as soon as they may
        self._version: int | None = None  # of the ledger, by the weights that all replicas hold
        self.is_over = False

    def is_open(self) -> bool:
        """True once the trainer ranks have opened the ledger."""
        self._ledger = self._ledger or self._board.opened()
        return self._ledger is not None

    @property
    def ledger(self) -> Ledger:
        """The ledger as it was opened. Raises: RuntimeError, it is not open yet."""
        if self._ledger is None:
            raise RuntimeError("the ledger of the groups is not open yet")
        return self._ledger

    @property
    def rule(self) -> LedgerRule:
        """The rule of the ledger."""
        return self.ledger.rule

    @property
    def filters(self) -> bool:
        """True if this replica filters what it writes; else the trainer ranks ask for what replaces a prompt."""
        return self.rule.prompts > 1 and not self.rule.rounds

    def next_group(self, held: int) -> GroupWork | None:
        """The next group that this replica may begin; see `GroupLink`."""
        for take in (self._asked, self._by_ticket):
            work = self._next.get(take) or take()
            begins = work is not None and self._may_begin(work.place, held)
            self._next[take] = None if begins else work
            if work is not None and begins:
                least = 0 if work.place is None else self.rule.least_version(work.place)
                prompt = work.prompt or self._prompt(work.number)
                return work._replace(version=max(self._version or 0, least), prompt=prompt)
        return None

    def _asked(self) -> GroupWork | None:
        """A group that the trainer ranks ask for."""
        return self._board.take_asked(None if self.rule.staleness else self._queue) if self.rule.rounds else None

    def _by_ticket(self) -> GroupWork | None:
        """The next place of the run."""
        if self.is_over or not self.rule.staleness:
            return None
        number = self.ledger.place_of(self._board.take_ticket())
        self.is_over = number is None
        return None if number is None else GroupWork(number, place=number)

    def _may_begin(self, place: int | None, held: int) -> bool:
        """True if all replicas hold the version that a place needs; greedy completions come after their groups."""
        if place is None:
            return True
        least = self.rule.least_version(place)
        if self._version is None or self._version < least:
            self._version = self._board.batch_of_weights(held)
        return self._version is not None and self._version >= least

    def _prompt(self, place: int) -> GroupPrompt:
        """The prompt of a new group."""
        chosen = self._board.prompts_of if self._weighed else None
        return prompt_of_place(self.ledger, place, take=self._board.take_prompt, chosen=chosen)

    def replace(self, work: GroupWork) -> GroupWork | None:
        """The same place with another prompt; see `GroupLink`."""
        assert work.place is not None
        if self._board.take_replacement(work.place // self.rule.places) >= self.rule.refills:
            return None
        return work._replace(attempt=work.attempt + 1, prompt=self._prompt(work.place))

    def begin(self, groups: Sequence[GroupWork]) -> None:
        """Report groups that begin."""
        begun = [GroupBegin(self.owner, x.place, x.attempt, x.version) for x in groups if x.place is not None]
        if begun:
            self._board.begin(begun)

    def deliver(self, work: GroupWork, group: WrittenGroup) -> None:
        """Deliver a group."""
        self._board.deliver(work.number, group._replace(attempt=work.attempt))

    def hold(self, version: int) -> None:
        """Report the version of this replica."""
        self._board.hold(version)

    def show_work(self) -> None:
        """Signal to waiting ranks that this replica works."""
        self._board.show_work()
