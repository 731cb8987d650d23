"""Partial rollouts: a completion is written over several steps, so that no step waits for the longest one.

In each step a request samples a limited number of new tokens. An unfinished completion continues in the next step with
that step's weights; its tokens, their log-probabilities and the versions of the weights that sampled them are kept. A
prompt is trained on once all its samples are finished. If fewer prompts are finished than a batch needs, further ones
are begun, so that a batch is full from the first step on. Prompts that finish beyond a full batch wait for the next
one, in the order of the prompts. None of this depends on the mesh or on timing.

Begun prompts are part of the source's state. Each rank holds and checkpoints its own rows of them; the rows to continue
are redistributed in each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch, as_dict
from funrl.data.order import places_in_order, take_next
from funrl.data.prompts import Example
from funrl.fields import FIELDS
from funrl.mesh.mesh import Mesh
from funrl.rollout.requests import Completion, Request, RequestGroups
from funrl.rollout.sampling import request_seed
from funrl.seeds import derived_seed
from funrl.trainer.sources.generation import empty_rollout, generating_ranks, run_requests, to_rows
from funrl.trainer.sources.observing import Show, ShownSample, first_samples
from funrl.trainer.sources.pending_rewards import Totals, add_totals, entry_metrics
from funrl.trainer.sources.prompts import (
    Generation,
    PromptSchedule,
    chosen_rows,
    failed_rows,
    filter_metrics,
    filter_samples,
    one_step_of,
    prompt_source,
    rewarded_samples,
    skips_empty,
)
from funrl.trainer.sources.source import SKIPPED, Source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows, join_rows, moved, on_cpu, rows_of, take, widened
from funrl.trainer.storage.row_shards import HeldRows


class BegunPrompts(NamedTuple):
    """Prompts that were begun and are not trained on yet, in the order of the prompts.

    Attributes:
      places: [P] position of each prompt in the order of the prompts.
      seeds: [R] seed of each row's request; the rows of a prompt are neighbours.
      paused: [R] rows that are not finished.
      rows: R rows, without the scores of reward models.
      entries: totals of further numbers that reward functions returned in the current step.
    """

    places: np.ndarray
    seeds: np.ndarray
    paused: np.ndarray
    rows: Rows
    entries: Totals = {}  # noqa: RUF012  (never mutated)

    def ready(self, samples: int) -> np.ndarray:
        """[P] bool, prompts whose samples are all finished."""
        return ~np.asarray(self.paused.reshape(-1, samples).any(1))

    def some(self, prompts: np.ndarray, samples: int) -> BegunPrompts:
        """Select prompts by their indices in `places`."""
        numbers = (prompts[:, None] * samples + np.arange(samples)).flatten()
        return BegunPrompts(
            self.places[prompts], self.seeds[numbers], self.paused[numbers], rows=take(self.rows, numbers)
        )


class Examined(NamedTuple):
    """Finished prompts that the filter has seen: places, rows with all scores, and the mask [P, S] of kept samples."""

    places: np.ndarray
    rows: Rows
    kept_PS: np.ndarray


class RowWriter(NamedTuple):
    """Settings for writing rows in a step.

    Attributes:
      generation: of the source.
      tokens: bound on the new tokens of a request in a step.
      clock: times the phases.
      weights: sampling weights of the prompts in this step; see `take_next`.
    """

    generation: Generation
    tokens: int
    clock: Clock
    weights: np.ndarray | None


class Filled(NamedTuple):
    """Prompts of a step.

    Attributes:
      held: all prompts that are begun or finished.
      consumed: next position in the order of the prompts.
      examined: finished prompts.
      begun: number of prompts begun in this step.
      beyond: number of prompts that were finished beyond the budget of tokens.
    """

    held: BegunPrompts
    consumed: int
    examined: Sequence[Examined]
    begun: int
    beyond: int


def partial_source(generation: Generation, tokens: int, clock: Clock, show: Show) -> Source:
    """A source whose rows the policy writes over several steps; evaluated with whole completions.

    Args:
      generation: as in `prompt_source`.
      tokens: bound on the new tokens of a request in a step.
      clock: times the phases.
      show: receives samples and remarks.
    """
    engine = generation.engine
    mesh = engine.mesh
    sampling = generation.sampling
    weighing = generation.schedule.weighing
    batch_size = generation.schedule.batch
    empty = to_rows((), empty_rollout(engine), sampling, pad=generation.pad, versions=True)
    nothing = BegunPrompts(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool), rows=empty)
    whole = prompt_source(generation, clock, show)

    def next_rows(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        begin = state["prompts_consumed"]
        weights, measured, weighed = weighing.weights(state["curriculum"], step)
        filled = _fill(RowWriter(generation, tokens, clock, weights=weights), _held(state["begun"], mesh), begin)
        held = filled.held
        seen = _joined_examined(filled.examined)
        numbers = _prompt_numbers(generation.schedule, seen.places)
        measured = weighing.measured(measured, numbers, seen.rows.batch.get("scores"), seen.rows.batch.get("failed"))
        metrics = weighed | _metrics(generation, filled, seen) | entry_metrics(held.entries)
        if weights is not None:
            metrics["curriculum/passed_over"] = filled.consumed - begin - filled.begun
        seen, skipped = _with_some_kept(generation, seen, show, step=step)
        useful = np.flatnonzero(seen.kept_PS.any(1))[:batch_size]
        chosen = chosen_rows(_examples(generation.schedule, seen.places), seen.rows, useful, kept_PS=seen.kept_PS)
        dropped = seen.places if skipped else seen.places[~seen.kept_PS.any(1)]
        left = np.flatnonzero(~np.isin(held.places, np.concatenate([seen.places[useful], dropped])))
        held = held.some(left, sampling.samples)
        rows = one_step_of(
            generation, [chosen], begin, clock=clock, baseline=generation.greedy_baseline and not skipped
        )
        metrics |= {} if generation.selection.filter is None else {SKIPPED: float(skipped)}
        version = engine.engine.version or 0
        rows = rows.with_fields(stale=rows.batch.mask & (rows.batch.version != version))
        metrics |= _staleness(rows, version)
        if generation.shows(step):
            show.samples(step, _first_rows(generation, chosen.examples[:8], rows, samples=chosen.counts))
        state = {**state, "prompts_consumed": filled.consumed, "curriculum": measured, "begun": _tree(held)}
        return rows, state, metrics

    def saved(state: trees.Tree) -> trees.Tree:
        held = _held(state["begun"], mesh)
        return {**state, "begun": _tree(held._replace(rows=widened(held.rows)))}

    def rows(state: trees.Tree) -> HeldRows:
        names = {f"begun/fields/{name}" for name in state["begun"]["fields"] if not FIELDS[name].kind.everywhere}
        return HeldRows(frozenset(names), state["begun"]["owner"].numpy(), mesh)

    def restored(state: trees.Tree) -> trees.Tree:
        begun = state["begun"]
        owner = generating_ranks(len(begun["owner"]), 1, mesh.size(mesh.row_axes))
        return {**whole.restored(state), "begun": {**begun, "owner": torch.from_numpy(owner)}}

    first = {**whole.init(), "begun": _tree(nothing)}
    return Source(
        lambda: trees.map(lambda x: x, first),
        next_rows,
        whole.evaluate,
        saved=saved,
        rows=rows,
        restored=restored,
        observed=whole.observed,
        spread=True,
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
            show.note(f"step {step}: the filter kept {kept} prompts, the batch needs {wanted}")
        return seen, False
    rewarded_PS = rewarded_samples(generation, seen.rows, len(seen.places))
    skipped = skips_empty(generation, show, step, prompts=len(seen.places))
    return seen._replace(kept_PS=rewarded_PS), skipped


def _fill(writer: RowWriter, held: BegunPrompts, begin: int) -> Filled:
    """Write until enough prompts are finished.

    First continue all begun prompts, and begin as many as the batch lacks. While prompts are still missing, begin
    further ones, as long as no more are left unfinished than are trained on during the longest completion; after that,
    finish the oldest unfinished ones beyond the budget of tokens.

    Args:
      writer: writes the rows.
      held: prompts that were begun in earlier steps.
      begin: next position in the order of the prompts.
    """
    generation, tokens, clock, _ = writer
    sampling = generation.sampling
    samples = sampling.samples
    batch = generation.schedule.batch
    most = batch * generation.selection.max_refills if generation.selection.filter else None
    under_way = batch * (-(-sampling.max_new_tokens // tokens) - 1)
    examined = []
    begun = beyond = kept = 0
    new = max(0, batch - int(held.ready(samples).sum()))
    held, consumed = _write(writer, held, held.paused, begin=begin, new=new, tokens=tokens)
    while True:
        begun += new
        known = np.concatenate([np.zeros(0, np.int64), *(prompts.places for prompts in examined)])
        fresh = np.flatnonzero(held.ready(samples) & ~np.isin(held.places, known))
        if len(fresh):
            examined.append(_examine(generation, clock, held.some(fresh, samples)))
            kept += int(examined[-1].kept_PS.any(1).sum())
        missing = batch - kept
        waiting = np.flatnonzero(~held.ready(samples))
        may_begin = missing if most is None else min(missing, most - begun)
        new = max(0, min(may_begin, under_way + missing - len(waiting)))
        if missing <= 0 or not (new or len(waiting)):
            return Filled(held, consumed, examined, begun=begun, beyond=beyond)
        if new:
            held, consumed = _write(writer, held, np.zeros_like(held.paused), begin=consumed, new=new, tokens=tokens)
        else:
            oldest = np.isin(np.arange(len(held.paused)) // samples, waiting[:missing])
            held, consumed = _write(writer, held, held.paused & oldest, begin=consumed, new=0, tokens=None)
            beyond += min(missing, len(waiting))


def _write(
    writer: RowWriter, held: BegunPrompts, goes_on: np.ndarray, begin: int, new: int, tokens: int | None
) -> tuple[BegunPrompts, int]:
    """Continue some rows and begin some prompts; return all begun prompts and the next position in the order.

    Args:
      writer: writes the rows.
      held: begun prompts.
      goes_on: [R] bool, rows to continue.
      begin: next position in the order of the prompts.
      new: number of prompts to begin.
      tokens: bound on the new tokens of each row; None: write to its end.
    """
    generation, _, clock, weights = writer
    schedule = generation.schedule
    sampling = generation.sampling
    mesh = generation.engine.mesh
    numbers = np.flatnonzero(goes_on)
    if not len(numbers) and not new:
        return held, begin
    samples = sampling.samples
    first = len(numbers)
    old = [example for example in _examples(schedule, held.places) for _ in range(samples)]
    taken = take_next(schedule.prompts, new, schedule.seed, position=begin, weights=weights)
    selected = [schedule.prompts[place] for place in taken.places.tolist()]
    seed = derived_seed(schedule.seed, begin)
    seeds = np.array([request_seed(seed, n) for n in range(new * samples)], dtype=np.int64)
    held = held._replace(rows=_dealt(held.rows, numbers, mesh))
    own = []
    for n in np.flatnonzero(goes_on & (held.rows.owner == held.rows.index)).tolist():
        written = _completion(held.rows, n, old[n], finish="paused")
        number = int(np.searchsorted(numbers, n))
        own.append(Request(number, old[n].tokens, sampling, seed=int(held.seeds[n]), begun=written, most=tokens))
    groups = RequestGroups([example.tokens for example in selected], sampling, seed, first=first, most=tokens)
    examples = [*(old[n] for n in numbers), *(example for example in selected for _ in range(samples))]
    with clock.phase("generate"):
        done = run_requests(generation.engine, groups, examples, rows=len(examples), own=own)
        rows = to_rows(examples, done, dataclasses.replace(sampling, samples=1), pad=generation.pad, versions=True)
    if done.reward_s:
        clock.move(done.reward_s, "generate", "reward")
    paused = (~done.finished & (done.lengths < sampling.max_new_tokens)).cpu().numpy()
    order = np.arange(len(old) + new * samples)
    order[numbers] = len(old) + np.arange(first)
    order[len(old) :] = len(old) + first + np.arange(new * samples)
    prompts = BegunPrompts(
        np.concatenate([held.places, taken.positions]),
        np.concatenate([held.seeds, seeds]),
        np.concatenate([held.paused, paused])[order],
        rows=take(join_rows([held.rows, rows]), order),
        entries=add_totals(held.entries, done.entries),
    )
    return prompts, taken.end


def _dealt(rows: Rows, numbers: np.ndarray, mesh: Mesh) -> Rows:
    """Redistribute some rows so that each rank has about as many of them, of about the same lengths."""
    owner = rows.owner.copy()
    longest_first = numbers[np.argsort(-rows.lengths[numbers], kind="stable")]
    owner[longest_first] = np.arange(len(numbers)) % mesh.size(mesh.row_axes)
    return moved(rows, owner, mesh)


def _examine(generation: Generation, clock: Clock, prompts: BegunPrompts) -> Examined:
    """Score finished prompts with all rewards and apply the filter."""
    samples = generation.sampling.samples
    rows = prompts.rows
    rows = rows.with_fields(group=torch.arange(len(rows.owner), device=rows.batch.length.device) // samples)
    if generation.rescore is not None:
        rows = generation.rescore(rows, _examples(generation.schedule, prompts.places), "")
    return Examined(prompts.places, rows, filter_samples(generation, rows, len(prompts.places)))


def _joined_examined(examined: Sequence[Examined]) -> Examined:
    """Join them in the order of the prompts."""
    places = np.concatenate([prompts.places for prompts in examined])
    kept_PS = np.concatenate([prompts.kept_PS for prompts in examined])
    order = np.argsort(places)
    samples = kept_PS.shape[1]
    numbers = (order[:, None] * samples + np.arange(samples)).flatten()
    return Examined(places[order], take(join_rows([prompts.rows for prompts in examined]), numbers), kept_PS[order])


def _metrics(generation: Generation, filled: Filled, seen: Examined) -> dict[str, float]:
    """Metrics of a step's prompts."""
    useful = np.asarray(seen.kept_PS.any(1))
    metrics: dict[str, float] = {
        "partial/new_prompts": filled.begun,
        "partial/unfinished_prompts": int((~filled.held.ready(generation.sampling.samples)).sum()),
        "partial/finished_prompts_left": max(0, int(useful.sum()) - generation.schedule.batch),
        "partial/prompts_beyond_budget": filled.beyond,
    }
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


