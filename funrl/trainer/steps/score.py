"""Scoring: what the models of a run write about the tokens of a batch, before the advantages."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import TOKEN_INT, Batch
from funrl.data.packing import Slots, unpack_tokens
from funrl.processes.heartbeat import beat
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.contexts import VIEWS
from funrl.trainer.steps.micro import own_micro_batches, row_cost
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.step_rows import Rows, agent_numbers, on_all_rows, take

TOKEN_SCORES = ("logp", "entropy", "sum_pi_squared")


def score(
    roles: Mapping[str, Role],
    params: Mapping[str, trees.Tree],
    rows: Rows,
    token_budget: int = 16384,
    clock: Clock | None = None,
    agents: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> Rows:
    """The rows with the fields that the roles write, without gradient; each is computed where it is.

    Args:
      roles: those without `writes` are passed over.
      params: of each role.
      token_budget: tokens in one forward pass of one device.
      clock: receives the phases, "score_policy" and so on.
      agents: of each role that sees only some agents' rows, the numbers of these agents.
    """
    clock = clock or Clock()
    for name, role in roles.items():
        if role.writes:
            with clock.phase(f"score_{name}"):
                seen = seen_rows(role, rows, agents.get(name))
                if seen is None:
                    fields = score_role(role, params[name], rows, token_budget)
                elif len(seen):
                    fields = on_all_rows(score_role(role, params[name], take(rows, seen), token_budget), seen, rows)
                else:
                    fields = unwritten_fields(role, rows)
                rows = rows.with_fields(**fields)
    return rows


def seen_rows(role: Role, rows: Rows, agents: Collection[int] | None = None) -> np.ndarray | None:
    """Numbers of the rows that a role sees, those of its agents or sources; None: all rows."""
    if role.sources:
        return np.flatnonzero(np.isin(rows.batch.data_source.cpu().numpy(), role.sources))
    return None if agents is None else agent_numbers(rows, agents)


def unwritten_fields(role: Role, rows: Rows) -> dict[str, Tensor]:
    """Zeros for the fields of a role that sees none of the rows, where no other role wrote them."""
    zero_BT = torch.zeros(
        rows.batch.tokens.shape,
        dtype=torch.promote_types(role.placed.dtype, torch.float32),
        device=rows.mesh.device,
    )
    zero_BTK = zero_BT[..., None].expand(*zero_BT.shape, role.topk)
    zeros = dict.fromkeys(role.writes.values(), zero_BT) | {"topk": zero_BTK.to(TOKEN_INT), "topk_logp": zero_BTK}
    return {field: zeros[output].clone() for field, output in role.writes.items() if rows.batch.get(field) is None}


@torch.no_grad()
def score_role(role: Role, params: trees.Tree, rows: Rows, token_budget: int) -> dict[str, Tensor]:
    """The fields that one role writes, [b, T, ...] each, of this rank's rows."""
    shown = VIEWS[role.context](rows, role.context) if role.context else None
    seen = rows if shown is None else shown.rows
    fields = role.placed.expert_rows.repeat(lambda: _scores(role, params, seen, token_budget))
    return fields if shown is None else {name: shown.back(x) for name, x in fields.items()}


def _scores(role: Role, params: trees.Tree, rows: Rows, token_budget: int) -> dict[str, Tensor]:
    whole: list[Tensor] = []
    for places, outs in _places_with_outputs(role, params, rows, token_budget):
        if not whole:
            shape = rows.batch.tokens.shape
            dtypes = [out.dtype if out.is_floating_point() else TOKEN_INT for out in outs]
            whole = [out.new_zeros(*shape, *out.shape[2:], dtype=d) for out, d in zip(outs, dtypes, strict=True)]
        for all_rows, out in zip(whole, outs, strict=True):
            unpack_tokens(out, places, all_rows)
        del places, outs, out  # before the next ones are made
        beat()
    return dict(zip(role.writes, whole, strict=True))


def _places_with_outputs(
    role: Role, params: trees.Tree, rows: Rows, token_budget: int
) -> Iterator[tuple[Slots, Sequence[Tensor]]]:
    """The fields that one role writes, of each of this rank's micro-batches, and the places of its tokens.

    One micro-batch is held, and not by the caller too.
    """
    pieces = own_micro_batches(rows, token_budget, row_cost(role.placed))
    if role.programs is None:
        for piece in pieces:
            yield piece.at, outputs(role, params, piece.batch)
        return
    while group := tuple(itertools.islice(pieces, role.programs.lanes)):
        outs = role.programs.outputs(role, params, [piece.batch for piece in group])
        yield from zip([piece.at for piece in group], outs, strict=True)


def outputs(role: Role, params: trees.Tree, rows: Batch) -> Sequence[Tensor]:
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
