"""Groups of rows that a replica writes without a break: begun by the rule of the ledger, beside its engine's steps.

Between two iterations of its engine a replica looks for requests of the trainer ranks, takes weights that have
arrived, and begins groups. Its first tensor rank decides and tells the others, so that all make the same calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import numpy as np

from funrl import trees
from funrl.batch import FIELDS, Batch, as_dict
from funrl.data.prompts import Example
from funrl.environments.logged import LoggedEpisode
from funrl.mesh.collectives import from_first
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import PROGRESS_S, Answers
from funrl.mesh.pools.handover import Handover, send_rows
from funrl.mesh.pools.transfer import WeightDelivery, WeightReceiver
from funrl.processes import heartbeat
from funrl.rewards.call import RewardError
from funrl.rollout.group_board import GroupBoard
from funrl.rollout.policy import RunEndingError
from funrl.rollout.requests import Completion, Request
from funrl.rollout.resident import ResidentEngine, follow
from funrl.trainer.placement.group_prompts import GroupPart, GroupPrompt, GroupPrompts, GroupResult
from funrl.trainer.placement.messages import (
    GroupFields,
    SendGroupsRequest,
    WrittenGroup,
    further_fields,
    own_fields,
    split_origins,
    versions_of,
    written_rows,
)
from funrl.trainer.sources.curriculum import UNWEIGHTED
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.group_rows import Share, write_group
from funrl.trainer.sources.observing import SHOWN_PROMPTS, ShownSample, shown_samples
from funrl.trainer.sources.prompts import baseline_sampling
from funrl.trainer.sources.selection import filter_samples
from funrl.trainer.sources.source import DroppedPrompt, Generation
from funrl.trainer.steps.step_rows import Rows, failed_rows, join_rows, rows_of, take

WRITER_IDLE_S = 0.002  # that an idle replica waits before it looks again
STORE_LOOK_S = 0.001  # between two looks at the store, for each replica more


class ReplicaStep(NamedTuple):
    """The next thing that all tensor ranks of a replica do; without any, they step the engine.

    Attributes:
      request: take a request of the trainer ranks.
      weights: take weights that have arrived.
      rows: fields of the rows of groups that have ended, by the numbers of the groups.
      ended: note that this replica's part of an evaluation has ended.
    """

    request: bool = False
    weights: bool = False
    ended: bool = False
    rows: dict[int, GroupFields] = {}  # noqa: RUF012  (never mutated)


class GroupWriter:
    """The groups of this rank's replica.

    Attributes:
      resident: the engine as coroutines see it; None: this is not the replica's first tensor rank.
      engine: of this rank.
      mesh: to generate on.
      evaluates: whether an evaluation runs beside the groups, until whose end the engine keeps its weights.
    """

    def __init__(
        self,
        generation: Generation,
        receiver: WeightReceiver,
        take_weights: Callable[[WeightDelivery], None],
    ) -> None:
        """Begin without groups.

        Args:
          generation: as of a source, on the mesh to generate on.
          receiver: of weights.
          take_weights: gives arrived weights to the engine.
        """
        self.mesh = mesh = generation.engine.mesh
        self.engine = generation.engine.engine
        self.resident = ResidentEngine(self.engine) if mesh.index("tensor") == 0 else None
        self._replica = int(mesh.index(mesh.row_axes))
        self._alone = Mesh(device=mesh.device, timeout=mesh.timeout)
        self._generation = generation._replace(
            engine=generation.engine._replace(mesh=self._alone, proof=None, note=self._note)
        )
        self._receiver = receiver
        self._take_weights = take_weights
        self._board = GroupBoard(mesh.size(mesh.row_axes))
        self._requests = generation.sampling.samples + generation.greedy_baseline  # of a group
        self._prompts = GroupPrompts(self._board, weighed=generation.schedule.weighing is not UNWEIGHTED)
        self._loop = asyncio.new_event_loop()
        self.evaluates = False
        self._evaluation: asyncio.Task[Share] | None = None  # on the first tensor rank
        self._tasks: dict[int, asyncio.Task[GroupResult]] = {}
        self._held: dict[int, Rows] = {}
        self._logged: dict[int, list[LoggedEpisode]] = {}  # by group; of the newest batch too
        self._sent: tuple[int, ...] = ()  # groups of the newest batch
        self._has_next = False
        self._next: int | None = None  # the group that begins next, if there is one
        self._version: int | None = None  # of the ledger, by the weights that all replicas hold
        self._begun: dict[int, int] = {}  # group -> version at which it began
        self._told: int | None = None  # the newest version that the others know of
        self._next_look = 0.0
        self._next_sign = 0.0
        self._idle_since: float | None = None
        self._waited_s = 0.0
        self._notes: list[str] = []

    @property
    def leader(self) -> ResidentEngine:
        """The engine as coroutines see it. Raises: RuntimeError, this is not the replica's first tensor rank."""
        if self.resident is None:
            raise RuntimeError("only the first tensor rank of a replica writes groups")
        return self.resident

    def turn(self, answers: Answers | None) -> ReplicaStep:
        """The next thing to do. Collective over "tensor".

        Args:
          answers: the requests to look for; None: none is taken.
        """
        decided = self._decide(answers) if self.resident is not None else None
        turn: ReplicaStep = from_first(decided, self.mesh, "tensor") or ReplicaStep()
        for number, (fields, further) in turn.rows.items():
            on_device = trees.map(lambda x: x.to(self.mesh.device), fields)
            batch = Batch(FIELDS | further if further else FIELDS, **on_device)
            self._held[number] = rows_of(batch, mesh=self._alone)
        if turn.weights:
            self.take()
        if turn.ended:
            self.evaluates = False
        return turn

    def step(self) -> None:
        """Step the engine once, or wait a little where it has nothing to do. Collective over "tensor"."""
        if self.resident is None:
            follow(self.engine, self.mesh)
            return
        self._loop.run_until_complete(self.resident.iterate(self.mesh, WRITER_IDLE_S))

    def take(self) -> None:
        """Load weights that have arrived on all tensor ranks into the engine. Collective over "tensor"."""
        arrived = self._receiver.arrived()
        assert arrived is not None
        self._take_weights(arrived)
        self._receiver.release()

    def take_version(self, version: int) -> None:
        """Take weights until the engine has a version. Collective over "tensor".

        Older weights are taken too: nothing is received as long as they are in the second buffer.
        """
        self.engine.check([])  # a native engine measures its free memory now, on all ranks
        while self.evaluates and (self.engine.version or 0) < version:
            self.turn(None)
            self.step()
        heartbeat.entered(f"weights {version} of the trainer ranks")
        while (self.engine.version or 0) < version:
            complete = self.resident is not None and self._has_arrived()
            if from_first(complete, self.mesh, "tensor"):
                self.take()
            else:
                heartbeat.beat()
                time.sleep(WRITER_IDLE_S)
        heartbeat.left()
        self._tell_version()

    def begin_evaluation(self, write: Callable[[ResidentEngine], Coroutine[object, None, Share]]) -> None:
        """Begin to write this replica's part of an evaluation. Collective over "tensor"."""
        self.evaluates = True
        if self.resident is not None:
            self._evaluation = self._loop.create_task(write(self.resident))

    def end_evaluation(self) -> Share | None:
        """Wait for this replica's part of the evaluation; None on its other tensor ranks. Collective over "tensor"."""
        while self.evaluates:
            self.turn(None)
            self.step()
        return None if self._evaluation is None else self._evaluation.result()

    def complete_beside(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete requests beside the groups; no newer weights arrive meanwhile. Collective over "tensor"."""
        task = None if self.resident is None else self._loop.create_task(self.resident.ask_all(requests))
        while not from_first(task is not None and task.done(), self.mesh, "tensor"):
            self.turn(None)
            self.step()
        return from_first(None if task is None else task.result(), self.mesh, "tensor")

    def send(self, request: SendGroupsRequest, training: Mesh) -> None:
        """Hand over rows of groups, and let go of all rows of these groups."""
        own = np.flatnonzero(request.owner == self._replica)
        if len(own):
            runs = split_origins(request.origins[own])
            rows = join_rows([take(self._held[number], places) for number, places in runs])
            way = Handover(request.lengths, request.owner, request.to, source=self.mesh, target=training)
            with heartbeat.phase("send_rows"):
                send_rows(*own_fields(rows.batch), way)
        for number in request.groups:
            self._held.pop(number, None)
        for number in self._sent:
            self._logged.pop(number, None)
        self._sent = request.groups

    def logged_episodes(self, groups: Sequence[int]) -> list[LoggedEpisode]:
        """This replica's episodes of some groups of the newest batch, numbered in the order of the batch."""
        samples = self._generation.sampling.samples
        return [
            logged._replace(number=place * samples + logged.number)
            for place, group in enumerate(groups)
            for logged in self._logged.get(group, ())
        ]

    def close(self) -> None:
        """End all groups."""
        evaluation = [] if self._evaluation is None else [self._evaluation]
        self._loop.run_until_complete(_cancelled([*self._tasks.values(), *evaluation]))
        self._loop.close()

    def _note(self, text: str) -> None:
        self._notes.append(text)

    def _decide(self, answers: Answers | None) -> ReplicaStep | None:
        rows = self._deliver_ended()
        if self.evaluates and self._evaluation is not None and self._evaluation.done():
            return ReplicaStep(rows=rows, ended=True)
        now = time.monotonic()
        if now < self._next_look:
            return ReplicaStep(rows=rows) if rows else None
        self._next_look = now + STORE_LOOK_S * max(1, self._board.replicas // 8)
        self._tell_version()
        if answers is not None and answers.waiting():
            return ReplicaStep(request=True, rows=rows)
        if not self.evaluates and self._has_arrived():
            return ReplicaStep(weights=True, rows=rows)
        self._begin_groups()
        return ReplicaStep(rows=rows) if rows else None

    def _has_arrived(self) -> bool:
        """True if all tensor ranks have weights that the engine has not. Raises: MeshError."""
        arrived = self._receiver.arrived()
        return arrived is not None and self._receiver.complete(arrived.number)

    def _tell_version(self) -> None:
        """Publish the version of this replica."""
        version = self.engine.version
        if self.resident is None or version is None or version == self._told:
            return
        for passed in range(version if self._told is None else self._told + 1, version + 1):
            self._board.hold(passed)
        self._told = version

    def _begin_groups(self) -> None:
        """Begin the groups that may begin and for which the engine has room."""
        if self.resident is None or not self._prompts.is_open():
            return
        room = self.resident.room()
        while (room > 0 or not self._tasks) and (number := self._prompts.take_again()) is not None:
            self._start(number)
            room -= self._requests
        while room > 0 or not self._tasks:
            if not self._has_next:
                self._next = self._prompts.ledger.place_of(self._board.take_ticket())
                self._has_next = True
            if self._next is None or not self._may_begin(self._next):
                break
            self._start(self._next)
            self._has_next = False
            room -= self._requests
        idle = not self._tasks and not self.evaluates
        self._count_waiting(idle and not (self._has_next and self._next is None))

    def _start(self, number: int) -> None:
        self._begun[number] = max(self._version or 0, self._prompts.ledger.rule.least_version(number))
        self._tasks[number] = self._loop.create_task(self._write(number, self._prompts.begin(number)))

    def _may_begin(self, number: int) -> bool:
        """True if all replicas hold the version that a group needs."""
        least = self._prompts.ledger.rule.least_version(number)
        if self._told is not None and (self._version is None or self._version < least):
            self._version = self._board.batch_of_weights(self._told)
        return self._version is not None and self._version >= least

    def _count_waiting(self, waits: bool) -> None:
        """Show that this replica works, and count the time since the last call if it had nothing to write."""
        now = time.monotonic()
        if (self._tasks or self.evaluates) and now >= self._next_sign:
            self._next_sign = now + PROGRESS_S
            self._board.show_work()
        if self._idle_since is not None:
            self._waited_s += now - self._idle_since
        self._idle_since = now if waits else None

    def _deliver_ended(self) -> dict[int, GroupFields]:
        """Deliver groups that have ended; returns their rows."""
        ended = [number for number, task in self._tasks.items() if task.done()]
        kept: dict[int, GroupFields] = {}
        for number in ended:
            task = self._tasks.pop(number)
            try:
                done, rows, prompt, dropped, baseline = task.result()
            except (RewardError, RunEndingError) as error:
                self._board.deliver(number, self._group(number, problem=str(error)))
                continue
            rescored = self._generation.rewards.rescore is not None
            held = join_rows([rows, baseline[1]]) if baseline is not None and rescored else rows
            fields = as_dict(held.batch)
            if self.mesh.size("tensor") > 1:
                fields = trees.map(lambda x: x.cpu(), fields)
            kept[number] = GroupFields(fields, further_fields(held.batch))
            tokens, switches = versions_of(rows)
            group = self._group(number)._replace(written=written_rows(done, rows), tokens=tokens, switches=switches)
            if baseline is not None:
                further = versions_of(baseline[1])[1]
                group = group._replace(baseline=written_rows(*baseline), switches=[*switches, *further])
            shown = self._shown(number, done, rows, prompt=prompt)
            self._board.deliver(number, group._replace(shown=shown, prompt=prompt, dropped=dropped))
        return kept

    def _shown(self, number: int, done: Rollout, rows: Rows, prompt: GroupPrompt) -> list[ShownSample]:
        """The first sample of a group, if its step shows samples and it is among the first."""
        batch, place = divmod(number, self._prompts.ledger.rule.places)
        generation = self._generation
        if place >= SHOWN_PROMPTS or not generation.shows(batch + 1):
            return []
        decode = generation.engine.decode
        samples = generation.sampling.samples
        examples = [self._example(prompt)]
        names = generation.rewards.names[: done.scores.shape[1]]  # models reward it where it is trained
        return shown_samples(done, rows, examples, samples, decode=decode, names=names)

    def _group(self, number: int, problem: str | None = None) -> WrittenGroup:
        """A group without rows, with what has happened since the last one."""
        waited_s, self._waited_s = self._waited_s, 0.0
        notes, self._notes = self._notes, []
        version = self._begun.pop(number)
        return WrittenGroup(self._replica, None, {}, (), waited_s, notes=notes, problem=problem, version=version)

    def _example(self, prompt: GroupPrompt) -> Example:
        return self._generation.schedule.examples_at([prompt.position])[0]

    async def _write(self, group: int, prompt: GroupPrompt) -> GroupResult:
        """Write and reward a group; where this replica filters, of further prompts as long as the filter drops them.

        Raises:
          RewardError, RunEndingError: the run ends.
        """
        generation = self._generation
        dropped: list[DroppedPrompt] = []
        while True:
            example = self._example(prompt)
            writing = (write_group(generation, self.leader, example, *part) for part in self._parts(prompt))
            parts = await asyncio.gather(*writing)
            self._logged[group] = [episode for part in parts for episode in part.episodes]
            done, rows, _ = parts[0]
            replacement = None
            if self._prompts.filters and not filter_samples(generation, rows, 1).any():
                replacement = self._prompts.replace(group)
            if replacement is None:
                baseline = (parts[1].done, parts[1].rows) if len(parts) > 1 else None
                return GroupResult(done, rows, prompt, dropped, baseline)
            dropped.append(DroppedPrompt(prompt.position, failed_rows(rows), done.entries, done.episodes))
            prompt = replacement

    def _parts(self, prompt: GroupPrompt) -> list[GroupPart]:
        """The samples of a group, and the greedy completion that they are compared with, if there is one."""
        generation = self._generation
        samples = generation.sampling.samples
        parts = [GroupPart(generation.sampling, prompt.seeds(generation.schedule.seed, samples))]
        if generation.greedy_baseline:
            parts.append(GroupPart(baseline_sampling(generation.sampling), [prompt.baseline_seed]))
        return parts


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and let them clean up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
