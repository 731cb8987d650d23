"""From prompts to rows: generate, reward, and tell all ranks of each row what is not per token.

Each data rank of the generate mesh completes prompts as it has room for them, and has the workers of its pool reward
what is complete while it writes the rest. The rows stay there; one collective gives lengths, ends and scores to all
ranks, so that every rank filters and chooses alike.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.batch import TOKEN_INT, Batch
from funrl.mesh import collectives, heartbeat
from funrl.mesh.counter import shared_counter
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import gather_table
from funrl.mesh.sums import own_range
from funrl.rewards.call import Completed, RewardError
from funrl.rewards.pool import Pool
from funrl.rollout.engine import Engine, complete
from funrl.rollout.requests import Completion, Request, requests_of
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.tickets import complete_shared
from funrl.trainer.pending_rewards import PendingRewards
from funrl.trainer.step_rows import Rows, rows_of


class Example(NamedTuple):
    """A prompt ready to be completed.

    Attributes:
      tokens: ids of the prompt, special tokens and chat template included.
      text: what the reward function is given as the prompt.
      fields: the other fields of the prompt's record, given to the reward function by name.
      source: the file and the line or row it is from.
      messages: of a chat, which the text is made of; None: the prompt is a text.
    """

    tokens: list[int]
    text: str
    fields: dict[str, Any]
    source: str = ""
    messages: Sequence[Mapping[str, Any]] | None = None


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
      dtype: of log-probabilities.
      reward_s: seconds that this rank waited for rewards, of its own rows or others', when all rows were complete.
      failed: [R] bool, a reward function failed on the row, whose number is then 0; None: a failure ends the run.
      problem: message of one failure; "" where there is none.
    """

    completions: Sequence[Completion]
    lengths: Tensor
    finished: Tensor
    score: Tensor
    scores: Tensor
    owner: np.ndarray
    mesh: Mesh
    dtype: torch.dtype = torch.float32
    reward_s: float = 0.0
    failed: Tensor | None = None
    problem: str = ""

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
    queue: str = "tickets",
    on_error: str = "stop",
) -> Rollout:
    """Complete and reward all prompts.

    Args:
      engine: holds the weights; on `mesh`.
      examples: the same on every rank.
      pool: runs the K reward functions; K may be 0.
      decode: token ids without the stop token -> text.
      mesh: the generate mesh.
      weights: of the K numbers in a row's score.
      queue: "tickets", replicas take prompts as they have room; "fixed", each has its share of them by their numbers.
      on_error: "stop" raises where a reward function fails; else the row is marked as failed.

    Raises:
      RewardError: the reward function failed on some rank; raised on every rank, with the prompt and completion.
    """
    samples = sampling.samples
    requests = requests_of([example.tokens for example in examples], sampling, seed)
    groups = [requests[low : low + samples] for low in range(0, len(requests), samples)]
    return fulfilled(engine, groups, (), examples, pool, decode, mesh, weights, queue, None, on_error)


