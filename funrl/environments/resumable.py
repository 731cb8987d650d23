"""Episodes that span several rollouts, each with its own weights, and checkpoints.

    episodes = ResumableEpisodes(environment, setup, limits)
    run = episodes.continue_groups(engine, mesh, new_groups, allowance=64)
    engine.load(new_weights)
    own = [(group_of[record.first], record, 64) for record in run.records if record.waiting]
    run = episodes.continue_groups(engine, mesh, (), own)

A call of the policy that has sampled what it may is parked: whoever awaits it waits, and is not resumed before it gets
a new allowance. What it has sampled keeps its versions; the next weights continue it. Between two rollouts nothing
runs. The record of a group has everything that was said in its episodes. Where an episode is not alive, as after a
checkpoint, its environment runs again with the recorded turns, and must give the recorded answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import time
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from funrl.data.prompts import Example
from funrl.environments.attempt import EpisodeClock
from funrl.environments.environment import Environment
from funrl.environments.run import EpisodeGroup, EpisodeRunner, tickets_of
from funrl.mesh.collectives import from_first
from funrl.mesh.mesh import Mesh
from funrl.rollout.engine import Engine
from funrl.rollout.episode_records import record_from_json, to_json
from funrl.rollout.episode_replay import EpisodeLog, LogError, LoggedPolicy, completion_of
from funrl.rollout.episodes import Episode, Trajectory, from_record, to_record
from funrl.rollout.policy import EPISODE_LIMITS, EpisodeLimits, Policy, PolicySetup, RunEndingError, with_turn
from funrl.rollout.requests import Completion, Request
from funrl.rollout.resident import ResidentEngine, run_beside, run_coroutine
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.tickets import TAKE_EVERY_S, Tickets

_Task = asyncio.Task[object]
_CALLERS: ContextVar[tuple[_Task, ...]] = ContextVar("callers", default=())
PARKED = 0  # the allowance of an episode that is rebuilt: every call that its log does not answer is parked
UNKNOWN_WAIT_S = 1.0  # between two checks whether episodes that wait for something unknown have waited long enough
SETTLING = 32  # turns of the event loop, after which coroutines that only wait for each other have run


class CompletionEnvironment:
    """An environment whose episodes are one reply to a prompt, which has no reward yet."""

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Complete a prompt.

        Raises:
          RunEndingError: the engine cannot take the request.
        """
        del seed
        try:
            _, trajectory = await policy.sample(policy.start(example.tokens))
        except ValueError as error:
            raise RunEndingError(str(error)) from error
        return Episode([trajectory], {trajectory.agent: None})


class UnfinishedEpisode(NamedTuple):
    """An episode that has not ended.

    Attributes:
      calls: of the policy in its current attempt, as `EpisodeLog.calls`, as the trajectories of an episode.
      answers: of the environment in that attempt, as `EpisodeLog.answers`.
      failures: failed attempts.
    """

    calls: Episode = Episode((), {})
    answers: Sequence[str] = ()
    failures: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class GroupRecord:
    """A group between two rollouts; an immutable value.

    Attributes:
      first: number of its first episode.
      samples: its episodes.
    """

    first: int
    samples: Sequence[Episode | UnfinishedEpisode]

    @property
    def ended(self) -> list[Episode]:
        """The episodes that have ended."""
        return [sample for sample in self.samples if isinstance(sample, Episode)]

    @property
    def waiting(self) -> int:
        """Number of episodes that have not ended; 0: they were also scored."""
        return len(self.samples) - len(self.ended)

    @functools.cached_property
    def text(self) -> str:
        """The episodes as JSON. Raises: TypeError, a message has what JSON cannot hold."""
        entries: list[dict[str, Any]] = []
        for sample in self.samples:
            if isinstance(sample, Episode):
                entries.append({"done": to_record(sample)})
            else:
                entries.append({"done": None, **sample._asdict(), "calls": to_record(sample.calls)})
        return to_json(entries)

    @classmethod
    def from_text(cls, first: int, text: str) -> GroupRecord:
        """The record whose `text` this is."""
        samples: list[Episode | UnfinishedEpisode] = []
        for entry in json.loads(text):
            episode = from_record(record_from_json(entry["done"] or entry["calls"]))
            if entry["done"] is None:
                episode = UnfinishedEpisode(episode, entry["answers"], entry["failures"])
            samples.append(episode)
        return cls(first, samples)


OwnGroups = Sequence[tuple[EpisodeGroup, GroupRecord, int | None]]  # each with its allowance


