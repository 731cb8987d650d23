"""Messages between trainer and generator ranks: groups that are asked for, facts of written ones, requests."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.advantages.units import episode_units
from funrl.batch import FIELDS, Batch, as_dict, kind_of, schema_of
from funrl.data.prompts import Example
from funrl.fields import Field
from funrl.kinds import FieldKind, Value, line_places
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.handover import LineForm, blank_fields, line_forms
from funrl.rollout.requests import request_seed
from funrl.rollout.resident import ResidentEngine
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.sources.curriculum import PromptSchedule
from funrl.trainer.sources.evaluation import HeldoutText, heldout_texts
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.group_rows import WrittenSamples, write_group
from funrl.trainer.sources.observing import SHOWN_PROMPTS, ShownSample, shown_samples
from funrl.trainer.sources.pending_rewards import Totals, add_totals
from funrl.trainer.sources.prompts import BASELINE_SEED, baseline_sampling
from funrl.trainer.sources.selection import filter_samples
from funrl.trainer.sources.source import DroppedPrompt, Generation
from funrl.trainer.steps.step_rows import Rows, join_rows, rows_of

ORIGIN = {"origin": Field("row", "source", "the row's number among those of the generator ranks", dtype="int")}


class GroupPrompt(NamedTuple):
    """The prompt of a group.

    Attributes:
      index: among the prompts of the job.
      seed: of the noise of all prompts that are asked for together.
      number: of the prompt among these.
      position: in the order of prompts; -1: the trainer ranks take a step's prompts from the order when it begins.
    """

    index: int
    seed: int
    number: int
    position: int = -1

    def seeds(self, samples: int) -> list[int]:
        """Seeds of the samples.

        Args:
          samples: their number.
        """
        begin = self.number * samples
        return [request_seed(self.seed, begin + sample) for sample in range(samples)]

    @property
    def baseline_seed(self) -> int:
        """Seed of the greedy completion or episode that is written beside the samples."""
        return request_seed(BASELINE_SEED, self.position)


def prompts_at(schedule: PromptSchedule, positions: Sequence[int], firsts: Sequence[int]) -> list[GroupPrompt]:
    """Prompts at some positions of the order.

    Args:
      schedule: of the run.
      positions: of the prompts.
      firsts: for each the position from which the samples are numbered, whose seeds depend on both.
    """
    indices = schedule.numbers_at(np.array(positions, dtype=np.int64)).tolist()
    return [
        GroupPrompt(index, derived_seed(schedule.seed, first), position - first, position)
        for index, position, first in zip(indices, positions, firsts, strict=True)
    ]


class GroupWork(NamedTuple):
    """A group that the trainer ranks ask for.

    Attributes:
      number: under which its rows are kept; no other group of the run has it.
      place: in the ledger; None: of an evaluation, or a greedy completion or episode of a group that has a place.
      prompt: of the group.
      weights: version of the weights that all replicas hold before it begins.
      baseline: whether its samples come with the greedy completion or episode of the prompt.
      heldout: whether it is of an evaluation, which is written with `weights` alone.
    """

    number: int
    place: int | None
    prompt: GroupPrompt
    weights: int = 0
    baseline: bool = False
    heldout: bool = False

    @property
    def is_greedy(self) -> bool:
        """True of a greedy completion or episode alone."""
        return self.place is None and not self.heldout

    def example(self, generation: Generation) -> Example:
        """The prompt itself."""
        prompts = generation.evaluation.heldout if self.heldout else generation.schedule.prompts
        return prompts[self.prompt.index]

    def sampling(self, generation: Generation) -> Sampling:
        """Sampling of its samples."""
        return generation.evaluation.sampling if self.heldout else generation.sampling


def group_parts(work: GroupWork, sampling: Sampling) -> list[tuple[Sampling, list[int]]]:
    """Sampling and seeds of the samples of a group, and of its greedy baseline; each part is rewarded by itself.

    Args:
      sampling: of the samples.
    """
    prompt = work.prompt
    greedy = baseline_sampling(sampling)
    if work.is_greedy:
        return [(greedy, prompt.seeds(1))]
    samples = sampling, prompt.seeds(sampling.samples)
    return [samples, (greedy, [prompt.baseline_seed])] if work.baseline else [samples]


async def write_work(generation: Generation, resident: ResidentEngine, work: GroupWork) -> list[WrittenSamples]:
    """Write and reward the parts of a group; see `write_group`."""
    example = work.example(generation)
    parts = group_parts(work, work.sampling(generation))
    return await asyncio.gather(*(write_group(generation, resident, example, *part) for part in parts))


def baseline_of(number: int) -> int:
    """Number under which a replica keeps the greedy completion or episode that it has written with a group."""
    return number + (1 << 30)  # above the groups of any run


class WrittenRows(NamedTuple):
    """Completions and rows of a group, as far as every rank knows them; the rest stays where it is.

    Numbers are numpy's: many are sent in a fraction of the time of as many tensors.

    Attributes:
      rollout: fields of `Rollout`, without the completions and the mesh.
      owner: [B] of the rows, by their index over the row axes of the mesh to generate on.
      fields: of the rows whose kind is `everywhere`.
      lines: form of the lines of each other field, in the order in which they are sent.
      further: declarations of fields that are not among `FIELDS`.
    """

    rollout: Mapping[str, Any]
    owner: np.ndarray
    fields: Mapping[str, np.ndarray]
    lines: Mapping[str, LineForm]
    further: Mapping[str, Field]


class JoinedRows(NamedTuple):
    """`WrittenRows` of several groups, one group after the other.

    Attributes:
      numbers: [G] under which the rows of each group are kept.
      generators: [G] replica of each, by its index over the row axes of the mesh to generate on.
      counts: [G] rows of each.
      written: of all of them; totals are added in the order of the groups.
    """

    numbers: np.ndarray
    generators: np.ndarray
    counts: np.ndarray
    written: WrittenRows

    def take(self, places: np.ndarray) -> JoinedRows:
        """The rows of some groups, without facts of their rollout.

        Args:
          places: of the groups among these.
        """
        begins = np.cumsum(self.counts) - self.counts
        rows = line_places(begins[places], self.counts[places]).numpy()
        fields = {name: x[rows] for name, x in self.written.fields.items()}
        written = self.written._replace(rollout={}, owner=self.written.owner[rows], fields=fields)
        return JoinedRows(self.numbers[places], self.generators[places], self.counts[places], written)


class WrittenGroup(NamedTuple):
    """Facts of a group that a replica has written, for the trainer ranks.

    Attributes:
      generator: the replica, by its index over the row axes.
      work: the group, with the prompt that it has at the end.
      written: its rows; None where there is a problem.
      tokens: version -> sampled tokens of the rows.
      switches: of each row, (first sampled token, version) pairs; those of `baseline` follow.
      waited_s: seconds in which the replica had nothing to write, since it delivered another group.
      shown: its first sample, where samples are shown.
      notes: remarks.
      problem: message of the `RewardError` that ends the run; None without one.
      keeps: whether the filter keeps some of its rows, where it sees each group by itself.
      dropped: prompts before it in this place, whose rows the filter dropped.
      baseline: row of the greedy completion of the prompt, or rows of its greedy episode; None: there is none.
      texts: of a held-out prompt's completions, by their numbers among those of all.
      totals: rows on which a reward function failed, and totals of all rows as in `Rollout`; of a group `without_rows`.
    """

    generator: int
    work: GroupWork
    written: WrittenRows | None
    tokens: Mapping[int, int]
    switches: Sequence[Sequence[tuple[int, int]]]
    waited_s: float
    shown: Sequence[ShownSample] = ()
    notes: Sequence[str] = ()
    problem: str | None = None
    keeps: bool = True
    dropped: Sequence[DroppedPrompt] = ()
    baseline: WrittenRows | None = None
    texts: Mapping[int, HeldoutText] = {}
    totals: tuple[int, Totals, Totals] = (0, {}, {})


class GroupFields(NamedTuple):
    """Rows of a group on their way to another process.

    Attributes:
      fields: of the rows, on the host.
      further: declarations of fields that are not among `FIELDS`.
    """

    fields: dict[str, Value]
    further: dict[str, Field]

    @classmethod
    def of(cls, batch: Batch) -> GroupFields:
        """Fields of rows."""
        return cls(trees.map(lambda x: x.cpu(), as_dict(batch)), further_fields(batch))

    def rows(self, mesh: Mesh) -> Rows:
        """The rows, on a mesh of this process alone."""
        fields = trees.map(lambda x: x.to(mesh.device), self.fields)
        return rows_of(Batch(FIELDS | self.further if self.further else FIELDS, **fields), mesh=mesh)


def describe_group(
    generation: Generation, written: Sequence[WrittenSamples], group: WrittenGroup, *, filters: bool
) -> WrittenGroup:
    """Add the facts of what was written to a group, and its first sample if its step shows it.

    Args:
      generation: of the replica.
      written: its samples; and its greedy completion or episode, if it has one.
      group: without rows.
      filters: whether the filter sees each group by itself.
    """
    done, rows, _ = written[0]
    if filters and group.work.place is not None:
        group = group._replace(keeps=bool(filter_samples(generation, rows, 1).any()))
    tokens, switches = versions_of(rows)
    if len(written) > 1:
        group = group._replace(baseline=written_rows(written[1].done, written[1].rows))
        switches = [*switches, *versions_of(written[1].rows)[1]]
    group = group._replace(written=written_rows(done, rows), tokens=tokens, switches=switches)
    decode = generation.engine.decode
    work = group.work
    if work.heldout:
        texts = heldout_texts(generation.evaluation, done.completions, decode, work.prompt.index)
        group = group._replace(texts=texts)
    if not is_shown(generation, work):
        return group
    names = generation.rewards.names[: done.scores.shape[1]]  # models reward it where it is trained
    samples = work.sampling(generation).samples
    return group._replace(
        shown=shown_samples(done, rows, [work.example(generation)], samples, decode=decode, names=names)
    )


def is_shown(generation: Generation, work: GroupWork) -> bool:
    """True if the first sample of a group is shown."""
    if work.place is None:
        return work.heldout and work.prompt.index < SHOWN_PROMPTS
    batch, place = divmod(work.place, generation.schedule.batch)
    return place < SHOWN_PROMPTS and generation.shows(batch + 1)


def written_rows(done: Rollout, rows: Rows) -> WrittenRows:
    """Completions and their rows as far as every rank knows them."""
    facts = done._asdict()
    for name in ("completions", "mesh"):
        del facts[name]
    known = {name: x.cpu().numpy() for name, x in as_dict(rows.batch).items() if kind_of(rows.batch, name).everywhere}
    forms = line_forms(*own_fields(rows.batch))
    facts = {name: x.cpu().numpy() if isinstance(x, Tensor) else x for name, x in facts.items()}
    return WrittenRows(facts, rows.owner, known, forms, further_fields(rows.batch))


def further_fields(batch: Batch) -> dict[str, Field]:
    """Declarations of fields that are not among `FIELDS`."""
    return {name: field for name, field in schema_of(batch).items() if name not in FIELDS}


def own_fields(batch: Batch) -> tuple[dict[str, Value], dict[str, FieldKind]]:
    """Fields that only the ranks of a row know, and their kinds, in the order in which they are sent."""
    fields = as_dict(batch)
    kinds = {name: kind for name in sorted(fields) if not (kind := kind_of(batch, name)).everywhere}
    return {name: fields[name] for name in kinds}, kinds


def split_origins(origins: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Runs of rows of one group each: its number, and the numbers of the rows among its own.

    There is at least one row.
    """
    numbers = origins >> 32
    begins = np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]])
    parts = np.split(origins & 0xFFFFFFFF, begins[1:])
    return [(int(numbers[begin]), part) for begin, part in zip(begins, parts, strict=True)]


