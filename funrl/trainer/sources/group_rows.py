"""Completions or episodes of prompts, written beside an engine's steps, and their rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from funrl.data.prompts import Example
from funrl.environments.logged import LoggedEpisode
from funrl.environments.run import EpisodeGroup, EpisodeRun, EpisodeRunner, episode_groups
from funrl.kinds import joined_lines
from funrl.mesh.collectives import from_first
from funrl.processes import spans
from funrl.rollout.policy import RunEndingError
from funrl.rollout.requests import Completion, Request
from funrl.rollout.resident import ResidentEngine, run_beside
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.tickets import share_tickets
from funrl.trainer.sources.episode_rows import policy_setup, rollout_of_episodes
from funrl.trainer.sources.generation import (
    CompletionRun,
    Rollout,
    collected_rollout,
    pending_rewards,
    raise_everywhere,
    rollout,
    settle_proof,
    to_rows,
)
from funrl.trainer.sources.observing import SHOWN_PROMPTS, ShownSample, shown_samples, with_scores
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows

REWARDS_S = 0.005  # between two looks whether workers have rewarded a group


class WrittenSamples(NamedTuple):
    """Completions or episodes of prompts.

    Attributes:
      done, rows: what was written, and its rows.
      episodes: of this replica for the log of the run, with numbers from 0; empty where the log keeps none.
    """

    done: Rollout
    rows: Rows
    episodes: Sequence[LoggedEpisode] = ()


Share = Sequence[Completion] | EpisodeRun | RunEndingError  # what a replica wrote, or the error that ends the run


def join_samples(
    generation: Generation, run: CompletionRun | EpisodeRun, examples: Sequence[Example], sampling: Sampling
) -> tuple[Rollout, Rows]:
    """Completions or episodes of all replicas with their rewards, and their rows. Collective.

    Args:
      generation: as of a source.
      run: of this replica.
      examples: prompts of all replicas.
      sampling: of the samples.

    Raises:
      RewardError: a reward function failed; raised on every rank.
    """
    engine = generation.engine
    if isinstance(run, EpisodeRun):
        return rollout_of_episodes(generation.setup, engine, run, examples, sampling)
    done = collected_rollout(engine, run, rows=len(examples) * sampling.samples)
    return done, to_rows(examples, done, sampling, generation.form)


def rewarded_rows(
    generation: Generation, clock: Clock, examples: Sequence[Example], sampling: Sampling, seed: int, *, phase: str = ""
) -> tuple[Rollout, Rows]:
    """Completions or episodes by engines that write nothing else meanwhile, and their rows with rewards. Collective.

    Args:
      generation: as of a source.
      clock: times all of it under `phase`; "": under "generate", "reward" and a phase for each scoring model.
      examples: prompts, the same on every rank.
      sampling: of the samples.
      seed: of their noise.

    Raises:
      RewardError, SyncError: as of `rollout`.
    """
    engine = generation.engine
    with clock.phase(phase or "generate"):
        if generation.episodes is None:
            done = rollout(engine, examples, sampling, seed)
            rows = to_rows(examples, done, sampling, generation.form)
        else:
            groups = episode_groups(examples, sampling.samples, seed)
            writer = SampleWriter(generation, groups, sampling, fixed=engine.queue == "fixed")
            with settle_proof(engine.proof):
                share = run_beside(engine.engine, engine.mesh, writer.write)
            done, rows, logged = writer.join(share)
            if generation.episodes.log is not None:
                generation.episodes.log.extend(logged)
    if done.reward_s and not phase:
        clock.move(done.reward_s, "generate", "reward")
    return done, rescored(generation, rows, examples, phase)


class SampleWriter:
    """Writer of this replica's share of the completions or episodes of some prompts, beside what else engines do.

    They depend on prompts, seeds and weights alone, whichever replica writes them and beside what.

    Example:
      writer = SampleWriter(generation, episode_groups(examples, samples=4, seed=0), sampling)
      done, rows, _ = writer.join(await writer.write(resident))
    """

    def __init__(
        self, generation: Generation, groups: Sequence[EpisodeGroup], sampling: Sampling, *, fixed: bool = True
    ) -> None:
        """Begin without samples. Collective over the mesh to generate on.

        Args:
          generation: as of a source, on that mesh.
          groups: of all replicas; their samples are numbered from 0.
          sampling: of the samples.
          fixed: whether each replica takes an equal range of the groups instead of what it has room for.
        """
        engine = generation.engine
        self.generation = generation
        self._groups = groups
        self._sampling = sampling
        self._examples = [group.example for group in groups]
        self._tickets = share_tickets(groups, engine.mesh, size=sampling.samples, fixed=fixed)
        completes = generation.episodes is None
        self._pending = pending_rewards(engine, self._examples, sampling.samples) if completes else None
        self._begin = time.perf_counter()

    async def write(self, resident: ResidentEngine) -> Share:
        """Write the share, on this replica's first tensor rank."""
        setup = self.generation.episodes
        if setup is not None:
            runner = EpisodeRunner(setup.environment, policy_setup(setup, self._sampling), setup.limits)
            try:
                return await runner.run(resident, self._tickets)
            except RunEndingError as error:
                return error
        ended = None if self._pending is None else self._pending.add
        writing = (complete_group(resident, group, self._sampling, ended) for group in self._tickets.groups)
        return [done for group in await asyncio.gather(*writing) for done in group]

    def rewarded(self) -> bool:
        """True if `join` waits for no reward of this replica, whose share is written."""
        return self._pending is None or self._pending.ready()

    def join(self, share: Share | None) -> WrittenSamples:
        """The samples of all replicas with their rewards, and their rows. Collective.

        Args:
          share: of this replica; None on its other tensor ranks.

        Raises:
          RewardError: a reward function failed, or the environment cannot work in this run; raised on every rank.
        """
        generation = self.generation
        mesh = generation.engine.mesh
        raise_everywhere(str(share) if isinstance(share, RunEndingError) else None, (), mesh)
        run = from_first(share, mesh, "tensor")
        logged: list[LoggedEpisode] = []
        if generation.episodes is None:
            run = CompletionRun(run, self._pending, self._begin)
        elif generation.episodes.log is not None:
            seeds = [seed for group in self._groups for seed in group.seeds]
            logged = [LoggedEpisode(number, seeds[number], episode) for number, episode in run.episodes]
        return WrittenSamples(*join_samples(generation, run, self._examples, self._sampling), logged)


