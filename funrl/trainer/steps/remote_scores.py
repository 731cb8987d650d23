"""A frozen role on other ranks, as the ranks that ask it see it: rows go there and its fields come back.

The trainer ranks ask a role that scores tokens, and one that rewards completions of batches. Generator ranks ask the
latter for evaluations.

What a request says is metadata; a row's tokens go point to point, from the rank that trains it to the one that scores
it, and its fields come back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from funrl import trees
from funrl.batch import as_dict, kind_of, schema_of
from funrl.data.packing import pack
from funrl.data.prompts import Example
from funrl.fields import Field
from funrl.kinds import FieldKind
from funrl.mesh.launch import ranks_per_node
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan, plan
from funrl.mesh.pools.channel import Requests
from funrl.mesh.pools.handover import Handover, LineForm, blank_fields, line_forms, receive_rows, send_rows
from funrl.models.weight_dtypes import weight_dtypes
from funrl.rewards.call import RewardError
from funrl.trainer.steps.micro import row_cost, sizes_of, token_ranks
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.step_rows import Rows, owned_fields

READ_FIELDS = ("tokens", "mask")  # that a model reads of a row
REWARD_FIELDS = (*READ_FIELDS, "rollout_logp")  # that a model which rewards completions reads, and whose dtype it has
NUMBERS_OF_A_POOL = 1 << 32  # requests to each pool have numbers of their own in the store
BATCHES = 1 << 31  # the first of those for batches


class ScoreRequest(NamedTuple):
    """Score rows that follow. Its answer has the form of the lines of each field, and the fields follow.

    Attributes:
      step: that the rows are of.
      lengths, owner: [B] of the rows, on the mesh to train on.
      lines: form of the lines of each field that is sent.
    """

    step: int
    lengths: np.ndarray
    owner: np.ndarray
    lines: Mapping[str, LineForm]


class RewardRequest(NamedTuple):
    """Reward rows that follow. The answer is a `RewardProblem`, or `RewardedRows`, after which their fields follow.

    Attributes:
      examples: the prompts, each with the same number of rows.
      fields: of the rows whose kind is `everywhere`, without scores.
      lengths, owner: [B] of the rows, on the mesh of the ranks that ask.
      to: [B] the rank that gets each row, by its index over the row axes of the role's mesh.
      lines: form of the lines of each field that is sent.
    """

    examples: Sequence[Example]
    fields: Mapping[str, torch.Tensor]
    lengths: np.ndarray
    owner: np.ndarray
    to: np.ndarray
    lines: Mapping[str, LineForm]


class RewardedRows(NamedTuple):
    """Rewards that a role has given.

    Attributes:
      column: [B, 1] its own score of each row.
      part: [B] of it in the reward.
      owner: [B] the rank of the role that has each row, by its index over the row axes of its mesh.
      lines: form of the lines of each field that it has written, besides.
      notes: remarks.
    """

    column: torch.Tensor
    part: torch.Tensor
    owner: np.ndarray
    lines: Mapping[str, LineForm]
    notes: Sequence[str]


class RewardProblem(NamedTuple):
    """The `RewardError` that ends the run instead of rewards.

    Attributes:
      notes: remarks.
      message: of the error.
    """

    notes: Sequence[str]
    message: str


class RemoteRewards:
    """A model that rewards completions, on other ranks, as the ranks that ask it see it.

    Attributes:
      name: of the role.
      mesh: of its ranks.
      asking: mesh of the ranks that ask.
    """

    def __init__(self, name: str, mesh: Mesh, asking: Mesh, first: int) -> None:
        """Begin without a request.

        Args:
          name, mesh, asking: its attributes.
          first: number of the first request, as of `Requests`.
        """
        self.name = name
        self.mesh = mesh
        self.asking = asking
        self.requests = Requests(asking, first=first)

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
        fields = {name: as_dict(batch)[name] for name in REWARD_FIELDS}
        known = {name: x.cpu() for name, x in as_dict(batch).items() if kind_of(batch, name).everywhere}
        known = {name: x for name, x in known.items() if name not in ("score", "scores")}
        ranks = self.mesh.size(self.mesh.row_axes)
        prompts = np.diff(np.arange(ranks + 1) * len(examples) // ranks)  # of each rank
        to = np.repeat(np.arange(ranks), prompts * (len(rows.owner) // len(examples)))
        kinds = row_field_kinds(schema_of(batch), fields)
        lines = line_forms(fields, kinds)
        number = self.requests.post(RewardRequest(examples, known, rows.lengths, rows.owner, to, lines))
        send_rows(fields, kinds, Handover(rows.lengths, rows.owner, to, source=self.asking, target=self.mesh))
        answer: RewardedRows | RewardProblem = self.requests.answer(number, f"the {self.name}'s scores")
        for line in answer.notes:
            note(line)
        if isinstance(answer, RewardProblem):
            raise RewardError(answer.message)
        column_B1 = answer.column.to(self.asking.device)
        part_B = answer.part.to(self.asking.device)
        before = batch.get("score")
        columns = batch.get("scores")
        rows = rows.with_fields(
            score=part_B if before is None else before + part_B,
            scores=column_B1 if columns is None else torch.cat([columns, column_B1], 1),
        )
        way = Handover(rows.lengths, answer.owner, rows.owner, source=self.mesh, target=self.asking)
        return with_arriving(rows, answer.lines, way) if answer.lines else rows


def with_arriving(rows: Rows, lines: Mapping[str, LineForm], way: Handover) -> Rows:
    """The rows with fields that arrive from the ranks of a role. Collective over the target of the way.

    Args:
      lines: form of the lines of each field.
    """
    kinds = row_field_kinds(schema_of(rows.batch), lines)
    fields, _ = receive_rows(blank_fields(lines, kinds, way.target.device), kinds, way)
    width = rows.batch.tokens.shape[1]
    return rows.with_fields(**{name: kinds[name].fit(x, width) for name, x in fields.items()})


def first_request(pool: int, batches: bool = False) -> int:
    """Number of the first request to a pool, as of `Requests`.

    Args:
      pool: its number, from 0.
      batches: whether the request is of the trainer ranks, for batches.
    """
    return (pool + 1) * NUMBERS_OF_A_POOL + BATCHES * batches


class RemoteScorer:
    """A role on other ranks.

    Attributes:
      name: of the role.
      role: with its model on those ranks.
    """

    def __init__(self, name: str, role: Role, training: Mesh, pool: int, token_budget: int) -> None:
        """Make the scorer, without weights.

        Args:
          name, role: its attributes.
          training: mesh of the ranks that ask.
          pool: number of its ranks among those pools.
          token_budget: tokens in one forward pass of one device.
        """
        self.name = name
        self.role = role
        self.training = training
        self.token_budget = token_budget
        self.requests = Requests(training, first=first_request(pool))
        self.number = -1  # of the request that waits for its answer

    @property
    def mesh(self) -> Mesh:
        """Mesh of its ranks."""
        return self.role.placed.mesh

    @property
    def owned(self) -> dict[str, Field]:
        """Declarations of the fields of values that rows own and its model reads, such as pictures."""
        owned = self.role.placed.model.owned
        return {} if owned is None else owned_fields(owned.none)

    def first_plan(self, stored: trees.Tree, dtype: torch.dtype) -> Plan:
        """The plan by which its first weights come from the trainer ranks.

        Args:
          stored: layouts there.
          dtype: of its weights.
        """
        own = self.role.placed.stored
        ranks = {"src_ranks": self.training.ranks, "dst_ranks": self.mesh.ranks}
        return plan(stored, own, weight_dtypes(own, dtype), ranks_per_node(), **ranks)

    def targets(self, lengths: np.ndarray) -> np.ndarray:
        """[B] the rank that scores each row, by its index over the row axes of its mesh; the same on all ranks."""
        sizes, _ = sizes_of(lengths, self.token_budget, token_ranks(self.mesh))
        ranks = self.mesh.size(self.mesh.row_axes)
        return pack(lengths, ranks, sizes, max_segments=len(lengths), cost=row_cost(self.role.placed)).rank

    def begin(self, rows: Rows, step: int) -> None:
        """Send rows to score. Collective over the trainer ranks.

        Args:
          step: that the rows are of.
        """
        fields = {name: as_dict(rows.batch)[name] for name in (*READ_FIELDS, *self.owned)}
        kinds = row_field_kinds(schema_of(rows.batch), fields)
        self.number = self.requests.post(ScoreRequest(step, rows.lengths, rows.owner, line_forms(fields, kinds)))
        way = Handover(rows.lengths, rows.owner, self.targets(rows.lengths), source=self.training, target=self.mesh)
        send_rows(fields, kinds, way)

    def finish(self, rows: Rows) -> Rows:
        """The rows of `begin` with the fields that the role writes. Collective over the trainer ranks."""
        lines = self.requests.answer(self.number, f"the {self.name}'s scores")
        way = Handover(rows.lengths, self.targets(rows.lengths), rows.owner, source=self.mesh, target=self.training)
        return with_arriving(rows, lines, way)


def row_field_kinds(schema: Mapping[str, Field], names: Mapping[str, object]) -> dict[str, FieldKind]:
    """Kind of each of some fields."""
    return {name: schema[name].kind for name in names}
