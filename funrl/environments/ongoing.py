"""Episodes that span several rollouts, each with its own weights, and checkpoints.

    ongoing = OngoingEpisodes(environment, setup, limits)
    run = ongoing.run(engine, mesh, Round(new_groups, allowance=64))  # no trajectory samples more than 64 tokens
    engine.load(new_weights)
    own = [(group_of[x.first], x.text, 64) for x in run.groups if x.waiting]
    run = ongoing.run(engine, mesh, Round((), own))

Between two rollouts nothing runs: the coroutines of unfinished episodes wait for their calls of the policy, and their
environments for them. The record of a group says all that was said in its episodes. Where an episode is not alive, as
after a checkpoint, its environment runs again with the recorded turns, and must give the recorded answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from funrl.data.prompts import Example
from funrl.environments.attempt import EpisodeClock
from funrl.environments.environment import Environment
from funrl.environments.resumable import PARKED, CallHooks, ResumablePolicy
from funrl.environments.run import EpisodeGroup, EpisodeRunner, tickets_of
from funrl.mesh.collectives import from_first
from funrl.mesh.mesh import Mesh
from funrl.rollout.engine import Engine
from funrl.rollout.episode_records import from_record, record_from_json, to_json, to_record
from funrl.rollout.episode_replay import EpisodeLog
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import EPISODE_LIMITS, EpisodeLimits, PolicySetup
from funrl.rollout.requests import Completion, Request
from funrl.rollout.resident import ResidentEngine, run_beside, run_coroutine
from funrl.rollout.tickets import TAKE_EVERY_S, Tickets

LOOK_EVERY_S = 1.0  # whether episodes that wait for something unknown have waited long enough
SETTLING = 32  # turns of the event loop, after which coroutines that only wait for each other have run


class GroupRecord(NamedTuple):
    """A group of episodes between two rollouts.

    Attributes:
      first: number of its first episode.
      text: everything that was said, as JSON.
      waiting: episodes that have not ended; 0: they were also scored.
    """

    first: int
    text: str
    waiting: int


class Round(NamedTuple):
    """Groups of a rollout.

    Attributes:
      new: groups to begin, the same on every rank; each is taken by a replica.
      own: unfinished groups of this replica to continue, with their records and allowances.
      allowance: bound on the tokens that a path of an episode of the new groups grows by; None: they run to their end.
    """

    new: Sequence[EpisodeGroup]
    own: Sequence[tuple[EpisodeGroup, str, int | None]] = ()
    allowance: int | None = None


class OngoingRun(NamedTuple):
    """Groups of a replica after a rollout.

    Attributes:
      groups: the groups that it has begun or continued, ascending by their first episodes.
      restarted: episodes that were begun anew, since their environments differed from the record.
      problem: how the first of them differed; "" without one.
    """

    groups: list[GroupRecord]
    restarted: int
    problem: str


def recorded_episodes(text: str) -> list[Episode]:
    """The episodes of a group's record; all have ended."""
    return [from_record(record_from_json(entry["done"])) for entry in json.loads(text)]


class OngoingEpisodes:
    """The unfinished episodes of this replica. They live on its first tensor rank."""

    def __init__(self, environment: Environment, setup: PolicySetup, limits: EpisodeLimits = EPISODE_LIMITS):
        self._runner = _OngoingRunner(environment, setup, limits)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._close = weakref.finalize(self, lambda: None)

    def run(self, engine: Engine, mesh: Mesh, groups: Round) -> OngoingRun:
        """Begin and continue groups until each has ended or has sampled what it may. Collective over the mesh.

        Args:
          engine: as in `run_episodes`.
          mesh: of the engines.
          groups: what to run.

        Returns: the same on all tensor ranks of the replica.
        """
        tickets = tickets_of(groups.new, mesh, self._runner.limits)
        if self._loop is None and mesh.index("tensor") == 0:
            self._loop = asyncio.new_event_loop()
            self._close = weakref.finalize(self, _close, self._runner, self._loop)
        run = run_beside(engine, mesh, functools.partial(self._runner.go_on, tickets, groups), self._loop)
        return from_first(run, mesh, "tensor")

    def close(self) -> None:
        """End all unfinished episodes and their environments; so does the end of the process."""
        self._close()
        self._loop = None