def versions_of(rows: Rows) -> tuple[dict[int, int], list[list[tuple[int, int]]]]:
    """Tokens of each version, and each row's (first sampled token, version) pairs; none of rows without versions."""
    version_BT = rows.batch.get("version")
    if version_BT is None:
        return {}, []
    mask_BT = rows.batch.mask.cpu()
    version_BT = version_BT.cpu()
    versions, counts = version_BT[mask_BT].unique(return_counts=True)
    switches = [switches_of(version_T[mask_T]) for version_T, mask_T in zip(version_BT, mask_BT, strict=True)]
    return dict(zip(versions.tolist(), counts.tolist(), strict=True)), switches


def switches_of(versions: Tensor) -> list[tuple[int, int]]:
    """(First token, version) pairs of the versions of some tokens."""
    begins = np.flatnonzero(np.diff(versions.numpy(), prepend=-1)).tolist()
    return [(begin, int(versions[begin])) for begin in begins]


def without_rows(group: WrittenGroup) -> WrittenGroup:
    """A group without its rows but with their totals."""
    written = group.written
    if written is None:
        return group
    failed = written.fields.get("failed")
    count = 0 if failed is None else int(failed.sum())
    totals = (count, written.rollout["entries"], written.rollout["episodes"])
    return group._replace(written=None, baseline=None, totals=totals)


