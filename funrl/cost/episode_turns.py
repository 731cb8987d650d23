"""Turns of episodes in a dry run: assumed lengths, and the seconds in which a step only waits for environments.

All replies have the greatest length: t replies of n tokens, with c tokens of context before each but the first, make an
episode of p + t n + (t - 1) c tokens after a prompt of p. No episode branches.
"""

from __future__ import annotations

import dataclasses
import math

from funrl.cost.decoding import EngineWork, own_prompts, rows_in_cache
from funrl.cost.tracing.costs import Costs, plus
from funrl.cost.tracing.hardware import USABLE, Hardware
from funrl.cost.tracing.turns import EpisodeCost, turns_of
from funrl.rollout.native.cache_sizes import FREE_SHARE
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.steps.parts import Generator


def episode_cost(work: EngineWork, generating: float) -> EpisodeCost:
    """Cost of environments beside an engine.

    A step takes at least what the engine has to do, and at least the time of the episodes that one after the other take
    one of the `open` places: the larger of the two is assumed. It is the asymptotic bound of a closed network.

    Args:
      work: of the engine, at full depth.
      generating: seconds in which it does the work of the step.

    References: Denning and Buzen, 1978, https://doi.org/10.1145/356733.356735
    """
    job = work.job
    turns = work.turns
    sampling = job.sampling
    rows = own_prompts(job, work.generator.mesh) * sampling.samples
    fitting, row_bytes = rows_in_cache(work, sampling)
    most = min(rows, job.settings.environments.max_waiting)
    running = max(1, min(most, job.settings.engines.decode_rows, fitting))
    own = generating * running / rows  # seconds that one episode generates
    waiting = turns.gaps * turns.seconds
    wanted = math.ceil(running * (own + waiting) / own) if own else most
    begun = min(most, wanted)
    waits = begun - running
    kept = max(0, min(waits, fitting - running))
    evicted = (waits - kept) / begun  # share of the episodes whose pages do not stay
    again = sum(work.prompt_tokens + k * (sampling.max_new_tokens + turns.context) for k in range(turns.gaps))
    again += turns.gaps * sampling.max_new_tokens
    bound = math.ceil(rows / begun) * (own + waiting)
    waited = max(0.0, bound - generating) if waiting else 0.0
    return EpisodeCost(
        turns,
        turns.row_tokens(work.prompt_tokens, sampling.max_new_tokens),
        running,
        begun,
        read=rows * turns.gaps * turns.context,
        recomputed=round(rows * evicted * again),
        waited=waited,
        overlapped=max(0.0, math.ceil(rows / begun) * waiting - waited),
        cache=kept * row_bytes,
    )


def with_waiting(
    job: Job, generator: Generator, costs: Costs, tokens: int, held: float, hardware: Hardware
) -> tuple[Costs, EpisodeCost | None]:
    """Costs of generation with the seconds and pages of episodes that wait; and what is known of these.

    Args:
      costs: of generation.
      tokens: of a prompt.
      held: bytes that a rank holds besides the cache.
    """
    turns = turns_of(job.settings)
    if not isinstance(job, RLJob) or not turns.gaps or not job.model.pages:
        return costs, None
    room = FREE_SHARE * max(0.0, hardware.memory * USABLE - held)
    work = EngineWork(job, generator, generator, prompt_tokens=tokens, room=room, hardware=hardware, turns=turns)
    episodes = episode_cost(work, costs.seconds)
    waiting = dataclasses.replace(costs, seconds=costs.seconds + episodes.waited)
    return plus(waiting, {"cache": episodes.cache}), episodes
