"""Rows of episodes as an advantage chain sees them: one number for each agent of an episode.

An episode of several turns and branches has several rows, and an environment may have several agents. Statistics are
over (group, agent), and an agent of an episode has one score, however many rows it has. So the chain runs on a batch
whose row fields have one number for each such unit, while tokens stay where they are: `batch.across` adds the rows of a
unit, and gives each row its unit's number. No piece needs to know of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funrl.across import Across
from funrl.batch import Batch, as_dict, kind_of, map_fields, select, with_across


class Units(NamedTuple):
    """Rows grouped by episode and agent.

    Attributes:
      index: [B] int64, the unit of each row, 0 to U - 1, in the order of (episode, agent).
      first: [U] int64, the first row of each unit.
    """

    index: Tensor
    first: Tensor

    def sums(self, x_B: Tensor) -> Tensor:
        """The sum over each unit's rows, [B, ...] -> [U, ...]."""
        return x_B.new_zeros(len(self.first), *x_B.shape[1:]).index_add_(0, self.index, x_B)


def units_of(batch: Batch) -> Units | None:
    """The units of a batch's rows; None: each row is one."""
    fields = as_dict(batch)  # which is not a read: the chain's pieces read what they need
    episode_B = fields.get("episode")
    if episode_B is None:
        return None
    agent_B = fields["agent"]
    keys_B = episode_B * (agent_B.max() + 1 if len(agent_B) else 1) + agent_B
    unique_U, index_B = keys_B.unique(return_inverse=True)
    places_B = torch.arange(len(keys_B), device=keys_B.device)
    first_U = places_B.new_full((len(unique_U),), len(keys_B)).scatter_reduce_(0, index_B, places_B, "amin")
    return Units(index_B, first_U)


def episode_units(batch: Batch) -> Units:
    """`units_of` rows of episodes. Raises: ValueError, the batch has no field `episode`."""
    units = units_of(batch)
    if units is None:
        raise ValueError("the rows are not of episodes: the batch has no field 'episode'")
    return units


def by_unit(batch: Batch, units: Units) -> Batch:
    """The batch with one number for each unit in its row fields [U], and token fields as they are.

    A unit has the numbers of its first row, and the tokens (`length`) of all its rows. `group` becomes one for each
    group and agent.
    """
    agent_B = as_dict(batch)["agent"]
    agents = agent_B.max() + 1 if len(agent_B) else 1

    def unit_field(name: str, x: Tensor) -> Tensor:
        kind = kind_of(batch, name)
        if not kind.everywhere:
            return x
        if name == "length":
            return units.sums(x)
        x_U = kind.select(x, units.first)
        return x_U * agents + agent_B[units.first] if name == "group" else x_U

    across = batch.across
    remade = Across(
        lambda x_bT: units.sums(across.sums(x_bT)),
        lambda x_U: across.own(x_U[units.index]),
        across.kth_largest,
        by_row=across.rows,
    )
    return with_across(map_fields(unit_field, batch), remade)


def episode_fields(batch: Batch, units: Units) -> dict[str, Tensor]:
    """`episode_tokens` and `episode_first` for the batch's mask, and `unit`."""
    tokens_U = units.sums(batch.across.sums(as_dict(batch)["mask"])).to(torch.int64)
    first_B = torch.zeros_like(units.index, dtype=torch.bool).index_fill_(0, units.first, True)
    return {"episode_tokens": tokens_U[units.index], "episode_first": first_B, "unit": units.index}


def units_of_copies(unit_N: Tensor, rows_N: Tensor) -> Tensor:
    """Unit index of each chosen row; a unit chosen twice counts as two units.

    Args:
      unit_N: [N] of the chosen rows.
      rows_N: [N] their numbers.
    """
    order_N = rows_N.argsort(stable=True)
    _, counts = rows_N[order_N].unique_consecutive(return_counts=True)
    place_N = torch.arange(len(rows_N), device=rows_N.device)
    copy_N = torch.empty_like(place_N).scatter_(
        0, order_N, place_N - (counts.cumsum(0) - counts).repeat_interleave(counts)
    )
    return unit_N + copy_N * (unit_N.max() + 1 if len(unit_N) else 1)


def choose_rows(batch: Batch, rows_N: Tensor) -> Batch:
    """Some rows of every field; a unit that is chosen twice is two."""
    chosen = select(batch, rows_N)
    unit_N = as_dict(chosen).get("unit")
    return chosen if unit_N is None else chosen._replace(unit=units_of_copies(unit_N, rows_N))