def plain_group(group: WrittenGroup) -> tuple[Any, ...]:
    """A group without texts as plain tuples, which are sent in a fraction of the time; see `group_of`."""
    group = group._replace(texts={})
    number, place, prompt, *further = group.work
    return (group.generator, (number, place, tuple(prompt), *further), *group[2:])


def group_of(values: Sequence[Any]) -> WrittenGroup:
    """The group of the values of `plain_group`."""
    generator, (number, place, prompt, *further), *facts = values
    return WrittenGroup(generator, GroupWork(number, place, GroupPrompt(*prompt), *further), *facts)


def in_place_of(lost: WrittenGroup | None, group: WrittenGroup) -> WrittenGroup:
    """A group that has taken the place of one which the filter has dropped, with the prompt of that among its own."""
    if lost is None:
        return group
    prompt = DroppedPrompt(lost.work.prompt.position, *lost.totals)
    return group._replace(dropped=[*lost.dropped, prompt], waited_s=group.waited_s + lost.waited_s)


def join_written(written: Sequence[tuple[int, int, WrittenRows]]) -> JoinedRows:
    """Join rows of groups; there is at least one group.

    Args:
      written: of each group the number under which its rows are kept, its replica and the rows.
    """
    numbers, generators, parts = zip(*written, strict=True)
    first = parts[0]
    rollout = joined_facts([part.rollout for part in parts])
    fields = {name: np.concatenate([part.fields[name] for part in parts]) for name in first.fields}
    owner = np.repeat(generators, counts := np.array([len(part.owner) for part in parts]))
    joined = WrittenRows(rollout, owner, fields, first.lines, first.further)
    return JoinedRows(np.array(numbers), np.array(generators), counts, joined)


