"""Given texts as rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from funrl.algos.advantages.units import episode_fields, episode_units
from funrl.algos.reading import reads
from funrl.batch import select
from funrl.data.supervised import TextExample, rows_of_conversation, text_batch
from funrl.data.text_lengths import check_lengths, examples_ahead, mismatched
from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import gather_table
from funrl.trainer.jobs.job import TextJob
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.steps.step_rows import Rows, rows_of, with_owned


def text_rows(job: TextJob, mesh: Mesh, examples: Sequence[Any]) -> Rows:
    """Given texts as rows; each rank reads its own part, and no other.

    An example is a row. A conversation of several texts has a row for each, which are an episode: what is counted by
    sequence is counted by conversation.

    Where the algorithm reads `mismatched`, as many rows follow, each with the prompt of an example and the completion
    of the next one.

    Raises:
      DataError: a text has more tokens than it may, or cannot be read.
    """
    most = job.task.most or job.model.config.max_positions
    count = len(examples)
    further = count if "mismatched" in reads(job.algorithm).required else 0
    owner = generating_ranks(count + further, 1, mesh.size(mesh.row_axes))
    places = np.flatnonzero(owner == int(mesh.index(mesh.row_axes))).tolist()
    own = [*examples_ahead(examples, [i for i in places if i < count])]
    check_lengths(own, most, job.tokenizer)
    own += [mismatched(examples[i - count], examples[(i + 1) % count], most) for i in places if i >= count]
    counts = np.ones(count + further, dtype=np.int64)
    some = own or [examples[0]]  # a rank without texts has the same fields of no rows
    if job.task.kind == "demonstrations":
        counts = _row_counts(own, places, count, mesh)
        own = [row for example in own for row in rows_of_conversation(example)]
        some = own or rows_of_conversation(examples[0])
    owner = owner.repeat(counts)
    at_end = job.kind_of_role(job.main_role).scores_completions
    some = text_batch(some, job.pad, at_end, mesh.device, job.task.kind == "steps")
    mine = select(some, slice(len(own)))
    margin = mine.get("margin")
    mine = mine if margin is None else mine._replace(margin=margin.to(job.master))
    if further:
        mine = mine._replace(mismatched=torch.arange(count + further, device=mesh.device) >= count)
    table = gather_table({"length": mine.length}, owner, mesh, mesh.row_axes)
    rows = rows_of(mine._replace(length=table["length"]), owner, mesh)
    if (counts > 1).any():
        rows = _as_episodes(rows, counts)
    owned = job.model.owned
    if owned is None:
        return rows
    lines = [example.owned[0] if example.owned else None for example in own]
    for example, value in zip(own, lines, strict=True):
        owned.check([token for text in example.texts for token in text.tokens], value)
    return with_owned(rows, lines, owned.none)


def _row_counts(own: Sequence[TextExample], places: Sequence[int], count: int, mesh: Mesh) -> np.ndarray:
    """[count] rows of each example, the same on every rank, in one collective.

    Args:
      own: examples of this rank.
      places: their numbers.
      count: examples of all ranks.
    """
    counts = torch.zeros(count, dtype=torch.float64)
    counts[places] = torch.tensor([len(example.texts) for example in own], dtype=torch.float64)
    return collectives.psum(counts.to(mesh.device), mesh, mesh.row_axes).cpu().numpy().astype(np.int64)


def _as_episodes(rows: Rows, counts: np.ndarray) -> Rows:
    """Rows whose conversations are episodes of one agent."""
    device = rows.batch.length.device
    episode_B = torch.from_numpy(np.arange(len(counts)).repeat(counts)).to(device)
    rows = rows.with_fields(episode=episode_B, agent=torch.zeros_like(episode_B))
    units = episode_units(rows.batch)
    return rows.with_fields(**episode_fields(rows.batch, units))
