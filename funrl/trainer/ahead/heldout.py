"""An evaluation whose completions or episodes replicas write beside their groups, or beside the trainer."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

from funrl.data.prompts import Example
from funrl.environments.run import EpisodeRun, EpisodeRunner, Tickets, episode_groups, run_of_replica
from funrl.mesh.collectives import from_first
from funrl.mesh.counter import shared_counter
from funrl.mesh.mesh import SINGLE
from funrl.rollout.policy import RunEndingError
from funrl.rollout.requests import Completion
from funrl.rollout.resident import ResidentEngine
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.sources.episode_rows import EpisodeSetup, policy_setup, rollout_of_episodes
from funrl.trainer.sources.generation import (
    Rollout,
    collected_rollout,
    pending_rewards,
    raise_everywhere,
    request_groups,
    to_rows,
)
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.prompts import evaluate_heldout
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows


class WrittenPart(NamedTuple):
    """A replica's part of an evaluation.

    Attributes:
      completions: of its prompts, ascending by their numbers.
      episodes: of its prompts and their costs, where prompts become episodes; None: they do not.
      problem: message of the error that ends the run; None without one.
    """

    completions: list[Completion] = []  # noqa: RUF012  (never mutated)
    episodes: EpisodeRun | None = None
    problem: str | None = None


class HeldoutWriter:
    """Writer of this replica's part of an evaluation, which evaluates all parts.

    Replica r of N has the held-out prompts r, r + N, and so on. Completions and rewards depend on the prompt, its seed
    and the weights alone, so that the metrics are those of an evaluation that has the engines to itself.
    """

    def __init__(self, generation: Generation, step: int) -> None:
        """Begin without completions.

        Args:
          generation: as of a source, on the mesh to generate on.
          step: number of training steps before the evaluation.
        """
        mesh = generation.engine.mesh
        self._generation = generation
        self._step = step
        self._samples = generation.evaluation.sampling.samples
        self._own = slice(int(mesh.index(mesh.row_axes)), None, mesh.size(mesh.row_axes))
        self._begin = time.perf_counter()
        self._pending = None
        if generation.episodes is None:
            self._pending = pending_rewards(generation.engine, generation.evaluation.heldout, self._samples)

    async def write(self, resident: ResidentEngine) -> WrittenPart:
        """Write this replica's part, on its first tensor rank."""
        setup = self._generation.episodes
        if setup is not None:
            return await self._episodes(setup, resident)
        heldout, sampling, _, seed, _ = self._generation.evaluation
        groups = request_groups(heldout, sampling, seed)[self._own]
        added = None if self._pending is None else self._pending.add
        return WrittenPart(await resident.ask_all([request for group in groups for request in group], added))

    def evaluate(self, part: WrittenPart | None, show: Show, clock: Clock) -> dict[str, float]:
        """Metrics of all parts. Collective over the mesh to generate on.

        Args:
          part: of this replica; None on its other tensor ranks.
          show: receives some completions.
          clock: times the wait for rewards.

        Raises:
          RewardError: a reward function or the environment has failed; raised on every rank.
        """
        mesh = self._generation.engine.mesh
        raise_everywhere(None if part is None else part.problem, (), mesh)
        if self._generation.episodes is None:
            written = WrittenPart(from_first(None if part is None else part.completions, mesh, "tensor"))
        else:
            written = WrittenPart(episodes=run_of_replica(None if part is None else part.episodes, mesh))
        collected = functools.partial(self._collected, written)
        return evaluate_heldout(self._generation, clock, show, self._step, collected)

    def _collected(
        self,
        written: WrittenPart,
        generation: Generation,
        clock: Clock,
        examples: Sequence[Example],
        *,
        sampling: Sampling,
        **others: object,
    ) -> tuple[Rollout, Rows]:
        """All parts as one rollout, and their rows; see `rewarded_rows`."""
        engine = generation.engine
        run = written.episodes
        if run is not None:
            setup = generation.setup
            return rollout_of_episodes(setup, engine, run.episodes, examples, sampling, costs=run.costs)
        count = len(examples) * sampling.samples
        with clock.phase("eval"):
            done = collected_rollout(engine, written.completions, self._pending, rows=count, begin=self._begin)
        rows = to_rows(examples, done, sampling, generation.form)
        return done, rows if generation.rewards.rescore is None else generation.rewards.rescore(rows, examples, "eval")

    async def _episodes(self, setup: EpisodeSetup, resident: ResidentEngine) -> WrittenPart:
        heldout, sampling, _, seed, _ = self._generation.evaluation
        policy = policy_setup(setup, sampling)
        groups = episode_groups(heldout, self._samples, seed)[self._own]
        try:
            runner = EpisodeRunner(setup.environment, policy, setup.limits)
            episodes = await runner.run(resident, Tickets(groups, shared_counter(SINGLE), replicas=1))
        except RunEndingError as error:
            return WrittenPart(problem=str(error))
        costs = [runner.costs[number] for number, _ in episodes]
        return WrittenPart(episodes=EpisodeRun(episodes, 0.0, 0.0, costs, runner.attempts))
