"""Scores of completions, or of each of their steps, by reward models, with or without reward functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.data.conversations import Text
from funrl.data.packing import pack
from funrl.data.prompts import Example
from funrl.data.supervised import TextExample, text_batch
from funrl.mesh.rows import gather_table
from funrl.rewards.call import RewardError
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.micro import own_micro_batches, row_cost, sizes_of, token_ranks
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.score import score_role
from funrl.trainer.steps.step_rows import Rows, moved, rows_of

Scorer = Callable[[Rows, Sequence[Example]], Rows]
Rescore = Callable[[Rows, Sequence[Example], str], Rows]  # see `ScoreColumns.rescore`
ReadRows = Callable[[Rows, Sequence[Example]], Rows]  # (rows, prompts) -> rows as a model reads them; see `as_read`
OF_STEPS: dict[str, Callable[[Tensor], Tensor]] = {  # [steps] probability of being right -> a completion's score
    "min": torch.amin,
    "mean": torch.mean,
    "last": lambda x: x[-1],
    "product": torch.prod,
}


class RewardModel(NamedTuple):
    """A model that rewards completions.

    Attributes:
      role: of the model.
      params: this rank's weights.
      weight: of its score in the reward.
      budget: tokens in one forward pass of one device.
    """

    role: Role
    params: trees.Tree
    weight: float
    budget: int


def with_completion_scores(rows: Rows, examples: Sequence[Example], model: RewardModel, read: ReadRows) -> Rows:
    """Add a reward model's scores: a last column of `scores`, and its weighted share of every score.

    The rows move to the ranks of the model's mesh that read them.

    Args:
      rows: completions, with their scores so far.
      examples: prompts, each with the same number of rows.
      model: the reward model.
      read: gives the rows as the model reads them.

    Raises:
      RewardError: a score is not finite; raised on every rank.
    """
    rows = moved(rows, reading_ranks(rows.lengths, model.role, model.budget), model.role.placed.mesh)
    score_B = end_values(model.role, model.params, read(rows, examples), token_budget=model.budget)
    check_scores(score_B, examples, "reward model")
    return with_column(rows, score_B, model.weight)


def with_step_scores(
    rows: Rows,
    examples: Sequence[Example],
    model: RewardModel,
    reduction: str,
    read: Callable[[Rows, Sequence[Example]], tuple[Rows, Sequence[Sequence[int]]]],
) -> Rows:
    """Add a process reward model's scores of the steps: the probability that each step is right.

    Args:
      rows: completions, with their scores so far.
      examples: prompts, each with the same number of rows.
      model: the process reward model.
      reduction: "each" rewards the token that ends a step, and adds the mean over steps as a column of `scores` that
        does not count; a name of `OF_STEPS` makes one number per row, which counts.
      read: gives the rows as the model reads them, and for each row of this rank the positions of the tokens that end
        its steps.

    Raises:
      RewardError: a score is not finite; raised on every rank.
    """
    role = model.role
    rows = moved(rows, reading_ranks(rows.lengths, role, model.budget), role.placed.mesh)
    reading, ends = read(rows, examples)
    values_bT = score_role(role._replace(writes={"value": "values"}), model.params, reading, token_budget=model.budget)[
        "value"
    ]
    chances = [x[mask].sigmoid() for x, mask in zip(values_bT, reading.batch.mask, strict=True)]
    number = OF_STEPS["mean" if reduction == "each" else reduction]
    own_b = torch.stack([number(x) if len(x) else x.new_zeros(()) for x in chances]) if chances else values_bT[:, 0]
    score_B = gather_table({"score": own_b}, rows.owner, rows.mesh, axes=rows.mesh.row_axes)["score"]
    check_scores(score_B, examples, "process reward model")
    if reduction != "each":
        return with_column(rows, score_B, model.weight)
    reward_bT = torch.zeros_like(rows.batch.rollout_logp)
    for reward_T, x, places in zip(reward_bT, chances, ends, strict=True):
        index = torch.tensor(places, dtype=torch.int64, device=x.device)
        reward_T.index_add_(0, index, model.weight * x.to(reward_T.dtype))  # several steps may end with one token
    return with_column(rows, score_B, 0.0).with_fields(token_reward=reward_bT)


def check_scores(score_B: Tensor, examples: Sequence[Example], what: str) -> None:
    """Raise RewardError if a model's score of a row is not finite.

    Args:
      what: name of the model.
    """
    bad = (~score_B.isfinite()).nonzero().flatten().tolist()
    if bad:
        example = examples[bad[0] * len(examples) // len(score_B)]
        raise RewardError(
            f"the {what} gave {score_B[bad[0]].item()} for a completion of the prompt {example.text!r}; its weights "
            "may have diverged"
        )


def with_column(rows: Rows, score_B: Tensor, weight: float) -> Rows:
    """Add a column of scores, and add its weighted value to every score. NaN: it does not apply to that row."""
    before = rows.batch.get("score")
    columns = rows.batch.get("scores")
    score_B = score_B.to(rows.batch.rollout_logp.dtype)
    part = (weight * score_B).nan_to_num(0.0)
    all_columns = score_B[:, None] if columns is None else torch.cat([columns, score_B[:, None]], 1)
    return rows.with_fields(score=part if before is None else before + part, scores=all_columns)


def reading_ranks(lengths: np.ndarray, role: Role, token_budget: int) -> np.ndarray:
    """Rank of each row, [B], that balances a pass of a reward model over the rows.

    Args:
      lengths: [B] tokens of each row.
    """
    mesh = role.placed.mesh
    sizes, _ = sizes_of(lengths, token_budget, token_ranks(mesh))
    return pack(lengths, mesh.size(mesh.row_axes), sizes, max_segments=len(lengths), cost=row_cost(role.placed)).rank


@torch.no_grad()
def completion_scores(role: Role, params: trees.Tree, rows: Rows, pad: int, token_budget: int = 16384) -> Tensor:
    """Value at the end of each row, [B], the same on every rank.

    Args:
      role, params: a model with a value head, and this rank's weights.
      pad: id of the padding token.
      token_budget: tokens in one forward pass of one device.
    """
    return end_values(role, params, as_read(rows, pad), token_budget=token_budget)


def as_read(rows: Rows, pad: int) -> Rows:
    """The rows as a reward model reads them in training.

    Each is one token longer than its text without padding, and the mask is true there, so that the value at that
    position has seen the whole text.
    """
    lengths = rows.lengths[rows.own].tolist()
    texts = [tokens[:length] for tokens, length in zip(rows.batch.tokens.tolist(), lengths, strict=True)]
    whole = [TextExample((Text(tokens, [False] * len(tokens)),)) for tokens in texts]
    batch = text_batch(whole, pad, reader=True, device=rows.mesh.device)
    table = gather_table({"length": batch.length}, rows.owner, rows.mesh, axes=rows.mesh.row_axes)
    return rows_of(batch._replace(length=table["length"]), rows.owner, rows.mesh)


@torch.no_grad()
def end_values(role: Role, params: trees.Tree, read: Rows, token_budget: int) -> Tensor:
    """Value at the last token of each row, [B], the same on every rank; see `as_read`."""
    values = role.placed.expert_rows.repeat(
        lambda: [
            (places, role.placed.values(params, piece)[0, micro.offsets[1 : 1 + len(places)].long() - 1])
            for places, micro, piece in own_micro_batches(read, token_budget, row_cost(role.placed))
        ]
    )
    score_b = values[0][1].new_zeros(len(read.own))
    for places, value_N in values:
        score_b[places] = value_N
    return gather_table({"score": score_b}, read.owner, read.mesh, axes=read.mesh.row_axes)["score"]


def scored_in_order(scorers: Mapping[str, Scorer], clock: Clock) -> Rescore:
    """A function that adds scores to rows, in the order of some models; the phase is one of each where none is given.

    Args:
      scorers: by the model's name.
      clock: of the phases.
    """

    def rescore(rows: Rows, examples: Sequence[Example], phase: str) -> Rows:
        for name, scorer in scorers.items():
            with clock.phase(phase or f"score_{name}"):
                rows = scorer(rows, examples)
        return rows

    return rescore
