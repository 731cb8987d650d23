"""From prompts to rows: generate, reward, and tell all ranks of each row what is not per token.

Each data rank of the generate mesh completes its own share of the prompts and rewards what it wrote. The rows stay
there; one collective gives lengths, ends and scores to all ranks, so that every rank filters and chooses alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.batch import TOKEN_INT, Batch
from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import gather_table
from funrl.mesh.sums import own_range
from funrl.rewards.load import RewardError
from funrl.rollout.completions import Completions, Engine, Sampling
from funrl.trainer.step_rows import Rows, rows_of


class Example(NamedTuple):
    """A prompt ready to be completed.

    Attributes:
      tokens: ids of the prompt, special tokens and chat template included.
      text: what the reward function is given as the prompt.
      fields: the other fields of the prompt's line, given to the reward function by name.
    """

    tokens: list[int]
    text: str
    fields: dict[str, Any]


class Rollout(NamedTuple):
    """Completions of all prompts, rewarded. Row r is sample `r % samples` of prompt `r // samples`.

    Attributes:
      completions: of this rank's own rows, in their order.
      lengths: [R] tokens of every completion.
      finished: [R] bool, ended by a stop token rather than by the limit.
      score: [R] rewards, the weighted sums of the next; 0 where there is none.
      scores: [R, K] what each reward function gave; NaN where one of several functions does not apply.
      owner: [R] the rank that has each row, by its index over the row axes of `mesh`.
      mesh: the generate mesh.
    """

    completions: Completions
    lengths: Tensor
    finished: Tensor
    score: Tensor
    scores: Tensor
    owner: np.ndarray
    mesh: Mesh

    @property
    def own(self) -> np.ndarray:
        """Numbers of this rank's rows, ascending."""
        return np.flatnonzero(self.owner == int(self.mesh.index(self.mesh.row_axes)))


Score = Callable[[Sequence[Example], Sequence[str]], list[list[float]]]


def rollout(
    engine: Engine,
    examples: Sequence[Example],
    sampling: Sampling,
    seed: int,
    score: Score,
    decode: Callable[[list[int]], str],
    mesh: Mesh,
    weights: Sequence[float] = (1.0,),
) -> Rollout:
    """Complete and reward all prompts.

    Args:
      engine: holds the weights; on `mesh`.
      examples: the same on every rank.
      score: rewards of (example, completion text) pairs, K numbers each.
      decode: token ids without the stop token -> text.
      mesh: the generate mesh.
      weights: of the K numbers in a row's score; K may be 0.

    Raises:
      RewardError: the reward function failed on some rank; raised on every rank, with the prompt and completion.
    """
    mine = own_range(len(examples), mesh, mesh.row_axes)
    done = engine.generate([examples[i].tokens for i in mine], sampling, seed, first_prompt=mine.start)
    rows = [examples[i] for i in mine for _ in range(sampling.samples)]
    texts = completion_texts(done, decode, [row.tokens[-1] for row in rows])
    # Every tensor rank holds the same rows; one of them asks the reward function, which may be costly or random.
    problem, rewards = None, [[0.0] * len(weights)] * len(rows)
    if mesh.index("tensor") == 0:
        try:
            rewards = score(rows, texts)
        except RewardError as error:
            problem = str(error)
    _raise_everywhere(problem, mesh)
    own = torch.tensor(rewards, dtype=torch.float64, device=mesh.device).view(len(rows), len(weights))
    own = collectives.psum(own, mesh, "tensor")
    owner = generating_ranks(len(examples), sampling.samples, mesh.size(mesh.row_axes))
    columns = {"lengths": done.lengths, "finished": done.finished, "scores": own}
    table = gather_table(columns, owner, mesh, mesh.row_axes)
    scores_RK = table["scores"]
    factors_K = torch.tensor(weights, dtype=scores_RK.dtype, device=scores_RK.device)
    score_R = (scores_RK * factors_K).nansum(1)  # NaN: that reward does not apply to the row
    return Rollout(done, table["lengths"], table["finished"], score_R, scores_RK, owner, mesh)


