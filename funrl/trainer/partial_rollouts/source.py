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

import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from funrl import trees
from funrl.data.order import take_next
from funrl.data.prompts import Example
from funrl.environments.resumable import CompletionEnvironment, GroupRecord, GroupRun, ResumableEpisodes
from funrl.environments.run import EpisodeGroup, EpisodeRun
from funrl.mesh import collectives
from funrl.rollout.engine import onload_engine
from funrl.rollout.episode_replay import completion_of
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import EpisodeLimits, PolicySetup
from funrl.rollout.sampling import request_seed
from funrl.seeds import derived_seed
from funrl.trainer.sources.episode_rows import policy_setup
from funrl.trainer.sources.generation import (
    LONGEST_REMARK,
    CompletionRun,
    generating_ranks,
    pending_rewards,
    settle_proof,
)
from funrl.trainer.sources.group_rows import first_samples, join_samples, rescored
from funrl.trainer.sources.observing import SHOWN_PROMPTS, Show
from funrl.trainer.sources.prompts import prompt_source, rows_of_choice
from funrl.trainer.sources.selection import SamplingRound, chosen_of_step, filtered_round, first_chosen, join_chosen
from funrl.trainer.sources.source import Generation, SampledPrompts, Source, StepRows, StoredState
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows, on_cpu, with_stale
from funrl.trainer.storage.row_shards import HeldRows

NEW = "partial/new_prompts"  # metric: prompts begun in a step
GROUP_COLUMNS = ("places", "seeds", "owner", "waiting", "steps")  # of a checkpoint, as the fields of `BegunGroup`
UNFILTERED_BATCHES = 2  # begun in a step, for episodes that continue or fail: most are far shorter than the longest
COMPLETION_LIMITS = EpisodeLimits(turns=1, environment_s=math.inf, retries=0, waiting=sys.maxsize)


class BegunGroup(NamedTuple):
    """A group that was begun and is not trained on yet.

    Attributes:
      place: position of its prompt in the order of the prompts.
      seeds: of its samples.
      owner: its replica, as an index over the row axes of the generate mesh.
      waiting: samples that have not ended.
      steps: number of steps in which it was written.
      record: of its samples, on its replica.
    """

    place: int
    seeds: Sequence[int]
    owner: int
    waiting: int
    steps: int
    record: GroupRecord | None = None


@dataclass(frozen=True, eq=False)
class BegunGroups:
    """Groups that were begun and are not trained on yet; an immutable value, a leaf of the source's state.

    Attributes:
      groups: in the order of the prompts.
    """

    groups: Sequence[BegunGroup] = ()


_Groups = Sequence[BegunGroup]


