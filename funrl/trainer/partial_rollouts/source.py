"""Partial rollouts: a completion is written over several steps, so that no step waits for the longest one.

In each step a request samples a limited number of new tokens. An unfinished completion continues in the next step with
that step's weights; its tokens, their log-probabilities and the versions of the weights that sampled them are kept. A
prompt is trained on once all its samples are finished. If fewer prompts are finished than a batch needs, further ones
are begun, so that a batch is full from the first step on. Prompts that finish beyond a full batch wait for the next
one, in the order of the prompts. None of this depends on the mesh or on timing.

Begun prompts are part of the source's state. Each rank holds and checkpoints its own rows of them. So it is with
episodes; each trajectory samples a limited number of new tokens, and a rank holds their records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.rollout.engine import onload_engine
from funrl.rollout.requests import Completion
from funrl.trainer.partial_rollouts.groups import (
    BegunGroups,
    CompletionWriter,
    EpisodeWriter,
    Examined,
    NewPrompts,
    PartialWriter,
    RecordT,
    empty_rollout,
    sample_numbers,
)
from funrl.trainer.sources.episode_totals import episode_metrics
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.sources.group_rows import first_samples
from funrl.trainer.sources.observing import SHOWN_PROMPTS, Show, ShownSample
from funrl.trainer.sources.pending_rewards import add_totals, entry_metrics
from funrl.trainer.sources.prompts import one_step_of, prompt_source
from funrl.trainer.sources.selection import (
    Chosen,
    chosen_rows,
    count_empty,
    filter_metrics,
    rewarded_samples,
    skips_empty,
)
from funrl.trainer.sources.source import SKIPPED, Generation, Source, StepRows, StoredState
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows, failed_rows, join_rows, on_cpu, take, with_stale
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
    if generation.episodes is None:
        return source_of_writer(CompletionWriter(generation, tokens, clock, show))
    return source_of_writer(EpisodeWriter(generation, tokens, clock, show))


def source_of_writer(writer: PartialWriter[RecordT]) -> Source:
    """The source of the rows of a writer; see `partial_source`."""
    generation = writer.generation
    clock = writer.clock
    show = writer.show
    whole = prompt_source(generation, clock, show)
    mesh = writer.mesh
    schedule = generation.schedule
    weighing = schedule.weighing

    @onload_engine(generation.engine.engine)
    def next_rows(state: trees.Tree, step: int) -> StepRows:
        begin = state["prompts_consumed"]
        weights, measured, weighed = weighing.weights(state["curriculum"], step)
        new = NewPrompts(begin, weights=weights)
        begun = state["begun"]
        begun = begun if isinstance(begun, BegunGroups) else writer.restored(begun)
        begun = dataclasses.replace(begun, restarted=0, entries={})
        held, consumed, examined, counts = _fill(writer, begun, new, schedule.batch)
        seen = _joined_examined(examined)
        measured = weighing.measured(measured, schedule.numbers_at(seen.places), seen.scores, seen.failed)
        entries = add_totals(held.entries, seen.entries)
        metrics = {**weighed, **counts, **_metrics(generation, seen), **writer.metrics(held)}
        metrics |= entry_metrics(entries) | episode_metrics(seen.episodes)
        if weights is not None:
            metrics["curriculum/passed_over"] = consumed - begin - counts[NEW]
        seen, skipped = _with_some_kept(generation, seen, show, step=step)
        state = {**state, "prompts_consumed": consumed, "curriculum": measured}
        unusable = 0 if seen.kept_PS.any() else seen.kept_PS.size
        state, emptiness = count_empty(state, step, unusable, seen.episodes, show)
        metrics |= emptiness
        useful = np.flatnonzero(seen.kept_PS.any(1))[: schedule.batch]
        examples = schedule.examples_at(seen.places)
        chosen = chosen_rows(examples, seen.places, seen.rows, useful, kept_PS=seen.kept_PS)
        dropped = seen.places if skipped else seen.places[~seen.kept_PS.any(1)]
        left = np.flatnonzero(~np.isin(held.places, np.concatenate([seen.places[useful], dropped])))
        held = held.select(left)
        baseline = generation.greedy_baseline and not skipped and len(useful) > 0
        rows = one_step_of(generation, [chosen], begin, clock=clock, baseline=baseline)
        metrics |= {} if generation.selection.filter is None else {SKIPPED: float(skipped or not len(useful))}
        version = generation.engine.engine.version or 0
        rows = with_stale(rows, version)
        metrics |= _staleness(rows, version)
        if generation.shows(step) and len(useful):
            show.samples(step, _shown(generation, chosen, rows))
        return rows, {**state, "begun": held}, metrics

    def saved(state: trees.Tree, largest: Callable[[int], int]) -> trees.Tree:
        begun = state["begun"]
        return {**state, "begun": writer.saved(begun, largest) if isinstance(begun, BegunGroups) else begun}

    def rows(state: trees.Tree) -> HeldRows:
        held = writer.rows(state["begun"])
        return held._replace(names=frozenset(f"begun/{name}" for name in held.names))

    def restored(state: trees.Tree) -> trees.Tree:
        begun = state["begun"]
        owner = generating_ranks(len(begun["owner"]), 1, mesh.size(mesh.row_axes))
        return {**whole.stored.restored(state), "begun": {**begun, "owner": torch.from_numpy(owner)}}

    first = {**whole.init(), "begun": writer.saved(writer.nothing(), lambda width: width)}
    return whole._replace(
        init=lambda: trees.map(lambda x: x, first),
        next_rows=next_rows,
        stored=StoredState(saved, rows, restored, spread=True),
        close=writer.close,
    )


def _with_some_kept(generation: Generation, seen: Examined, show: Show, step: int) -> tuple[Examined, bool]:
    """If the filter kept no sample, keep the rewarded ones; also returns True if the step is to be skipped.

    Args:
      generation: as in `prompt_source`.
      seen: prompts that the filter examined.
      show: receives a remark if fewer prompts are kept than the batch needs.
      step: number of the step.
    """
    wanted = generation.schedule.batch
    kept = min(int(seen.kept_PS.any(1).sum()), wanted)
    if kept:
        if kept < wanted:
            what = "the filter kept" if generation.selection.filter else "there are episodes of"
            show.note(f"step {step}: {what} {kept} prompts, the batch needs {wanted}")
        return seen, False
    rewarded_PS = rewarded_samples(generation, seen.rows, len(seen.places))
    if not rewarded_PS.any():
        return seen, False  # see `count_empty`
    skipped = skips_empty(generation.selection.when_empty, step, len(seen.places), show)
    return seen._replace(kept_PS=rewarded_PS), skipped


def _shown(generation: Generation, chosen: Chosen, rows: Rows) -> list[ShownSample]:
    """The first sample of each of the first prompts of a step."""
    examples = chosen.examples[:SHOWN_PROMPTS]
    firsts = take(rows, np.cumsum([0, *chosen.counts])[: len(examples)])
    batch = firsts.batch
    completions = []
    for row, number in enumerate(firsts.own.tolist()):
        here = slice(int(batch.mask[row].int().argmax()), int(batch.length[number]))
        tokens, logp, versions = (x[row, here].cpu() for x in (batch.tokens, batch.rollout_logp, batch.version))
        finish = "length" if batch.truncated[number] else "stop"
        completions.append(Completion(number, tokens.long(), logp, logp, versions.long(), finish))
    done = empty_rollout(generation)._replace(completions=completions, owner=firsts.owner, mesh=firsts.mesh)
    if generation.episodes is not None:
        score_R = firsts.batch.score
        done = done._replace(score=score_R, scores=score_R[:, None], failed=None)
    return first_samples(generation, examples, done, rows=firsts, samples=1)


def _fill(
    writer: PartialWriter[RecordT], held: BegunGroups[RecordT], new: NewPrompts, batch: int
) -> tuple[BegunGroups[RecordT], int, list[Examined], Mapping[str, float]]:
    """Write until enough prompts are finished.

    First continue all begun prompts, and begin as many as the batch lacks. While prompts are still missing, begin
    further ones, as long as no more are left unfinished than are trained on during the longest completion; after that,
    finish the oldest unfinished ones beyond the budget of tokens.

    Args:
      writer: writes the rows.
      held: prompts that were begun in earlier steps.
      new: the next position in the order of the prompts, and their weights.
      batch: prompts of a step.

    Returns: all prompts that are begun or finished, the next position in their order, the finished ones, and counts.
    """
    under_way = batch * (-(-writer.longest // writer.tokens) - 1)
    examined = []
    begun = beyond = kept = 0
    count = max(0, batch - int((held.waiting == 0).sum()))
    going_on = np.ones(len(held.places), bool)
    held, consumed = writer.write(held, going_on, new._replace(count=count), writer.tokens)
    while True:
        begun += count
        known = np.concatenate([np.zeros(0, np.int64), *(prompts.places for prompts in examined)])
        fresh = np.flatnonzero((held.waiting == 0) & ~np.isin(held.places, known))
        if len(fresh):
            examined.append(writer.examine(held.select(fresh)))
            kept += int(examined[-1].kept_PS.any(1).sum())
        missing = batch - kept
        waiting = np.flatnonzero(held.waiting > 0)
        may_begin = missing if writer.most_new is None else min(missing, writer.most_new - begun)
        count = max(0, min(may_begin, under_way + missing - len(waiting)))
        if missing <= 0 or not (count or len(waiting)):
            counts = {NEW: begun, "partial/unfinished_prompts": len(waiting), "partial/prompts_beyond_budget": beyond}
            return held, consumed, examined, counts
        if count:
            none = np.zeros(len(held.places), bool)
            held, consumed = writer.write(held, none, new._replace(begin=consumed, count=count), writer.tokens)
        else:
            oldest = np.isin(np.arange(len(held.places)), waiting[:missing])
            held, consumed = writer.write(held, oldest, new._replace(begin=consumed), None)
            beyond += min(missing, len(waiting))


def _joined_examined(examined: Sequence[Examined]) -> Examined:
    """Join them in the order of the prompts."""
    places = np.concatenate([prompts.places for prompts in examined])
    kept_PS = np.concatenate([prompts.kept_PS for prompts in examined])
    order = np.argsort(places)
    samples = kept_PS.shape[1]
    numbers = torch.from_numpy(sample_numbers(order, samples))
    return Examined(
        places[order],
        _in_order(examined, order, samples),
        kept_PS[order],
        scores=_joined([prompts.scores for prompts in examined], numbers),
        failed=_joined([prompts.failed for prompts in examined], numbers),
        entries=add_totals(*(prompts.entries for prompts in examined)),
        episodes=add_totals(*(prompts.episodes for prompts in examined)),
    )


def _joined(parts: Sequence[Tensor | None], numbers: Tensor) -> Tensor | None:
    """Columns of all samples in an order; None where the parts have none."""
    present = [part for part in parts if part is not None]
    return torch.cat(present)[numbers.to(present[0].device)] if present else None


def _in_order(examined: Sequence[Examined], order: np.ndarray, samples: int) -> Rows:
    """Rows of all examined prompts, ordered by their prompts.

    Args:
      examined: the prompts; groups and episodes of their rows count from 0 in each part.
      order: numbers of the prompts among those of all parts, in their new order.
      samples: of each prompt.
    """
    rows = join_rows([prompts.rows for prompts in examined])
    if rows.examples is None:
        return take(rows, sample_numbers(order, samples))
    begins = np.cumsum([0, *(len(prompts.places) * samples for prompts in examined)])
    parts = [len(prompts.rows.owner) for prompts in examined]
    episode_B = rows.examples + np.repeat(begins[:-1], parts)
    prompt_B = np.argsort(order)[episode_B // samples]
    number_B = prompt_B * samples + episode_B % samples
    by_number = np.argsort(number_B, kind="stable")
    episode = torch.from_numpy(number_B[by_number]).to(rows.batch.episode.device)
    return take(rows, by_number).with_fields(episode=episode, group=episode // samples)


def _metrics(generation: Generation, seen: Examined) -> dict[str, float]:
    """Metrics of a step's finished prompts."""
    useful = np.asarray(seen.kept_PS.any(1))
    metrics = {"partial/finished_prompts_left": float(max(0, int(useful.sum()) - generation.schedule.batch))}
    if seen.rows.batch.get("failed") is not None:
        metrics["reward/failed"] = failed_rows(seen.rows)
    if generation.selection.filter is None:
        return metrics
    return metrics | filter_metrics(int(useful.sum()), len(useful), int((~seen.kept_PS[useful]).sum()))


def _staleness(rows: Rows, version: int) -> dict[str, float]:
    """Syncs of weights between the sampling of a token and this step, over the sampled tokens of all rows."""
    batch = on_cpu(rows).batch
    lag_bT = (version - batch.version) * batch.mask
    sums = batch.across.sums
    count = max(1.0, float(sums(batch.mask).sum()))
    largest = float(batch.across.kth_largest(lag_bT.double(), torch.tensor(1))) if len(rows.owner) else 0.0
    return {"partial/staleness_mean": float(sums(lag_bT).sum()) / count, "partial/staleness_max": largest}
