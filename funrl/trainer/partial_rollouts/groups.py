"""Prompt groups that are written over several steps. A group stays with the replica that took it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.data.order import take_next
from funrl.environments.resumable import GroupRecord, ResumableEpisodes, Round
from funrl.environments.run import EpisodeGroup
from funrl.mesh import collectives
from funrl.rollout.policy import PolicySetup
from funrl.rollout.requests import Completion, Finish, Request, RequestGroups
from funrl.rollout.sampling import request_seed
from funrl.seeds import derived_seed
from funrl.serve.endpoint import serve_agent
from funrl.trainer.sources.episode_rows import rollout_of_episodes
from funrl.trainer.sources.generation import LONGEST_REMARK, Rollout, run_requests, settle_proof, to_rows
from funrl.trainer.sources.group_rows import rescored
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.pending_rewards import Totals, add_totals
from funrl.trainer.sources.selection import filter_samples
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows
from funrl.trainer.storage.row_shards import HeldRows

GROUP_COLUMNS = ("places", "seeds", "owner", "waiting", "steps")
FINISHES = get_args(Finish)
ROLLOUT_COLUMNS = ("lengths", "finished", "score", "scores", "failed")
UNFILTERED_BATCHES = 2  # begun in a step, for episodes that continue or fail: most are far shorter than the longest

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, eq=False)
class BegunGroups(Generic[RecordT]):
    """Groups that were begun and are not trained on yet, in the order of the prompts; an immutable value.

    Attributes:
      places: [P] position of each group's prompt in the order of the prompts.
      seeds: [P, S] of the samples.
      owner: [P] replica of each group, as an index over the row axes of the generate mesh.
      waiting: [P] samples that have not ended.
      steps: [P] steps in which the group was written.
      records: what is written of this replica's own groups, by place.
      columns: of a `Rollout` of all samples, where these are completions.
      restarted: episodes begun anew in this step, since their environments differed from their records.
      entries: totals of further numbers that reward functions returned in this step.
    """

    places: np.ndarray
    seeds: np.ndarray
    owner: np.ndarray
    waiting: np.ndarray
    steps: np.ndarray
    records: Mapping[int, RecordT]
    columns: Mapping[str, Tensor]
    restarted: int = 0
    entries: Totals = field(default_factory=dict)

    @property
    def own(self) -> list[RecordT]:
        """Records of this replica's groups, in their order."""
        return [self.records[place] for place in self.places.tolist() if place in self.records]

    def select(self, groups: np.ndarray) -> BegunGroups[RecordT]:
        """Some groups by their indices, ascending."""
        samples = torch.from_numpy(sample_numbers(groups, self.seeds.shape[1]))
        places = set(self.places[groups].tolist())
        return dataclasses.replace(
            self,
            **{name: getattr(self, name)[groups] for name in GROUP_COLUMNS},
            records={place: record for place, record in self.records.items() if place in places},
            columns={name: x[samples.to(x.device)] for name, x in self.columns.items()},
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


class Examined(NamedTuple):
    """Finished groups that the filter has seen.

    Attributes:
      places: [P] as in `BegunGroups`.
      rows: with all scores.
      kept_PS: [P, S] samples that the filter keeps.
      scores: [P * S, K] of each sample; None: there are no reward functions.
      failed: [P * S] bool, samples without a usable score; None: a failure ends the run.
      entries: totals of further numbers of rewards.
      episodes: totals of facts about episodes.
    """

    places: np.ndarray
    rows: Rows
    kept_PS: np.ndarray
    scores: Tensor | None = None
    failed: Tensor | None = None
    entries: Totals = {}  # noqa: RUF012  (never mutated)
    episodes: Totals = {}  # noqa: RUF012  (never mutated)


class PartialWriter(abc.ABC, Generic[RecordT]):
    """Writer of groups over several steps. Its methods are collective.

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
        self.generation = generation
        self.tokens = tokens
        self.clock = clock
        self.show = show
        self.samples = generation.sampling.samples
        self.mesh = generation.engine.mesh
        self.index = int(self.mesh.index(self.mesh.row_axes))
        self.longest = generation.sampling.max_new_tokens
        self.most_new = generation.schedule.batch * selection.max_refills if selection.filter else None

    def write(
        self, held: BegunGroups[RecordT], going_on: np.ndarray, new: NewPrompts, tokens: int | None
    ) -> tuple[BegunGroups[RecordT], int]:
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
        held = dataclasses.replace(
            held,
            **{
                name: np.concatenate([getattr(held, name), values])
                for name, values in zip(GROUP_COLUMNS, begun, strict=True)
            },
            columns={name: torch.cat([x, x.new_zeros(len(seeds), *x.shape[1:])]) for name, x in held.columns.items()},
        )
        written = np.concatenate([going_on, none == 0])
        held = dataclasses.replace(held, steps=held.steps + written)
        with self.clock.phase("generate"):
            return self.write_round(held, written, new=new.count, noise=noise, tokens=tokens), taken.end

    def metrics(self, held: BegunGroups[RecordT]) -> dict[str, float]:
        """Metrics of the groups that are begun at the end of a step."""
        return {}

    def nothing(self) -> BegunGroups[RecordT]:
        """No groups."""
        none = np.zeros(0, np.int64)
        return BegunGroups(none, np.zeros((0, self.samples), np.int64), none, none, steps=none, records={}, columns={})

    def saved(self, held: BegunGroups[RecordT], largest: Callable[[int], int]) -> dict[str, trees.Tree]:
        """Begun groups as a checkpoint stores them, with records of one width on all ranks; see `StoredState`."""
        records = [self.encode(record) for record in held.own]
        width = largest(max(map(len, records), default=0))
        tensors = {name: torch.from_numpy(getattr(held, name)) for name in GROUP_COLUMNS}
        stored = torch.zeros(len(records), width, dtype=self.encode(None).dtype)
        for row, record in zip(stored, records, strict=True):
            row[: len(record)] = record
        return {**tensors, "records": stored, "columns": dict(held.columns)}

    def restored(self, tree: dict[str, trees.Tree]) -> BegunGroups[RecordT]:
        """The begun groups of such a tree."""
        groups = {name: tree[name].cpu().numpy() for name in GROUP_COLUMNS}
        own = groups["places"][groups["owner"] == self.index].tolist()
        records = {place: self.decode(place, row) for place, row in zip(own, tree["records"].cpu(), strict=True)}
        return BegunGroups(**groups, records=records, columns=tree["columns"])

    def rows(self, tree: dict[str, trees.Tree]) -> HeldRows:
        """The leaves of such a tree that each replica has for its own groups."""
        return HeldRows(frozenset({"records"}), tree["owner"].cpu().numpy(), self.mesh)

    @abc.abstractmethod
    def close(self) -> None:
        """End all that runs between steps."""

    @abc.abstractmethod
    def examine(self, held: BegunGroups[RecordT]) -> Examined:
        """Score finished groups with all rewards and apply the filter."""

    @abc.abstractmethod
    def encode(self, record: RecordT | None) -> Tensor:
        """A record as numbers, without zeros at the end; None: no numbers."""

    @abc.abstractmethod
    def decode(self, place: int, numbers: Tensor) -> RecordT:
        """The record of these numbers, which zeros may follow."""

    @abc.abstractmethod
    def write_round(
        self, held: BegunGroups[RecordT], written: np.ndarray, *, new: int, noise: int, tokens: int | None
    ) -> BegunGroups[RecordT]:
        """Write some groups, until each sample has ended or has sampled what it may.

        Args:
          held: all groups, with those that begin.
          written: [P] bool, the groups.
          new: how many of them begin; they are the last ones.
          noise: seed of their noise.
          tokens: as of `write`.
        """


class CompletionWriter(PartialWriter[tuple[Completion, ...]]):
    """Writer of completions. What is written of a group is all that there is of it between two steps."""

    def nothing(self) -> BegunGroups[tuple[Completion, ...]]:
        """No groups."""
        return dataclasses.replace(super().nothing(), columns=_columns(empty_rollout(self.generation)))

    def examine(self, held: BegunGroups[tuple[Completion, ...]]) -> Examined:
        """Score finished groups with the models that reward them, and apply the filter."""
        generation = self.generation
        examples = generation.schedule.examples_at(held.places)
        completions = [completion for record in held.own for completion in record]
        owner = np.repeat(held.owner, self.samples)
        done = empty_rollout(generation)._replace(completions=completions, owner=owner, **held.columns)
        rows = to_rows(examples, done, generation.sampling, generation.form._replace(versions=True, choices=0))
        rows = rescored(generation, rows, examples)
        kept_PS = filter_samples(generation, rows, len(held.places))
        return Examined(held.places, rows, kept_PS, rows.batch.get("scores"), rows.batch.get("failed"))

    def encode(self, record: tuple[Completion, ...] | None) -> Tensor:
        """Lengths, ends, tokens, log-probabilities and versions."""
        numbers = [torch.zeros(0, dtype=torch.float64)]
        for _, tokens, sampling_logp, raw_logp, versions, finish, *_ in record or ():
            numbers += [torch.tensor([len(tokens), FINISHES.index(finish)]), tokens, sampling_logp, raw_logp, versions]
        return torch.cat([x.double() for x in numbers])

    def decode(self, place: int, numbers: Tensor) -> tuple[Completion, ...]:
        """The completions of these numbers."""
        completions = []
        for number in range(self.samples):
            length, finish = map(int, numbers[:2])
            fields = numbers[2 : 2 + 4 * length].reshape(4, length)
            sampling_logp, raw_logp = fields[1:3].to(self.generation.engine.dtype)
            tokens, versions = fields[::3].long()
            completions.append(Completion(number, tokens, sampling_logp, raw_logp, versions, FINISHES[finish]))
            numbers = numbers[2 + 4 * length :]
        return tuple(completions)

    def write_round(
        self,
        held: BegunGroups[tuple[Completion, ...]],
        written: np.ndarray,
        *,
        new: int,
        noise: int,
        tokens: int | None,
    ) -> BegunGroups[tuple[Completion, ...]]:
        """Continue and begin completions, and reward those that end; see `PartialWriter`."""
        generation = self.generation
        sampling = generation.sampling
        samples = self.samples
        examples = generation.schedule.examples_at(held.places)
        places = held.places.tolist()
        rows = np.flatnonzero(self._paused(held.columns) & np.repeat(written, samples))
        first = len(rows) - new * samples
        own = []
        for n, row in enumerate(rows[:first].tolist()):
            group, sample = divmod(row, samples)
            if places[group] in held.records:
                begun = held.records[places[group]][sample]
                seed = int(held.seeds[group, sample])
                own.append(Request(n, examples[group].tokens, sampling, seed, begun, most=tokens))
        prompts = [example.tokens for example in examples[len(examples) - new :]]
        groups = RequestGroups(prompts, sampling, noise, first=first, most=tokens)
        done = run_requests(
            generation.engine, groups, [examples[row // samples] for row in rows.tolist()], rows=len(rows), own=own
        )
        if done.reward_s:
            self.clock.move(done.reward_s, "generate", "reward")
        index = torch.from_numpy(rows).to(done.lengths.device)
        columns = {name: held.columns[name].to(x).index_copy(0, index, x) for name, x in _columns(done).items()}
        records = dict(held.records)
        for completion in done.completions:
            group, sample = divmod(int(rows[completion.number]), samples)
            begun = records.get(places[group], (completion,) * samples)
            records[places[group]] = (*begun[:sample], completion, *begun[sample + 1 :])
        return dataclasses.replace(
            held,
            owner=np.concatenate([held.owner[: len(places) - new], done.owner[first::samples]]),
            waiting=self._paused(columns).reshape(-1, samples).sum(1),
            records=records,
            columns=columns,
            entries=add_totals(held.entries, done.entries),
        )

    def close(self) -> None:
        """Do nothing: nothing runs between steps."""

    def _paused(self, columns: Mapping[str, Tensor]) -> np.ndarray:
        """[P * S] bool, completions that have not ended."""
        return (~columns["finished"] & (columns["lengths"] < self.longest)).cpu().numpy()


class EpisodeWriter(PartialWriter[GroupRecord]):
    """Writer of episodes, which wait for their next tokens with their environments alive."""

    def __init__(self, generation: Generation, tokens: int, clock: Clock, show: Show):
        """As `PartialWriter`."""
        super().__init__(generation, tokens, clock, show)
        sampling = generation.sampling
        setup = generation.setup
        limits = setup.limits
        bounds = (limits.turns * sampling.max_new_tokens, limits.tokens, limits.length)
        self.longest = min(bound for bound in bounds if bound)
        self.most_new = self.most_new or generation.schedule.batch * UNFILTERED_BATCHES
        policy = PolicySetup(sampling, setup.chat, serve=serve_agent)
        self._episodes = ResumableEpisodes(setup.environment, policy, limits)

    def examine(self, held: BegunGroups[GroupRecord]) -> Examined:
        """Rows of ended episodes, and what the filter keeps of them."""
        generation = self.generation
        numbers = sample_numbers(np.flatnonzero(held.owner == self.index), self.samples).tolist()
        episodes = list(zip(numbers, [episode for record in held.own for episode in record.ended], strict=True))
        examples = generation.schedule.examples_at(held.places)
        done, rows = rollout_of_episodes(generation.setup, generation.engine, episodes, examples, generation.sampling)
        kept_PS = filter_samples(generation, rows, len(held.places))
        totals = {"entries": done.entries, "episodes": done.episodes}
        return Examined(held.places, rows, kept_PS, done.scores, done.failed, **totals)

    def metrics(self, held: BegunGroups[GroupRecord]) -> dict[str, float]:
        """Metrics of episodes between steps."""
        return {
            "partial/waiting_episodes": float(held.waiting.sum()),
            "partial/restarted_episodes": float(held.restarted),
        }

    def encode(self, record: GroupRecord | None) -> Tensor:
        """The bytes of its JSON."""
        data = b"" if record is None else record.text.encode()
        return torch.from_numpy(np.frombuffer(data, np.uint8).copy())

    def decode(self, place: int, numbers: Tensor) -> GroupRecord:
        """The record of this JSON."""
        return GroupRecord.from_text(place * self.samples, bytes(numbers.numpy()).rstrip(b"\0").decode())

    def write_round(
        self, held: BegunGroups[GroupRecord], written: np.ndarray, *, new: int, noise: int, tokens: int | None
    ) -> BegunGroups[GroupRecord]:
        """Run episodes; see `PartialWriter`.

        A group that was begun as many steps ago as the longest trajectory takes is run to its end, so that its oldest
        token is never older, however many trajectories its episodes have.
        """
        del noise  # it is in the seeds
        mesh = self.mesh
        engine = self.generation.engine
        examples = self.generation.schedule.examples_at(held.places)
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
            problems = collectives.gather_objects("".join(run.problems[:1]), mesh)
            self.show.note(
                f"{restarted} episodes begin anew, as their environments did not repeat what a checkpoint has of them, "
                f"such as: {next(filter(None, problems))[:LONGEST_REMARK]}; let the environment draw from the seed "
                "that it gets"
            )
        return dataclasses.replace(
            held,
            owner=np.where(ran_P > 0, owner_P, held.owner),
            waiting=np.where(ran_P > 0, waiting_P, held.waiting),
            records={**held.records, **{record.first // self.samples: record for record in run.records}},
            restarted=held.restarted + restarted,
        )

    def close(self) -> None:
        """End all episodes and their environments."""
        self._episodes.close()


def sample_numbers(groups: Sequence[int] | np.ndarray, samples: int) -> np.ndarray:
    """Sample indices of some groups."""
    return (np.asarray(groups)[:, None] * samples + np.arange(samples)).flatten()


def empty_rollout(generation: Generation) -> Rollout:
    """A rollout without completions."""
    engine = generation.engine
    mesh = engine.mesh
    none = torch.zeros(0, dtype=torch.int64, device=mesh.device)
    scores = torch.zeros(0, len(engine.weights), dtype=torch.float64, device=mesh.device)
    failed = None if engine.on_error == "stop" else none.bool()
    owner = np.zeros(0, np.int64)
    columns = {"score": none.double(), "scores": scores, "owner": owner, "failed": failed}
    return Rollout((), none, none.bool(), mesh=mesh, dtype=engine.dtype, **columns)


def _columns(done: Rollout) -> dict[str, Tensor]:
    """Columns of all rows of a rollout."""
    return {name: x for name in ROLLOUT_COLUMNS if (x := getattr(done, name)) is not None}
