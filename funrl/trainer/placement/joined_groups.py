"""Groups of a batch together: their rows as one rollout, the ages of their tokens, and their replacements."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from funrl.algos.advantages.units import units_of
from funrl.batch import declare
from funrl.fields import Field
from funrl.mesh.mesh import Mesh
from funrl.trainer.placement.messages import WrittenGroup, WrittenRows, blank_batch, origins_of
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.pending_rewards import add_totals
from funrl.trainer.sources.source import DroppedPrompt
from funrl.trainer.steps.step_rows import Rows, join_rows, rows_of

ORIGIN = {"origin": Field("row", "source", "the row's number among those of the generator ranks", dtype="int")}


def in_place_of(lost: WrittenGroup | None, group: WrittenGroup) -> WrittenGroup:
    """A group that has taken the place of one which the filter has dropped, with the prompt of that among its own."""
    if lost is None or lost.written is None:
        return group
    facts = lost.written.rollout
    failed = lost.written.fields.get("failed")
    count = 0 if failed is None else int(failed.sum())
    prompt = DroppedPrompt(lost.work.prompt.position, count, facts["entries"], facts["episodes"])
    return group._replace(dropped=[*lost.dropped, prompt], waited_s=group.waited_s + lost.waited_s)


def joined_rows(
    written: Sequence[tuple[int, int, WrittenRows | None]], mesh: Mesh, device: torch.device, *, samples: int
) -> tuple[Rollout, Rows]:
    """Rows that other ranks have, as one rollout.

    Args:
      written: of each group the number under which its rows are kept, its replica and these rows.
      mesh: of the ranks that have them.
      device: of this rank.
      samples: of a group.
    """
    parts = []
    facts = list[Mapping[str, Any]]()
    for number, generator, own in written:
        assert own is not None
        batch = declare(blank_batch(own, device), ORIGIN)
        rows = len(own.owner)
        batch = batch._replace(origin=torch.from_numpy(origins_of(number, rows)).to(device))
        parts.append(rows_of(batch, np.full(rows, generator), mesh))
        owner = np.full(len(own.rollout["owner"]), generator)
        here = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in own.rollout.items()}
        facts.append({**here, "owner": owner})
    return join_groups(facts, parts, mesh, samples=samples)


def join_groups(
    facts: Sequence[Mapping[str, Any]], parts: Sequence[Rows], mesh: Mesh, *, samples: int
) -> tuple[Rollout, Rows]:
    """The groups of a batch as one rollout, and their rows; sums are taken in the order of the groups.

    Args:
      facts: fields of the `Rollout` of each group, in the order of the batch.
      parts: rows of each group.
      mesh: on which they were written.
      samples: of a group.
    """
    placed = []
    for place, rows in enumerate(parts):
        fields = {"group": torch.full_like(rows.batch.group, place)}
        episode_B = rows.batch.get("episode")
        if episode_B is not None:
            fields["episode"] = episode_B + place * samples
        placed.append(rows.with_fields(**fields))
    rows = join_rows(placed)
    units = units_of(rows.batch)
    if units is not None:
        rows = rows.with_fields(unit=units.index)
    columns = {name: [of_group[name] for of_group in facts] for name in facts[0]}
    done = Rollout(
        completions=(),
        lengths=torch.cat(columns["lengths"]),
        finished=torch.cat(columns["finished"]),
        score=torch.cat(columns["score"]),
        scores=torch.cat(columns["scores"]),
        owner=np.concatenate(columns["owner"]),
        mesh=mesh,
        dtype=columns["dtype"][0],
        failed=None if columns["failed"][0] is None else torch.cat(columns["failed"]),
        entries=add_totals(*columns["entries"]),
        episodes=add_totals(*columns["episodes"]),
    )
    return done, rows


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