class PartialWriter:
    """Writer of groups over several steps. Its methods are collective.

    Episodes wait for their next tokens with their environments alive. A completion is an episode of one reply.

    Attributes:
      most_steps: bound on the steps that a trajectory takes.
      most_new: bound on the groups begun in a step; None: as many as a batch needs.
      restarted: episodes begun anew in this step, since their environments differed from their records.
      weights: sampling weights of the prompts in this step; see `take_next`.
    """

    restarted = 0
    weights: np.ndarray | None = None

    def __init__(self, generation: Generation, tokens: int, clock: Clock, show: Show):
        """Make it.

        Args:
          generation: of the source.
          tokens: bound on the new tokens of a completion, or of a trajectory, in a step.
          clock: times the phases.
          show: receives remarks.
        """
        selection = generation.selection
        sampling = generation.sampling
        setup = generation.episodes
        self.generation = generation._replace(form=generation.form._replace(versions=True, choices=0))
        self.tokens = tokens
        self.clock = clock
        self.show = show
        self.samples = sampling.samples
        self.mesh = generation.engine.mesh
        self.index = int(self.mesh.index(self.mesh.row_axes))
        longest = sampling.max_new_tokens
        self.most_new = generation.schedule.batch * selection.max_refills if selection.filter else None
        self.most_steps = -(-longest // tokens)
        self._examples: dict[int, Example] = {}  # by position in the order
        self._pending = None
        if setup is None:
            self._pending = pending_rewards(generation.engine, self._examples, self.samples)
            limits = COMPLETION_LIMITS._replace(fixed=generation.engine.queue == "fixed")
            self._episodes = ResumableEpisodes(CompletionEnvironment(), PolicySetup(sampling), limits, self._reward)
            return
        limits = setup.limits
        bounds = (limits.turns * longest, limits.tokens, limits.length)
        self.most_steps = -(-min(bound for bound in bounds if bound) // tokens)
        self.most_new = self.most_new or generation.schedule.batch * UNFILTERED_BATCHES
        self._episodes = ResumableEpisodes(setup.environment, policy_setup(setup, sampling), limits)

    def write(
        self, held: _Groups, places: Collection[int], begin: int, count: int = 0, *, tokens: int | None = None
    ) -> tuple[_Groups, int]:
        """Continue some groups and begin some; return all, and the next position in the order of the prompts.

        A group that was begun as many steps ago as the longest trajectory takes is run to its end, so that its oldest
        token is never older, however many trajectories its episodes have.

        Args:
          held: begun groups.
          places: groups whose unfinished samples to continue.
          begin: next position in the order of the prompts.
          count: prompts to begin.
          tokens: bound on the new tokens of each sample; None: write to its end.
        """
        if not places and not count:
            return held, begin
        schedule = self.generation.schedule
        taken = take_next(schedule.prompts, count, schedule.seed, position=begin, weights=self.weights)
        noise = derived_seed(schedule.seed, begin)
        seeds = [[request_seed(noise, n * self.samples + i) for i in range(self.samples)] for n in range(count)]
        begun = [BegunGroup(*group, -1, self.samples, 0) for group in zip(taken.positions.tolist(), seeds, strict=True)]
        continued = [group._replace(steps=group.steps + (group.place in places)) for group in held]
        groups = [*continued, *(group._replace(steps=1) for group in begun)]
        examples = schedule.examples_at([group.place for group in groups])
        self._examples.clear()
        self._examples.update({group.place: example for group, example in zip(groups, examples, strict=True)})
        if self._pending is not None:
            self._pending.keep(self._examples)
        own = [
            (self._episodes_of(group), group.record, None if group.steps >= self.most_steps else tokens)
            for group in continued
            if group.place in places and group.record is not None
        ]
        engine = self.generation.engine
        with self.clock.phase("generate"), settle_proof(engine.proof):
            run = self._episodes.continue_groups(
                engine.engine, self.mesh, [self._episodes_of(group) for group in begun], own, tokens
            )
        return self._joined(groups, run), taken.end

    def examine(self, groups: _Groups) -> SampledPrompts:
        """Finished groups with all rewards, at their positions in the order of the prompts."""
        generation = self.generation
        places = np.array([group.place for group in groups])
        examples = generation.schedule.examples_at(places)
        own = [
            (number * self.samples + n, group.place * self.samples + n, episode)
            for number, group in enumerate(groups)
            if group.record is not None
            for n, episode in enumerate(group.record.ended)
        ]
        run = EpisodeRun([(number, episode) for number, _, episode in own], ())
        if generation.episodes is None:
            for _, at_run, episode in own:  # such as those of a checkpoint
                self._reward(at_run, episode)
            completions = [completion_of(x.ends[0].leaf)._replace(number=number) for number, _, x in own]
            run = CompletionRun(completions, self._pending, time.perf_counter(), [at_run for _, at_run, _ in own])
        with self.clock.phase("generate"):
            done, rows = join_samples(generation, run, examples, generation.sampling)
        if done.reward_s:
            self.clock.move(done.reward_s, "generate", "reward")
        return SampledPrompts(examples, places, done, rescored(generation, rows, examples))

    def saved(self, held: _Groups, largest: Callable[[int], int]) -> dict[str, trees.Tree]:
        """Begun groups as a checkpoint stores them, with records of one width on all ranks; see `StoredState`."""
        columns = {
            name: torch.tensor([group[n] for group in held], dtype=torch.int64) for n, name in enumerate(GROUP_COLUMNS)
        }
        columns["seeds"] = columns["seeds"].reshape(-1, self.samples)
        texts = [np.frombuffer(group.record.text.encode(), np.uint8) for group in held if group.record is not None]
        stored = np.zeros((len(texts), largest(max(map(len, texts), default=0))), np.uint8)
        for row, text in zip(stored, texts, strict=True):
            row[: len(text)] = text
        return {**columns, "records": torch.from_numpy(stored)}

    def restored(self, tree: dict[str, trees.Tree]) -> _Groups:
        """The begun groups of such a tree."""
        columns = [tree[name].tolist() for name in GROUP_COLUMNS]
        groups = [BegunGroup(*values) for values in zip(*columns, strict=True)]
        texts = (bytes(row.numpy()).rstrip(b"\0").decode() for row in tree["records"].cpu())
        return [
            group._replace(record=GroupRecord.from_text(group.place * self.samples, next(texts)))
            if group.owner == self.index
            else group
            for group in groups
        ]

    def close(self) -> None:
        """End all episodes and their environments."""
        self._episodes.close()

    def _reward(self, number: int, episode: Episode) -> None:
        """Begin to reward a completion that has ended, unless that is done."""
        if self._pending is not None:
            self._pending.add(completion_of(episode.ends[0].leaf)._replace(number=number))

    def _episodes_of(self, group: BegunGroup) -> EpisodeGroup:
        return EpisodeGroup(self._examples[group.place], group.place * self.samples, group.seeds)

    def _joined(self, groups: _Groups, run: GroupRun) -> _Groups:
        """All groups after the replicas have run some.

        Args:
          groups: before that.
          run: of this replica.
        """
        records = {record.first // self.samples: record for record in run.records}
        table = torch.zeros(1 + len(groups), 3, dtype=torch.int64)
        table[0, 0] = len(run.problems)
        for number, group in enumerate(groups, 1):
            if group.place in records:
                table[number] = torch.tensor([1, self.index, records[group.place].waiting])
        (anew, _, _), *facts = collectives.psum(table.to(self.mesh.device), self.mesh, self.mesh.row_axes).tolist()
        if anew:
            problems = collectives.gather_objects("".join(run.problems[:1]), self.mesh)
            self.show.note(
                f"{anew} episodes begin anew, as their environments did not repeat what a checkpoint has of them, such "
                f"as: {next(filter(None, problems))[:LONGEST_REMARK]}; let the environment draw from the seed that it "
                "gets"
            )
        self.restarted += anew
        return [
            group._replace(owner=owner, waiting=waiting, record=records.get(group.place)) if ran else group
            for group, (ran, owner, waiting) in zip(groups, facts, strict=True)
        ]


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
        writer.weights, measured, metrics = weighing.weights(state["curriculum"], step)
        writer.restarted = 0
        begun = state["begun"]
        begun = begun.groups if isinstance(begun, BegunGroups) else writer.restored(begun)
        held, sampled, rounds, counts = _fill(writer, begun, begin)
        for part in sampled:
            numbers = schedule.numbers_at(part.places)
            measured = weighing.measured(measured, numbers, part.done.scores, part.done.failed)
        if writer.weights is not None:
            metrics["curriculum/passed_over"] = rounds[-1].end - begin - counts[NEW]
        if generation.shows(step):
            parts = [first_samples(generation, x.examples, x.done, x.rows, writer.samples) for x in sampled]
            show.samples(step, [sample for part in parts for sample in part][:SHOWN_PROMPTS])
        choice = chosen_of_step(generation, rounds, sampled, step, show)
        ready = {place for part in choice.chosen for place in part.places.tolist()}
        choice = choice._replace(chosen=[first_chosen(join_chosen(choice.chosen), schedule.batch)])
        rows, state, counted = rows_of_choice(generation, clock, show, state=state, step=step, choice=choice)
        later = ready - set(choice.chosen[0].places.tolist())
        held = [group for group in held if group.waiting or group.place in later]
        version = generation.engine.engine.version or 0
        rows = with_stale(rows, version)
        metrics |= {
            **counted,
            **counts,
            "partial/finished_prompts_left": float(len(later)),
            **_staleness(rows, version),
        }
        return rows, {**state, "begun": BegunGroups(held), "curriculum": measured}, metrics

    def saved(state: trees.Tree, largest: Callable[[int], int]) -> trees.Tree:
        begun = state["begun"]
        return {**state, "begun": writer.saved(begun.groups, largest) if isinstance(begun, BegunGroups) else begun}

    def rows(state: trees.Tree) -> HeldRows:
        return HeldRows(frozenset({"begun/records"}), state["begun"]["owner"].cpu().numpy(), mesh)

    def restored(state: trees.Tree) -> trees.Tree:
        begun = state["begun"]
        owner = generating_ranks(len(begun["owner"]), 1, mesh.size(mesh.row_axes))
        return {**whole.stored.restored(state), "begun": {**begun, "owner": torch.from_numpy(owner)}}

    first = {**whole.init(), "begun": writer.saved((), lambda width: width)}
    return whole._replace(
        init=lambda: trees.map(lambda x: x, first),
        next_rows=next_rows,
        stored=StoredState(saved, rows, restored, spread=True),
        close=writer.close,
    )


def _fill(
    writer: PartialWriter, held: _Groups, consumed: int
) -> tuple[_Groups, list[SampledPrompts], list[SamplingRound], Mapping[str, float]]:
    """Write until enough prompts are finished.

    First continue all begun prompts, and begin as many as the batch lacks. While prompts are still missing, begin
    further ones, as long as no more are left unfinished than are trained on during the longest completion; after that,
    finish the oldest unfinished ones beyond the budget of tokens.

    Args:
      writer: writes the rows.
      held: prompts that were begun in earlier steps.
      consumed: the next position in the order of the prompts.

    Returns: all prompts that are begun or finished, the finished ones, what the filter keeps of them, and metrics.
    """
    generation = writer.generation
    batch = generation.schedule.batch
    under_way = batch * (writer.most_steps - 1)
    sampled: list[SampledPrompts] = []
    rounds: list[SamplingRound] = []
    known = set[int]()
    begun = beyond = 0
    count = max(0, batch - sum(not group.waiting for group in held))
    waiting = {group.place for group in held if group.waiting}
    held, consumed = writer.write(held, waiting, consumed, count, tokens=writer.tokens)
    while True:
        begun += count
        fresh = [group for group in held if not group.waiting and group.place not in known]
        if fresh:
            known.update(group.place for group in fresh)
            sampled.append(writer.examine(fresh))
            rounds.append(filtered_round(generation, sampled[-1], consumed))
        missing = batch - sum(len(part.kept) for part in rounds)
        waiting = [group.place for group in held if group.waiting]
        may_begin = missing if writer.most_new is None else min(missing, writer.most_new - begun)
        count = max(0, min(may_begin, under_way + missing - len(waiting)))
        if missing <= 0 or not (count or waiting):
            break
        if count:
            held, consumed = writer.write(held, (), consumed, count, tokens=writer.tokens)
        else:
            oldest = set(waiting[:missing])
            held, consumed = writer.write(held, oldest, consumed)
            beyond += len(oldest)
    counts = {NEW: begun, "partial/unfinished_prompts": len(waiting), "partial/prompts_beyond_budget": beyond}
    if generation.episodes is not None:
        episodes = sum(group.waiting for group in held)
        counts |= {"partial/waiting_episodes": episodes, "partial/restarted_episodes": writer.restarted}
    rounds[-1] = rounds[-1]._replace(end=consumed)
    return held, sampled, rounds, {name: float(x) for name, x in counts.items()}


def _staleness(rows: Rows, version: int) -> dict[str, float]:
    """Syncs of weights between the sampling of a token and this step, over the sampled tokens of all rows."""
    batch = on_cpu(rows).batch
    lag_bT = (version - batch.version) * batch.mask
    sums = batch.across.sums
    count = max(1.0, float(sums(batch.mask).sum()))
    largest = float(batch.across.kth_largest(lag_bT.double(), torch.tensor(1))) if len(rows.owner) else 0.0
    return {"partial/staleness_mean": float(sums(lag_bT).sum()) / count, "partial/staleness_max": largest}
