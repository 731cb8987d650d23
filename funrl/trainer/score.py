"""Scoring: what the models of a run write about the tokens of a batch, before the advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch
from funrl.mesh.sums import psum_tree
from funrl.trainer.clock import Clock
from funrl.trainer.micro import own_micro_batches
from funrl.trainer.roles import Role

TOKEN_SCORES = ("logp", "entropy", "sum_pi_squared")


def score(
    roles: Mapping[str, Role],
    params: Mapping[str, trees.Tree],
    batch: Batch,
    token_budget: int = 16384,
    clock: Clock | None = None,
) -> Batch:
    """The batch with the fields that the roles write, without gradient.

    Args:
      roles: those without `writes` are passed over.
      params: of each role.
      batch: all rows; the same on every rank.
      token_budget: padded tokens in one forward pass of one device.
      clock: told the phases, "score_policy" and so on.
    """
    clock = clock or Clock()
    for name, role in roles.items():
        if role.writes:
            with clock.phase(f"score_{name}"):
                batch = batch._replace(**score_role(role, params[name], batch, token_budget))
    return batch


@torch.no_grad()
def score_role(role: Role, params: trees.Tree, batch: Batch, token_budget: int) -> dict[str, Tensor]:
    """The fields that one role writes, [B, T, ...] each, known to all ranks."""
    mesh, whole = role.placed.mesh, []
    for rows, piece in own_micro_batches(batch, mesh, token_budget):
        outs = _outputs(role, params, piece)
        if not whole:
            whole = [out.new_zeros(*batch.tokens.shape, *out.shape[2:]) for out in outs]
        for all_rows, out in zip(whole, outs, strict=True):
            all_rows[rows, : out.shape[1]] = out[: len(rows)]
    # Every row was computed by one data rank and is zero on the others: the sum is the union.
    return dict(zip(role.writes, psum_tree(whole, mesh, mesh.row_axes), strict=True))


def _outputs(role: Role, params: trees.Tree, rows: Batch) -> Sequence[Tensor]:
    """Values of the model for each field that the role writes."""
    wanted, placed, found = tuple(role.writes.values()), role.placed, {}
    if "values" in wanted:
        found["values"] = placed.values(params, rows)
    want = tuple(name for name in wanted if name in TOKEN_SCORES)
    if want:
        found |= placed.token_scores(params, rows, want, role.temperature)._asdict()
    if "topk" in wanted or "topk_logp" in wanted:
        found["topk"], found["topk_logp"] = placed.topk(params, rows, role.topk, role.temperature)
    return [found[name] for name in wanted]