def _close(runner: _OngoingRunner, loop: asyncio.AbstractEventLoop) -> None:
    run_coroutine(runner.close(), loop)
    loop.close()


@dataclasses.dataclass(eq=False)
class _Ongoing:
    """An episode.

    Attributes:
      number, seed: as in `EpisodeGroup`.
      log: continued by the next attempt.
      failures: failed attempts.
      policy: of the attempt that is alive.
      done: the episode once it has ended.
    """

    number: int
    seed: int
    log: EpisodeLog = EpisodeLog()  # noqa: RUF009  (immutable)
    failures: int = 0
    policy: ResumablePolicy | None = None
    done: Episode | None = None

    @property
    def parked(self) -> bool:
        return self.done is None and self.policy is not None and self.policy.parked

    def entry(self) -> dict[str, Any]:
        """The episode in the record of its group."""
        if self.done is not None:
            return {"done": to_record(self.done)}
        log = self.log if self.policy is None else self.policy.log()
        calls = to_record(Episode(log.calls, {}))
        return {"done": None, "calls": calls, "answers": log.answers, "failures": self.failures}


@dataclasses.dataclass(eq=False)
class _LiveGroup:
    """A group whose episodes are alive on this rank.

    Attributes:
      group: its example and numbers.
      episodes: in their order.
      task: runs them.
      allowance: of their policies; see `ResumablePolicy`.
      text: the record after the last rollout.
    """

    group: EpisodeGroup
    episodes: list[_Ongoing]
    task: asyncio.Task[list[tuple[int, Episode]]]
    allowance: int | None = PARKED
    text: str = ""

    @property
    def settled(self) -> bool:
        """True if it has ended, or waits only for parked calls."""
        if self.task.done():
            return True
        waiting = [episode for episode in self.episodes if episode.done is None]
        return bool(waiting) and all(episode.parked for episode in waiting)

    def renew(self, allowance: int | None) -> None:
        """Resume parked calls with a new allowance of tokens."""
        self.allowance = allowance
        for episode in self.episodes:
            if episode.done is None and episode.policy is not None:
                episode.policy.renew(allowance)

    def record(self) -> GroupRecord:
        """The group as it is now."""
        if self.task.done():
            for episode, (_, done) in zip(self.episodes, self.task.result(), strict=True):
                episode.done = done
        self.text = to_json([episode.entry() for episode in self.episodes])
        return GroupRecord(self.group.first, self.text, sum(episode.done is None for episode in self.episodes))


