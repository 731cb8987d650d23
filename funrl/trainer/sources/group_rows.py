"""Rows of written completions or episodes, and the coroutine that writes the samples of one prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from funrl.data.prompts import Example
from funrl.environments.logged import LoggedEpisode
from funrl.environments.run import EpisodeGroup, EpisodeRun, EpisodeRunner
from funrl.kinds import joined_lines
from funrl.rollout.requests import Completion, Request
from funrl.rollout.resident import ResidentEngine
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.sources.episode_rows import policy_setup, rollout_of_episodes
from funrl.trainer.sources.generation import Rollout, collected_rollout, pending_rewards, to_rows
from funrl.trainer.sources.observing import SHOWN_PROMPTS, ShownSample, shown_samples, with_scores
from funrl.trainer.sources.pending_rewards import PendingRewards
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.step_rows import Rows

REWARDS_S = 0.005  # between two looks whether workers have rewarded a group


class WrittenSamples(NamedTuple):
    """Completions or episodes of one prompt.

    Attributes:
      done, rows: what was written, and its rows.
      episodes: for the log of the run, with numbers from 0; empty where the log keeps none.
    """

    done: Rollout
    rows: Rows
    episodes: Sequence[LoggedEpisode] = ()


class WrittenCompletions(NamedTuple):
    """Completions of this replica.

    Attributes:
      completions: ascending by their numbers.
      pending: their rewards; None: another rank asks for them, or there are none.
      begin: when they began, by `time.perf_counter`.
    """

    completions: Sequence[Completion]
    pending: PendingRewards | None
    begin: float


def join_samples(
    generation: Generation, written: WrittenCompletions | EpisodeRun, examples: Sequence[Example], sampling: Sampling
) -> tuple[Rollout, Rows]:
    """Completions or episodes of all replicas with their rewards, and their rows. Collective.

    Args:
      generation: as of a source.
      written: by this replica.
      examples: prompts of all replicas.
      sampling: of the samples.

    Raises:
      RewardError: a reward function failed; raised on every rank.
    """
    engine = generation.engine
    if isinstance(written, EpisodeRun):
        setup = generation.setup
        return rollout_of_episodes(setup, engine, written.episodes, examples, sampling, costs=written.costs)
    completions, pending, begin = written
    count = len(examples) * sampling.samples
    done = collected_rollout(engine, completions, pending, rows=count, begin=begin)
    return done, to_rows(examples, done, sampling, generation.form)


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
      RewardError, RunEndingError: the run ends.
    """
    logged: list[LoggedEpisode] = []
    setup = generation.episodes
    if setup is not None:
        runner = EpisodeRunner(setup.environment, policy_setup(setup, sampling), setup.limits)
        runner.resident = resident
        episodes = await runner.run_group(EpisodeGroup(example, 0, seeds))
        written = EpisodeRun(episodes, [runner.costs[number] for number, _ in episodes])
        if setup.log is not None:
            logged = [LoggedEpisode(number, seeds[number], episode) for number, episode in episodes]
    else:
        owned = joined_lines([example.owned])
        pending = pending_rewards(generation.engine, [example], len(seeds))
        requests = [Request(n, example.tokens, sampling, seed, owned=owned) for n, seed in enumerate(seeds)]
        begin = time.perf_counter()
        completions = await resident.ask_all(requests, None if pending is None else pending.add)
        while pending is not None and not pending.ready():
            await asyncio.sleep(REWARDS_S)
        written = WrittenCompletions(completions, pending, begin)
    done, rows = join_samples(generation, written, [example], sampling)
    return WrittenSamples(done, rows, logged)
