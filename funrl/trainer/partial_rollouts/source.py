"""Partial rollouts: a completion is written over several steps, so that no step waits for the longest one.

In each step a request samples a limited number of new tokens. An unfinished completion continues in the next step with
that step's weights; its tokens, their log-probabilities and the versions of the weights that sampled them are kept. A
prompt is trained on once all its samples are finished. If fewer prompts are finished than a batch needs, further ones
are begun, so that a batch is full from the first step on. Prompts that finish beyond a full batch wait for the next
one, in the order of the prompts. None of this depends on the mesh or on timing.

Begun prompts are part of the source's state. Each rank holds and checkpoints the records of its own ones. So it is with
episodes; each trajectory samples a limited number of new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from funrl import trees
from funrl.rollout.engine import onload_engine
from funrl.trainer.partial_rollouts.groups import BegunGroups, NewPrompts, PartialWriter
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.sources.group_rows import first_samples
from funrl.trainer.sources.observing import SHOWN_PROMPTS, Show, ShownSample
from funrl.trainer.sources.prompts import StepChoice, prompt_source, rows_of_choice
from funrl.trainer.sources.selection import (
    SamplingRound,
    chosen_of_step,
    filtered_round,
    first_chosen,
    join_chosen,
)
from funrl.trainer.sources.source import Generation, SampledPrompts, Source, StepRows, StoredState
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows, on_cpu, with_stale
from funrl.trainer.storage.row_shards import HeldRows

NEW = "partial/new_prompts"  # metric: prompts begun in a step


def partial_source(generation: Generation, tokens: int, clock: Clock, show: Show) -> Source:
    """A source whose rows the policy writes over several steps; evaluated with whole completions.

    Args:
      generation: as in `prompt_source`.
      tokens: bound on the new tokens of a request, or of a trajectory, in a step.
      clock: times the phases.
      show: receives samples and remarks.
    """
    writer = PartialWriter(generation, tokens, clock, show)
    whole = prompt_source(generation, clock, show)
    mesh = writer.mesh
    schedule = generation.schedule
    weighing = schedule.weighing

    @onload_engine(generation.engine.engine)
    def next_rows(state: trees.Tree, step: int) -> StepRows:
        begin = state["prompts_consumed"]
        weights, measured, metrics = weighing.weights(state["curriculum"], step)
        begun = state["begun"]
        begun = begun if isinstance(begun, BegunGroups) else writer.restored(begun)
        prompts = NewPrompts(begin, weights=weights)
        held, sampled, rounds, counts = _fill(writer, BegunGroups(begun.groups), prompts)
        for part in sampled:
            numbers = schedule.numbers_at(part.places)
            measured = weighing.measured(measured, numbers, part.done.scores, part.done.failed)
        if weights is not None:
            metrics["curriculum/passed_over"] = rounds[-1].end - begin - counts[NEW]
        if generation.shows(step):
            show.samples(step, _shown(generation, sampled))
        chosen, skipped = chosen_of_step(generation, rounds, sampled, step, show)
        choice = StepChoice(rounds, [first_chosen(join_chosen(chosen), schedule.batch)], skipped)
        rows, state, counted = rows_of_choice(generation, clock, show, state=state, step=step, choice=choice)
        ready = {place for part in chosen for place in part.places.tolist()}
        later = ready - set(choice.chosen[0].places.tolist())
        held = BegunGroups([group for group in held.groups if group.waiting or group.place in later])
        version = generation.engine.engine.version or 0
        rows = with_stale(rows, version)
        metrics |= {
            **counted,
            **counts,
            "partial/finished_prompts_left": float(len(later)),
            **_staleness(rows, version),
        }
        return rows, {**state, "begun": held, "curriculum": measured}, metrics

    def saved(state: trees.Tree, largest: Callable[[int], int]) -> trees.Tree:
        begun = state["begun"]
        return {**state, "begun": writer.saved(begun, largest) if isinstance(begun, BegunGroups) else begun}

    def rows(state: trees.Tree) -> HeldRows:
        return HeldRows(frozenset({"begun/records"}), state["begun"]["owner"].cpu().numpy(), mesh)

    def restored(state: trees.Tree) -> trees.Tree:
        begun = state["begun"]
        owner = generating_ranks(len(begun["owner"]), 1, mesh.size(mesh.row_axes))
        return {**whole.stored.restored(state), "begun": {**begun, "owner": torch.from_numpy(owner)}}

    first = {**whole.init(), "begun": writer.saved(BegunGroups(), lambda width: width)}
    return whole._replace(
        init=lambda: trees.map(lambda x: x, first),
        next_rows=next_rows,
        stored=StoredState(saved, rows, restored, spread=True),
        close=writer.close,
    )


def _fill(
    writer: PartialWriter, held: BegunGroups, new: NewPrompts
) -> tuple[BegunGroups, list[SampledPrompts], list[SamplingRound], Mapping[str, float]]:
    """Write until enough prompts are finished.

    First continue all begun prompts, and begin as many as the batch lacks. While prompts are still missing, begin
    further ones, as long as no more are left unfinished than are trained on during the longest completion; after that,
    finish the oldest unfinished ones beyond the budget of tokens.

    Args:
      writer: writes the rows.
      held: prompts that were begun in earlier steps.
      new: the next position in the order of the prompts, and their weights.

    Returns: all prompts that are begun or finished, the finished ones, what the filter keeps of them, and metrics.
    """
    generation = writer.generation
    batch = generation.schedule.batch
    under_way = batch * (writer.most_steps - 1)
    sampled: list[SampledPrompts] = []
    rounds: list[SamplingRound] = []
    known = set[int]()
    begun = beyond = 0
    count = max(0, batch - sum(not group.waiting for group in held.groups))
    waiting = [group.place for group in held.groups if group.waiting]
    held, consumed = writer.write(held, set(waiting), new._replace(count=count), writer.tokens)
    while True:
        begun += count
        fresh = [group for group in held.groups if not group.waiting and group.place not in known]
        if fresh:
            known.update(group.place for group in fresh)
            sampled.append(writer.examine(fresh))
            rounds.append(filtered_round(generation, sampled[-1], consumed))
        missing = batch - sum(len(part.kept) for part in rounds)
        waiting = [group.place for group in held.groups if group.waiting]
        may_begin = missing if writer.most_new is None else min(missing, writer.most_new - begun)
        count = max(0, min(may_begin, under_way + missing - len(waiting)))
        if missing <= 0 or not (count or waiting):
            break
        if count:
            held, consumed = writer.write(held, (), new._replace(begin=consumed, count=count), writer.tokens)
        else:
            oldest = set(waiting[:missing])
            held, consumed = writer.write(held, oldest, new._replace(begin=consumed), None)
            beyond += len(oldest)
    counts = {NEW: begun, "partial/unfinished_prompts": len(waiting), "partial/prompts_beyond_budget": beyond}
    if generation.episodes is not None:
        episodes = sum(group.waiting for group in held.groups)
        counts |= {"partial/waiting_episodes": episodes, "partial/restarted_episodes": held.restarted}
    rounds[-1] = rounds[-1]._replace(end=consumed)
    return held, sampled, rounds, {name: float(x) for name, x in counts.items()}


def _shown(generation: Generation, sampled: Sequence[SampledPrompts]) -> list[ShownSample]:
    """The first sample of each of the prompts that were finished first."""
    samples = generation.sampling.samples
    parts = [first_samples(generation, part.examples, part.done, part.rows, samples) for part in sampled]
    return [sample for part in parts for sample in part][:SHOWN_PROMPTS]


def _staleness(rows: Rows, version: int) -> dict[str, float]:
    """Syncs of weights between the sampling of a token and this step, over the sampled tokens of all rows."""
    batch = on_cpu(rows).batch
    lag_bT = (version - batch.version) * batch.mask
    sums = batch.across.sums
    count = max(1.0, float(sums(batch.mask).sum()))
    largest = float(batch.across.kth_largest(lag_bT.double(), torch.tensor(1))) if len(rows.owner) else 0.0
    return {"partial/staleness_mean": float(sums(lag_bT).sum()) / count, "partial/staleness_max": largest}