def generating_ranks(prompts: int, samples: int, ranks: int) -> np.ndarray:
    """[prompts * samples] the rank that writes each row, as `own_range` shares the prompts out."""
    shares = [prompts * (i + 1) // ranks - prompts * i // ranks for i in range(ranks)]
    return np.repeat(np.arange(ranks), np.array(shares) * samples)


def completion_texts(
    done: Completions, decode: Callable[[list[int]], str], before: Sequence[int] | None = None
) -> list[str]:
    """The text of every row, without the stop token that ended it.

    Args:
      decode: token ids -> text.
      before: the token before each row's completion. Many tokenizers drop the space that opens a text; behind another
        token it stays, so that prompt and completion join to what the model wrote.
    """
    lengths = (done.lengths - done.finished.long()).tolist()
    rows = [row[:n] for row, n in zip(done.tokens.tolist(), lengths, strict=True)]
    if before is None:
        return [decode(row) for row in rows]
    opening = {token: decode([token]) for token in set(before)}
    texts = []
    for token, row in zip(before, rows, strict=True):
        joined = decode([token, *row])
        kept = joined.startswith(opening[token])
        texts.append(joined[len(opening[token]) :] if kept else decode(row))
    return texts


def to_rows(examples: Sequence[Example], done: Rollout, sampling: Sampling, pad: int, first_group: int = 0) -> Rows:
    """Prompt and completion joined in rows, each on the rank that wrote it, padded on the right to a multiple of 8."""
    completions, samples, own = done.completions, sampling.samples, done.own
    device = completions.tokens.device
    prompt_R = torch.tensor([len(e.tokens) for e in examples for _ in range(samples)], device=device)
    length_R, here = prompt_R + done.lengths, torch.from_numpy(own).to(device)
    prompt_r, length_r = prompt_R[here], length_R[here]
    width = math.ceil(int(length_r.max()) / 8) * 8 if len(own) else 8
    tokens = torch.full((len(own), width), pad, dtype=TOKEN_INT, device=device)
    for row, number in enumerate(own.tolist()):
        prompt = examples[number // samples].tokens
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    at_rT = torch.arange(width, device=device)
    mask = (at_rT >= prompt_r[:, None]) & (at_rT < length_r[:, None])
    written = torch.arange(completions.tokens.shape[1], device=device) < completions.lengths[:, None]
    tokens[mask] = completions.tokens[written].to(TOKEN_INT)
    # The sampling distribution is the tempered model as long as nothing is truncated away; see settings' check.
    truncated = sampling.top_k > 0 or sampling.top_p < 1
    engine_logp = completions.model_logp if truncated else completions.logp
    rollout_logp = torch.zeros(tokens.shape, dtype=engine_logp.dtype, device=device)
    rollout_logp[mask] = engine_logp[written]
    scored = done.scores.shape[1] > 0
    batch = Batch(
        tokens=tokens,
        mask=mask,
        length=length_R,
        group=first_group + torch.arange(len(prompt_R), device=device) // samples,
        score=done.score.to(engine_logp.dtype) if scored else None,
        scores=done.scores.to(engine_logp.dtype) if scored else None,
        truncated=~done.finished,
        rollout_logp=rollout_logp,
    )
    return rows_of(batch, done.owner, done.mesh)


def first_texts(
    done: Rollout, numbers: Sequence[int], decode: Callable[[list[int]], str], before: Sequence[int]
) -> list[str]:
    """The texts of some rows, which may be on any ranks; every rank gets them.

    Args:
      numbers: of the rows.
      decode, before: as in `completion_texts`, `before` of these rows.
    """
    own = done.own
    mine = [i for i, number in enumerate(numbers) if number in own]
    at = torch.from_numpy(np.searchsorted(own, [numbers[i] for i in mine]).astype(np.int64))
    some = Completions(*(x[at.to(x.device)] for x in done.completions))
    texts = dict(zip(mine, completion_texts(some, decode, [before[i] for i in mine]), strict=True))
    found: dict[int, str] = {}
    for others in collectives.gather_objects(texts, done.mesh):
        found |= others
    return [found[i] for i in range(len(numbers))]


def _raise_everywhere(problem: str | None, mesh: Mesh) -> None:
    """If any rank has a problem, every rank raises it: none is left waiting in a collective."""
    everyone = tuple(mesh.sizes)
    failed = torch.tensor(float(problem is not None), device=mesh.device)
    if collectives.pmax(failed, mesh, everyone).item() == 0:
        return
    raise RewardError(next(p for p in collectives.gather_objects(problem, mesh) if p is not None))
