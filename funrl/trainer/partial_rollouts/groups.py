"""Prompt groups that are written over several steps. A group stays with the replica that took it."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from funrl import trees
from funrl.data.order import take_next
from funrl.data.prompts import Example
from funrl.environments.resumable import CompletionEnvironment, GroupRecord, GroupRun, ResumableEpisodes, Round
from funrl.environments.run import EpisodeGroup
from funrl.mesh import collectives
from funrl.rollout.episode_replay import completion_of
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import EpisodeLimits, PolicySetup
from funrl.rollout.sampling import request_seed
from funrl.seeds import derived_seed
from funrl.trainer.sources.episode_rows import policy_setup, rollout_of_episodes
from funrl.trainer.sources.generation import (
    LONGEST_REMARK,
    collected_rollout,
    pending_rewards,
    settle_proof,
    to_rows,
)
from funrl.trainer.sources.group_rows import rescored
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.selection import SampledPrompts
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.storage.row_shards import HeldRows

GROUP_COLUMNS = ("places", "seeds", "owner", "waiting", "steps")
UNFILTERED_BATCHES = 2  # begun in a step, for episodes that continue or fail: most are far shorter than the longest
COMPLETION_LIMITS = EpisodeLimits(turns=1, environment_s=math.inf, retries=0, waiting=sys.maxsize)


@dataclass(frozen=True, eq=False)
class BegunGroups:
    """Groups that were begun and are not trained on yet, in the order of the prompts; an immutable value.

    Attributes:
      places: [P] position of each group's prompt in the order of the prompts.
      seeds: [P, S] of the samples.
      owner: [P] replica of each group, as an index over the row axes of the generate mesh.
      waiting: [P] samples that have not ended.
      steps: [P] steps in which the group was written.
      records: of this replica's own groups, by place.
      restarted: episodes begun anew in this step, since their environments differed from their records.
    """

    places: np.ndarray
    seeds: np.ndarray
    owner: np.ndarray
    waiting: np.ndarray
    steps: np.ndarray
    records: Mapping[int, GroupRecord]
    restarted: int = 0

    @property
    def own(self) -> list[GroupRecord]:
        """Records of this replica's groups, in their order."""
        return [self.records[place] for place in self.places.tolist() if place in self.records]

    def select(self, groups: np.ndarray) -> BegunGroups:
        """Some groups by their indices, ascending."""
        places = set(self.places[groups].tolist())
        return dataclasses.replace(
            self,
            **{name: getattr(self, name)[groups] for name in GROUP_COLUMNS},
            records={place: record for place, record in self.records.items() if place in places},
        )


class NewPrompts(NamedTuple):
    """Prompts to begin.

    Attributes:
      begin: next position in the order of the prompts.
      count: how many to begin.
      weights: sampling weights of the prompts in this step; see `take_next`.
    """

    begin: int
    count: int = 0
    weights: np.ndarray | None = None