async def complete_group(
    resident: ResidentEngine, group: EpisodeGroup, sampling: Sampling, ended: Callable[[Completion], None] | None
) -> list[Completion]:
    """Complete the prompt of a group with each of its seeds.

    Args:
      ended: called with each completion.
    """
    owned = joined_lines([group.example.owned])
    tokens = group.example.tokens
    requests = [Request(n, tokens, sampling, seed, owned=owned) for n, seed in enumerate(group.seeds, group.first)]
    with spans.span("group", first=group.first):
        return await resident.ask_all(requests, ended)


def rescored(generation: Generation, rows: Rows, examples: Sequence[Example], phase: str = "") -> Rows:
    """Rows with the scores of models that reward them here, if there are some; see `ScoreColumns.rescore`."""
    return rows if generation.rewards.rescore is None else generation.rewards.rescore(rows, examples, phase)


def first_samples(
    generation: Generation, examples: Sequence[Example], done: Rollout, rows: Rows, samples: int
) -> list[ShownSample]:
    """The first sample of each of the first prompts; see `shown_samples`. Collective."""
    if generation.remote is not None:
        shown = generation.remote.samples()
        if generation.rewards.rescore is None:
            return list(shown.values())
        return with_scores(shown, rows, samples, generation.rewards.names)
    decode = generation.engine.decode
    return shown_samples(done, rows, examples[:SHOWN_PROMPTS], samples, decode=decode, names=generation.rewards.names)


async def write_group(
    generation: Generation, resident: ResidentEngine, example: Example, sampling: Sampling, seeds: Sequence[int]
) -> WrittenSamples:
    """Write and reward samples of a prompt.

    Args:
      generation: as of a source; its mesh is this process alone, and the engine's proof is None.
      resident: the engine.
      example: the prompt.
      sampling: of the samples, as many as there are seeds.
      seeds: of each sample.

    Raises:
      RewardError: as of `SampleWriter.join`.
    """
    if sampling.greedy:  # a baseline
        generation = generation.untrained
    writer = SampleWriter(generation, [EpisodeGroup(example, 0, seeds)], sampling)
    share = await writer.write(resident)
    while not writer.rewarded():
        await asyncio.sleep(REWARDS_S)
    return writer.join(share)
