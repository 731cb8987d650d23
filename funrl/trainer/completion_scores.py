"""Scores of whole completions by a reward model, beside the reward functions or instead of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from funrl import trees
from funrl.data.supervised import Text, TextExample, text_batch
from funrl.mesh.collectives import psum
from funrl.rewards.load import RewardError
from funrl.trainer.generation import Example, Rollout
from funrl.trainer.micro import own_micro_batches
from funrl.trainer.roles import Role


def with_completion_scores(
    done: Rollout,
    examples: Sequence[Example],
    role: Role,
    params: trees.Tree,
    weight: float,
    pad: int,
    token_budget: int = 16384,
) -> Rollout:
    """The rollout with a reward model's numbers: its last column of scores, and part of every score.

    Args:
      done: completions of the examples, the same on every rank.
      examples: prompts, each with the same number of rows.
      role, params: the reward model, and this rank's weights.
      weight: of its number in a row's score.
      pad: id of the padding token of its tokenizer.
      token_budget: padded tokens in one forward pass of one device.

    Raises:
      RewardError: a number is not finite; on every rank alike.
    """
    samples = len(done.score) // len(examples)
    rows = zip(done.completions.tokens.tolist(), done.completions.lengths.tolist(), strict=True)
    texts = [[*examples[i // samples].tokens, *tokens[:length]] for i, (tokens, length) in enumerate(rows)]
    score_R = completion_scores(role, params, texts, pad, token_budget).to(done.score)
    bad = (~score_R.isfinite()).nonzero().flatten().tolist()
    if bad:
        example = examples[bad[0] // samples]
        raise RewardError(
            f"the reward model gave {score_R[bad[0]].item()} for a completion of the prompt {example.text!r}; its "
            "weights may have diverged"
        )
    return done._replace(score=done.score + weight * score_R, scores=torch.cat([done.scores, score_R[:, None]], 1))


@torch.no_grad()
def completion_scores(
    role: Role, params: trees.Tree, texts: Sequence[Sequence[int]], pad: int, token_budget: int = 16384
) -> Tensor:
    """The value at the end of each text, [R], known to all ranks. It is read as in training: at one token more than
    the last that is not padding, so that it has seen the whole text.

    Args:
      role, params: a model with a value head, and this rank's weights.
      texts: token ids, the same on every rank.
      pad: id of the padding token.
      token_budget: padded tokens in one forward pass of one device.
    """
    mesh = role.placed.mesh
    whole = [TextExample((Text(list(tokens), [False] * len(tokens)),)) for tokens in texts]
    batch, score_R = text_batch(whole, pad, reader=True, device=mesh.device), None
    for rows, piece in own_micro_batches(batch, mesh, token_budget):
        value_N = role.placed.values(params, piece)[piece.mask]
        score_R = value_N.new_zeros(len(texts)) if score_R is None else score_R
        score_R[rows] = value_N
    assert score_R is not None
    return psum(score_R, mesh, mesh.row_axes)  # zero on all data ranks but the one that computed it