class PartialWriter:
    """Writer of groups over several steps. Its methods are collective.

    Episodes wait for their next tokens with their environments alive. A completion is an episode of one reply.

    Attributes:
      longest: bound on the tokens that are sampled for a trajectory.
      most_new: bound on the groups begun in a step; None: as many as a batch needs.
    """

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
        self.generation = generation
        self.tokens = tokens
        self.clock = clock
        self.show = show
        self.samples = sampling.samples
        self.mesh = generation.engine.mesh
        self.index = int(self.mesh.index(self.mesh.row_axes))
        self.longest = sampling.max_new_tokens
        self.most_new = generation.schedule.batch * selection.max_refills if selection.filter else None
        self._examples: dict[int, Example] = {}  # by position in the order
        self._pending = None
        if setup is None:
            self._pending = pending_rewards(generation.engine, self._examples, self.samples)
            limits = COMPLETION_LIMITS._replace(fixed=generation.engine.queue == "fixed")
            self._episodes = ResumableEpisodes(CompletionEnvironment(), PolicySetup(sampling), limits, self._reward)
            return
        limits = setup.limits
        bounds = (limits.turns * sampling.max_new_tokens, limits.tokens, limits.length)
        self.longest = min(bound for bound in bounds if bound)
        self.most_new = self.most_new or generation.schedule.batch * UNFILTERED_BATCHES
        self._episodes = ResumableEpisodes(setup.environment, policy_setup(setup, sampling), limits)

    def write(
        self, held: BegunGroups, going_on: np.ndarray, new: NewPrompts, tokens: int | None
    ) -> tuple[BegunGroups, int]:
        """Continue some groups and begin some; return all, and the next position in the order of the prompts.

        Args:
          held: begun groups.
          going_on: [P] bool, groups whose unfinished samples to continue.
          new: prompts to begin.
          tokens: bound on the new tokens of each sample; None: write to its end.
        """
        schedule = self.generation.schedule
        going_on = going_on & (held.waiting > 0)
        if not going_on.any() and not new.count:
            return held, new.begin
        taken = take_next(schedule.prompts, new.count, schedule.seed, position=new.begin, weights=new.weights)
        noise = derived_seed(schedule.seed, new.begin)
        seeds = [request_seed(noise, n) for n in range(new.count * self.samples)]
        none = np.zeros(new.count, np.int64)
        begun = (taken.positions, np.array(seeds, np.int64).reshape(-1, self.samples), none - 1, none, none)
        columns = {
            name: np.concatenate([getattr(held, name), values])
            for name, values in zip(GROUP_COLUMNS, begun, strict=True)
        }
        written = np.concatenate([going_on, none == 0])
        columns["steps"] = columns["steps"] + written
        with self.clock.phase("generate"):
            return self._write_round(dataclasses.replace(held, **columns), written, new.count, tokens), taken.end

    def examine(self, held: BegunGroups) -> SampledPrompts:
        """Finished groups with all rewards, at their positions in the order of the prompts."""
        generation = self.generation
        engine = generation.engine
        sampling = generation.sampling
        examples = generation.schedule.examples_at(held.places)
        own = [(record.first + n, x) for record in held.own for n, x in enumerate(record.ended)]
        numbers = sample_numbers(np.flatnonzero(held.owner == self.index), self.samples).tolist()
        with self.clock.phase("generate"):
            if generation.episodes is not None:
                episodes = list(zip(numbers, [episode for _, episode in own], strict=True))
                done, rows = rollout_of_episodes(generation.episodes, engine, episodes, examples, sampling)
                return SampledPrompts(examples, held.places, done, rows)
            for number, episode in own:  # such as those of a checkpoint
                self._reward(number, episode)
            completions = [
                completion_of(episode.ends[0].leaf)._replace(number=number)
                for number, (_, episode) in zip(numbers, own, strict=True)
            ]
            done = collected_rollout(
                engine,
                completions,
                self._pending,
                rows=len(examples) * self.samples,
                begin=time.perf_counter(),
                numbers=[number for number, _ in own],
            )
            form = generation.form._replace(versions=True, choices=0)
            rows = to_rows(examples, done, sampling, form)
        if done.reward_s:
            self.clock.move(done.reward_s, "generate", "reward")
        return SampledPrompts(examples, held.places, done, rescored(generation, rows, examples))

    def nothing(self) -> BegunGroups:
        """No groups."""
        none = np.zeros(0, np.int64)
        return BegunGroups(none, np.zeros((0, self.samples), np.int64), none, none, steps=none, records={})

    def saved(self, held: BegunGroups, largest: Callable[[int], int]) -> dict[str, trees.Tree]:
        """Begun groups as a checkpoint stores them, with records of one width on all ranks; see `StoredState`."""
        records = [np.frombuffer(record.text.encode(), np.uint8) for record in held.own]
        stored = np.zeros((len(records), largest(max(map(len, records), default=0))), np.uint8)
        for row, record in zip(stored, records, strict=True):
            row[: len(record)] = record
        return {name: torch.from_numpy(getattr(held, name)) for name in GROUP_COLUMNS} | {
            "records": torch.from_numpy(stored)
        }

    def restored(self, tree: dict[str, trees.Tree]) -> BegunGroups:
        """The begun groups of such a tree."""
        groups = {name: tree[name].cpu().numpy() for name in GROUP_COLUMNS}
        own = groups["places"][groups["owner"] == self.index].tolist()
        texts = [bytes(row.numpy()).rstrip(b"\0").decode() for row in tree["records"].cpu()]
        records = {
            place: GroupRecord.from_text(place * self.samples, text) for place, text in zip(own, texts, strict=True)
        }
        return BegunGroups(**groups, records=records)

    def rows(self, tree: dict[str, trees.Tree]) -> HeldRows:
        """The leaves of such a tree that each replica has for its own groups."""
        return HeldRows(frozenset({"records"}), tree["owner"].cpu().numpy(), self.mesh)

    def close(self) -> None:
        """End all episodes and their environments."""
        self._episodes.close()

    def _reward(self, number: int, episode: Episode) -> None:
        """Begin to reward a completion that has ended, unless that is done."""
        if self._pending is not None:
            self._pending.add(completion_of(episode.ends[0].leaf)._replace(number=number))

    def _write_round(self, held: BegunGroups, written: np.ndarray, new: int, tokens: int | None) -> BegunGroups:
        """Write some groups, until each sample has ended or has sampled what it may.

        A group that was begun as many steps ago as the longest trajectory takes is run to its end, so that its oldest
        token is never older, however many trajectories its episodes have.

        Args:
          held: all groups, with those that begin.
          written: [P] bool, the groups.
          new: how many of them begin; they are the last ones.
          tokens: as of `write`.
        """
        mesh = self.mesh
        engine = self.generation.engine
        examples = self.generation.schedule.examples_at(held.places)
        self._examples.clear()
        self._examples.update(zip(held.places.tolist(), examples, strict=True))
        if self._pending is not None:
            self._pending.keep(self._examples)
        firsts = (held.places * self.samples).tolist()
        groups = [EpisodeGroup(*group) for group in zip(examples, firsts, held.seeds.tolist(), strict=True)]
        last = held.steps >= -(-self.longest // self.tokens)
        own = [
            (groups[n], record, None if last[n] else tokens)
            for n in np.flatnonzero(written).tolist()
            if (record := held.records.get(int(held.places[n])))
        ]
        with settle_proof(engine.proof):
            run = self._episodes.continue_groups(engine.engine, mesh, Round(groups[len(groups) - new :], own, tokens))
        number_of = {first: number for number, first in enumerate(firsts)}
        table = torch.zeros(1 + len(groups), 3, dtype=torch.int64)
        table[0, 0] = len(run.problems)
        for record in run.records:
            table[1 + number_of[record.first]] = torch.tensor([1, self.index, record.waiting])
        whole = collectives.psum(table.to(mesh.device), mesh, mesh.row_axes).cpu().numpy()
        ran_P, owner_P, waiting_P = whole[1:].T
        restarted = int(whole[0, 0])
        if restarted:
            self._note_restarted(run, restarted)
        return dataclasses.replace(
            held,
            owner=np.where(ran_P > 0, owner_P, held.owner),
            waiting=np.where(ran_P > 0, waiting_P, held.waiting),
            records={**held.records, **{record.first // self.samples: record for record in run.records}},
            restarted=held.restarted + restarted,
        )

    def _note_restarted(self, run: GroupRun, count: int) -> None:
        """Show why episodes begin anew."""
        problems = collectives.gather_objects("".join(run.problems[:1]), self.mesh)
        self.show.note(
            f"{count} episodes begin anew, as their environments did not repeat what a checkpoint has of them, such "
            f"as: {next(filter(None, problems))[:LONGEST_REMARK]}; let the environment draw from the seed that it gets"
        )


def sample_numbers(groups: Sequence[int] | np.ndarray, samples: int) -> np.ndarray:
    """Sample indices of some groups."""
    return (np.asarray(groups)[:, None] * samples + np.arange(samples)).flatten()
