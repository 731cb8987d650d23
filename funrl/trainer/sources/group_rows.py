"""One group of rows: a coroutine beside a resident engine that writes and rewards the samples of a prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from funrl.data.prompts import Example
from funrl.environments.logged import LoggedEpisode
from funrl.environments.run import EpisodeGroup, EpisodeRunner
from funrl.kinds import joined_lines
from funrl.rollout.requests import Request
from funrl.rollout.resident import ResidentEngine
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.sources.episode_rows import policy_setup, rollout_of_episodes
from funrl.trainer.sources.generation import Rollout, collected_rollout, pending_rewards, to_rows
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


async def write_group(
    generation: Generation, resident: ResidentEngine, example: Example, sampling: Sampling, seeds: Sequence[int]
) -> WrittenSamples:
    """Write and reward samples of a prompt.

    Args:
      generation: as of a source; its mesh is this process alone, and the engine's proof is None.
      resident: the engine.
      example: the prompt.
      sampling: of the samples.
      seeds: of each sample.

    Raises:
      RewardError, RunEndingError: the run ends.
    """
    if generation.episodes is not None:
        return await _write_episodes(generation, resident, example, sampling, seeds)
    owned = joined_lines([example.owned])
    pending = pending_rewards(generation.engine, [example], len(seeds))
    requests = [Request(n, example.tokens, sampling, seed, owned=owned) for n, seed in enumerate(seeds)]
    begin = time.perf_counter()
    completions = await resident.ask_all(requests, None if pending is None else pending.add)
    while pending is not None and not pending.ready():
        await asyncio.sleep(REWARDS_S)
    done = collected_rollout(generation.engine, completions, pending, rows=len(completions), begin=begin)
    return WrittenSamples(done, to_rows([example], done, sampling, generation.form))


async def _write_episodes(
    generation: Generation, resident: ResidentEngine, example: Example, sampling: Sampling, seeds: Sequence[int]
) -> WrittenSamples:
    """Episodes of `write_group`."""
    setup = generation.setup
    runner = EpisodeRunner(setup.environment, policy_setup(setup, sampling), setup.limits)
    runner.resident = resident
    episodes = await runner.run_group(EpisodeGroup(example, 0, seeds))
    costs = [runner.costs[number] for number, _ in episodes]
    logged = [] if setup.log is None else [LoggedEpisode(n, seeds[n], episode) for n, episode in episodes]
    done, rows = rollout_of_episodes(setup, generation.engine, episodes, [example], sampling, costs=costs)
    return WrittenSamples(done, rows, logged)
