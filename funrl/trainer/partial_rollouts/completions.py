"""Completions that are written over several steps."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch, as_dict
from funrl.data.order import take_next
from funrl.fields import FIELDS
from funrl.mesh.mesh import Mesh
from funrl.rollout.requests import Completion, Finish, Request, RequestGroups
from funrl.rollout.sampling import request_seed
from funrl.seeds import derived_seed
from funrl.trainer.partial_rollouts.begun import Examined, NewPrompts, examples_at, sample_numbers
from funrl.trainer.sources.generation import RewardedEngine, Rollout, run_requests, to_rows
from funrl.trainer.sources.pending_rewards import Totals, add_totals
from funrl.trainer.sources.selection import filter_samples
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows, join_rows, moved, rows_of, take, widened
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


class CompletionWriter:
    """Writer of completions; see `RowWriter`. Rows to continue are redistributed in each step."""

    def __init__(self, generation: Generation, clock: Clock):
        selection = generation.selection
        self.longest = generation.sampling.max_new_tokens
        self.most_new = generation.schedule.batch * selection.max_refills if selection.filter else None
        self._generation = generation
        self._form = generation.form._replace(versions=True, choices=0)
        self._clock = clock
        self._samples = generation.sampling.samples
        self._mesh = generation.engine.mesh

    def nothing(self) -> BegunPrompts:
        """No prompts."""
        generation = self._generation
        empty = to_rows(
            (),
            empty_rollout(generation.engine),
            generation.sampling,
            self._form,
        )
        return BegunPrompts(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool), rows=empty)

    def ready(self, held: BegunPrompts) -> np.ndarray:
        """[P] bool, prompts whose samples are all finished."""
        return ~np.asarray(held.paused.reshape(-1, self._samples).any(1))

    def select(self, held: BegunPrompts, prompts: np.ndarray) -> BegunPrompts:
        """Some prompts."""
        numbers = sample_numbers(prompts, self._samples)
        rows = take(held.rows, numbers)
        return BegunPrompts(held.places[prompts], held.seeds[numbers], held.paused[numbers], rows=rows)

    def write(
        self, held: BegunPrompts, going_on: np.ndarray, new: NewPrompts, tokens: int | None
    ) -> tuple[BegunPrompts, int]:
        """Continue some prompts and begin some; see `RowWriter`."""
        generation = self._generation
        schedule = generation.schedule
        sampling = generation.sampling
        goes_on = held.paused & np.repeat(going_on, self._samples)
        numbers = np.flatnonzero(goes_on)
        if not len(numbers) and not new.count:
            return held, new.begin
        samples = sampling.samples
        first = len(numbers)
        old = [example for example in examples_at(schedule, held.places) for _ in range(samples)]
        taken = take_next(schedule.prompts, new.count, schedule.seed, position=new.begin, weights=new.weights)
        selected = [schedule.prompts[place] for place in taken.places.tolist()]
        seed = derived_seed(schedule.seed, new.begin)
        seeds = np.array([request_seed(seed, n) for n in range(new.count * samples)], dtype=np.int64)
        held = held._replace(rows=_dealt(held.rows, numbers, self._mesh))
        own = []
        for n in np.flatnonzero(goes_on & (held.rows.owner == held.rows.index)).tolist():
            written = _completion(held.rows, n, finish="paused")
            number = int(np.searchsorted(numbers, n))
            own.append(Request(number, old[n].tokens, sampling, seed=int(held.seeds[n]), begun=written, most=tokens))
        groups = RequestGroups([example.tokens for example in selected], sampling, seed, first=first, most=tokens)
        examples = [*(old[n] for n in numbers), *(example for example in selected for _ in range(samples))]
        with self._clock.phase("generate"):
            done = run_requests(generation.engine, groups, examples, rows=len(examples), own=own)
            rows = to_rows(
                examples,
                done,
                dataclasses.replace(sampling, samples=1),
                self._form,
            )
        if done.reward_s:
            self._clock.move(done.reward_s, "generate", "reward")
        paused = (~done.finished & (done.lengths < sampling.max_new_tokens)).cpu().numpy()
        order = np.arange(len(old) + new.count * samples)
        order[numbers] = len(old) + np.arange(first)
        order[len(old) :] = len(old) + first + np.arange(new.count * samples)
        prompts = BegunPrompts(
            np.concatenate([held.places, taken.positions]),
            np.concatenate([held.seeds, seeds]),
            np.concatenate([held.paused, paused])[order],
            rows=take(join_rows([held.rows, rows]), order),
            entries=add_totals(held.entries, done.entries),
        )
        return prompts, taken.end

    def examine(self, held: BegunPrompts) -> Examined:
        """Score finished prompts with all rewards and apply the filter."""
        generation = self._generation
        rows = held.rows
        device = rows.batch.length.device
        rows = rows.with_fields(group=torch.arange(len(rows.owner), device=device) // self._samples)
        if generation.rewards.rescore is not None:
            rows = generation.rewards.rescore(rows, examples_at(generation.schedule, held.places), "")
        kept_PS = filter_samples(generation, rows, len(held.places))
        return Examined(held.places, rows, kept_PS, rows.batch.get("scores"), rows.batch.get("failed"))

    def metrics(self, held: BegunPrompts) -> dict[str, float]:
        """No further ones."""
        return {}

    def tree(self, held: BegunPrompts) -> dict[str, trees.Tree]:
        """Begun prompts as a tree of tensors."""
        columns = {"places": held.places, "seeds": held.seeds, "paused": held.paused, "owner": held.rows.owner}
        tensors: dict[str, Tensor] = {name: torch.from_numpy(x) for name, x in columns.items()}
        return {**tensors, "fields": as_dict(held.rows.batch)}

    def held(self, tree: dict[str, trees.Tree]) -> BegunPrompts:
        """The begun prompts of a tree."""
        rows = rows_of(Batch(**tree["fields"]), tree["owner"].numpy(), self._mesh)
        return BegunPrompts(tree["places"].numpy(), tree["seeds"].numpy(), tree["paused"].numpy(), rows=rows)

    def saved(self, tree: dict[str, trees.Tree]) -> dict[str, trees.Tree]:
        """The tree with rows of one width on all ranks."""
        held = self.held(tree)
        return self.tree(held._replace(rows=widened(held.rows)))

    def rows(self, tree: dict[str, trees.Tree]) -> HeldRows:
        """The fields that each rank has of its own rows."""
        names = {f"fields/{name}" for name in tree["fields"] if not FIELDS[name].kind.everywhere}
        return HeldRows(frozenset(names), tree["owner"].numpy(), self._mesh)

    def close(self) -> None:
        """Do nothing: no work runs between steps."""


def first_rollout(generation: Generation, rows: Rows, counts: np.ndarray) -> tuple[Rollout, Rows]:
    """The first row of each prompt as a completion, and these rows.

    Args:
      generation: as of the source.
      rows: of these and further prompts, one after the other.
      counts: [P] rows of each prompt.
    """
    firsts = take(rows, np.cumsum([0, *counts])[: len(counts)])
    truncated = firsts.batch.truncated.tolist()
    completions = [_completion(firsts, n, finish="length" if truncated[n] else "stop") for n in firsts.own.tolist()]
    done = empty_rollout(generation.engine)._replace(completions=completions, owner=firsts.owner, mesh=firsts.mesh)
    return done, firsts


def _completion(rows: Rows, number: int, finish: Finish) -> Completion:
    """Everything that was written after the prompt of a row on this rank."""
    (row,) = rows.local(np.array([number]))
    batch = rows.batch
    begin = int(batch.mask[row].int().argmax())
    here = slice(begin, int(batch.length[number]))
    tokens, logp, versions = (x[row, here].cpu() for x in (batch.tokens, batch.rollout_logp, batch.version))
    return Completion(number, tokens.long(), logp, raw_logp=logp, versions=versions.long(), finish=finish)


def _dealt(rows: Rows, numbers: np.ndarray, mesh: Mesh) -> Rows:
    """Redistribute some rows so that each rank has about as many of them, of about the same lengths."""
    owner = rows.owner.copy()
    longest_first = numbers[np.argsort(-rows.lengths[numbers], kind="stable")]
    owner[longest_first] = np.arange(len(numbers)) % mesh.size(mesh.row_axes)
    return moved(rows, owner, mesh)


def empty_rollout(engine: RewardedEngine) -> Rollout:
    """A rollout without prompts."""
    mesh = engine.mesh
    none = torch.zeros(0, dtype=torch.int64, device=mesh.device)
    scores = torch.zeros(0, len(engine.weights), dtype=torch.float64, device=mesh.device)
    failed = None if engine.on_error == "stop" else none.bool()
    owner = np.zeros(0, dtype=np.int64)
    return Rollout(
        (),
        lengths=none,
        finished=none.bool(),
        score=scores.sum(1),
        scores=scores,
        owner=owner,
        mesh=mesh,
        dtype=engine.dtype,
        failed=failed,
    )
