"""From prompts to rows: generate, reward, and tell all ranks of each row what is not per token.

Each data rank of the generate mesh completes its own share of the prompts, and has the workers of its pool reward what
is complete while it writes the rest. The rows stay there; one collective gives lengths, ends and scores to all ranks,
so that every rank filters and chooses alike.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.batch import Batch
from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import gather_table
from funrl.mesh.sums import own_range
from funrl.rewards.load import RewardError
from funrl.rewards.pool import Completed, Pool
from funrl.rollout.completions import Completions, Engine, Sampling, written
from funrl.trainer.pending_rewards import PendingRewards
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
      reward_s: seconds that this rank waited for rewards, of its own rows or others', when all rows were complete.
    """

    completions: Completions
    lengths: Tensor
    finished: Tensor
    score: Tensor
    scores: Tensor
    owner: np.ndarray
    mesh: Mesh
    reward_s: float = 0.0

    @property
    def own(self) -> np.ndarray:
        """Numbers of this rank's rows, ascending."""
        return np.flatnonzero(self.owner == int(self.mesh.index(self.mesh.row_axes)))


def rollout(
    engine: Engine,
    examples: Sequence[Example],
    sampling: Sampling,
    seed: int,
    pool: Pool,
    decode: Callable[[list[int]], str],
    mesh: Mesh,
    weights: Sequence[float] = (1.0,),
) -> Rollout:
    """Complete and reward all prompts.

    Args:
      engine: holds the weights; on `mesh`.
      examples: the same on every rank.
      pool: runs the K reward functions; K may be 0.
      decode: token ids without the stop token -> text.
      mesh: the generate mesh.
      weights: of the K numbers in a row's score.

    Raises:
      RewardError: the reward function failed on some rank; raised on every rank, with the prompt and completion.
    """
    mine = own_range(len(examples), mesh, mesh.row_axes)
    prompts = [examples[i] for i in mine]
    # Every tensor rank holds the same rows; one of them asks the reward functions, which may be costly or random.
    asks = mesh.index("tensor") == 0 and bool(pool.rewards)
    pending = _pending(pool, prompts, sampling.samples, decode) if asks else None
    start = time.perf_counter()
    done = engine.generate(
        [prompt.tokens for prompt in prompts], sampling, seed, mine.start, None if pending is None else pending.add
    )
    generated = rewarded = time.perf_counter()
    problem, rows = None, len(prompts) * sampling.samples
    rewards = [[0.0] * len(weights)] * rows
    if pending is not None:
        try:
            rewards = pending.collect()
        except RewardError as error:
            problem = str(error)
        rewarded = time.perf_counter()
    last_generated, last_rewarded = _raise_everywhere(problem, (generated - start, rewarded - start), mesh)
    reward_s = min(last_rewarded - last_generated, time.perf_counter() - generated)  # ranks begin nearly together
    own = torch.tensor(rewards, dtype=torch.float64, device=mesh.device).view(rows, len(weights))
    own = collectives.psum(own, mesh, "tensor")
    ranks = mesh.size(mesh.row_axes)
    shares = [len(examples) * (i + 1) // ranks - len(examples) * i // ranks for i in range(ranks)]
    owner = np.repeat(np.arange(ranks), np.array(shares) * sampling.samples)
    columns = {"lengths": done.lengths, "finished": done.finished, "scores": own}
    table = gather_table(columns, owner, mesh, mesh.row_axes)
    scores_RK = table["scores"]
    factors_K = torch.tensor(weights, dtype=scores_RK.dtype, device=scores_RK.device)
    score_R = (scores_RK * factors_K).nansum(1)  # NaN: that reward does not apply to the row
    return Rollout(done, table["lengths"], table["finished"], score_R, scores_RK, owner, mesh, reward_s)


def _pending(
    pool: Pool, prompts: Sequence[Example], samples: int, decode: Callable[[list[int]], str]
) -> PendingRewards:
    """Rewards of the rows of these prompts, none of which is complete yet."""
    opening = functools.cache(lambda token: decode([token]))

    def completed(number: int, ids: Sequence[int]) -> Completed:
        example = prompts[number // samples]
        before = example.tokens[-1]
        return Completed(example.text, _text_after(opening(before), before, ids, decode), example.fields)

    return PendingRewards(pool, completed)


def completion_texts(
    done: Completions, decode: Callable[[list[int]], str], before: Sequence[int] | None = None
) -> list[str]:
    """The text of every row, without the stop token that ended it.

    Args:
      decode: token ids -> text.
      before: the token before each row's completion. Many tokenizers drop the space that opens a text; behind another
        token it stays, so that prompt and completion join to what the model wrote.
    """
    rows = written(done.tokens, done.lengths, done.finished)
    if before is None:
        return [decode(row) for row in rows]
    opening = {token: decode([token]) for token in set(before)}
    return [_text_after(opening[token], token, row, decode) for token, row in zip(before, rows, strict=True)]


def _text_after(opening: str, before: int, tokens: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """The text of a completion as it continues the token before it, whose own text is `opening`."""
    joined = decode([before, *tokens])
    return joined[len(opening) :] if joined.startswith(opening) else decode(list(tokens))


def to_rows(examples: Sequence[Example], done: Rollout, sampling: Sampling, pad: int, first_group: int = 0) -> Rows:
    """Prompt and completion joined in rows, each on the rank that wrote it, padded on the right to a multiple of 8."""
    completions, samples, own = done.completions, sampling.samples, done.own
    device = completions.tokens.device
    prompt_R = torch.tensor([len(e.tokens) for e in examples for _ in range(samples)], device=device)
    length_R, here = prompt_R + done.lengths, torch.from_numpy(own).to(device)
    prompt_r, length_r = prompt_R[here], length_R[here]
    width = math.ceil(int(length_r.max()) / 8) * 8 if len(own) else 8
    tokens = torch.full((len(own), width), pad, dtype=torch.int64, device=device)
    for row, number in enumerate(own.tolist()):
        prompt = examples[number // samples].tokens
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    at_rT = torch.arange(width, device=device)
    mask = (at_rT >= prompt_r[:, None]) & (at_rT < length_r[:, None])
    written = torch.arange(completions.tokens.shape[1], device=device) < completions.lengths[:, None]
    tokens[mask] = completions.tokens[written]
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


def _raise_everywhere(problem: str | None, numbers: Sequence[float], mesh: Mesh) -> list[float]:
    """If any rank has a problem, every rank raises it: none is left waiting in a collective. Else the largest of each
    number."""
    everyone = tuple(mesh.sizes)
    ours = torch.tensor([float(problem is not None), *numbers], dtype=torch.float64, device=mesh.device)
    failed, *largest = collectives.pmax(ours, mesh, everyone).tolist()
    if not failed:
        return largest
    raise RewardError(next(p for p in collectives.gather_objects(problem, mesh) if p is not None))