def joined_facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join fields of the `Rollout` of groups, one group after the other; sums are taken in this order."""

    def joined(name: str) -> Any:
        values = [of_group[name] for of_group in facts]
        if name in ("entries", "episodes"):
            return add_totals(*values)
        if isinstance(values[0], Tensor):
            return torch.cat(values)
        return np.concatenate(values) if isinstance(values[0], np.ndarray) else values[0]

    return {name: joined(name) for name in facts[0]}


def joined_rollout(joined: JoinedRows, mesh: Mesh, device: torch.device) -> Rollout:
    """Completions or episodes of groups that other ranks have.

    Args:
      joined: of the groups.
      mesh: of the ranks that have them.
      device: of this rank.
    """
    facts = joined.written.rollout
    here = {name: torch.from_numpy(x).to(device) for name, x in facts.items() if isinstance(x, np.ndarray)}
    owner = np.repeat(joined.generators, len(here["lengths"]) // len(joined.numbers))
    return Rollout(completions=(), mesh=mesh, **{**facts, **here, "owner": owner, "reward_s": 0.0})


def joined_rows(joined: JoinedRows, mesh: Mesh, device: torch.device, samples: int) -> Rows:
    """Rows of groups that other ranks have.

    Args:
      joined, mesh, device: as of `joined_rollout`.
      samples: of a group.
    """
    written = joined.written
    begins = np.cumsum(joined.counts) - joined.counts
    group_B = np.repeat(np.arange(len(joined.numbers)), joined.counts)
    origins = (joined.numbers[group_B] << 32) + np.arange(len(group_B)) - begins[group_B]
    schema = (FIELDS | written.further).extended(ORIGIN)
    blank = blank_fields(written.lines, {name: schema[name].kind for name in written.lines}, device)
    known = {name: torch.as_tensor(x).to(device) for name, x in {**written.fields, "origin": origins}.items()}
    rows = rows_of(Batch(schema, **known, **blank), written.owner, mesh)
    return in_batch(rows, torch.from_numpy(group_B).to(device), samples)


def in_batch(rows: Rows, group_B: Tensor, samples: int) -> Rows:
    """Rows of groups with the numbers of their groups and episodes in a batch.

    Args:
      rows: whose groups and episodes are numbered from 0 in each group.
      group_B: number of each row's group.
      samples: of a group.
    """
    rows = rows.with_fields(group=group_B)
    episode_B = rows.batch.get("episode")
    if episode_B is None:
        return rows
    rows = rows.with_fields(episode=episode_B + group_B * samples)
    return rows.with_fields(unit=episode_units(rows.batch).index)


def join_groups(
    facts: Sequence[Mapping[str, Any]], parts: Sequence[Rows], mesh: Mesh, *, samples: int
) -> tuple[Rollout, Rows]:
    """The groups of a batch as one rollout, and their rows.

    Args:
      facts: fields of the `Rollout` of each group, in the order of the batch.
      parts: rows of each group.
      mesh: on which they were written.
      samples: of a group.
    """
    rows = join_rows(parts)
    group_B = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part.owner) for part in parts]))
    done = Rollout(**{**joined_facts(facts), "completions": (), "mesh": mesh, "reward_s": 0.0})
    return done, in_batch(rows, group_B.to(rows.batch.group.device), samples)


def age_metrics(groups: Sequence[Mapping[int, int]], newest: int) -> dict[str, float]:
    """Metrics of the ages of a batch's sampled tokens, in versions; none without tokens.

    Args:
      groups: of each group, version -> tokens that it sampled.
      newest: version of the weights that train on them.
    """
    tokens: collections.Counter[int] = collections.Counter()
    for group in groups:
        tokens.update(group)
    count = sum(tokens.values())
    if not count:
        return {}
    mean = sum((newest - version) * number for version, number in tokens.items()) / count
    return {"age/mean": mean, "age/max": float(newest - min(tokens))}
