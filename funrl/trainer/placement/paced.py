"""Groups that a replica writes by the clock of its engine, so that two runs are the same; see `token_clock`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from funrl.asynchrony.token_clock import EngineTime, ReplicaClock
from funrl.environments.environment import answer_delay
from funrl.environments.run import EpisodeGroup, EpisodeRunner
from funrl.mesh.collectives import from_first
from funrl.mesh.pools.channel import Answers
from funrl.processes import heartbeat
from funrl.rollout.policy import RunEndingError
from funrl.rollout.requests import Completion, Request
from funrl.rollout.resident import ResidentEngine
from funrl.trainer.ahead.heldout import WrittenEpisode
from funrl.trainer.placement.group_prompts import GroupPart, GroupPrompt
from funrl.trainer.placement.messages import WrittenGroup
from funrl.trainer.placement.paced_programs import PacedPrograms
from funrl.trainer.placement.writer import WRITER_IDLE_S, GroupWriter, ReplicaStep
from funrl.trainer.steps.step_rows import Rows


class EpisodePace(NamedTuple):
    """The pace of a group's episodes; a `Pace`.

    Attributes:
      programs: of the replica.
      group: number of the group.
      delay: iterations that an answer of the environment takes.
      first: number of the first of the episodes among the programs of the group.
    """

    programs: PacedPrograms
    group: int
    delay: int
    first: int = 0

    async def ask(self, number: int) -> None:
        """Wait until a call of the policy enters the engine; see `PacedPrograms`."""
        await self.programs.ask(self.group, self.first + number)

    def answered(self, number: int) -> None:
        """Note that a call has been completed."""
        self.programs.answered(self.group, self.first + number, self.delay)

    async def end(self, number: int) -> None:
        """Wait until an episode ends."""
        await self.programs.end(self.group, self.first + number)


class PacedWriter(GroupWriter):
    """A `GroupWriter` of a run with --clock=tokens."""

    paced = True

    def __init__(self, *args: Any) -> None:
        """Begin without groups; the arguments are those of `GroupWriter`."""
        super().__init__(*args)
        moved = self.resident.wake if self.resident is not None else lambda: None
        self._programs = PacedPrograms(moved, filtered=self._prompts.replaced)
        self._heldout = PacedPrograms(moved)  # of evaluations, at whose iterations the clock stands still
        self._clock: ReplicaClock | None = None
        self._ended: dict[int, EngineTime] = {}  # of groups that have ended and are not delivered
        self._steps = False  # whether the engine is stepped next
        self._waits = False  # at a gate that the trainer ranks have not opened
        self._wanted = 0  # version that a request waits for

    def step(self) -> None:
        """Step the engine once, or wait a little where it may not be stepped. Collective over "tensor"."""
        if self.resident is None or not self._steps:
            self._rest()
            return
        if self.beside.goes_on:
            self._heldout.tick += 1
        elif self._clock is not None:
            self._clock.tick += 1
            self._programs.tick += 1
        super().step()

    def take_version(self, version: int, generates: bool = False) -> None:
        """Write groups until the engine has a version. Collective over "tensor".

        Args:
          version: of the weights.
          generates: whether the engine is to be used, which is done at a gate alone.
        """
        self._wanted = version
        self._waits = False  # as of now
        heartbeat.entered(f"weights {version} of the trainer ranks")
        while not from_first(self._reached(version, generates), self.mesh, "tensor"):
            if self.turn(None).weights < 0:
                self.step()
        heartbeat.left()
        self._wanted = 0

    def _reached(self, version: int, generates: bool) -> bool:
        begun = self._plan is not None and generates
        return (self.engine.version or 0) >= version and (self._waits or not begun)

    def _rest(self) -> None:
        if self.resident is None:
            super().step()
        else:
            self._loop.run_until_complete(self.resident.rest(self.mesh, WRITER_IDLE_S))

    def _decide(self, answers: Answers | None) -> ReplicaStep | None:
        rows = self._deliver_ended()
        if self.beside.has_ended:
            self._steps = False
            return ReplicaStep(rows=rows, ended=True)
        now = time.monotonic()
        if now >= self._next_look:
            self._look_again_after(now)
            self._tell_time()
            if answers is not None and answers.waiting():
                return ReplicaStep(request=True, rows=rows)
        transfer = self._advance()
        self._count_waiting(self._waits)
        return ReplicaStep(weights=-1 if transfer is None else transfer, rows=rows)

    def _tell_time(self) -> None:
        if self._rule.window > 1 and self._clock is not None:
            self._board.tell_time(self._replica, min([self._clock.time, *self._ended.values()]))

    def _advance(self) -> int | None:
        """Do all that is due before the next iteration; returns the transfer whose weights are taken now."""
        self._steps = self._waits = False
        if self.beside.goes_on:  # at a gate, with the groups set aside
            self._steps = self._advance_heldout()
            return None
        clock = self._opened()
        if clock is None or self.resident is None or not self._programs.settled:
            return None
        self._loop.run_until_complete(self._programs.release())
        while self._programs.ended:
            number = self._programs.ended.pop(0)
            self._ended[number] = clock.end(number)
        if not self._programs.settled:  # a group is filtered, or begins again
            return None
        if clock.at_gate:
            return self._pass_gate(clock)
        self._begin_groups()
        if self._programs.settled:
            self._steps = self._busy(clock)
        return None

    def _advance_heldout(self) -> bool:
        """Do all of an evaluation that is due before the next iteration; returns whether the engine is stepped."""
        programs = self._heldout
        if self.resident is None or not programs.settled:
            return False
        self._loop.run_until_complete(programs.release())
        programs.ended.clear()
        if not programs.settled:
            return False
        if not self.resident.busy and programs.next_due is not None:
            programs.tick = programs.next_due
        return self.resident.busy

    async def run_heldout(
        self, runner: Callable[[], EpisodeRunner], resident: ResidentEngine, groups: Sequence[EpisodeGroup]
    ) -> list[WrittenEpisode]:
        """Run episodes of an evaluation, as `run_as_there_is_room`; their calls enter at fixed iterations too.

        As many as may be unfinished begin together, and the next ones when all of these have ended.
        """
        written = []
        at_once = max(1, runner().limits.waiting // len(groups[0].seeds)) if groups else 1
        for begin in range(0, len(groups), at_once):
            some = list(enumerate(groups[begin : begin + at_once]))
            runners = [self._paced_heldout(runner(), resident, group, number) for number, group in some]
            tasks = [asyncio.create_task(own.run_group(group)) for own, (_, group) in zip(runners, some, strict=True)]
            try:
                ended = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            for own, episodes in zip(runners, ended, strict=True):
                written += [WrittenEpisode(number, episode, own.costs[number]) for number, episode in episodes]
        return written

    def _paced_heldout(
        self, runner: EpisodeRunner, resident: ResidentEngine, group: EpisodeGroup, number: int
    ) -> EpisodeRunner:
        """The runner of a group of an evaluation, which begins."""
        self._heldout.begin(number, len(group.seeds), self._delay)
        runner.resident = resident
        runner.setup = runner.setup._replace(serve=refused_endpoint)
        runner.pace = EpisodePace(self._heldout, number, self._delay, -group.first)
        return runner

    def _busy(self, clock: ReplicaClock) -> bool:
        """True if the engine has something to do; else let time pass until a program is due."""
        if self.leader.busy:
            return True
        due = self._programs.next_due
        if due is not None:
            clock.tick += due - self._programs.tick
            self._programs.tick = due
        return False

    @property
    def clock(self) -> ReplicaClock:
        """The clock of this replica. Raises: RuntimeError, the plan is not open yet."""
        if self._clock is None:
            raise RuntimeError("the plan of the groups is not open yet")
        return self._clock

    def _opened(self) -> ReplicaClock | None:
        if self._plan is None:
            self._plan = self._board.plan()
        if self._clock is None and self._plan is not None:
            self._clock = ReplicaClock(self._rule, self._plan.number_of, self._replica, self._board.replicas)
        return self._clock

    def _pass_gate(self, clock: ReplicaClock) -> int | None:
        """Begin the next turn once the engine has its weights; returns the transfer that brings some."""
        announced = self._board.version_of_batch(clock.turn + 1)
        version = self._wanted if announced is None else announced
        if (self.engine.version or 0) < version:
            return self._complete_transfer()
        if announced is None:
            self._waits = True
        else:
            clock.pass_gate()
        return None

    def _begin_groups(self) -> None:
        """Begin the groups that may begin and for which the engine has room."""
        clock = self.clock
        while clock.may_begin and (not clock.running or self.leader.room() > self._programs.outside):
            number = clock.begin()
            self._programs.begin(number, self._requests, self._delay)
            self._start(number)

    @property
    def _delay(self) -> int:
        """Iterations that an environment's answer takes; 0 without one."""
        setup = self._generation.episodes
        return 0 if setup is None else answer_delay(setup.environment)

    def _group(self, number: int, problem: str | None = None) -> WrittenGroup:
        if problem is not None:
            self._give_up(number)
        ended = self._ended.pop(number, EngineTime(0, 0))
        return super()._group(number, problem)._replace(ended=ended)

    def _give_up(self, number: int) -> None:
        """Advance the clock without a group that has failed: before the run ends, requests wait for a gate."""
        self._programs.forget(number)
        if number in self.clock.running:
            self.clock.end(number)

    async def _ask(self, group: int, number: int, request: Request) -> Completion:
        """Complete a request of a group's sample."""
        await self._programs.ask(group, number)
        try:
            done = await super()._ask(group, number, request)
        finally:
            self._programs.answered(group, number, delay=0)
        await self._programs.end(group, number)
        return done

    async def _replacement(self, group: int, rows: Rows) -> GroupPrompt | None:
        """The prompt that takes the place of a group's, decided at the iteration at which its samples have ended."""
        if not self._prompts.replaced:
            return None
        await self._programs.filter(group)
        prompt = await super()._replacement(group, rows)
        if prompt is None:
            self._programs.ended.append(group)
        else:
            self._programs.begin(group, self._requests, self._delay)
        return prompt

    def _runner(self, group: int, part: GroupPart) -> EpisodeRunner:
        """Runner of episodes of a group."""
        runner = super()._runner(group, part)
        runner.setup = runner.setup._replace(serve=refused_endpoint)
        runner.pace = EpisodePace(self._programs, group, self._delay, part.first)
        return runner


def refused_endpoint(policy: Any, agent: str) -> Any:
    """Raise RunEndingError: programs that call an endpoint ask when they like."""
    raise RunEndingError(
        f"--clock=tokens: the environment opens an endpoint for {agent!r}, and when a program behind it asks depends "
        "on time; call the policy in the environment, or leave --clock=tokens out"
    )