def _first_rows(
    generation: Generation, examples: Sequence[Example], rows: Rows, samples: np.ndarray
) -> list[ShownSample]:
    """The first sample of each of the first prompts, in the form of `first_samples`."""
    firsts = take(rows, np.cumsum([0, *samples])[: len(examples)])
    truncated = firsts.batch.truncated.tolist()
    completions = [
        _completion(firsts, n, examples[n], finish="length" if truncated[n] else "stop")._replace(number=n)
        for n in firsts.own.tolist()
    ]
    done = empty_rollout(generation.engine)._replace(completions=completions, owner=firsts.owner, mesh=firsts.mesh)
    return first_samples(
        done, firsts, examples, samples=1, decode=generation.engine.decode, names=generation.reward_names
    )


def _completion(rows: Rows, number: int, example: Example, finish: str) -> Completion:
    """Tokens written so far of a row on this rank."""
    (row,) = rows.local(np.array([number]))
    batch = rows.batch
    here = slice(len(example.tokens), int(batch.length[number]))
    tokens, logp, versions = (x[row, here].cpu() for x in (batch.tokens, batch.rollout_logp, batch.version))
    return Completion(number, tokens.long(), logp, raw_logp=logp, versions=versions.long(), finish=finish)  # type: ignore[arg-type]


