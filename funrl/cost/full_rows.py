"""Rows of a dry run, each of the greatest length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.reading import reads
from funrl.batch import TOKEN_INT, Batch, as_dict
from funrl.cost.row_pictures import picture_tokens_of
from funrl.cost.tracing.estimate import FieldShapes
from funrl.cost.tracing.turns import turns_of
from funrl.data.conversations import Text
from funrl.data.supervised import TEXT_FIELDS, TextExample, text_batch
from funrl.role_kinds import SCORING_ROLES
from funrl.trainer import loop, phases
from funrl.trainer.jobs.demonstrations import learns_from_demonstrations
from funrl.trainer.jobs.job import Job, TextJob
from funrl.trainer.settings.scorers import has_environment
from funrl.trainer.sources.generation import generating_ranks
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
