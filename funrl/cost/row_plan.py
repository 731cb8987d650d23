"""Rows in a dry run: the rank that holds each row in each phase, the traffic of moves, and the use of packed batches.

Every row has maximum length. The trainer's own plans, over all rows and ranks, decide which rank holds each row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from funrl.algos.reading import reads
from funrl.cost.tracing.costs import UPDATES, Costs, Traffic, add_traffic, times
from funrl.cost.tracing.estimate import MOVE, MOVES
from funrl.data.packing import Packing, RowCost, lockstep_work
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import move_traffic
from funrl.role_kinds import SCORING_ROLES
from funrl.trainer import phases
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.settings.settings import scoring_budget
from funrl.trainer.sources.completion_scores import reading_ranks
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.steps.micro import Epoch, pack_in_place, plan_epoch, row_cost, token_ranks
from funrl.trainer.steps.parts import GeneratingParts, Parts

WORD = 8  # bytes per number of the row table when it is sent


class Holders(NamedTuple):
    """The rank that holds each row in one phase.

    Attributes:
      owner: [B] index of the rank over the row axes of `mesh`.
      mesh: mesh of the ranks.
    """

    owner: np.ndarray
    mesh: Mesh


class RowPlan(NamedTuple):
    """Rows of a step.

    Attributes:
      lengths: [B] tokens of each row.
      before: ranks that hold the rows from generation to scoring.
      epochs: passes over them.
    """

    lengths: np.ndarray
    before: list[Holders]
    epochs: list[Epoch]

    @property
    def again(self) -> list[Holders]:
        """Ranks that hold the rows while they are scored, then in each epoch."""
        return [self.before[-1], *(Holders(epoch.to, self.before[-1].mesh) for epoch in self.epochs)]


def row_plan(job: Job, parts: Parts, width: int, step: int) -> RowPlan:
    """Plan the rows of a step, each of `width` tokens."""
    settings = job.settings
    mesh = parts.mesh
    samples = rows_of_step(job) // settings.run.batch_prompts
    source = parts.generator.mesh if isinstance(parts, GeneratingParts) else mesh
    lengths = np.full(settings.run.batch_prompts * samples, width)
    group = torch.arange(len(lengths)) // samples
    generating = generating_ranks(settings.run.batch_prompts, samples, source.size(source.row_axes))
    before = [Holders(generating, source)]
    for name in SCORING_ROLES if isinstance(job, RLJob) else ():
        if name in parts.roles:
            before.append(Holders(reading_ranks(lengths, parts.roles[name], scoring_budget(settings)), mesh))
    before.append(Holders(phases.scoring_ranks(job, parts, lengths, group, step)[0], mesh))
    plan = phases.update_plan(job, parts, step)
    epochs = [plan_epoch(lengths, mesh, plan, number) for number in range(plan.epochs)]
    return RowPlan(lengths, before, epochs)


def rows_of_step(job: Job) -> int:
    """Number of rows of a step: completions of all prompts, or texts with KTO's mismatched ones."""
    samples = job.sampling.samples if isinstance(job, RLJob) else 1 + ("mismatched" in reads(job.algorithm).required)
    return job.settings.run.batch_prompts * samples


def with_moves(
    job: Job,
    plan: RowPlan,
    phases: Mapping[str, Costs],
    token_bytes: tuple[int, int],
    owned_bytes: Sequence[float] = (),
) -> dict[str, Costs]:
    """Replace the traced traffic of moves by that of the moves of all rows.

    Args:
      phases: costs by phase; those of a move are of one move.
      token_bytes: bytes that a move sends per token, before and after scoring.
      owned_bytes: of each ragged field of a row.
    """
    first = _traffic_before(job, plan, token_bytes[0], owned_bytes)
    again = _moves(plan.lengths, plan.again, token_bytes[1], owned_bytes)
    traffic: dict[str, Any] = dict(zip(MOVES, (first, again), strict=True))
    often: dict[str, int] = dict(zip(MOVES, (_count(plan.before), _count(plan.again)), strict=True))
    return {
        name: dataclasses.replace(times(costs, often[name]), traffic=traffic[name]) if name in traffic else costs
        for name, costs in phases.items()
        if traffic.get(name, True)
    }


