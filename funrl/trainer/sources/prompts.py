"""The source whose rows the policy writes: prompts, completed and rewarded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from funrl import trees
from funrl.data.order import order_digest, take_next
from funrl.rewards.call import RewardError
from funrl.rollout.engine import onload_engine
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.sources.episode_totals import episode_metrics
from funrl.trainer.sources.group_rows import first_samples, rescored, rewarded_rows
from funrl.trainer.sources.heldout import evaluate_heldout
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.pending_rewards import add_totals, entry_metrics
from funrl.trainer.sources.selection import (
    Chosen,
    SamplingRound,
    StepChoice,
    chosen_of_step,
    count_empty,
    filtered_round,
    join_chosen,
    rounds_metrics,
)
from funrl.trainer.sources.source import Generation, SampledPrompts, Source, StepLog, StoredState, same_order
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.roles import RoleState
from funrl.trainer.steps.step_rows import Rows, failed_rows, take

BASELINE_SEED = 1 << 41  # of greedy completions and episodes; neither a training step nor an evaluation has it


def prompt_source(generation: Generation, clock: Clock, show: Show) -> Source:
    """Rows that the policy writes: prompts in a shuffled order, completed and rewarded.

    Prompts whose rows the filter drops are replaced by further ones until the batch is full, within a bound. No
    completion that the filter keeps is thrown away. Metrics count the prompts and rows that it drops.
    """
    prompts, _, seed, weighing = generation.schedule
    log = [] if generation.episodes is None or generation.episodes.log is None else generation.episodes.log

    def next_rows(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        begin = state["prompts_consumed"]
        log.clear()
        weights, measured, metrics = weighing.weights(state["curriculum"], step)
        rounds: list[SamplingRound] = []
        spare: list[SampledPrompts] = []
        with running_engine(generation):
            for newest, part in sampling_rounds(generation, clock, show, step=step, position=begin, weights=weights):
                measured = weighing.measured(measured, newest.places, newest.done.scores, newest.done.failed)
                if not spare or len(newest.rows.owner):  # where all episodes failed there are no rows
                    spare = [newest]
                rounds.append(part)
            choice = chosen_of_step(generation, rounds, spare, step, show)
            batch, state, counted = rows_of_choice(generation, clock, show, state=state, step=step, choice=choice)
        if generation.demonstrate is not None and not choice.skipped:
            batch = generation.demonstrate(batch, [example for part in choice.chosen for example in part.examples])
        if weights is not None:
            metrics["curriculum/passed_over"] = rounds[-1].end - begin - sum(part.sampled for part in rounds)
        return batch, {**state, "curriculum": measured}, metrics | counted

    order = order_digest(prompts, seed, [len(example.tokens) for example in prompts])
    first = {"prompts_consumed": 0, "order": order, "curriculum": weighing.init()}
    if generation.episodes is not None:
        first["empty_steps"] = 0

    def restored(state: trees.Tree) -> trees.Tree:
        return same_order(order, show, {**state, "curriculum": trees.map(lambda x: x.cpu(), state["curriculum"])})

    def observed(state: trees.Tree, metrics: Mapping[str, float]) -> trees.Tree:
        return {**state, "curriculum": weighing.observed(state["curriculum"], metrics)}

    def evaluate(states: Mapping[str, RoleState], step: int) -> dict[str, float]:
        with running_engine(generation):
            return evaluate_heldout(generation, clock, show, step=step)

    return Source(
        lambda: dict(first),
        next_rows,
        evaluate,
        observed,
        stored=StoredState(restored=restored),
        log=StepLog(log),
    )


def running_engine(generation: Generation) -> contextlib.AbstractContextManager[None]:
    """Onload this rank's engine, if it is the one that generates; outside the context its cache is the trainer's."""
    return contextlib.nullcontext() if generation.remote is not None else onload_engine(generation.engine.engine)


def sampling_rounds(
    generation: Generation, clock: Clock, show: Show, *, step: int, position: int, weights: np.ndarray | None
) -> Iterator[tuple[SampledPrompts, SamplingRound]]:
    """Sample prompts until the filter has kept enough for a batch, within the bound of `RowSelection`.

    Args:
      generation, clock, show: as of the source.
      step: its number.
      position: of the first prompt in their order.
      weights: [N] of all prompts; None: all equal.
    """
    prompts, room, seed, _ = generation.schedule
    sampling = generation.sampling
    remote = generation.remote
    left = room * (1 if remote is not None and remote.refills else generation.selection.rounds)
    first = True
    while room and left > 0:
        taken = take_next(prompts, min(room, left), seed, position=position, weights=weights)
        places = taken.places
        noise = derived_seed(seed, position)
        if remote is None:
            examples = [prompts[place] for place in places.tolist()]
            done, rows = rewarded_rows(generation, clock, examples, sampling=sampling, seed=noise)
            sampled = SampledPrompts(examples, places, done, rows)
        else:
            with clock.phase("generate"):
                sampled = remote.write(places, sampling, noise)
            sampled = sampled._replace(rows=rescored(generation, sampled.rows, sampled.examples))
        if first and generation.shows(step):
            examples, _, done, rows, _ = sampled
            show.samples(step, first_samples(generation, examples, done, rows=rows, samples=sampling.samples))
        part = filtered_round(generation, sampled, taken.end + len(sampled.replaced))
        if remote is not None:
            remote.keep(part.kept)
        yield sampled, part
        position = part.end
        room -= len(part.kept)
        left -= part.sampled
        first = False


def rows_of_choice(
    generation: Generation, clock: Clock, show: Show, *, state: Mapping[str, Any], step: int, choice: StepChoice
) -> tuple[Rows, dict[str, Any], dict[str, float]]:
    """The rows of a step, the source's state after it, and metrics.

    Args:
      generation, clock, show: as of the source.
      state: of the source before the step.
      step: its number.
      choice: what it is trained on.
    """
    rounds, chosen, skipped = choice
    entries, facts = (add_totals(*totals) for totals in zip(*(x for part in rounds for x in part.totals), strict=True))
    unusable = 0 if chosen[0].examples else sum(part.sampled for part in rounds) * generation.sampling.samples
    after, emptiness = count_empty(state, step, unusable, facts, show)
    joined = join_chosen(chosen)
    group_B = torch.from_numpy(state["prompts_consumed"] + joined.prompt_B)  # which continue those of earlier steps
    rows = joined.rows.with_fields(group=group_B.to(joined.rows.batch.group.device), failed=None)
    if generation.expects:
        value_P = generation.schedule.weighing.expected(state["curriculum"], joined.places)
        rows = rows.with_fields(prompt_value=value_P[joined.prompt_B].to(rows.batch.score))
    if generation.greedy_baseline and not skipped:
        rows = _compared_with_greedy(rows, joined.prompt_B, greedy_rows(generation, clock, joined))
    metrics = rounds_metrics(generation, rounds, skipped) | entry_metrics(entries) | episode_metrics(facts) | emptiness
    return rows, {**after, "prompts_consumed": rounds[-1].end}, metrics


def greedy_rows(generation: Generation, clock: Clock, chosen: Chosen) -> Rows:
    """Rows of a greedy completion or episode of each prompt, without those that failed."""
    examples, places, rows, _ = chosen
    sampling = baseline_sampling(generation.sampling)
    if generation.remote is None:
        _, greedy = rewarded_rows(generation.untrained, clock, examples, sampling=sampling, seed=BASELINE_SEED)
    else:
        groups = rows.batch.group.unique_consecutive().cpu().numpy()
        with clock.phase("generate"):
            greedy = generation.remote.baseline_rows(groups, places, sampling)
        greedy = rescored(generation, greedy, examples)
    if generation.episodes is None and generation.engine.on_error == "skip" and failed_rows(greedy):
        greedy = take(greedy, np.flatnonzero(~greedy.batch.failed.cpu().numpy()))
    return greedy


def baseline_sampling(sampling: Sampling) -> Sampling:
    """Sampling of the greedy completion that the samples of a prompt are compared with."""
    return dataclasses.replace(sampling, greedy=True, samples=1)


def _compared_with_greedy(rows: Rows, prompt_B: np.ndarray, greedy: Rows) -> Rows:
    """Rows with the score of the greedy completion, or greedy episode of their agent, of their prompt, if it has one.

    Args:
      rows: of completions or episodes.
      prompt_B: number of each row's prompt.
      greedy: rows of one completion or episode of each prompt, without those that failed or are unscored.

    Raises:
      RewardError: no row is left.
    """
    agent_B, agent_G = (x.batch.group * 0 if (agent := x.batch.get("agent")) is None else agent for x in (rows, greedy))
    agents = 1 + int(torch.cat([agent_B, agent_G]).max()) if len(agent_B) + len(agent_G) else 1
    row_of_key = {key: row for row, key in enumerate((greedy.batch.group * agents + agent_G).tolist())}
    keys = (prompt_B * agents + agent_B.cpu().numpy()).tolist()
    place_B = np.array([row_of_key.get(key, -1) for key in keys], dtype=np.int64)
    kept = np.flatnonzero(place_B >= 0)
    if not len(kept):
        raise RewardError("the greedy samples of all prompts, which are the baseline, failed or are unscored")
    compared = rows if len(kept) == len(place_B) else take(rows, kept)
    score_B = greedy.batch.score[torch.from_numpy(place_B[kept]).to(greedy.batch.score.device)]
    return compared.with_fields(greedy_score=score_B.to(rows.batch.score))
