"""Rows in a dry run, each of the greatest length: their fields, the rank that holds each, their moves and packing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.reading import reads
from funrl.batch import TOKEN_INT, Batch, as_dict
from funrl.cost.row_pictures import picture_tokens_of
from funrl.cost.tracing.costs import UPDATES, Costs, Traffic, add_traffic, times
from funrl.cost.tracing.estimate import MOVE, MOVES, FieldShapes
from funrl.cost.tracing.turns import turns_of
from funrl.data.conversations import Text
from funrl.data.packing import Packing, RowCost, lockstep_work
from funrl.data.supervised import TEXT_FIELDS, TextExample, text_batch
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import move_traffic
from funrl.role_kinds import SCORING_ROLES
from funrl.trainer import loop, phases
from funrl.trainer.jobs.demonstrations import learns_from_demonstrations
from funrl.trainer.jobs.job import Job, RLJob, TextJob
from funrl.trainer.settings.scorers import has_environment
from funrl.trainer.settings.settings import scoring_budget
from funrl.trainer.sources.completion_scores import reading_ranks
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.steps.micro import Epoch, pack_in_place, plan_epoch, row_cost, token_ranks
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.step_rows import Rows, rows_of


def full_rows(job: Job, parts: Parts, tokens: int, local: int) -> Rows:
    """Rows of the greatest length as the source makes them, on the generator ranks.

    Args:
      job: of the run.
      parts: of the run.
      tokens: of a prompt or text.
      local: rows of each rank that trains.
    """
    mesh = parts.generator.mesh if isinstance(parts, GeneratingParts) else parts.mesh
    count = local * parts.mesh.size(parts.mesh.row_axes)
    owner = generating_ranks(count, 1, mesh.size(mesh.row_axes))
    own = int((owner == mesh.index(mesh.row_axes)).sum())
    return rows_of(full_batch(job, tokens, count, own), owner, mesh)


def rows_to_read(job: Job, rows: Rows) -> Rows:
    """The rows as a reward model reads them, all of the greatest length."""
    length = int(rows.lengths.max())
    text = Text(rows.batch.tokens.new_ones(length).tolist(), [False] * length)
    example = text_batch([TextExample((text,))], job.pad if job.pad != 1 else 0, reader=True)
    here = trees.map(lambda x: x.expand(len(rows.own), *x.shape[1:]).clone(), example)
    return rows_of(here._replace(length=example.length.expand(len(rows.owner)).clone()), rows.owner, rows.mesh)


def score_or_fill(
    trainer: phases.Trainer,
    state: loop.State,
    rows: Rows,
    written: FieldShapes | None,
    empty: Callable[..., Tensor],
) -> tuple[Rows, loop.State]:
    """The rows with the fields that roles write, and with advantages; the state after them.

    Args:
      trainer, state: of the step.
      rows: as the trainer scores them.
      written: fields to make without scoring, by `written_fields`; None: score.
      empty: (shape, dtype=dtype) -> a tensor without numbers.
    """
    if written is not None:
        silent = {name: role._replace(writes={}) for name, role in trainer.parts.roles.items()}
        trainer = trainer._replace(parts=dataclasses.replace(trainer.parts, roles=silent))
        shape = rows.batch.tokens.shape
        rows = rows.with_fields(
            **{name: empty((*shape, *more), dtype=dtype) for name, (more, dtype) in written.items()}
        )
    rows, state, _ = phases.score_batch(trainer, state, rows)
    return rows, state


def written_fields(parts: Parts, rows: Rows) -> FieldShapes:
    """The fields of scored rows that roles have written."""
    fields = as_dict(rows.batch)
    names = [name for role in parts.roles.values() for name in role.writes]
    return {name: (fields[name].shape[2:], fields[name].dtype) for name in names}


def full_batch(job: Job, tokens: int, rows: int, own: int | None = None) -> Batch:
    """Batch of rows of the greatest length, as the source makes it.

    Args:
      job: of the run.
      tokens: of a prompt or text.
      rows: of all ranks.
      own: rows whose tokens are on this rank; None: all.
    """
    own = rows if own is None else own
    if isinstance(job, TextJob):
        first = max(1, picture_tokens_of(job, tokens))  # the first of all tokens that is trained
        text = Text([i % job.model.config.vocab for i in range(tokens)], [i >= first for i in range(tokens)])
        needed = reads(job.algorithm)
        margin = 0.0 if "margin" in needed.required | needed.optional else None
        labels = {"ratings": (1.0,), "steps": (1.0,) * (tokens - first)}.get(job.task.kind, ())
        example = TextExample((text,) * len(TEXT_FIELDS[job.task.kind]), margin, labels)
        row = text_batch([example], job.pad, job.main_role in SCORING_ROLES, steps=job.task.kind == "steps")
        if margin is not None:
            row = row._replace(margin=row.margin.to(job.master))
        batch = trees.map(lambda x: x.expand(own, *x.shape[1:]).clone(), row)
        other = torch.arange(rows) % 2 == 1 if "mismatched" in needed.required else None
        return batch._replace(length=row.length.expand(rows).clone(), mismatched=other)
    turns = turns_of(job.settings)
    reply = job.sampling.max_new_tokens
    length = turns.row_tokens(tokens, reply)
    begins = turns.begins(tokens, reply)
    shape = (own, -(-length // 8) * 8)
    wide = torch.promote_types(job.dtype, torch.float32)
    choices = job.model.abilities.choices
    at_T = torch.arange(shape[1])
    written_T = torch.stack([(at_T >= begin) & (at_T < begin + reply) for begin in begins]).any(0)
    score_B = torch.arange(rows).remainder(2).to(wide)
    return Batch(
        tokens=torch.arange(math.prod(shape), dtype=TOKEN_INT).remainder(job.model.config.vocab).view(shape),
        mask=written_T.expand(shape).clone(),
        length=torch.full((rows,), length, dtype=torch.int64),
        group=torch.arange(rows) // job.sampling.samples,
        score=score_B,
        scores=score_B[:, None],
        truncated=torch.ones(rows, dtype=torch.bool),
        rollout_logp=torch.zeros(shape, dtype=wide),
        routes=torch.zeros(*shape, choices, dtype=TOKEN_INT) if job.settings.routers.router_replay else None,
        greedy_score=score_B if "greedy_score" in reads(job.algorithm).required else None,
        demonstration=torch.zeros(shape, dtype=torch.bool) if learns_from_demonstrations(job.algorithm) else None,
        **(_episode_fields(job, shape, begins, wide) if has_environment(job.settings) else {}),
    )


def _episode_fields(job: Job, shape: tuple[int, int], begins: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """The fields per token that rows of episodes have besides, as far as the algorithm reads them.

    Args:
      shape: [own rows, T].
      begins: of each reply.
    """
    read = reads(job.algorithm)
    turn_T = (torch.arange(shape[1])[:, None] >= torch.tensor(begins[1:])).sum(1)
    fields = {
        "turn": turn_T.to(TOKEN_INT).expand(shape).clone(),
        "token_reward": torch.zeros(shape, dtype=dtype),
    }
    return {name: x for name, x in fields.items() if name in read.required | read.optional}


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
