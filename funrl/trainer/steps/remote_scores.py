"""A frozen role on other ranks, as the trainer ranks see it: rows go there and its fields come back.

What a request says is metadata; a row's tokens go point to point, from the rank that has it to the one that scores it,
and its fields come back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import as_dict, kind_of, schema_of
from funrl.data.packing import pack
from funrl.data.prompts import Example
from funrl.fields import CONTEXT_FIELDS, Field
from funrl.kinds import FieldKind
from funrl.mesh.launch import ranks_per_node
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan, plan
from funrl.mesh.pools.channel import Requests
from funrl.mesh.pools.handover import Handover, LineForm, blank_fields, line_forms, receive_rows, send_rows
from funrl.models.weight_dtypes import weight_dtypes
from funrl.trainer.steps.micro import row_cost, sizes_of, token_ranks
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.score import seen_rows, unwritten_fields
from funrl.trainer.steps.step_rows import Rows, on_all_rows, owned_fields, take

READ_FIELDS = ("tokens", "mask")  # that a model reads of a row
REWARD_FIELDS = (*READ_FIELDS, "rollout_logp")  # that a model which rewards completions reads, and whose dtype it has


class RowsRequest(NamedTuple):
    """Compute fields of rows that follow. Its answer is `RowsAnswer`, after which fields follow.

    Attributes:
      step: that the rows are of; 0: unknown.
      examples: the prompts, each with the same number of rows, for a model that rewards completions.
      known: fields of the rows whose kind is `everywhere`, without scores.
      lengths, owner: [B] of the rows, on the mesh of the trainer ranks.
      to: [B] the rank that gets each row, by its index over the row axes of the role's mesh.
      lines: form of the lines of each field that is sent.
    """

    step: int
    examples: Sequence[Example]
    known: Mapping[str, Tensor]
    lengths: np.ndarray
    owner: np.ndarray
    to: np.ndarray
    lines: Mapping[str, LineForm]


class RowsAnswer(NamedTuple):
    """Fields that a role has computed.

    Attributes:
      owner: [B] the rank of the role that has each row, by its index over the row axes of its mesh.
      known: its own fields whose kind is `everywhere`, such as scores.
      lines: form of the lines of each other field, which follow.
    """

    owner: np.ndarray
    known: Mapping[str, Tensor]
    lines: Mapping[str, LineForm]


class RemoteRole:
    """A role on other ranks.

    Attributes:
      name: of the role.
      mesh: of its ranks.
      training: mesh of the trainer ranks.
    """

    def __init__(self, name: str, mesh: Mesh, training: Mesh) -> None:
        """Begin without a request.

        Args:
          name, mesh, training: its attributes.
        """
        self.name = name
        self.mesh = mesh
        self.training = training
        self.requests = Requests(training, name)
        self._number = -1  # of the request that waits for its answer

    def send(
        self,
        rows: Rows,
        names: Sequence[str],
        to: np.ndarray,
        *,
        known: Sequence[str] = ("length",),
        step: int = 0,
        examples: Sequence[Example] = (),
    ) -> None:
        """Send rows. Collective over the trainer ranks.

        Args:
          names: of the fields that the role reads, besides those that every rank knows.
          known: names of these.
          to, step, examples: as of a `RowsRequest`.
        """
        batch = as_dict(rows.batch)
        fields = {name: batch[name] for name in names}
        kinds = row_field_kinds(schema_of(rows.batch), fields)
        forms = line_forms(fields, kinds)
        everywhere = {name: batch[name].cpu() for name in known}
        self._number = self.requests.post(RowsRequest(step, examples, everywhere, rows.lengths, rows.owner, to, forms))
        send_rows(fields, kinds, Handover(rows.lengths, rows.owner, to, source=self.training, target=self.mesh))

    def receive(self, rows: Rows) -> tuple[Rows, RowsAnswer]:
        """The rows of `send` with the fields of the role that belong to one rank, and its answer. Collective."""
        answer: RowsAnswer = self.requests.answer(self._number, f"the {self.name}'s scores")
        if not answer.lines:
            return rows, answer
        way = Handover(rows.lengths, answer.owner, rows.owner, source=self.mesh, target=self.training)
        kinds = row_field_kinds(schema_of(rows.batch), answer.lines)
        fields = receive_rows(blank_fields(answer.lines, kinds, self.training.device), kinds, way)
        width = rows.batch.tokens.shape[1]
        return rows.with_fields(**{name: kinds[name].fit(x, width) for name, x in fields.items()}), answer


class RemoteRewards(RemoteRole):
    """A model that rewards completions, on other ranks."""

    def rewarded(self, rows: Rows, examples: Sequence[Example], note: Callable[[str], None]) -> Rows:
        """The rows with the role's column of scores, its part of every score, and what else it writes. Collective.

        Args:
          rows: completions, with their scores so far.
          examples: prompts, each with the same number of rows.
          note: receives remarks.

        Raises:
          RewardError: on every rank; as the role raises it.
        """
        batch = rows.batch
        before, columns = batch.get("score"), batch.get("scores")
        known = [name for name in as_dict(batch) if kind_of(batch, name).everywhere and name not in ("score", "scores")]
        ranks = self.mesh.size(self.mesh.row_axes)
        prompts = np.diff(np.arange(ranks + 1) * len(examples) // ranks)  # of each rank
        to = np.repeat(np.arange(ranks), prompts * (len(rows.owner) // len(examples)))
        self.send(rows, REWARD_FIELDS, to, known=known, examples=examples)
        self.requests.note = note
        rows, answer = self.receive(rows)
        part_B, column_B1 = (answer.known[name].to(self.training.device) for name in ("score", "scores"))
        return rows.with_fields(
            score=part_B if before is None else before + part_B,
            scores=column_B1 if columns is None else torch.cat([columns, column_B1], 1),
        )


class RemoteScorer(RemoteRole):
    """A role that scores tokens, on other ranks."""

    def __init__(self, name: str, role: Role, training: Mesh, token_budget: int) -> None:
        """Make the scorer, without weights.

        Args:
          name: of the role.
          role: with its model on those ranks.
          training: mesh of the ranks that ask.
          token_budget: tokens in one forward pass of one device.
        """
        super().__init__(name, role.placed.mesh, training)
        self.role = role
        self.token_budget = token_budget

    @property
    def owned(self) -> dict[str, Field]:
        """Declarations of the fields of values that rows own and its model reads, such as pictures."""
        owned = self.role.placed.model.owned
        context = {self.role.context: CONTEXT_FIELDS[self.role.context]} if self.role.context else {}
        return context if owned is None else owned_fields(owned.none)

    def first_plan(self, stored: trees.Tree, dtype: torch.dtype) -> Plan:
        """The plan by which its first weights come from the trainer ranks.

        Args:
          stored: layouts there.
          dtype: of its weights.
        """
        own = self.role.placed.stored
        ranks = {"src_ranks": self.training.ranks, "dst_ranks": self.mesh.ranks}
        return plan(stored, own, weight_dtypes(own, dtype), ranks_per_node(), **ranks)

    def begin(self, rows: Rows, step: int) -> None:
        """Send the rows that the role scores. Collective over the trainer ranks.

        Args:
          step: that the rows are of.
        """
        seen = seen_rows(self.role, rows)
        if seen is not None:
            rows = take(rows, seen)
        if not len(rows.owner):
            return
        sizes, _ = sizes_of(rows.lengths, self.token_budget, token_ranks(self.mesh))
        ranks = self.mesh.size(self.mesh.row_axes)
        cost = row_cost(self.role.placed)
        to = pack(rows.lengths, ranks, sizes, max_segments=len(rows.lengths), cost=cost).rank
        self.send(rows, (*READ_FIELDS, *self.owned), to, step=step)

    def finish(self, rows: Rows) -> Rows:
        """The rows of `begin` with the fields that the role writes. Collective over the trainer ranks."""
        seen = seen_rows(self.role, rows)
        if seen is None:
            return self.receive(rows)[0]
        if not len(seen):
            return rows.with_fields(**unwritten_fields(self.role, rows))
        scored = as_dict(self.receive(take(rows, seen))[0].batch)
        return rows.with_fields(**on_all_rows({name: scored[name] for name in self.role.writes}, seen, rows))


def row_field_kinds(schema: Mapping[str, Field], names: Mapping[str, object]) -> dict[str, FieldKind]:
    """Kind of each of some fields."""
    return {name: schema[name].kind for name in names}