class GroupRun(NamedTuple):
    """Groups of a replica after a rollout.

    Attributes:
      records: of the groups that it has begun or continued, ascending by their first episodes.
      problems: how episodes that were begun anew differed from their records.
    """

    records: Sequence[GroupRecord]
    problems: Sequence[str]


@dataclasses.dataclass(eq=False)
class _LiveGroup:
    """A group whose episodes are alive on this rank.

    Attributes:
      group: its example and numbers.
      record: after the last rollout.
      policies: of its episodes, in their order.
      task: runs them.
    """

    group: EpisodeGroup
    record: GroupRecord | None
    policies: list[ResumablePolicy]
    task: asyncio.Task[list[tuple[int, Episode]]]

    @property
    def unfinished(self) -> list[ResumablePolicy]:
        """Policies of the episodes that have not ended."""
        return [policy for policy in self.policies if policy.done is None]

    @property
    def settled(self) -> bool:
        """True if it has ended, or waits only for parked calls."""
        unfinished = self.unfinished
        return self.task.done() or (bool(unfinished) and all(policy.parked for policy in unfinished))

    def write_record(self) -> GroupRecord:
        """The group as it is now."""
        ended = [episode for _, episode in self.task.result()] if self.task.done() else None
        self.record = GroupRecord(self.group.first, ended or [policy.record() for policy in self.policies])
        return self.record


class ResumableEpisodes(EpisodeRunner):
    """The unfinished episodes of this replica. They live on its first tensor rank, on a loop that stands still."""

    def __init__(
        self,
        environment: Environment,
        setup: PolicySetup,
        limits: EpisodeLimits = EPISODE_LIMITS,
        ended: Callable[[int, Episode], None] = lambda number, episode: None,
    ):
        """Begin without episodes.

        Args:
          environment, setup, limits: as of `run_episodes`.
          ended: called with the number of an episode and the episode once it has ended.
        """
        super().__init__(environment, setup, limits)
        self._ended = ended
        self._live: dict[int, _LiveGroup] = {}  # by number of the first episode
        self._policies: dict[int, list[ResumablePolicy]] = {}  # of the group of an episode that begins, by its number
        self._problems: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._close = weakref.finalize(self, lambda: None)

    def continue_groups(
        self, engine: Engine, mesh: Mesh, new: Sequence[EpisodeGroup], own: OwnGroups = (), allowance: int | None = None
    ) -> GroupRun:
        """Begin and continue groups until each has ended or has sampled what it may. Collective over the mesh.

        Args:
          engine: as in `run_episodes`.
          mesh: of the engines.
          new: groups to begin, the same on every rank; each is taken by a replica.
          own: unfinished groups of this replica to continue, with their records and allowances.
          allowance: bound on the tokens that a path of an episode of the new groups grows by; None: they run to their
            end.

        Returns: the same on all tensor ranks of the replica.
        """
        tickets = tickets_of(new, mesh, self.limits)
        if self._loop is None and mesh.index("tensor") == 0:
            self._loop = asyncio.new_event_loop()
            self._close = weakref.finalize(self, _close, self._live, self._loop)
        run = run_beside(engine, mesh, functools.partial(self._go_on, tickets, own, allowance), self._loop)
        received: GroupRun = from_first(run, mesh, "tensor")
        return run or received

    def close(self) -> None:
        """End all unfinished episodes and their environments; so does the end of the process."""
        self._close()
        self._loop = None

    async def _go_on(
        self, tickets: Tickets[EpisodeGroup], own: OwnGroups, allowance: int | None, resident: ResidentEngine
    ) -> GroupRun:
        """Run the groups of a rollout until each is settled."""
        self.resident = resident
        self._problems = []
        try:
            running: list[_LiveGroup] = []
            for group, record, _ in own:
                live = self._live.get(group.first)
                is_alive = live is not None and live.record is record
                running.append(live if live and is_alive else await self._start(group, record, PARKED))
            await self._rebuild(running)
            for live, (_, _, renewed) in zip(running, own, strict=True):
                for policy in live.unfinished:
                    policy.renew(renewed)
            await self._settle(running, tickets, allowance)
            records = [live.write_record() for live in running]
        except BaseException:
            await _end_groups(self._live, list(self._live))
            raise
        for live in running:
            if live.task.done():
                del self._live[live.group.first]
        return GroupRun(sorted(records, key=lambda record: record.first), self._problems)

    async def _settle(
        self, running: list[_LiveGroup], tickets: Tickets[EpisodeGroup] | None = None, allowance: int | None = None
    ) -> None:
        """Wait until groups are settled, and begin those of tickets meanwhile as there is room."""
        while True:
            idle = all(live.settled for live in running)
            room = self._room()
            left = tickets is not None and tickets.left
            if tickets is not None and left and (room > 0 or idle):
                running += [await self._start(group, None, allowance) for group in tickets.take(max(room, 1))]
            elif left or not idle:
                await self.resident.progress(TAKE_EVERY_S if left else UNKNOWN_WAIT_S)
            elif await _stay_settled(running):
                return

    async def _rebuild(self, groups: list[_LiveGroup]) -> None:
        """Wait until rebuilt episodes have reached their saved place; episodes that diverge from it begin anew."""
        while True:
            await self._settle(groups)
            differing = [policy for live in groups for policy in live.unfinished if policy.difference]
            for policy in differing:
                policy.reject()
            if not differing:
                return
            await asyncio.sleep(0)

    async def _start(self, group: EpisodeGroup, record: GroupRecord | None, allowance: int | None) -> _LiveGroup:
        """Begin a group, or what its record says of it, instead of what may be alive of it."""
        await _end_groups(self._live, [group.first])
        samples = [UnfinishedEpisode()] * len(group.seeds) if record is None else record.samples
        policies = [
            ResumablePolicy(self, number, seed, sample, allowance)
            for number, (seed, sample) in enumerate(zip(group.seeds, samples, strict=True), group.first)
        ]
        self._policies |= {group.first + n: policies for n in range(len(policies))}
        live = self._live[group.first] = _LiveGroup(group, record, policies, self._begin(group))
        live.task.add_done_callback(lambda _: self.resident.notify())
        return live

    async def _attempts(self, example: Example, number: int, seed: int) -> Episode:
        """Run one episode from where its log ends, several times if it fails."""
        policies = self._policies.pop(number)
        place = number - policies[0].number
        while (policy := policies[place]).done is None:
            done = await self._attempt(example, seed, policy, policy.clock)
            failures = policy.failures
            if policy.difference:
                self._problems.append(policy.difference)
            elif done.status == "failed" and failures < self.limits.retries:
                failures += 1
            else:
                policy.done = done
                break
            again = UnfinishedEpisode(failures=failures)
            policies[place] = ResumablePolicy(self, number, seed, again, policy.allowance)
        self._ended(number, policy.done)
        return policy.done

    def park(self, number: int) -> None:
        """Note that a call of an episode is parked."""
        self._beginning.discard(number)
        self.resident.keep(number, 0)
        self.resident.notify()


