"""Evaluations: completions or episodes of the held-out prompts, and their metrics.

An engine writes an evaluation alone, or beside the groups of its run. Completions and rewards depend on the prompt, its
seed and the weights alone, so that the metrics are the same.
"""

from __future__ import annotations

import numpy as np

from funrl.trainer.sources.episode_rows import outcome_rows
from funrl.trainer.sources.episode_totals import episode_metrics
from funrl.trainer.sources.evaluation import evaluated, metrics_of, source_of, table_of
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.group_rows import first_samples, rewarded_rows
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.pending_rewards import entry_metrics
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows


def evaluate_heldout(generation: Generation, clock: Clock, show: Show, step: int) -> dict[str, float]:
    """Complete the held-out prompts, show some completions, and return their metrics. Collective."""
    if generation.remote is not None:
        with clock.phase("eval"):
            return generation.remote.begin_evaluation(step)()
    heldout, sampling, _, seed, _ = generation.evaluation
    generation = for_heldout(generation)
    done, rows = rewarded_rows(generation, clock, heldout, sampling, seed, phase="eval")
    return heldout_metrics(generation, done, rows, show, step)


def for_heldout(generation: Generation) -> Generation:
    """The settings for held-out prompts: their episodes are not logged, and counted by the sources of these."""
    generation = generation.untrained
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
    if done.episodes and scores.reward_PN is not None:
        further["eval/prompts/unscored"] = float(np.isnan(scores.reward_PN).all(1).mean())
    return metrics_of(scores, heldout) | further