def _examples(schedule: PromptSchedule, places: np.ndarray) -> list[Example]:
    """The prompts at these positions of the order."""
    return [schedule.prompts[number] for number in _prompt_numbers(schedule, places).tolist()]


def _prompt_numbers(schedule: PromptSchedule, places: np.ndarray) -> np.ndarray:
    """Indices of the prompts at these positions of the order."""
    if not len(places):
        return places
    first = int(places.min())
    return places_in_order(schedule.prompts, int(places.max()) + 1 - first, schedule.seed, position=first)[
        places - first
    ]


def _tree(held: BegunPrompts) -> dict[str, trees.Tree]:
    """Begun prompts as a tree of tensors."""
    columns = {"places": held.places, "seeds": held.seeds, "paused": held.paused, "owner": held.rows.owner}
    tensors: dict[str, Tensor] = {name: torch.from_numpy(x) for name, x in columns.items()}
    return {**tensors, "fields": as_dict(held.rows.batch)}


def _held(tree: dict[str, trees.Tree], mesh: Mesh) -> BegunPrompts:
    rows = rows_of(Batch(**tree["fields"]), tree["owner"].numpy(), mesh)
    return BegunPrompts(tree["places"].numpy(), tree["seeds"].numpy(), tree["paused"].numpy(), rows=rows)
