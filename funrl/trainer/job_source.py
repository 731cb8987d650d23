"""The source of a job: its prompts, rewards and engine, or its texts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import reads
from funrl.batch import select
from funrl.data.supervised import check_lengths, text_batch
from funrl.data.tokenizer import load_tokenizer
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import gather_table
from funrl.rewards.load import score_row
from funrl.rollout.completions import Sampling
from funrl.trainer.build import Parts
from funrl.trainer.clock import Clock
from funrl.trainer.completion_scores import with_completion_scores
from funrl.trainer.generation import Example, Rollout, generating_ranks, rollout
from funrl.trainer.job import Job, Task
from funrl.trainer.settings import scoring_budget
from funrl.trainer.sources import Generation, Show, Source, prompt_source, text_source
from funrl.trainer.step_rows import Rows, rows_of


def make_source(job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show) -> Source:
    """The source of the rows that a job trains on."""
    settings, task = job.settings, job.task
    if not isinstance(task, Task):
        to_rows = functools.partial(text_rows, job, parts.mesh)
        return text_source(
            task.examples, task.heldout, to_rows, parts.roles, frozen, settings.batch_prompts, settings.seed,
            scoring_budget(settings), clock,
        )  # fmt: skip
    decode = functools.partial(job.tokenizer.decode, skip_special_tokens=True)
    generation = Generation(
        roll=functools.partial(roll, job, parts, decode),
        decode=decode,
        prompts=task.prompts,
        heldout=task.heldout[: settings.eval_prompts],
        solved=functools.partial(solved, task.weights[: len(task.rewards)]) if task.rewards else None,
        sampling=job.sampling,
        eval_sampling=job.eval_sampling,
        rescore=rescoring(job, parts, frozen),
        filter=job.algorithm.filter,
        pad=job.pad,
        batch_prompts=settings.batch_prompts,
        max_refills=settings.max_refills,
        greedy_baseline="greedy_score" in reads(job.algorithm).required,
        seed=settings.seed,
        shows=lambda step: step in (1, settings.steps) or step % settings.sample_every == 0,
    )
    return prompt_source(generation, clock, show)


def roll(job: Job, parts: Parts, decode: Any, examples: Sequence[Example], sampling: Sampling, seed: int) -> Rollout:
    """Completions of prompts by the engine, rewarded by the task's functions."""
    assert parts.generator is not None and isinstance(job.task, Task)
    rewards, weights = functools.partial(reward_rows, job.task), job.task.weights[: len(job.task.rewards)]
    return rollout(parts.generator.engine, examples, sampling, seed, rewards, decode, parts.generator.mesh, weights)


def rescoring(
    job: Job, parts: Parts, frozen: Mapping[str, trees.Tree]
) -> Callable[[Rows, Sequence[Example]], Rows] | None:
    """A function that adds the reward model's numbers to rows; None where the run has no reward model."""
    params = frozen.get("reward_model")
    if params is None:
        return None
    assert isinstance(job.task, Task)
    role, pad = parts.roles["reward_model"], load_tokenizer(job.directories["reward_model"]).pad_token_id
    return functools.partial(
        with_completion_scores, role=role, params=params, weight=job.task.weights[-1],
        pad=job.pad if pad is None else pad, token_budget=scoring_budget(job.settings),
    )  # fmt: skip


def solved(weights: Sequence[float], scores_RK: Tensor) -> Tensor:
    """Mask of the completions that have all that the reward functions can give, where each gives 1 at most.

    Args:
      weights: of the functions.
      scores_RK: theirs come first.
    """
    factors = torch.tensor(weights, dtype=scores_RK.dtype, device=scores_RK.device)
    full = sum(max(weight, 0.0) for weight in weights) - 1e-9
    return (scores_RK[:, : len(weights)] * factors).nansum(1) >= full


def reward_rows(task: Task, rows: Sequence[Example], texts: Sequence[str]) -> list[list[float]]:
    """Rewards of each completion by each reward function."""
    if not task.rewards:
        return [[] for _ in rows]
    return [score_row(task.rewards, row.text, text, row.fields) for row, text in zip(rows, texts, strict=True)]


def text_rows(job: Job, mesh: Mesh, examples: Sequence[Any]) -> Rows:
    """Given texts as rows, one an example; each rank reads its own part, and no other.

    Raises:
      DataError: a text has more tokens than the model has positions, or cannot be read.
    """
    owner = generating_ranks(len(examples), 1, mesh.size(mesh.row_axes))
    own = [examples[i] for i in np.flatnonzero(owner == int(mesh.index(mesh.row_axes))).tolist()]
    check_lengths(own, job.model.config.max_positions, job.tokenizer)
    # A rank without texts has the same fields of no rows.
    some = text_batch(own or [examples[0]], job.pad, job.lead == "reward_model", mesh.device)
    mine = select(some, slice(len(own)))
    margin = mine.get("margin")
    mine = mine if margin is None else mine._replace(margin=margin.to(job.master))
    table = gather_table({"length": mine.length}, owner, mesh, mesh.row_axes)
    return rows_of(mine._replace(length=table["length"]), owner, mesh)
