"""Evaluations: completions or episodes of the held-out prompts, and their metrics.

An engine writes an evaluation alone, or beside the groups of its run. Completions and rewards depend on the prompt, its
seed and the weights alone, so that the metrics are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from funrl.trainer.sources.episode_rows import outcome_rows
from funrl.trainer.sources.episode_totals import episode_metrics
from funrl.trainer.sources.evaluation import HeldoutText, evaluated, heldout_texts, metrics_of, source_of, table_of
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.group_rows import first_samples, rewarded_rows
from funrl.trainer.sources.observing import Show, ShownSample
from funrl.trainer.sources.pending_rewards import entry_metrics
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows


class HeldoutSamples(NamedTuple):
    """Completions or episodes of all held-out prompts.

    Attributes:
      done, rows: what was written, and its rows with all rewards.
      texts: of this rank's completions.
      shown: the first sample of each of the first prompts.
    """

    done: Rollout
    rows: Rows
    texts: Mapping[int, HeldoutText]
    shown: Sequence[ShownSample]


def evaluate_heldout(generation: Generation, clock: Clock, show: Show, step: int) -> dict[str, float]:
    """Complete the held-out prompts, show some completions, and return their metrics. Collective."""
    if generation.remote is not None:
        with clock.phase("eval"):
            return generation.remote.begin_evaluation(step)()
    heldout, sampling, _, seed, _ = generation.evaluation
    generation = for_heldout(generation)
    done, rows = rewarded_rows(generation, clock, heldout, sampling, seed, phase="eval")
    texts = heldout_texts(generation.evaluation, done.completions, generation.engine.decode)
    shown = first_samples(generation, heldout, done, rows=rows, samples=sampling.samples)
    return heldout_metrics(generation, HeldoutSamples(done, rows, texts, shown), show, step)


def for_heldout(generation: Generation) -> Generation:
    """The settings for held-out prompts: their episodes are not logged, and counted by the sources of these."""
    generation = generation.untrained
    if generation.episodes is None:
        return generation
    sources = source_of(generation.evaluation.heldout)
    return generation._replace(episodes=generation.episodes._replace(log=None, source_of=sources))


def heldout_metrics(generation: Generation, samples: HeldoutSamples, show: Show, step: int) -> dict[str, float]:
    """Metrics of completions or episodes of the held-out prompts, of which some are shown. Collective."""
    done, rows, texts, shown = samples
    evaluation = generation.evaluation
    show.samples(step, shown)
    scores = evaluated(evaluation, done, outcome_rows(done, rows), texts, names=generation.rewards.names)
    for part in table_of(scores, evaluation, texts, done.mesh, step):
        show.evaluated(part)
    further = entry_metrics(done.entries, "eval/reward") | episode_metrics(done.episodes, "eval/")
    if done.episodes and scores.reward_PN is not None:
        further["eval/prompts/unscored"] = float(np.isnan(scores.reward_PN).all(1).mean())
    return metrics_of(scores, evaluation.heldout) | further