async def _end_groups(live: dict[int, _LiveGroup], firsts: Sequence[int]) -> None:
    """End the episodes of some groups, so that their environments close."""
    tasks = {live.pop(first).task for first in firsts if first in live}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _close(live: dict[int, _LiveGroup], loop: asyncio.AbstractEventLoop) -> None:
    run_coroutine(_end_groups(live, list(live)), loop)
    loop.close()


async def _stay_settled(groups: Sequence[_LiveGroup]) -> bool:
    """Run coroutines that wait only for others of this loop; True if none has made progress."""
    for _ in range(SETTLING):
        await asyncio.sleep(0)
        if not all(live.settled for live in groups):
            return False
    return True


@dataclasses.dataclass(eq=False)
class _OpenCall:
    """A call that has not ended.

    Attributes:
      trajectory, sampling, seed: of the request.
      begun: what was sampled so far.
      fresh: tokens of it since the last `renew`.
      parked: whether it waits for the next one.
    """

    trajectory: Trajectory
    sampling: Sampling
    seed: int
    begun: Completion | None
    fresh: int = 0
    parked: bool = False
    task: asyncio.Task[object] | None = dataclasses.field(default_factory=asyncio.current_task)

    def turn(self) -> Trajectory:
        """The trajectory with the turn so far."""
        none = torch.zeros(0)
        begun = self.begun or Completion(0, none.long(), none, none, none.long(), finish="paused")
        return with_turn(self.trajectory, begun, self.sampling, self.seed)


