"""Partial rollouts: a completion is written over several steps, so that no step waits for the longest one.

In a step each request may draw so many new tokens. What is not finished by then goes on in the next step with the
weights of that step; its tokens, their log-probabilities and the versions of the weights that drew them stay. A prompt
is trained on when all its samples are finished. Where fewer prompts are finished than a batch needs, further ones are
begun, so a batch is full from the first step on; what is finished beyond a batch waits for the next one, the prompts
that were drawn first before the others. None of this depends on the mesh or on time.

What is begun is in the source's state. A rank holds its own rows of it and writes them to a checkpoint; rows that go on
are dealt out anew in each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch, as_dict, row_fields
from funrl.data.order import places_in_order, take_next
from funrl.mesh.mesh import Mesh
from funrl.rollout.requests import Completion, Request
from funrl.rollout.sampling import request_seed
from funrl.seeds import derived_seed
from funrl.trainer.clock import Clock
from funrl.trainer.generation import Example, Rollout, generating_ranks, to_rows
from funrl.trainer.observing import Show
from funrl.trainer.row_shards import HeldRows
from funrl.trainer.sources import (
    Generation,
    Source,
    chosen_rows,
    failed_rows,
    filtered_samples,
    one_step_of,
    prompt_source,
    rewarded_samples,
    show_samples,
)
from funrl.trainer.step_rows import Rows, join_rows, moved, on_cpu, rows_of, take, widened


class Budgeted(NamedTuple):
    """The way in which rows are written a part at a time.

    Attributes:
      fulfil: (groups of requests that replicas share, this replica's own requests, examples, rows) -> the completions,
        each example of as many rows as the others.
      version: () -> number of the engine's weights.
      nothing: completions of no prompts.
      tokens: new tokens of a request in a step.
    """

    fulfil: Callable[[Sequence[Sequence[Request]], Sequence[Request], Sequence[Example], int], Rollout]
    version: Callable[[], int]
    nothing: Rollout
    tokens: int

    @property
    def mesh(self) -> Mesh:
        """The generate mesh."""
        return self.nothing.mesh


class BegunPrompts(NamedTuple):
    """Prompts that were begun and not trained on yet, in the order of their numbers.

    Attributes:
      places: [P] position of each in the order of the prompts.
      seeds: [R] of each row's request; the rows of a prompt are neighbours.
      paused: [R] rows that are not finished.
      rows: R rows, without what a reward model gives.
    """

    places: np.ndarray
    seeds: np.ndarray
    paused: np.ndarray
    rows: Rows

    def ready(self, samples: int) -> np.ndarray:
        """[P] prompts all of whose samples are finished."""
        return ~np.asarray(self.paused.reshape(-1, samples).any(1))

    def some(self, prompts: np.ndarray, samples: int) -> BegunPrompts:
        """Some prompts, by their places here."""
        numbers = (prompts[:, None] * samples + np.arange(samples)).flatten()
        return BegunPrompts(self.places[prompts], self.seeds[numbers], self.paused[numbers], take(self.rows, numbers))


class Examined(NamedTuple):
    """Finished prompts that the filter has seen: their places, rows with all scores, and samples [P, S] kept."""

    places: np.ndarray
    rows: Rows
    kept_PS: np.ndarray


def partial_source(generation: Generation, budget: Budgeted, clock: Clock, show: Show) -> Source:
    """Rows that the policy writes over several steps; evaluated as `prompt_source` does, by whole completions."""
    g, empty = generation, to_rows((), budget.nothing, generation.sampling, generation.pad, versions=True)
    nothing = BegunPrompts(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool), empty)
    whole = prompt_source(g, clock, show)

    def draw(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        begin = state["prompts_consumed"]
        weights, told, weighed = g.weighing.weights(state["told"], step)
        at = _held(state["begun"], budget.mesh), begin
        held, consumed, examined, drawn, finished_early = _filled(g, budget, clock, *at, weights)
        seen = _joined_examined(examined)
        scored = seen.rows.batch.get("scores"), seen.rows.batch.get("failed")
        told = g.weighing.measured(told, _prompt_numbers(g, seen.places), *scored)
        useful = np.flatnonzero(seen.kept_PS.any(1))[: g.batch_prompts]
        metrics = weighed | _metrics(g, held, seen, drawn, finished_early)
        if weights is not None:
            metrics["curriculum/passed_over"] = consumed - begin - drawn
        if not len(useful):
            show.note(f"step {step}: the filter dropped all of {len(seen.places)} prompts; some are used as they are")
            seen = seen._replace(kept_PS=rewarded_samples(g, seen.rows, len(seen.places)))
            useful = np.flatnonzero(seen.kept_PS.any(1))[: g.batch_prompts]
        elif len(useful) < g.batch_prompts:
            show.note(f"step {step}: the filter kept {len(useful)} prompts, the batch needs {g.batch_prompts}")
        examples = _examples(g, seen.places)
        some = chosen_rows(examples, seen.rows, useful, seen.kept_PS)
        dropped = seen.places[~seen.kept_PS.any(1)]
        left = np.flatnonzero(~np.isin(held.places, np.concatenate([seen.places[useful], dropped])))
        held = held.some(left, g.sampling.samples)
        rows = one_step_of(g, [some], begin, clock)
        metrics |= _staleness(rows, budget.version())
        if g.shows(step):
            _show_first(g, show, step, some.examples[:8], rows, some.samples)
        return rows, {**state, "prompts_consumed": consumed, "told": told, "begun": _tree(held)}, metrics

    def saved(state: trees.Tree) -> trees.Tree:
        held = _held(state["begun"], budget.mesh)
        return {**state, "begun": _tree(held._replace(rows=widened(held.rows)))}

    def rows(state: trees.Tree) -> HeldRows:
        names = {f"begun/fields/{name}" for name in state["begun"]["fields"] if name not in row_fields()}
        return HeldRows(frozenset(names), state["begun"]["owner"].numpy(), budget.mesh)

    def restored(state: trees.Tree) -> trees.Tree:
        begun, mesh = state["begun"], budget.mesh
        owner = generating_ranks(len(begun["owner"]), 1, mesh.size(mesh.row_axes))
        return {**whole.restored(state), "begun": {**begun, "owner": torch.from_numpy(owner)}}

    first = {**whole.init(), "begun": _tree(nothing)}
    ways = {"saved": saved, "rows": rows, "restored": restored, "observed": whole.observed, "spread": True}
    return Source(lambda: trees.map(lambda x: x, first), draw, whole.evaluate, **ways)


def _filled(
    g: Generation, budget: Budgeted, clock: Clock, held: BegunPrompts, begin: int, weights: np.ndarray | None
) -> tuple[BegunPrompts, int, list[Examined], int, int]:
    """Write until enough prompts are finished.

    First all that is begun goes on, and as many prompts are begun as a batch lacks of finished ones. Then further ones
    are begun as they are missing, as long as no more will be left unfinished than the steps of the longest completion
    train on; then the first ones of those that are not finished are finished beyond the budget.

    Args:
      begin: position in the order.
      weights: of the prompts; see `take_next`.

    Returns: all prompts that are begun or finished; the new position; the finished ones; how many were begun, and how
      many were finished beyond the budget.
    """
    samples, batch, drawn, beyond = g.sampling.samples, g.batch_prompts, 0, 0
    most = batch * g.max_refills if g.filter else None
    under_way = batch * (-(-g.sampling.max_new_tokens // budget.tokens) - 1)
    examined, kept, new = [], 0, max(0, batch - int(held.ready(samples).sum()))
    held, consumed = _written(g, budget, clock, held, held.paused, begin, new, budget.tokens, weights)
    while True:
        drawn += new
        known = np.concatenate([np.zeros(0, np.int64), *(one.places for one in examined)])
        fresh = np.flatnonzero(held.ready(samples) & ~np.isin(held.places, known))
        if len(fresh):
            examined.append(_examine(g, clock, held.some(fresh, samples)))
            kept += int(examined[-1].kept_PS.any(1).sum())
        missing, waiting = batch - kept, np.flatnonzero(~held.ready(samples))
        may_begin = missing if most is None else min(missing, most - drawn)
        new = max(0, min(may_begin, under_way + missing - len(waiting)))
        if missing <= 0 or not (new or len(waiting)):
            return held, consumed, examined, drawn, beyond
        if new:
            none = np.zeros_like(held.paused)
            held, consumed = _written(g, budget, clock, held, none, consumed, new, budget.tokens, weights)
        else:
            oldest = np.isin(np.arange(len(held.paused)) // samples, waiting[:missing])
            held, consumed = _written(g, budget, clock, held, held.paused & oldest, consumed, 0, None, weights)
            beyond += min(missing, len(waiting))


def _written(
    g: Generation, budget: Budgeted, clock: Clock, held: BegunPrompts, goes_on: np.ndarray, begin: int, new: int,
    tokens: int | None, weights: np.ndarray | None,
) -> tuple[BegunPrompts, int]:  # fmt: skip
    """The prompts that are held, after some more writing, and the position in the order.

    Args:
      goes_on: [R] rows that are continued.
      begin: position in the order.
      new: prompts that are begun.
      tokens: that each of these rows may draw; None: to its end.
      weights: of the prompts; see `take_next`.
    """
    samples, numbers = g.sampling.samples, np.flatnonzero(goes_on)
    if not len(numbers) and not new:
        return held, begin
    old = [example for example in _examples(g, held.places) for _ in range(samples)]
    taken = take_next(g.prompts, new, g.seed, begin, weights)
    drawn = [g.prompts[place] for place in taken.places.tolist()]
    seed = derived_seed(g.seed, begin)
    seeds = np.array([request_seed(seed, n) for n in range(new * samples)], dtype=np.int64)
    held = held._replace(rows=_dealt(held.rows, numbers, budget.mesh))
    mine = np.flatnonzero(goes_on & (held.rows.owner == held.rows.index))
    own = [
        Request(
            int(np.searchsorted(numbers, n)), old[n].tokens, g.sampling, int(held.seeds[n]),
            _completion(held.rows, n, old[n], "paused"), tokens,
        )
        for n in mine.tolist()
    ]  # fmt: skip
    first = len(numbers)
    groups = [
        [
            Request(first + n, example.tokens, g.sampling, int(seeds[n]), None, tokens)
            for n in range(i * samples, (i + 1) * samples)
        ]
        for i, example in enumerate(drawn)
    ]
    examples = [*(old[n] for n in numbers), *(example for example in drawn for _ in range(samples))]
    with clock.phase("generate"):
        done = budget.fulfil(groups, own, examples, len(examples))
        rows = to_rows(examples, done, dataclasses.replace(g.sampling, samples=1), g.pad, versions=True)
    if done.reward_s:
        clock.move(done.reward_s, "generate", "reward")
    paused = (~done.finished & (done.lengths < g.sampling.max_new_tokens)).cpu().numpy()
    order = np.arange(len(old) + new * samples)
    order[numbers], order[len(old) :] = len(old) + np.arange(first), len(old) + first + np.arange(new * samples)
    made = BegunPrompts(
        np.concatenate([held.places, taken.positions]),
        np.concatenate([held.seeds, seeds]),
        np.concatenate([held.paused, paused])[order],
        take(join_rows([held.rows, rows]), order),
    )
    return made, taken.end


def _dealt(rows: Rows, numbers: np.ndarray, mesh: Mesh) -> Rows:
    """Rows, some of them dealt out by their lengths: each rank has about as many, and as long ones."""
    owner = rows.owner.copy()
    owner[numbers[np.argsort(-rows.lengths[numbers], kind="stable")]] = np.arange(len(numbers)) % mesh.size(
        mesh.row_axes
    )
    return moved(rows, owner, mesh)


def _examine(g: Generation, clock: Clock, done: BegunPrompts) -> Examined:
    """Finished prompts with all rewards and what the filter says."""
    samples, rows = g.sampling.samples, done.rows
    rows = rows.with_fields(group=torch.arange(len(rows.owner), device=rows.batch.length.device) // samples)
    if g.rescore is not None:
        rows = g.rescore(rows, _examples(g, done.places), "")
    return Examined(done.places, rows, filtered_samples(g, rows, len(done.places)))


def _joined_examined(found: Sequence[Examined]) -> Examined:
    """All of them in the order of their prompts."""
    places, kept_PS = np.concatenate([one.places for one in found]), np.concatenate([one.kept_PS for one in found])
    order, samples = np.argsort(places), kept_PS.shape[1]
    numbers = (order[:, None] * samples + np.arange(samples)).flatten()
    return Examined(places[order], take(join_rows([one.rows for one in found]), numbers), kept_PS[order])


def _metrics(g: Generation, held: BegunPrompts, seen: Examined, drawn: int, beyond: int) -> dict[str, float]:
    """Numbers of a step's prompts."""
    useful, unfinished = np.asarray(seen.kept_PS.any(1)), int((~held.ready(g.sampling.samples)).sum())
    told: dict[str, float] = {
        "partial/new_prompts": drawn,
        "partial/unfinished_prompts": unfinished,
        "partial/finished_prompts_left": max(0, int(useful.sum()) - g.batch_prompts),
        "partial/prompts_beyond_budget": beyond,
    }
    if seen.rows.batch.get("failed") is not None:
        told["reward/failed"] = failed_rows(seen.rows)
    if g.filter is None:
        return told
    return told | {
        "filter_groups/kept_share": float(useful.mean()),
        "filter_groups/sampled_prompts": len(useful),
        "filter_groups/dropped_prompts": int((~useful).sum()),
        "filter_groups/dropped_rows": int((~seen.kept_PS[useful]).sum()),
    }


def _staleness(rows: Rows, version: int) -> dict[str, float]:
    """Loads of weights between the draw of a token and this step, over the sampled tokens of all rows."""
    batch = on_cpu(rows).batch
    lag_bT = (version - batch.version) * batch.mask
    sums = batch.across.sums
    count = max(1.0, float(sums(batch.mask).sum()))
    largest = float(batch.across.kth_largest(lag_bT.double(), torch.tensor(1))) if len(rows.owner) else 0.0
    return {"partial/staleness_mean": float(sums(lag_bT).sum()) / count, "partial/staleness_max": largest}


def _show_first(
    g: Generation, show: Show, step: int, examples: Sequence[Example], rows: Rows, samples: np.ndarray
) -> None:
    """The first sample of each of the first prompts."""
    firsts = take(rows, np.cumsum([0, *samples])[: len(examples)])
    truncated = firsts.batch.truncated.tolist()
    done = [
        _completion(firsts, n, examples[n], "length" if truncated[n] else "stop")._replace(number=n)
        for n in firsts.own.tolist()
    ]
    empty = torch.zeros(0)
    rolled = Rollout(done, empty, empty, empty, empty, firsts.owner, firsts.mesh)
    show_samples(g, show, step, examples, rolled, firsts, 1)


def _completion(rows: Rows, number: int, example: Example, finish: str) -> Completion:
    """The tokens that are written of a row on this rank."""
    (at,), batch = rows.local(np.array([number])), rows.batch
    here = slice(len(example.tokens), int(batch.length[number]))
    tokens, logp, versions = (x[at, here].cpu() for x in (batch.tokens, batch.rollout_logp, batch.version))
    return Completion(number, tokens.long(), logp, logp, versions.long(), finish)  # type: ignore[arg-type]


def _examples(g: Generation, places: np.ndarray) -> list[Example]:
    """The prompts at these positions of the order."""
    return [g.prompts[number] for number in _prompt_numbers(g, places).tolist()]


def _prompt_numbers(g: Generation, places: np.ndarray) -> np.ndarray:
    """Places among all prompts of those at some positions of the order."""
    if not len(places):
        return places
    first = int(places.min())
    return places_in_order(g.prompts, int(places.max()) + 1 - first, g.seed, first)[places - first]


def _tree(held: BegunPrompts) -> dict[str, trees.Tree]:
    """Prompts that are held, as a tree of tensors."""
    columns = {"places": held.places, "seeds": held.seeds, "paused": held.paused, "owner": held.rows.owner}
    tensors: dict[str, Tensor] = {name: torch.from_numpy(x) for name, x in columns.items()}
    return {**tensors, "fields": as_dict(held.rows.batch)}


def _held(tree: dict[str, trees.Tree], mesh: Mesh) -> BegunPrompts:
    rows = rows_of(Batch(**tree["fields"]), tree["owner"].numpy(), mesh)
    return BegunPrompts(tree["places"].numpy(), tree["seeds"].numpy(), tree["paused"].numpy(), rows)
