"""Requests of the trainer ranks to generator ranks, and the answers."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.batch import FIELDS, Batch, as_dict, kind_of, schema_of
from funrl.fields import Field
from funrl.kinds import FieldKind, Value
from funrl.mesh.pools.handover import LineForm, blank_fields, line_forms
from funrl.trainer.placement.group_prompts import GroupWork
from funrl.trainer.sources.evaluation import EvalRow
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.observing import ShownSample
from funrl.trainer.sources.source import DroppedPrompt
from funrl.trainer.steps.step_rows import Rows


class SendGroupsRequest(NamedTuple):
    """Hand over rows of groups, and let go of some groups. Its answer is empty.

    Attributes:
      origins: [B] of the rows, as `origins_of` numbers them, by their groups.
      owner: [B] the rank that has each row, by its index over the row axes of the mesh to generate on.
      lengths: [B] tokens of each row.
      to: [B] the rank that gets each row, by its index over the row axes of the mesh to train on.
      groups: numbers of those whose rows nobody asks for any more.
      unlogged: numbers of those whose episodes nobody asks for any more.
    """

    origins: np.ndarray
    owner: np.ndarray
    lengths: np.ndarray
    to: np.ndarray
    groups: Sequence[int]
    unlogged: Sequence[int]


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
      dropped: prompts before it in this place, whose rows the filter dropped.
      baseline: row of the greedy completion of the prompt, or rows of its greedy episode; None: there is none.
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
    dropped: Sequence[DroppedPrompt] = ()
    baseline: WrittenRows | None = None

    @property
    def rows(self) -> WrittenRows:
        """`written` of a group without a problem. Raises: RuntimeError, it has one."""
        if self.written is None:
            raise RuntimeError(f"the group has no rows: {self.problem}")
        return self.written


class GroupFields(NamedTuple):
    """Rows of a group on their way to the other tensor ranks, which have the same rows.

    Attributes:
      fields: of the rows.
      further: declarations of fields that are not among `FIELDS`.
    """

    fields: dict[str, Value]
    further: dict[str, Field]


class EpisodesRequest(NamedTuple):
    """Write the episodes of groups of the newest step to files. Its answer is `WrittenFiles`.

    Attributes:
      folder: for the files, which all ranks see.
      groups: numbers of groups that were written together, in their order, and the episodes of each.
    """

    folder: str
    groups: Sequence[tuple[Sequence[int], int]]


class WrittenFiles(NamedTuple):
    """Files that the generator ranks have written.

    Attributes:
      nbytes: of all of them.
      problem: of the first rank that cannot write; "" without one.
    """

    nbytes: int
    problem: str


class BeginEvaluationRequest(NamedTuple):
    """Begin to evaluate on the held-out prompts, beside groups, after `step`. Its answer is empty, once it has begun.

    Attributes:
      step: that has ended.
      version: of the weights, which stay until each replica has written its part.
    """

    step: int
    version: int


class EndEvaluationRequest(NamedTuple):
    """End the evaluation that was begun. Its answer is `HeldoutEvaluation`."""


class PoolAnswer(NamedTuple):
    """Answer to any request but a `LoadRequest`.

    Attributes:
      value: as the request says; None where there is a problem.
      notes: remarks since the answer before.
      problem: message of the `RewardError` that ends the run; None without one.
    """

    value: Any
    notes: Sequence[str] = ()
    problem: str | None = None


class HeldoutEvaluation(NamedTuple):
    """Evaluation on the held-out prompts.

    Attributes:
      metrics: of it.
      samples: some completions.
      table: rows of the table of samples.
    """

    metrics: Mapping[str, float]
    samples: Sequence[ShownSample]
    table: Sequence[EvalRow]


class WrittenRows(NamedTuple):
    """Completions and rows of a group, as far as every rank knows them; the rest stays where it is.

    Attributes:
      rollout: fields of `Rollout`, without the completions and the mesh.
      owner: [B] of the rows, by their index over the row axes of the mesh to generate on.
      fields: of the rows whose kind is `everywhere`.
      lines: form of the lines of each other field, in the order in which they are sent.
      further: declarations of fields that are not among `FIELDS`.
    """

    rollout: Mapping[str, Any]
    owner: np.ndarray
    fields: Mapping[str, Tensor]
    lines: Mapping[str, LineForm]
    further: Mapping[str, Field]


def written_rows(done: Rollout, rows: Rows) -> WrittenRows:
    """Completions and their rows as far as every rank knows them."""
    facts = done._asdict()
    for name in ("completions", "mesh"):
        del facts[name]
    known = {name: x.cpu() for name, x in as_dict(rows.batch).items() if kind_of(rows.batch, name).everywhere}
    forms = line_forms(*own_fields(rows.batch))
    facts = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in facts.items()}
    return WrittenRows(facts, rows.owner, known, forms, further_fields(rows.batch))


def further_fields(batch: Batch) -> dict[str, Field]:
    """Declarations of fields that are not among `FIELDS`."""
    return {name: field for name, field in schema_of(batch).items() if name not in FIELDS}


def own_fields(batch: Batch) -> tuple[dict[str, Value], dict[str, FieldKind]]:
    """Fields that only the ranks of a row know, and their kinds, in the order in which they are sent."""
    fields = as_dict(batch)
    kinds = {name: kind for name in sorted(fields) if not (kind := kind_of(batch, name)).everywhere}
    return {name: fields[name] for name in kinds}, kinds


def blank_batch(written: WrittenRows, device: torch.device) -> Batch:
    """The batch of a rank that has none of the rows."""
    schema = FIELDS | written.further if written.further else FIELDS
    empty = blank_fields(written.lines, {name: schema[name].kind for name in written.lines}, device)
    return Batch(schema, **{name: x.to(device) for name, x in written.fields.items()}, **empty)


def origins_of(number: int, rows: int) -> np.ndarray:
    """Number the rows of one group, differently from the rows of all others."""
    return (np.int64(number) << 32) + np.arange(rows)


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
    tokens: collections.Counter[int] = collections.Counter()
    switches = []
    version_BT = rows.batch.get("version")
    if version_BT is None:
        return {}, []
    for version_T, mask_T in zip(version_BT.cpu(), rows.batch.mask.cpu(), strict=True):
        switches.append(switches_of(version_T[mask_T]))
        tokens.update(version_T[mask_T].tolist())
    return dict(tokens), switches


def switches_of(versions: Tensor) -> list[tuple[int, int]]:
    """(First token, version) pairs of the versions of some tokens."""
    begins = np.flatnonzero(np.diff(versions.numpy(), prepend=-1)).tolist()
    return [(begin, int(versions[begin])) for begin in begins]
