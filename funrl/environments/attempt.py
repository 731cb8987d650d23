"""One attempt at an episode: its environment is bounded in time, and whatever it does ends as an episode."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from numbers import Real

from funrl.environments.environment import ReturnError
from funrl.loading import user_frames, user_trace
from funrl.rollout.episodes import Episode, Trajectory
from funrl.rollout.policy import LimitReached, Policy, RunEndingError

CLEAN_UP_S = 5.0  # for an environment to clean up after its time is over
LONGEST_PROBLEM = 2000  # characters


class EpisodeClock:
    """Time that an environment takes between calls of the policy, in one attempt.

    Attributes:
      limit_s: seconds that it may take between two calls.
      environment_s: seconds so far.
    """

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self.environment_s = 0.0
        self._calls = 0
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._expired: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def attempt(self) -> Iterator[asyncio.Future[None]]:
        """Measure an attempt; gives a future that is done when the environment takes too long."""
        self._expired = asyncio.get_running_loop().create_future()
        self._start()
        try:
            yield self._expired
        finally:
            self._stop()
            self._expired = None

    @contextlib.contextmanager
    def policy(self) -> Iterator[None]:
        """Stand still during a call of the policy."""
        self._stop()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls and self._expired is not None:
                self._start()

    def _start(self) -> None:
        self._since = time.perf_counter()
        self._timer = asyncio.get_running_loop().call_later(self.limit_s, self._expire)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.environment_s += time.perf_counter() - self._since

    def _expire(self) -> None:
        if self._expired is not None and not self._expired.done():
            self._expired.set_result(None)


async def attempt_episode(run: Callable[[], Awaitable[Episode]], policy: Policy, clock: EpisodeClock) -> Episode:
    """Run an episode once.

    Args:
      run: runs it.
      policy: of the episode.
      clock: bounds the time of the environment.

    Returns: the episode; its status is "failed" if the environment raised, took too long or gave something else.

    Raises:
      RunEndingError: the environment cannot work in this run.
    """
    with clock.attempt() as expired:
        task = asyncio.ensure_future(guarded_episode(run, policy))
        try:
            await asyncio.wait({task, expired}, return_when=asyncio.FIRST_COMPLETED)
            if task.cancelled():
                return failed_episode("the environment has cancelled itself")
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait({task}, timeout=CLEAN_UP_S)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=CLEAN_UP_S)
            raise
    return failed_episode(
        f"the environment took longer than {clock.limit_s:g} s between two calls of the policy (--env_timeout)"
    )


def failed_episode(problem: str) -> Episode:
    """An episode without trajectories, and why."""
    return Episode((), {}, status="failed", problem=problem)


def problem_text(what: str, error: BaseException) -> str:
    """A line with the error and where it was raised, and the traceback below it without funrl's first frames."""
    if isinstance(error, ReturnError):
        return str(error)
    frames = traceback.extract_tb(user_frames(error))
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{what} raised {error!r}{where}\n{user_trace(error)[-LONGEST_PROBLEM:]}"


def checked_scores(scores: Sequence[float | None], count: int) -> list[float | None]:
    """Scores of a group. Raises ValueError if they are anything but a finite number or None for each episode."""
    if not isinstance(scores, Sequence) or len(scores) != count:
        raise ValueError(f"score gave {scores!r}; a number or None for each of {count} episodes is needed")
    for score in scores:
        if score is not None and not _finite(score):
            raise ValueError(f"score gave {score!r}; a finite number or None is needed")
    return list(scores)


def episode_problem(episode: object) -> str:
    """Reason why an environment's result is not a usable episode; "" if it is."""
    if not isinstance(episode, Episode):
        return f"the environment gave {episode!r:.200}, not an Episode"
    if episode.status == "failed":
        return episode.problem or "the environment says that it failed"
    if not episode.ends or not all(isinstance(end, Trajectory) for end in episode.ends):
        return f"the environment gave ends={episode.ends!r:.200}; at least one trajectory is needed"
    for end in episode.ends:
        if not any(node.sampled for node in end.nodes()):
            return f"a trajectory of {end.agent} has no turn of the policy"
        if end.agent not in episode.rewards:
            return f"there is no reward of agent {end.agent}, only of {list(episode.rewards)}; None: unscored"
    nodes = {node for end in episode.ends for node in end.nodes() if node.sampled}
    if not {*episode.turn_rewards, *episode.states} <= nodes:
        return "a turn's reward or state is not of a sampled node of the episode's trajectories"
    numbers = {f"reward of {agent}": reward for agent, reward in episode.rewards.items() if reward is not None}
    numbers |= {"part " + name: part for name, part in episode.parts.items()}
    numbers |= {f"reward of turn {n}": reward for n, reward in enumerate(episode.turn_rewards.values())}
    for name, number in numbers.items():
        if not _finite(number):
            return f"the {name} is {number!r}; a finite number is needed"
    return ""


async def guarded_episode(run: Callable[[], Awaitable[Episode]], policy: Policy) -> Episode:
    """Run an episode; whatever it raises or returns becomes an episode.

    Raises:
      RunEndingError: the environment cannot work in this run.
    """
    try:
        async with policy.served:
            episode = await run()
    except LimitReached as limit:
        ends = policy.ends()
        episode = Episode(ends, dict.fromkeys((end.agent for end in ends), None), status=limit.status)
    except RunEndingError:
        raise
    except (Exception, SystemExit) as error:
        return failed_episode(problem_text("the environment", error))
    if isinstance(episode, Episode) and episode.ends and all(isinstance(end, Trajectory) for end in episode.ends):
        episode = _with_forks(episode, policy)  # turns before a fork may have rewards
    problem = episode_problem(episode)
    return failed_episode(problem) if problem else episode


def _with_forks(episode: Episode, policy: Policy) -> Episode:
    """An episode with the trajectories from which its own forked, and with what the policy has counted.

    Where a limit came after a fork, the trajectory before it takes the place of that without a turn. Counts that an
    environment gives stand: an episode of a log has those of its first run, in which it forked.
    """
    ends = [_last_with_turn(end, policy) for end in episode.ends]
    leaves = {end.leaf for end in ends}
    before = [end for end in policy.before_forks(ends) if end.leaf not in leaves]
    counts = {**policy.counts(), **episode.counts}
    forked = len(before) + episode.forked
    return dataclasses.replace(episode, ends=[*before, *ends], counts=counts, forked=forked)


def _last_with_turn(end: Trajectory, policy: Policy) -> Trajectory:
    """The trajectory, or that from which it forked if it has no turn of its own."""
    if any(node.sampled for node in end.nodes()):
        return end
    return next(reversed(policy.before_forks([end])), end)


def _finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