class _OngoingRunner(EpisodeRunner):
    """Episodes of a replica, on an event loop that stands still between rollouts."""

    def __init__(self, environment: Environment, setup: PolicySetup, limits: EpisodeLimits):
        super().__init__(environment, setup, limits)
        self._live: dict[int, _LiveGroup] = {}  # by number of the first episode
        self._episodes: dict[int, tuple[_LiveGroup, _Ongoing]] = {}
        self._restarted: list[str] = []

    async def go_on(self, tickets: Tickets, groups: Round, resident: ResidentEngine) -> OngoingRun:
        """Run the groups of a rollout until each is settled."""
        self.resident = resident
        self._restarted = []
        try:
            running = [await self._revived(group, text) for group, text, _ in groups.own]
            await self._rebuild(running)
            for live, (_, _, allowance) in zip(running, groups.own, strict=True):
                live.renew(allowance)
            await self._take_and_settle(tickets, running, groups.allowance)
            records = [live.record() for live in running]
        except BaseException:
            await self.close()
            raise
        for live in running:
            if live.task.done():
                self._forget(live)
        records.sort(key=lambda record: record.first)
        return OngoingRun(records, len(self._restarted), next(iter(self._restarted), ""))

    async def close(self) -> None:
        """Cancel all episodes, so that their environments close."""
        await asyncio.gather(*(self._end(live) for live in list(self._live.values())))

    async def _take_and_settle(self, tickets: Tickets, running: list[_LiveGroup], allowance: int | None) -> None:
        """Take new groups as there is room, and wait until all are settled."""
        while True:
            idle = all(live.settled for live in running)
            room = self._room()
            if tickets.left and (room > 0 or idle):
                for group in tickets.take(max(room, 1)):
                    await self._end(self._live.get(group.first))
                    running.append(self._start(group, None, allowance))
            elif tickets.left or not idle:
                await self.resident.progress(TAKE_EVERY_S if tickets.left else LOOK_EVERY_S)
            elif await self._stays_settled(running):
                return

    async def _stays_settled(self, groups: Iterable[_LiveGroup]) -> bool:
        """Run coroutines that wait only for others of this loop; True if none has made progress."""
        for _ in range(SETTLING):
            await asyncio.sleep(0)
            if not all(live.settled for live in groups):
                return False
        return True

    async def _revived(self, group: EpisodeGroup, text: str) -> _LiveGroup:
        """The group as its record says: the one that is alive, or one to rebuild."""
        live = self._live.get(group.first)
        if live is not None and live.text == text:
            return live
        await self._end(live)
        return self._start(group, text, PARKED)

    async def _rebuild(self, groups: Sequence[_LiveGroup]) -> None:
        """Wait until rebuilt episodes have reached their saved place; episodes that diverge from it begin anew."""
        while not (all(live.settled for live in groups) and await self._stays_settled(groups)):
            await self.resident.progress(LOOK_EVERY_S)
        differing = [
            episode.policy
            for live in groups
            for episode in live.episodes
            if episode.parked and episode.policy is not None and episode.policy.difference
        ]
        for policy in differing:
            policy.reject()
        if differing:
            await asyncio.sleep(0)
            await self._rebuild(groups)

    def _start(self, group: EpisodeGroup, text: str | None, allowance: int | None) -> _LiveGroup:
        """Begin a group, or what its record says of it."""
        entries = [None] * len(group.seeds) if text is None else json.loads(text)
        numbered = zip(enumerate(group.seeds, group.first), entries, strict=True)
        episodes = [_ongoing(number, seed, entry) for (number, seed), entry in numbered]
        live = _LiveGroup(group, episodes, self._begin(group), allowance)
        self._live[group.first] = live
        self._episodes |= {episode.number: (live, episode) for episode in live.episodes}
        return live

    async def _end(self, live: _LiveGroup | None) -> None:
        """End the episodes of a group wherever they are."""
        if live is not None:
            live.task.cancel()
            await asyncio.wait({live.task})
            self._forget(live)

    def _forget(self, live: _LiveGroup) -> None:
        del self._live[live.group.first]
        for episode in live.episodes:
            del self._episodes[episode.number]

    async def _attempts(self, example: Example, number: int, seed: int) -> Episode:
        """Run one episode from where its log ends, several times if it fails."""
        live, episode = self._episodes[number]
        while episode.done is None:
            done, difference = await self._attempt_resumable(example, live, episode)
            if difference:
                self._restarted.append(difference)
            elif done.status == "failed" and episode.failures < self.limits.retries:
                episode.failures += 1
            else:
                episode.done = done
            episode.log = EpisodeLog()
        return episode.done

    async def _attempt_resumable(self, example: Example, live: _LiveGroup, episode: _Ongoing) -> tuple[Episode, str]:
        clock = EpisodeClock(self.limits.environment_s)
        ask = functools.partial(self._ask, episode.number)
        hooks = CallHooks(ask, clock.policy, functools.partial(self._parked, episode.number))
        policy = ResumablePolicy(hooks, self.setup, episode.seed, self.limits, log=episode.log)
        policy.allowance = live.allowance
        episode.policy = policy
        done = await self._attempted(example, episode.seed, policy, clock)
        return done, policy.difference

    async def _ask(self, number: int, request: Request) -> Completion:
        self._beginning.discard(number)
        resident = self.resident
        resident.keep(number, len(request.prompt) + request.sampling.max_new_tokens)
        completion = await resident.ask(request)
        resident.keep(number, len(request.prompt) + len(completion.tokens))
        return completion

    def _parked(self, number: int) -> None:
        self._beginning.discard(number)
        self.resident.keep(number, 0)
        self.resident.notify()


def _ongoing(number: int, seed: int, entry: dict[str, Any] | None) -> _Ongoing:
    """An episode as the record of its group says; None: one that has not begun."""
    if entry is None:
        return _Ongoing(number, seed)
    if entry["done"] is not None:
        return _Ongoing(number, seed, done=from_record(record_from_json(entry["done"])))
    calls = from_record(record_from_json(entry["calls"])).ends
    return _Ongoing(number, seed, EpisodeLog(calls, entry["answers"]), failures=entry["failures"])