def _traffic_before(
    job: Job, plan: RowPlan, token_bytes: int, owned_bytes: Sequence[float]
) -> dict[tuple[str, str], Traffic]:
    """Traffic of the busiest rank before scoring: the shared row table, and the moves of rows.

    Args:
      token_bytes: bytes sent per token.
      owned_bytes: as in `with_moves`.
    """
    source = plan.before[0].mesh
    table = {}
    if source.size(source.row_axes) > 1:
        nbytes = float(WORD * table_columns(job) * len(plan.lengths))
        table["all_reduce", source.group_name(source.row_axes)] = Traffic(1, nbytes)
    for key, (count, nbytes) in _moves(plan.lengths, plan.before, token_bytes, owned_bytes).items():
        add_traffic(table, key, count, nbytes)
    return table


def table_columns(job: Job) -> int:
    """Columns of the table that all ranks share about each row.

    A text has its length; a completion also its end, its rewards, and whether they failed.
    """
    if not isinstance(job, RLJob):
        return 1
    functions = job.settings.rewards.reward.split(",") if job.settings.rewards.reward else []
    return (
        2 + (len(functions) or job.settings.examples.prompts is None) + (job.settings.rewards.on_reward_error != "stop")
    )


def _count(stops: Sequence[Holders]) -> int:
    """Number of moves between consecutive holders."""
    return sum(a.mesh.sizes != b.mesh.sizes or not np.array_equal(a.owner, b.owner) for a, b in pairwise(stops))


def _moves(
    lengths: np.ndarray, stops: Sequence[Holders], token_bytes: int, owned_bytes: Sequence[float]
) -> dict[tuple[str, str], Traffic]:
    """Traffic of the moves between consecutive holders.

    Tokens travel together and each ragged field by itself, once all ranks know how much of it each row has.
    """
    traffic: dict[tuple[str, str], Traffic] = {}
    for (owner, source), (to, target) in pairwise(stops):
        same = source.sizes == target.sizes
        axes = target.row_axes if same else tuple(target.sizes)
        sent = move_traffic(lengths, owner, source, to, target)
        tokens = int(np.maximum(sent.sent, sent.received).max())
        if tokens:
            key = MOVE, target.group_name(axes)
            rows = tokens / int(lengths[0])
            messages = int(sent.messages.max()) * (1 + len(owned_bytes))
            add_traffic(traffic, key, messages, tokens * token_bytes + rows * sum(owned_bytes))
            if owned_bytes and source.size(source.row_axes) > 1:
                table = float(WORD * len(owned_bytes) * len(lengths))
                add_traffic(traffic, ("all_reduce", source.group_name(source.row_axes)), 1, table)
    return traffic


def useful_shares(job: Job, parts: Parts, plan: RowPlan) -> dict[str, float]:
    """Useful share of the FLOPs that all ranks could do, for each phase that packs rows."""
    mesh = parts.mesh
    budget = scoring_budget(job.settings)
    shares = {}
    ranks = mesh.size(mesh.row_axes)
    scores = plan.before[-1].owner
    for name, role in parts.roles.items():
        cost = row_cost(role.placed)
        read = plan.lengths
        owner = scores
        if name in SCORING_ROLES and isinstance(job, RLJob):  # one more token, which it reads
            readers = [reader for reader in SCORING_ROLES if reader in parts.roles]
            read = plan.lengths + 1
            owner = plan.before[1 + readers.index(name)].owner
        if role.writes or read is not plan.lengths:
            packing = pack_in_place(read, owner, ranks, budget, cost, token_ranks(mesh))
            shares[f"score_{name}"] = _share([(packing, read)], ranks, cost)
        if role.loss is not None:
            parts_of = [
                (packing, plan.lengths[part])
                for epoch in plan.epochs
                for part, packing in zip(epoch.parts, epoch.packings, strict=True)
            ]
            shares[UPDATES + name] = _share(parts_of, ranks, cost)
    return shares


def _share(packings: Sequence[tuple[Packing, np.ndarray]], ranks: int, cost: RowCost) -> float:
    useful = sum(int(cost.work(lengths).sum()) for _, lengths in packings)
    return useful / (ranks * sum(lockstep_work(packing, lengths, cost) for packing, lengths in packings))