def fulfilled(
    engine: Engine,
    groups: Sequence[Sequence[Request]],
    own: Sequence[Request],
    examples: Sequence[Example],
    pool: Pool,
    decode: Callable[[list[int]], str],
    mesh: Mesh,
    weights: Sequence[float] = (1.0,),
    queue: str = "tickets",
    rows: int | None = None,
    on_error: str = "stop",
) -> Rollout:
    """Complete requests of several kinds and reward those that end; what is paused has no reward yet.

    Args:
      groups: of all replicas, shared out by `queue`.
      own: requests of this replica alone.
      examples: of all requests by their numbers, each of as many as the others.
      rows: requests of all replicas, numbered from 0; None: those of the groups.

    The others, and what is raised: as in `rollout`.
    """
    rows = sum(map(len, groups)) if rows is None else rows
    # Every tensor rank holds the same rows; one of them asks the reward functions, which may be costly or random.
    asks = mesh.index("tensor") == 0 and bool(pool.functions)
    pending = _pending(pool, examples, rows // len(examples), decode) if asks else None
    start = time.perf_counter()
    if queue == "tickets":
        done = complete_shared(engine, groups, shared_counter(mesh), mesh, pending and pending.add, own)
    else:
        share = own_range(len(groups), mesh, mesh.row_axes)
        mine = [request for group in groups[share.start : share.stop] for request in group]
        done = complete(engine, [*own, *mine], pending and pending.add)
    generated = rewarded = time.perf_counter()
    problem, ended = None, np.array([one.finish != "paused" for one in done], dtype=bool)
    rewards, failed, trouble = np.zeros((len(done), len(weights))), np.zeros(len(done)), ""
    with heartbeat.phase("reward"):
        if pending is not None:
            try:
                found = pending.collect(on_error)
                rewards[ended] = np.array(found.scores, dtype=np.float64).reshape(-1, len(weights))
                failed[ended], trouble = found.failed, found.problem
            except RewardError as error:
                problem = str(error)
            rewarded = time.perf_counter()
    last_generated, last_rewarded = _raise_everywhere(problem, (generated - start, rewarded - start), mesh)
    reward_s = min(last_rewarded - last_generated, time.perf_counter() - generated)  # ranks begin nearly together
    scores = collectives.psum(torch.from_numpy(rewards).to(mesh.device), mesh, "tensor")
    owner_R = torch.zeros(rows, dtype=torch.int64, device=mesh.device)
    owner_R[[one.number for one in done]] = int(mesh.index(mesh.row_axes))
    owner = collectives.psum(owner_R, mesh, mesh.row_axes).cpu().numpy()
    columns = {
        "lengths": torch.tensor([len(one.tokens) for one in done], dtype=torch.int64, device=mesh.device),
        "finished": torch.tensor([one.finished for one in done], dtype=torch.bool, device=mesh.device),
        "scores": scores,
    }
    if on_error != "stop":
        columns["failed"] = collectives.psum(torch.from_numpy(failed).to(mesh.device), mesh, "tensor") > 0
    table = gather_table(columns, owner, mesh, mesh.row_axes)
    scores_RK = table["scores"]
    factors_K = torch.tensor(weights, dtype=scores_RK.dtype, device=scores_RK.device)
    score_R = (scores_RK * factors_K).nansum(1)  # NaN: that reward does not apply to the row
    dtype = torch.promote_types(engine.weights.dtype, torch.float32)
    rolled = Rollout(done, table["lengths"], table["finished"], score_R, scores_RK, owner, mesh, dtype, reward_s)
    if on_error == "stop":
        return rolled
    if table["failed"].any():
        trouble = next(filter(None, collectives.gather_objects(trouble, mesh)))
    return rolled._replace(failed=table["failed"], problem=trouble)


def _pending(
    pool: Pool, examples: Sequence[Example], samples: int, decode: Callable[[list[int]], str]
) -> PendingRewards:
    """Rewards of the rows of these prompts, none of which is complete yet."""
    opening = functools.cache(lambda token: decode([token]))
    takes_ids = any("completion_ids" in one.takes for one in pool.functions)

    def completed(done: Completion) -> Completed:
        example = examples[done.number // samples]
        before = example.tokens[-1]
        text = text_after(opening(before), before, done.written, decode)
        return Completed(example.text, text, example.fields, done.tokens.tolist() if takes_ids else ())

    return PendingRewards(pool, completed, samples)


def generating_ranks(prompts: int, samples: int, ranks: int) -> np.ndarray:
    """[prompts * samples] the rank that writes each row, as `own_range` shares the prompts out."""
    shares = [prompts * (i + 1) // ranks - prompts * i // ranks for i in range(ranks)]
    return np.repeat(np.arange(ranks), np.array(shares) * samples)


def completion_texts(
    done: Sequence[Completion], decode: Callable[[list[int]], str], before: Sequence[int] | None = None
) -> list[str]:
    """The text of every completion, without the stop token that ended it.

    Args:
      decode: token ids -> text.
      before: the token before each completion. Many tokenizers drop the space that opens a text; behind another token
        it stays, so that prompt and completion join to what the model wrote.
    """
    rows = [one.written for one in done]
    if before is None:
        return [decode(row) for row in rows]
    opening = {token: decode([token]) for token in set(before)}
    return [text_after(opening[token], token, row, decode) for token, row in zip(before, rows, strict=True)]


def text_after(opening: str, before: int, tokens: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """The text of a completion as it continues the token before it, whose own text is `opening`."""
    joined = decode([before, *tokens])
    return joined[len(opening) :] if joined.startswith(opening) else decode(list(tokens))


def to_rows(
    examples: Sequence[Example],
    done: Rollout,
    sampling: Sampling,
    pad: int,
    first_group: int = 0,
    versions: bool = False,
    choices: int = 0,
) -> Rows:
    """Prompt and completion joined in rows, each on the rank that wrote it, padded on the right to a multiple of 8.

    `rollout_logp` is of the whole vocabulary at the temperature, as the trainer's log-probabilities are, whatever
    top_k, top_p, min_p and the repetition penalty left to draw from: a ratio of the two measures the gap between engine
    and trainer alone, and between the weights that drew a token and the present ones where these differ.

    Args:
      versions: whether rows have the version of the weights that drew each token.
      choices: experts of each token that were recorded; 0: none.

    Warning: verl and TRL take vLLM's log-probabilities after truncation and penalty, the trainer's before, so that
      their ratios carry the probability of the tokens left (https://github.com/huggingface/trl/issues/6789,
      https://github.com/verl-project/verl/issues/6240). Neither they nor funrl correct for what was not drawn.
    """
    samples, own, device = sampling.samples, done.own, done.mesh.device
    prompt_R = torch.tensor([len(e.tokens) for e in examples for _ in range(samples)], dtype=torch.int64, device=device)
    length_R = prompt_R + done.lengths
    prompts = [examples[number // samples].tokens for number in own.tolist()]
    longest = max((len(p) + len(one.tokens) for p, one in zip(prompts, done.completions, strict=True)), default=1)
    shape = (len(own), math.ceil(longest / 8) * 8)
    tokens = torch.full(shape, pad, dtype=TOKEN_INT)
    mask, rollout_logp = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=done.dtype)
    version = torch.zeros(shape, dtype=TOKEN_INT)
    routes = torch.full((*shape, choices), -1, dtype=TOKEN_INT)
    # The trainer's distribution is the tempered model. What is drawn from is the same, unless tokens are cut away or
    # penalised; then it is the model's own, for the temperature is 1 (see the check of the settings).
    for row, (prompt, one) in enumerate(zip(prompts, done.completions, strict=True)):
        here = slice(len(prompt), len(prompt) + len(one.tokens))
        tokens[row, : len(prompt)], tokens[row, here], mask[row, here] = torch.tensor(prompt), one.tokens, True
        rollout_logp[row, here] = one.raw_logp if sampling.reshaped else one.sampling_logp
        version[row, here] = one.versions.to(TOKEN_INT)
        if one.routes is not None and choices:
            routes[row, : len(one.routes)] = one.routes.to(TOKEN_INT)
    scored = done.scores.shape[1] > 0
    batch = Batch(
        tokens=tokens.to(device),
        mask=mask.to(device),
        length=length_R,
        group=first_group + torch.arange(len(prompt_R), device=device) // samples,
        score=done.score.to(done.dtype) if scored else None,
        scores=done.scores.to(done.dtype) if scored else None,
        truncated=~done.finished,
        rollout_logp=rollout_logp.to(device),
        version=version.to(device) if versions else None,
        routes=routes.to(device) if choices else None,
        failed=done.failed,
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
    some = [done.completions[at] for at in np.searchsorted(own, [numbers[i] for i in mine])]
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
