"""From prompts to a batch: generate, reward, gather. Every rank ends with the same whole batch.

Each data rank of the generate mesh completes its own share of the prompts and rewards what it wrote; one collective
then gives all rows to all ranks. What follows (advantages, filters, mini-batches) is computed on the whole batch by
every rank alike, so no statistic depends on how many ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl.batch import Batch
from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh
from funrl.mesh.sums import gather_rows, own_range
from funrl.rewards.load import RewardError
from funrl.rollout.completions import Completions, Engine, Sampling


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
      completions: of all rows, the same on every rank.
      score: [R] rewards, the weighted sums of the next; 0 where there is none.
      scores: [R, K] what each reward function gave, and after them a reward model; NaN where one of several functions
        does not apply.
    """

    completions: Completions
    score: Tensor
    scores: Tensor

    @property
    def scored(self) -> bool:
        """True if anything rewards the completions."""
        return self.scores.shape[1] > 0


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
    count = len(examples) * sampling.samples
    columns = [_widen(done.tokens, sampling), _widen(done.logp, sampling), _widen(done.model_logp, sampling)]
    columns += [done.lengths, done.finished, own]
    # Shares are of prompts, and every prompt has as many rows: gather by prompt.
    by_prompt = [c.reshape(len(mine), sampling.samples, *c.shape[1:]) for c in columns]
    whole = [c.flatten(0, 1) for c in gather_rows(by_prompt, len(examples), mesh, mesh.row_axes)]
    tokens, logp, model_logp, lengths, finished, rewards_RK = whole
    assert len(tokens) == count
    factors_K = torch.tensor(weights, dtype=rewards_RK.dtype, device=rewards_RK.device)
    score_R = (rewards_RK * factors_K).nansum(1)  # NaN: that reward does not apply to the row
    return Rollout(Completions(tokens, lengths, logp, model_logp, finished), score_R, rewards_RK)


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


def to_batch(examples: Sequence[Example], done: Rollout, sampling: Sampling, pad: int, first_group: int) -> Batch:
    """Prompt and completion joined in rows, padded on the right to a multiple of 8."""
    completions, samples = done.completions, sampling.samples
    device = completions.tokens.device
    prompt_R = torch.tensor([len(e.tokens) for e in examples for _ in range(samples)], device=device)
    length_R = prompt_R + completions.lengths
    width = math.ceil(int(length_R.max()) / 8) * 8
    tokens = torch.full((len(prompt_R), width), pad, dtype=torch.int64, device=device)
    for i, example in enumerate(examples):
        tokens[i * samples : (i + 1) * samples, : len(example.tokens)] = torch.tensor(example.tokens, device=device)
    at_RT = torch.arange(width, device=device)
    mask = (at_RT >= prompt_R[:, None]) & (at_RT < length_R[:, None])
    written = torch.arange(completions.tokens.shape[1], device=device) < completions.lengths[:, None]
    tokens[mask] = completions.tokens[written]
    # The sampling distribution is the tempered model as long as nothing is truncated away; see settings' check.
    truncated = sampling.top_k > 0 or sampling.top_p < 1
    engine_logp = completions.model_logp if truncated else completions.logp
    rollout_logp = torch.zeros(tokens.shape, dtype=engine_logp.dtype, device=device)
    rollout_logp[mask] = engine_logp[written]
    return Batch(
        tokens=tokens,
        mask=mask,
        length=length_R,
        group=first_group + torch.arange(len(prompt_R), device=device) // samples,
        score=done.score.to(engine_logp.dtype) if done.scored else None,
        scores=done.scores.to(engine_logp.dtype) if done.scored else None,
        truncated=~completions.finished,
        rollout_logp=rollout_logp,
    )


def _widen(x_RT: Tensor, sampling: Sampling) -> Tensor:
    """Columns up to the limit of new tokens, the same on every rank."""
    return torch.nn.functional.pad(x_RT, (0, sampling.max_new_tokens - x_RT.shape[1]))


def _raise_everywhere(problem: str | None, mesh: Mesh) -> None:
    """If any rank has a problem, every rank raises it: none is left waiting in a collective."""
    everyone = tuple(mesh.sizes)
    failed = torch.tensor(float(problem is not None), device=mesh.device)
    if collectives.pmax(failed, mesh, everyone).item() == 0:
        return
    raise RewardError(next(p for p in collectives.gather_objects(problem, mesh) if p is not None))
