"""Evaluations: completions or episodes of the held-out prompts, written beside an engine's steps.

An engine writes an evaluation alone, or beside the groups of its run. Completions and rewards depend on the prompt, its
seed and the weights alone, so that the metrics are the same.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence

from funrl.environments.run import EpisodeGroup, EpisodeRun, EpisodeRunner, episode_groups, run_of_replica
from funrl.mesh.collectives import from_first
from funrl.rollout.policy import RunEndingError
from funrl.rollout.requests import Completion, Request
from funrl.rollout.resident import ResidentEngine, run_beside
from funrl.rollout.tickets import Tickets, run_groups, share_tickets
from funrl.trainer.sources.episode_rows import EpisodeSetup, outcome_rows, policy_setup
from funrl.trainer.sources.episode_totals import episode_metrics
from funrl.trainer.sources.evaluation import evaluated, metrics_of, source_of, table_of, unscored_metrics
from funrl.trainer.sources.generation import Rollout, pending_rewards, raise_everywhere, request_groups, settle_proof
from funrl.trainer.sources.group_rows import WrittenCompletions, first_samples, join_samples, rescored
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.pending_rewards import entry_metrics
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows

WrittenPart = Sequence[Completion] | EpisodeRun | RunEndingError  # a replica's part, or the error that ends the run


class HeldoutWriter:
    """Writer of this replica's part of an evaluation, which evaluates all parts."""

    def __init__(self, generation: Generation, step: int, *, alone: bool = False) -> None:
        """Begin without completions. Collective over the mesh to generate on.

        Args:
          generation: as of a source, on that mesh.
          step: number of training steps before the evaluation.
          alone: whether the engines write nothing else meanwhile. Replicas then take prompts as they have room; else
            each begins an equal range of them at once.
        """
        engine = generation.engine
        heldout, sampling, _, seed, _ = generation.evaluation
        setup = generation.episodes
        share = functools.partial(
            share_tickets, mesh=engine.mesh, size=sampling.samples, fixed=not alone or engine.queue == "fixed"
        )
        self._alone = alone
        self._pending = None
        if setup is None:
            self._pending = pending_rewards(engine, heldout, sampling.samples)
            self._write = functools.partial(self._completions, share(request_groups(heldout, sampling, seed)))
        else:
            setup = setup._replace(log=None, source_of=source_of(heldout))
            groups = share(episode_groups(heldout, sampling.samples, seed))
            self._write = functools.partial(self._episodes, groups, setup)
        self._generation = generation._replace(episodes=setup)
        self._step = step
        self._begin = time.perf_counter()

    async def write(self, resident: ResidentEngine) -> WrittenPart:
        """Write this replica's part, on its first tensor rank."""
        try:
            return await self._write(resident)
        except RunEndingError as error:
            return error

    def evaluate(self, part: WrittenPart | None, show: Show, clock: Clock) -> dict[str, float]:
        """Metrics of all parts. Collective over the mesh to generate on.

        Args:
          part: of this replica; None on its other tensor ranks.
          show: receives some completions.
          clock: times the wait for rewards.

        Raises:
          RewardError: a reward function or the environment has failed; raised on every rank.
        """
        generation = self._generation
        mesh = generation.engine.mesh
        raise_everywhere(str(part) if isinstance(part, RunEndingError) else None, (), mesh)
        heldout, sampling, *_ = generation.evaluation
        with clock.phase("eval"):
            if generation.episodes is not None:
                written = run_of_replica(part if isinstance(part, EpisodeRun) else None, mesh)
            else:
                written = WrittenCompletions(from_first(part, mesh, "tensor"), self._pending, self._begin)
            done, rows = join_samples(generation, written, heldout, sampling)
        return heldout_metrics(generation, done, rescored(generation, rows, heldout, "eval"), show, self._step)

    async def _completions(self, tickets: Tickets[Sequence[Request]], resident: ResidentEngine) -> Sequence[Completion]:
        ended = None if self._pending is None else self._pending.add
        room = resident.room if self._alone else lambda: sys.maxsize
        groups = await run_groups(resident, tickets, room, lambda group: resident.start(resident.ask_all(group, ended)))
        return sorted((done for group in groups for done in group), key=lambda done: done.number)

    async def _episodes(
        self, tickets: Tickets[EpisodeGroup], setup: EpisodeSetup, resident: ResidentEngine
    ) -> EpisodeRun:
        policy = policy_setup(setup, self._generation.evaluation.sampling)
        return await EpisodeRunner(setup.environment, policy, setup.limits).run(resident, tickets)


def evaluate_heldout(generation: Generation, clock: Clock, show: Show, step: int) -> dict[str, float]:
    """Complete the held-out prompts, show some completions, and return their metrics. Collective."""
    if generation.remote is not None:
        with clock.phase("eval"):
            return generation.remote.evaluate(step, show)
    engine = generation.engine
    with clock.phase("eval"), settle_proof(engine.proof):
        writer = HeldoutWriter(generation, step, alone=True)
        part = run_beside(engine.engine, engine.mesh, writer.write)
    return writer.evaluate(part, show, clock)


def for_heldout(generation: Generation) -> Generation:
    """The settings whose episodes are not logged, and counted by the sources of the held-out prompts."""
    if generation.episodes is None:
        return generation
    sources = source_of(generation.evaluation.heldout)
    return generation._replace(episodes=generation.episodes._replace(log=None, source_of=sources))


def heldout_metrics(generation: Generation, done: Rollout, rows: Rows, show: Show, step: int) -> dict[str, float]:
    """Metrics of completions or episodes of the held-out prompts, of which some are shown. Collective."""
    heldout, sampling, solved, _, table_prompts = generation.evaluation
    show.samples(step, first_samples(generation, heldout, done, rows=rows, samples=sampling.samples))
    decode = generation.engine.decode
    rows = outcome_rows(done, rows)
    scores = evaluated(heldout, done, rows, solved=solved, decode=decode, names=generation.rewards.names)
    for part in table_of(scores, heldout, done, decode=decode, step=step, prompts=table_prompts):
        show.evaluated(part)
    further = entry_metrics(done.entries, "eval/reward") | episode_metrics(done.episodes, "eval/")
    if done.episodes:
        further |= unscored_metrics(scores)
    return metrics_of(scores, heldout) | further
