"""A frozen role on ranks of its own, as the ranks that train see it: rows go there and its fields come back.

What a request says is metadata; a row's tokens go point to point, from the rank that trains it to the one that scores
it, and its fields come back the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from funrl import trees
from funrl.batch import as_dict, schema_of
from funrl.data.packing import pack
from funrl.fields import Field
from funrl.kinds import FieldKind
from funrl.mesh.launch import ranks_per_node
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan, plan
from funrl.mesh.pools.channel import Requests
from funrl.mesh.pools.handover import Handover, receive_rows, send_rows
from funrl.mesh.reshard import reshard
from funrl.models.weight_dtypes import weight_dtypes
from funrl.trainer.steps.micro import row_cost, sizes_of, token_ranks
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.step_rows import Rows

READ_FIELDS = ("tokens", "mask")  # that a model reads of a row
NUMBERS_OF_A_POOL = 1 << 32  # requests to each pool have numbers of their own in the store


class ScoreRequest(NamedTuple):
    """Score rows that follow. Its answer is `ScoredFields`, after which the fields follow.

    Attributes:
      step: that the rows are of.
      lengths, owner: [B] of the rows, on the mesh to train on.
      tokens: dtype and trailing shape of each field that is sent.
    """

    step: int
    lengths: np.ndarray
    owner: np.ndarray
    tokens: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class ScoredFields(NamedTuple):
    """Fields that a role has written.

    Attributes:
      tokens: dtype and trailing shape of each.
    """

    tokens: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


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
        self.requests = Requests(training, first=(pool + 1) * NUMBERS_OF_A_POOL)
        self.number = -1  # of the request that waits for its answer

    @property
    def mesh(self) -> Mesh:
        """Mesh of its ranks."""
        return self.role.placed.mesh

    def first_plan(self, stored: trees.Tree, dtype: torch.dtype) -> Plan:
        """The plan by which its first weights come from the ranks that train.

        Args:
          stored: layouts there.
          dtype: of its weights.
        """
        own = self.role.placed.stored
        ranks = {"src_ranks": self.training.ranks, "dst_ranks": self.mesh.ranks}
        return plan(stored, own, weight_dtypes(own, dtype), ranks_per_node(), **ranks)

    def send_first(self, params: trees.Tree, stored: trees.Tree, dtype: torch.dtype) -> None:
        """Send it the weights that the run begins with. Collective over the ranks that train and its own.

        Args:
          params: the weights, in the layouts `stored`.
          dtype: as of `first_plan`.
        """
        reshard(params, self.first_plan(stored, dtype), self.training)

    def targets(self, lengths: np.ndarray) -> np.ndarray:
        """[B] the rank that scores each row, by its index over the row axes of its mesh; the same on all ranks."""
        sizes, _ = sizes_of(lengths, self.token_budget, token_ranks(self.mesh))
        ranks = self.mesh.size(self.mesh.row_axes)
        return pack(lengths, ranks, sizes, max_segments=len(lengths), cost=row_cost(self.role.placed)).rank

    def begin(self, rows: Rows, step: int) -> None:
        """Send rows to score. Collective over the ranks that train.

        Args:
          step: that the rows are of.
        """
        fields = {name: as_dict(rows.batch)[name] for name in READ_FIELDS}
        shapes = {name: (x.dtype, tuple(x.shape[2:])) for name, x in fields.items()}
        self.number = self.requests.post(ScoreRequest(step, rows.lengths, rows.owner, shapes))
        way = Handover(rows.lengths, rows.owner, self.targets(rows.lengths), source=self.training, target=self.mesh)
        send_rows(fields, row_field_kinds(schema_of(rows.batch), fields), way)

    def finish(self, rows: Rows) -> Rows:
        """The rows of `begin` with the fields that the role writes. Collective over the ranks that train."""
        answer: ScoredFields = self.requests.answer(self.number, f"the {self.name}'s scores")
        way = Handover(rows.lengths, self.targets(rows.lengths), rows.owner, source=self.mesh, target=self.training)
        device = self.training.device
        like = {name: torch.empty(0, 8, *shape, dtype=x, device=device) for name, (x, shape) in answer.tokens.items()}
        kinds = row_field_kinds(schema_of(rows.batch), like)
        fields, _ = receive_rows(like, kinds, way)
        width = rows.batch.tokens.shape[1]
        return rows.with_fields(**{name: kinds[name].fit(x, width) for name, x in fields.items()})


def row_field_kinds(schema: Mapping[str, Field], names: Mapping[str, object]) -> dict[str, FieldKind]:
    """Kind of each of some fields."""
    return {name: schema[name].kind for name in names}