class ResumablePolicy(LoggedPolicy):
    """A policy whose trajectories grow by a bounded number of tokens between two calls of `renew`.

    The bound is of each path from root to leaf and of those that it forked from, so that it depends on no order
    in which concurrent calls arrive.

    Attributes:
      number: of the episode.
      failures: failed attempts before this one.
      done: the episode once it has ended.
      allowance: that bound; None: calls run to their end.
      clock: stands still during calls.
    """

    def __init__(
        self,
        runner: ResumableEpisodes,
        number: int,
        seed: int,
        sample: Episode | UnfinishedEpisode,
        allowance: int | None,
    ):
        """Begin an attempt.

        Args:
          runner: completes requests.
          number, seed: of the episode.
          sample: of its record; its log answers the first calls, see `LoggedPolicy`.
          allowance: as above.
        """
        self.done = sample if isinstance(sample, Episode) else None
        calls, answers, self.failures = UnfinishedEpisode() if isinstance(sample, Episode) else sample
        super().__init__(EpisodeLog(calls.ends, answers), runner.setup, seed, runner.limits)
        self.number = number
        self.allowance = allowance
        self.clock = EpisodeClock(runner.limits.environment_s)
        self._runner = runner
        self._open: list[_OpenCall] = []
        self._fresh: dict[int | None, int] = {}  # by seed of an ended call: its tokens since the last `renew`
        self._renewed: asyncio.Future[None] | None = None
        self._callers: dict[_Task, Sequence[_Task]] = {}  # with the callers that began them
        self._parked_at = 0.0

    @property
    def parked(self) -> bool:
        """True if the episode waits for parked calls and for nothing else that is known.

        A task that has called the policy and is in no call does something else, unless it waits for tasks of its own
        that have. That holds for as long as an environment may take between two calls.
        """
        if not self._open or not all(call.parked for call in self._open):
            return False
        if time.monotonic() > self._parked_at + self.limits.environment_s:
            return True
        self._callers = {task: before for task, before in self._callers.items() if not task.done()}
        waiting = {call.task for call in self._open}
        waiting.update(task for before in self._callers.values() for task in before)
        return waiting.issuperset(self._callers)

    def renew(self, allowance: int | None) -> None:
        """Resume parked calls with a new allowance of tokens."""
        self.allowance = allowance
        self._fresh.clear()
        for call in self._open:
            call.fresh = 0
            call.parked = False
        if self._renewed is not None:
            self._renewed.set_result(None)
            self._renewed = None

    def reject(self) -> None:
        """Make parked calls raise `LogError`, which ends the environment."""
        if self._renewed is not None:
            self._renewed.set_exception(LogError(self.difference))
            self._renewed = None

    def record(self) -> Episode | UnfinishedEpisode:
        """The episode with everything that was said so far."""
        calls = Episode([*self._sampled, *(call.turn() for call in self._open)], {})
        return self.done or UnfinishedEpisode(calls, tuple(self.answers), self.failures)

    async def _completion(self, trajectory: Trajectory, tokens: list[int], sampling: Sampling, seed: int) -> Completion:
        task = asyncio.current_task()
        assert task is not None
        before = _CALLERS.get()  # a task inherits the context of the one that begins it
        if task not in before:
            _CALLERS.set((*before, task))
        self._callers[task] = [caller for caller in before if caller is not task]
        turn = self._logged(tokens, sampling, seed)
        if turn is not None and turn.finish != "paused":
            return completion_of(turn)
        begun = None if turn is None or not turn.tokens else completion_of(turn)
        call = _OpenCall(trajectory, sampling, seed, begun)
        self._open.append(call)
        try:
            with self.clock.policy():
                while (completion := await self._continued(call, tokens)) is None:
                    call.parked = True
                    self._parked_at = time.monotonic()
                    self._runner.park(self.number)
                    self._renewed = self._renewed or asyncio.get_running_loop().create_future()
                    await asyncio.shield(self._renewed)
            self._fresh[seed] = call.fresh
            return completion
        finally:
            self._open.remove(call)

    async def _continued(self, call: _OpenCall, tokens: list[int]) -> Completion | None:
        """Sample as many tokens as a call may now; None: it has not ended."""
        written = 0 if call.begun is None else len(call.begun.tokens)
        most = None
        if self.allowance is not None:
            parts = [*self.before_forks([call.trajectory]), call.trajectory]
            seeds = {node.seed for part in parts for node in part.nodes() if node.sampled}
            path = sum(self._fresh.get(seed, 0) for seed in seeds)
            most = self.allowance - path - call.fresh
            if most < 1:
                return None
        prefix = self._prefix(call.trajectory.leaf)
        request = Request(0, tokens, call.sampling, call.seed, begun=call.begun, most=most, owned=prefix.owned)
        computed = prefix.computed
        if call.begun is not None and self.limits.turns > 1:  # no cache need grow for an only turn
            computed = len(tokens) + written - 1
        completion = await self._runner.ask(self.number, request._replace(computed=computed))
        call.fresh += len(completion.tokens) - written
        if completion.finish == "paused":
            call.begun = completion
            return None
        return completion
