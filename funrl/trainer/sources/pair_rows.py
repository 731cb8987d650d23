"""Preference pairs of sampled rows: the best and the worst completion of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.losses.pairs import best_and_worst
from funrl.batch import Batch, as_dict, schema_of
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.advantage_phase import describe
from funrl.trainer.steps.step_rows import Rows, moved, on_cpu, rows_of, take

SAMPLED_PAIRS = ("pair", "demonstrated")  # kinds of examples made from the policy's own rows


def pair_source(source: Source, names: Sequence[str] = ()) -> Source:
    """A source of pairs: the best and the worst row of each group of another source. Metrics cover all its rows.

    Args:
      names: of the rewards, as in `describe`.
    """

    def next_rows(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        rows, state, metrics = source.next_rows(state, step)
        here = on_cpu(rows)
        return paired(rows), state, metrics | describe(here, here.batch, names)

    return source._replace(next_rows=next_rows)


def paired(rows: Rows) -> Rows:
    """One row for each group whose scores differ: its best row followed by its worst, as segments 1 and 2.

    Both move to the rank of the best one. If no group has two different scores, the result is one row whose mask is
    false everywhere.
    """
    table = on_cpu(rows).batch
    best_P, worst_P = best_and_worst(table.score, table.group)
    none = not len(best_P)
    if none:
        best_P = worst_P = torch.zeros(1, dtype=torch.int64)
    count = len(best_P)
    chosen = take(rows, torch.cat([best_P, worst_P]).numpy())
    owner = chosen.owner[:count]
    both = moved(chosen, np.concatenate([owner, owner]), rows.mesh)
    length_P, fields = _joined(both, count)
    if none:
        fields["mask"] = torch.zeros_like(fields["mask"])
    group = both.batch.group[:count]
    return rows_of(Batch(schema_of(rows.batch), **fields, length=length_P, group=group), owner, rows.mesh)


def _joined(both: Rows, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Lengths [P] of all pairs, and the fields of this rank's pairs except replicated ones.

    Args:
      both: the chosen rows, then the rejected ones, each pair on one rank.
    """
    batch = both.batch
    half = len(both.own) // 2  # a rank's rows are in the order of their numbers
    first_p, second_p = (batch.length[own].to(batch.tokens.device) for own in (both.own[:half], both.own[half:]))
    width = -(-int((first_p + second_p).max()) // 8) * 8 if half else 8
    at_T = torch.arange(width, device=batch.tokens.device)
    in_first_pT = at_T < first_p[:, None]
    used_pT = at_T < (first_p + second_p)[:, None]
    place_pT = torch.where(in_first_pT, at_T, at_T - first_p[:, None])
    row_p = torch.arange(half, device=batch.tokens.device)[:, None]
    row_pT = torch.where(in_first_pT, row_p, row_p + half)
    column_pT = place_pT.clamp(0, batch.tokens.shape[1] - 1)
    fields = {}
    for name, x in as_dict(batch).items():
        kind = schema_of(batch)[name].kind
        if kind.per_token:
            fields[name] = torch.where(used_pT, x[row_pT, column_pT], torch.zeros_like(x[:1, :1]))
        elif not kind.everywhere:
            fields[name] = kind.beside(x, row_p[:, 0], row_p[:, 0] + half)
    fields |= {"positions": place_pT * used_pT, "segments": torch.where(in_first_pT, 1, 2) * used_pT}
    return batch.length[:count] + batch.length[count:], fields
