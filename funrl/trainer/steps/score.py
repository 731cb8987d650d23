"""Scoring: what the models of a run write about the tokens of a batch, before the advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from funrl import trees
from funrl.batch import TOKEN_INT, Batch
from funrl.data.micro_batch import unpack_tokens
from funrl.processes.heartbeat import beat
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.micro import own_micro_batches, row_cost
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.step_rows import Rows

TOKEN_SCORES = ("logp", "entropy", "sum_pi_squared")


def score(
    roles: Mapping[str, Role],
    params: Mapping[str, trees.Tree],
    rows: Rows,
    token_budget: int = 16384,
    clock: Clock | None = None,
) -> Rows:
    """The rows with the fields that the roles write, without gradient; each is computed where it is.

    Args:
      roles: those without `writes` are passed over.
      params: of each role.
      token_budget: tokens in one forward pass of one device.
      clock: receives the phases, "score_policy" and so on.
    """
    clock = clock or Clock()
    for name, role in roles.items():
        if role.writes:
            with clock.phase(f"score_{name}"):
                rows = rows.with_fields(**score_role(role, params[name], rows, token_budget))
    return rows


@torch.no_grad()
def score_role(role: Role, params: trees.Tree, rows: Rows, token_budget: int) -> dict[str, Tensor]:
    """The fields that one role writes, [b, T, ...] each, of this rank's rows."""
    whole: list[Tensor] = []
    for piece in own_micro_batches(rows, token_budget, row_cost(role.placed)):
        outs = _outputs(role, params, piece.batch)
        if not whole:
            shape = rows.batch.tokens.shape
            dtypes = [out.dtype if out.is_floating_point() else TOKEN_INT for out in outs]
            whole = [out.new_zeros(*shape, *out.shape[2:], dtype=d) for out, d in zip(outs, dtypes, strict=True)]
        for all_rows, out in zip(whole, outs, strict=True):
            unpack_tokens(out, piece.at, all_rows)
        beat()
    return dict(zip(role.writes, whole, strict=True))


def _outputs(role: Role, params: trees.Tree, rows: Batch) -> Sequence[Tensor]:
    """Values of the model for each field that the role writes."""
    wanted = tuple(role.writes.values())
    placed = role.placed
    outputs = {}
    if "values" in wanted:
        outputs["values"] = placed.values(params, rows)
    want = tuple(name for name in wanted if name in TOKEN_SCORES)
    if want:
        outputs |= placed.token_scores(params, rows, want, role.temperature)._asdict()
    if "topk" in wanted or "topk_logp" in wanted:
        outputs["topk"], outputs["topk_logp"] = placed.topk(params, rows, role.topk, role.temperature)
    return [outputs[name] for name in wanted]
