"""Run episodes on an engine: groups by tickets, environments beside the engine's steps, failures tried again."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from funrl.data.prompts import Example
from funrl.environments.attempt import EpisodeClock, attempt_episode, checked_scores, problem_text
from funrl.environments.environment import Environment, ScoringEnvironment
from funrl.mesh.collectives import from_first
from funrl.mesh.mesh import Mesh
from funrl.processes import spans
from funrl.rollout.engine import Engine
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import EPISODE_LIMITS, EpisodeLimits, Policy, PolicySetup
from funrl.rollout.requests import Completion, Request, request_seed
from funrl.rollout.resident import ResidentEngine, run_beside
from funrl.rollout.tickets import TAKE_EVERY_S, Tickets, share_tickets


class EpisodeGroup(NamedTuple):
    """The episodes of one example. They are run on one replica and scored together.

    Attributes:
      example: the prompt, and the other fields of its record.
      first: number of the first episode; the others follow.
      seeds: of each episode; the first call of the policy has the noise of `Request.seed`.
    """

    example: Example
    first: int
    seeds: Sequence[int]


class EpisodeSpending(NamedTuple):
    """Cost of an episode beside the tokens of its policy, over all attempts.

    Attributes:
      environment_s: seconds that its environment took.
      recomputed: tokens whose keys and values were evicted and computed again.
    """

    environment_s: float = 0.0
    recomputed: int = 0


class EpisodeRun(NamedTuple):
    """Episodes of a replica, and what it took to run them.

    Attributes:
      episodes: (number, episode) pairs, ascending: number = that of its group's first one + its index in the group.
      costs: of each of these episodes; none: they are not known.
    """

    episodes: list[tuple[int, Episode]]
    costs: Sequence[EpisodeSpending]


def episode_groups(examples: Sequence[Example], samples: int, seed: int, first: int = 0) -> list[EpisodeGroup]:
    """Groups of `samples` episodes of each example, whose first calls have the noise of `requests_of`.

    Args:
      examples: of all replicas.
      samples: episodes of each.
      seed: of the step.
      first: number of the first episode of the first example.
    """
    return [
        EpisodeGroup(example, first + n * samples, [request_seed(seed, n * samples + i) for i in range(samples)])
        for n, example in enumerate(examples)
    ]


def run_episodes(
    engine: Engine,
    mesh: Mesh,
    environment: Environment,
    groups: Sequence[EpisodeGroup],
    setup: PolicySetup,
    limits: EpisodeLimits = EPISODE_LIMITS,
) -> EpisodeRun:
    """Run the episodes of the groups that this replica takes. Collective over the mesh.

    A failed episode is tried again with a new call of the environment and the same seeds, `limits.retries` times; then
    its status is "failed". An environment's `score` replaces the rewards of a group without a failed episode.

    Args:
      engine: this replica's engine, awake and without unfinished requests.
      mesh: of the engines; its row axes are the replicas. All tensor ranks of a replica make this call.
      environment: makes the episodes; it runs on the first tensor rank of a replica only.
      groups: groups of all replicas, the same on every rank.
      setup: how the policy samples and renders.
      limits: of each episode.

    Returns: every episode of the groups that this replica took, once; the same on all of its tensor ranks.

    Raises:
      RuntimeError, FloatingPointError: as the engine raises them.
      RunEndingError: the environment cannot work in this run, such as one with an agent that `setup.models` lacks.
    """
    tickets = tickets_of(groups, mesh, limits)
    runner = EpisodeRunner(environment, setup, limits)
    return from_first(run_beside(engine, mesh, functools.partial(runner.run, tickets=tickets)), mesh, "tensor")


def tickets_of(groups: Sequence[EpisodeGroup], mesh: Mesh, limits: EpisodeLimits) -> Tickets[EpisodeGroup]:
    """Tickets of groups of episodes. Collective."""
    return share_tickets(groups, mesh, size=len(groups[0].seeds) if groups else 1, fixed=limits.fixed)


class EpisodeRunner:
    """The episodes of a replica, on its event loop.

    Attributes:
      setup: how the policy samples and renders.
      limits: of each episode.
      resident: the engine, from `run` on.
    """

    resident: ResidentEngine

    def __init__(self, environment: Environment, setup: PolicySetup, limits: EpisodeLimits):
        self.limits = limits
        self.setup = setup
        self._environment_s = defaultdict[int, float](float)  # by number of the episode
        self._recomputed = defaultdict[int, int](int)
        self._environment = environment
        self._unfinished: set[int] = set()  # numbers of episodes
        self._beginning: set[int] = set()  # those of them that have not called the policy yet

    async def run(self, resident: ResidentEngine, tickets: Tickets[EpisodeGroup]) -> EpisodeRun:
        """Run all groups that this replica takes, each as a task beside the engine."""
        self.resident = resident
        running: set[asyncio.Task[list[tuple[int, Episode]]]] = set()
        episodes: list[tuple[int, Episode]] = []
        try:
            while tickets.left or running:
                room = self._room()
                if tickets.left and (room > 0 or not running):
                    running |= {self._begin(group) for group in tickets.take(max(room, 1))}
                if tickets.left:
                    await resident.progress(TAKE_EVERY_S)
                elif running:  # otherwise other replicas have taken the rest
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ended = {task for task in running if task.done()}
                episodes += [pair for task in ended for pair in task.result()]
                running -= ended
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        ascending = sorted(episodes, key=lambda pair: pair[0])
        costs = [EpisodeSpending(self._environment_s[number], self._recomputed[number]) for number, _ in ascending]
        return EpisodeRun(ascending, costs)

    def _room(self) -> int:
        """Further episodes that may begin now: whose first requests the engine could begin, and within the limit."""
        return min(self.resident.room() - len(self._beginning), self.limits.waiting - len(self._unfinished))

    def _begin(self, group: EpisodeGroup) -> asyncio.Task[list[tuple[int, Episode]]]:
        numbers = range(group.first, group.first + len(group.seeds))
        self._unfinished.update(numbers)
        self._beginning.update(numbers)
        return self.resident.start(self.run_group(group))

    async def run_group(self, group: EpisodeGroup) -> list[tuple[int, Episode]]:
        """Run the episodes of a group, and score them together; `resident` is set."""
        pairs = list(enumerate(group.seeds, group.first))
        with spans.span("group", first=group.first):
            episodes = await asyncio.gather(*(self._episode(group.example, number, seed) for number, seed in pairs))
            episodes = await self._scored(episodes)
        return [(number, episode) for (number, _), episode in zip(pairs, episodes, strict=True)]

    async def _episode(self, example: Example, number: int, seed: int) -> Episode:
        """Run one episode."""
        try:
            return await self._attempts(example, number, seed)
        finally:
            self._beginning.discard(number)
            self._unfinished.discard(number)
            self.resident.keep(number, 0)
            self.resident.notify()

    async def _attempts(self, example: Example, number: int, seed: int) -> Episode:
        """Run one episode, several times if it fails."""
        failures = 0
        while True:
            clock = EpisodeClock(self.limits.environment_s)
            policy = Policy(functools.partial(self._complete, number, clock), self.setup, seed, self.limits)
            try:
                with spans.span("episode", number=number):
                    episode = await self._attempt(example, seed, policy, clock)
            finally:
                self._environment_s[number] += clock.environment_s
            if episode.status != "failed" or failures == self.limits.retries:
                return episode
            failures += 1

    async def _attempt(self, example: Example, seed: int, policy: Policy, clock: EpisodeClock) -> Episode:
        return await attempt_episode(lambda: self._environment.run(policy, example, seed), policy, clock)

    async def _complete(self, number: int, clock: EpisodeClock, request: Request) -> Completion:
        with clock.policy():
            completion = await self.ask(number, request)
        self._recomputed[number] += completion.recomputed
        return completion

    async def ask(self, number: int, request: Request) -> Completion:
        """Complete a request of an episode, perhaps in part."""
        resident = self.resident
        self._beginning.discard(number)
        resident.keep(number, len(request.prompt) + request.sampling.max_new_tokens)
        completion = await resident.ask(request)
        resident.keep(number, len(request.prompt) + len(completion.tokens))
        return completion

    async def _scored(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Episodes of a group with the rewards of `score`, if there is one; all have failed if it fails."""
        environment = self._environment
        if not isinstance(environment, ScoringEnvironment) or any(x.status == "failed" for x in episodes):
            return list(episodes)
        try:
            scores = await asyncio.wait_for(environment.score(episodes), self.limits.environment_s)
            scores = checked_scores(scores, len(episodes))
        except (Exception, SystemExit) as error:
            problem = problem_text("score", error)
            return [dataclasses.replace(x, status="failed", problem=problem) for x in episodes]
        return [
            dataclasses.replace(x, rewards=dict.fromkeys(x.agents(), score))
            for x, score in zip(episodes, scores, strict=True)
        ]
