"""From prompts to rows: generate, reward, and share each row's per-row values with all ranks.

Each data rank of the generate mesh completes prompts as it has room for them, while the workers of its pool reward the
finished completions. The rows stay on their rank; one collective gives their lengths, ends and scores to all ranks, so
that every rank filters the same rows.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import TOKEN_INT, Batch, declare
from funrl.compiled_kernels.truncated_scores import KeptTokens
from funrl.data.processors.form import PictureForm
from funrl.data.prompts import Example
from funrl.fields import CONTEXT_FIELDS, KEPT_FIELDS, TEACHER_PROMPT, TEACHER_TOKENS, Field
from funrl.kinds import Ragged
from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh
from funrl.processes import heartbeat
from funrl.rewards.call import CompletedRow, RewardError
from funrl.rewards.pool import Pool
from funrl.rollout.engine import NO_CALLBACKS, Callbacks, Engine
from funrl.rollout.episodes import SampledNumbers
from funrl.rollout.requests import Completion, RequestGroups
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.sync_proof import SyncProof
from funrl.rollout.tickets import complete_shared, share_tickets
from funrl.trainer.sources.own_texts import text_after
from funrl.trainer.sources.pending_rewards import PendingRewards, Rewarded, Totals, add_totals
from funrl.trainer.sources.teacher_prompts import ScoredCompletion, TeacherPrompts
from funrl.trainer.sources.teacher_tokens import TeacherTokens
from funrl.trainer.steps.step_rows import Rows, ragged, rows_of, with_owned

LONGEST_REMARK = 1000  # characters of a failure's message


class Rollout(NamedTuple):
    """Rewarded completions of all prompts. Row r is sample `r % samples` of prompt `r // samples`.

    Attributes:
      completions: of this rank's own rows, in their order; or transcripts of its episodes.
      lengths: [R] tokens of every completion.
      finished: [R] bool, ended by a stop token or stop string, not by the limit.
      score: [R] rewards, the weighted sums of `scores`; 0 without any.
      scores: [R, K] score of each reward function; NaN where one of several functions does not apply.
      owner: [R] rank of each row, as an index over the row axes of `mesh`.
      mesh: the generate mesh.
      dtype: of log-probabilities.
      reward_s: seconds that this rank waited for rewards, its own or other ranks', after all rows were complete.
      failed: [R] bool, rows on which a reward function failed, whose score is then 0; None: a failure ends the run.
      entries: totals of the further numbers that reward functions returned in dicts, over the rows of all ranks.
      episodes: totals of facts about episodes, over those of all ranks; where there are episodes, R counts them.
    """

    completions: Sequence[Any]
    lengths: Tensor
    finished: Tensor
    score: Tensor
    scores: Tensor
    owner: np.ndarray
    mesh: Mesh
    dtype: torch.dtype = torch.float32
    reward_s: float = 0.0
    failed: Tensor | None = None
    entries: Totals = {}  # noqa: RUF012  (never mutated)
    episodes: Totals = {}  # noqa: RUF012  (never mutated)

    @property
    def own(self) -> np.ndarray:
        """Row numbers of this rank, ascending."""
        return np.flatnonzero(self.owner == int(self.mesh.index(self.mesh.row_axes)))


class RewardedEngine(NamedTuple):
    """An engine, and the rewards of its completions.

    Attributes:
      engine: an engine on `mesh`.
      mesh: the generate mesh.
      decode: token ids without the stop token -> text.
      pool: runs the K reward functions; K may be 0.
      weights: [K] weights of the scores in a row's reward.
      queue: "tickets": replicas take prompts as they have room; "fixed": each has an equal range of them.
      on_error: "stop" raises if a reward function fails; otherwise the row is marked as failed.
      note: receives a remark if reward functions failed.
      proof: of the engine's weights, settled while it generates; None: they are not proved, or not meanwhile.
      read: (names of `TEXT_VIEWS`, tokens of the prompt, those of the completion) -> texts by name.
    """

    engine: Engine
    mesh: Mesh
    decode: Callable[[list[int]], str]
    pool: Pool
    weights: Sequence[float] = (1.0,)
    queue: str = "tickets"
    on_error: str = "stop"
    note: Callable[[str], None] = lambda message: None
    proof: SyncProof | None = None
    read: Callable[[Iterable[str], Sequence[int], Sequence[int]], dict[str, str]] = lambda names, before, tokens: {}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of log-probabilities."""
        return torch.promote_types(self.engine.weights.dtype, torch.float32)


class CompletionRun(NamedTuple):
    """Completions of this replica.

    Attributes:
      completions: ascending by their numbers.
      pending: their rewards; None: another rank asks for them, or there are none.
      begin: when they began, by `time.perf_counter`.
      numbers: of the completions in `pending`; None: the same.
    """

    completions: Sequence[Completion]
    pending: PendingRewards | None
    begin: float
    numbers: Sequence[int] | None = None


def rollout(engine: RewardedEngine, examples: Sequence[Example], sampling: Sampling, seed: int) -> Rollout:
    """Complete and reward all prompts. The proof of the engine's weights ends meanwhile.

    Args:
      engine: engine and rewards.
      examples: prompts, the same on every rank.
      sampling: of the completions.
      seed: of their noise.

    Raises:
      RewardError: a reward function failed on some rank; raised on every rank, with the prompt and completion.
      SyncError: the engine does not hold the trainer's weights.
    """
    owned = [example.owned for example in examples]
    groups = RequestGroups([example.tokens for example in examples], sampling, seed, owned=owned)
    pending = pending_rewards(engine, examples, sampling.samples)
    begin = time.perf_counter()
    callbacks = NO_CALLBACKS if pending is None else Callbacks(finished=pending.add)
    if engine.proof is not None:
        callbacks = callbacks._replace(iterated=engine.proof.iterated)
    tickets = share_tickets(groups, engine.mesh, size=sampling.samples, fixed=engine.queue == "fixed")
    with settle_proof(engine.proof):
        completions = complete_shared(engine.engine, tickets, engine.mesh, callbacks)
    return collected_rollout(engine, CompletionRun(completions, pending, begin), rows=len(examples) * sampling.samples)


@contextlib.contextmanager
def settle_proof(proof: SyncProof | None) -> Iterator[None]:
    """Settle the proof of an engine's weights after the context, also where the engine's logits are not finite.

    Wrong weights explain them.

    Raises:
      SyncError: the engine does not hold the trainer's weights.
    """
    try:
        yield
    except FloatingPointError:
        if proof is not None:
            proof.settle()
        raise
    if proof is not None:
        proof.settle()


def collected_rollout(engine: RewardedEngine, run: CompletionRun, rows: int) -> Rollout:
    """Completions of all ranks with their rewards, for which this waits. Collective.

    Args:
      run: of this replica.
      rows: number of completions of all replicas.

    Raises:
      RewardError: as in `rollout`.
    """
    completions, pending, begin, numbers = run
    mesh = engine.mesh
    generated = time.perf_counter()
    own = [completion.number for completion in completions]
    rewards = Rewarded([[0.0] * len(engine.weights) for _ in own], [False] * len(own), "")
    error = None
    with heartbeat.phase("reward"):
        try:
            rewards = rewards if pending is None else pending.collect(numbers or own, engine.on_error)
        except RewardError as problem:
            error = str(problem)
    rewarded = generated if pending is None else time.perf_counter()
    times = (generated - begin, rewarded - begin, float(bool(rewards.entries)))
    last_generated, last_rewarded, has_entries = raise_everywhere(error, times, mesh)
    entries = add_totals(*collectives.gather_objects(rewards.entries, mesh)) if has_entries else {}
    own_s = time.perf_counter() - generated  # ranks begin at nearly the same time
    reward_s = min(last_rewarded - last_generated, own_s)
    columns = {
        "length": [len(x.tokens) for x in completions],
        "finished": [x.finished for x in completions],
        "scores": np.reshape(rewards.scores, (len(own), len(engine.weights))),
        "failed": rewards.failed,
    }
    owner, table = share_table(own, columns, rows, mesh)
    scores_RK = table["scores"]
    failed_R = table["failed"] > 0
    if failed_R.any():
        problem = first_problem(rewards.problem, mesh)
        engine.note(f"a reward function failed on {int(failed_R.sum())} of {rows} completions, such as: {problem}")
    return Rollout(
        completions,
        table["length"].long(),
        table["finished"] > 0,
        score=(scores_RK * scores_RK.new_tensor(engine.weights)).nansum(1),  # NaN: that reward does not apply
        scores=scores_RK,
        owner=owner,
        mesh=mesh,
        dtype=engine.dtype,
        reward_s=reward_s,
        failed=None if engine.on_error == "stop" else failed_R,
        entries=entries,
    )


def share_table(
    numbers: Sequence[int], columns: Mapping[str, Sequence[object] | np.ndarray], count: int, mesh: Mesh
) -> tuple[np.ndarray, dict[str, Tensor]]:
    """The owners of all samples, and columns of facts about them, from what each replica knows of its own. Collective.

    Args:
      numbers: of this replica's samples.
      columns: [r] or [r, K] of these, as its first tensor rank has them.
      count: of all samples.
      mesh: of the engines.

    Returns: [count] index over the row axes; and [count] or [count, K] float64 by name.
    """
    own = {"owner": np.full(len(numbers), int(mesh.index(mesh.row_axes))), **columns}
    parts = [np.asarray(x, dtype=np.float64) for x in own.values()]
    wide = [x.reshape(len(numbers), x.shape[1] if x.ndim == 2 else 1) for x in parts]
    whole = torch.zeros(count, sum(x.shape[1] for x in wide), dtype=torch.float64)
    if mesh.index("tensor") == 0:
        whole[list(numbers)] = torch.from_numpy(np.concatenate(wide, 1))
    bits = collectives.psum(whole.view(torch.int64).to(mesh.device), mesh, (*mesh.row_axes, "tensor"))
    whole = bits.view(torch.float64)  # the sum of bits, 0 on all other ranks, is exact
    split = whole.split([x.shape[1] for x in wide], 1)
    table = {name: x if part.ndim == 2 else x[:, 0] for name, x, part in zip(own, split, parts, strict=True)}
    return table.pop("owner").cpu().numpy().astype(np.int64), table


def first_problem(problem: str, mesh: Mesh) -> str:
    """Begin of the message of the first rank that has one, "" where there is no problem. Collective."""
    return next(filter(None, collectives.gather_objects(problem, mesh)), "")[:LONGEST_REMARK]


def pending_rewards(
    engine: RewardedEngine, examples: Sequence[Example] | Mapping[int, Example], samples: int
) -> PendingRewards | None:
    """Rewards of the prompts' rows, before any is complete; None on a rank that asks for none.

    Every tensor rank has the same rows. One of them calls the reward functions, which may be costly or random.
    """
    if engine.mesh.index("tensor") or not engine.pool.functions:
        return None
    opening = functools.cache(lambda token: engine.decode([token]))
    takes_ids = any("completion_ids" in function.takes for function in engine.pool.functions)

    def completed(completion: Completion) -> CompletedRow:
        example = examples[completion.number // samples]
        text = text_after(opening(example.tokens[-1]), example.tokens[-1], completion.written, decode=engine.decode)
        ids = completion.tokens.tolist() if takes_ids else ()
        messages = example.messages if example.conversational else None
        views = engine.read(engine.pool.views, example.tokens, completion.written)
        return CompletedRow(example.text, text, example.fields, completion_ids=ids, messages=messages, views=views)

    return PendingRewards(engine.pool, completed, samples)


def generating_ranks(prompts: int, samples: int, ranks: int) -> np.ndarray:
    """Rank that writes each row, [prompts * samples], if prompts are shared out by `own_range`."""
    shares = [prompts * (i + 1) // ranks - prompts * i // ranks for i in range(ranks)]
    return np.repeat(np.arange(ranks), np.array(shares) * samples)


def completion_texts(
    written: Sequence[list[int]], decode: Callable[[list[int]], str], before: Sequence[int]
) -> list[str]:
    """Text of every completion.

    Args:
      written: their token ids, without the stop token that ended one.
      decode: token ids -> text.
      before: the token before each completion. Many tokenizers drop the space at the start of a text but keep it after
        another token; decoding after `before` lets prompt and completion join to what the model wrote.
    """
    opening = {token: decode([token]) for token in set(before)}
    return [text_after(opening[token], token, ids, decode=decode) for token, ids in zip(before, written, strict=True)]


class SourceNumber(NamedTuple):
    """A field with a number for the source of each row's prompt.

    Attributes:
      name, field: its name and declaration.
      number_of: the number of a prompt's source.
    """

    name: str
    field: Field
    number_of: Callable[[Example], int]


class RowForm(NamedTuple):
    """Form of rows that are made of completions or episodes.

    Attributes:
      agents: names of the agents that may have rows.
      frozen: names of the others, which are not trained.
      pad: id of the padding token.
      dtype: of log-probabilities and scores.
      raw: whether `rollout_logp` is of the model's own distribution, as where sampling is truncated or penalised; else
        of the one sampled from.
      versions: whether rows get the version of the weights that sampled each token.
      digests: whether rows get the digests of the weights that sampled their tokens.
      choices: experts recorded for each token; 0: none.
      kept: whether rows get the tokens that truncated sampling could take; `rollout_logp` is then of these.
      owned: lines of a row that owns nothing, as `OwnedValues.none`; None: no row owns any.
      pictures: form in which the model takes pictures; None: it sees none.
      context: makes the prompts of a teacher that sees more than the policy; None: it sees the same.
      numbers: fields with a number for the source of a row's prompt.
      teacher_tokens: reads rows in a teacher's tokens; None: teachers have the policy's.
    """

    agents: tuple[str, ...] = ("policy",)
    frozen: tuple[str, ...] = ()
    pad: int = 0
    dtype: torch.dtype = torch.float32
    raw: bool = False
    versions: bool = False
    digests: bool = False
    choices: int = 0
    kept: bool = False
    owned: Mapping[str, Tensor] | None = None
    pictures: PictureForm | None = None
    context: TeacherPrompts | None = None
    numbers: tuple[SourceNumber, ...] = ()
    teacher_tokens: TeacherTokens | None = None


PLAIN_FORM = RowForm()


class Span(NamedTuple):
    """Neighbouring tokens of a row that one side wrote.

    Attributes:
      tokens: their ids.
      numbers: from the policy, where they are trained; None: they are context.
      routes: of the row's tokens up to these, as in `Completion`.
      kept: ids that could be sampled at each of them; None: they are not recorded.
    """

    tokens: Sequence[int] | Tensor
    numbers: SampledNumbers | None = None
    routes: Tensor | None = None
    kept: KeptTokens | None = None


def to_rows(examples: Sequence[Example], done: Rollout, sampling: Sampling, form: RowForm = PLAIN_FORM) -> Rows:
    """Join prompts and completions into rows on the ranks that wrote them, right-padded to a multiple of 8 tokens.

    `rollout_logp` is of the trainer's distribution: the whole vocabulary at the temperature (with `form.raw`, at 1),
    regardless of top_k, top_p, min_p and the repetition penalty; with `form.kept` the tokens that these left. So a
    ratio of the two measures only the gap between engine and trainer, and between the weights that sampled a token and
    the current ones where these differ.

    Args:
      examples: the prompts.
      done: their completions.
      sampling: of the completions.
      form: of the rows.

    Warning: verl and TRL take vLLM's log-probabilities after truncation and penalty, the trainer's before, so that
      their ratios carry the probability of the tokens left (https://github.com/huggingface/trl/issues/6789,
      https://github.com/verl-project/verl/issues/6240). They do not correct for tokens that could not be sampled, and
      without `form.kept` neither does funrl.
    """
    samples = sampling.samples
    device = done.mesh.device
    prompt_P = torch.tensor([len(e.tokens) for e in examples], dtype=torch.int64, device=device)
    length_R = prompt_P.repeat_interleave(samples) + done.lengths
    prompts = [examples[number // samples] for number in done.own.tolist()]
    spans = [
        [
            Span(prompt.tokens),
            Span(x.tokens, SampledNumbers(x.raw_logp, x.sampling_logp, x.versions, x.digests), x.routes, x.kept),
        ]
        for prompt, x in zip(prompts, done.completions, strict=True)
    ]
    scored = done.scores.shape[1] > 0
    # The trainer's distribution is the tempered model, which is also what was sampled from, unless tokens are truncated
    # or penalised, or its own is asked for. Then take the model's own: the trainer's temperature is 1. With the tokens
    # that could be sampled the trainer's distribution is truncated too.
    raw = form.raw or (sampling.reshaped and not form.kept)
    batch = Batch(
        **token_fields(spans, form._replace(dtype=done.dtype, raw=raw), device),
        length=length_R,
        group=torch.arange(len(length_R), device=device) // samples,
        score=done.score.to(done.dtype) if scored else None,
        scores=done.scores.to(done.dtype) if scored else None,
        truncated=~done.finished,
        failed=done.failed,
    )
    batch = with_source_numbers(batch, examples, form)
    like = next((x.owned.values for x in examples if x.owned is not None), None)
    rows = with_owned(rows_of(batch, done.owner, done.mesh), [prompt.owned for prompt in prompts], like)
    if form.context is not None:
        lines = teacher_lines(form.context, examples, done, samples)
        rows = rows.declaring(CONTEXT_FIELDS).with_fields(**{TEACHER_PROMPT: Ragged(*(x.to(device) for x in lines))})
    if form.teacher_tokens is not None:
        rows = with_teacher_tokens(rows, form.teacher_tokens, prompts, done)
    return with_kept(rows, spans, device) if form.kept else rows


def teacher_lines(context: TeacherPrompts, examples: Sequence[Example], done: Rollout, samples: int) -> Ragged:
    """The teacher's prompts of this rank's rows, made by one of the ranks that have them. Collective.

    Raises:
      RewardError: a prompt cannot be made; raised on every rank.
    """
    score_R = done.score if done.failed is None else done.score.masked_fill(done.failed, -math.inf)
    scores = score_R.tolist()
    numbered = zip(done.own.tolist(), done.completions, strict=True)
    own = [ScoredCompletion(number, x.written, scores[number]) for number, x in numbered]
    return once_a_row(lambda: context.lines(examples, own, samples), done.mesh)


def with_teacher_tokens(rows: Rows, read: TeacherTokens, prompts: Sequence[Example], done: Rollout) -> Rows:
    """The rows with their tokens as a teacher reads them, and with spans. Collective.

    Args:
      read: reads them.
      prompts: of this rank's rows.
      done: their completions.

    Raises:
      RewardError: a teacher cannot read a text; raised on every rank.
    """
    device = rows.batch.tokens.device
    written = [(x.written, len(x.written) < len(x.tokens)) for x in done.completions]
    own = [(prompt, *x) for prompt, x in zip(prompts, written, strict=True)]
    lines, span_bT = once_a_row(lambda: read.lines(own, rows.batch.tokens.shape[1]), done.mesh)
    values = {TEACHER_TOKENS: Ragged(*(x.to(device) for x in lines)), "teacher_span": span_bT.to(device)}
    return rows.declaring(CONTEXT_FIELDS).with_fields(**values)


def once_a_row(make: Callable[[], Any], mesh: Mesh) -> Any:
    """A value that one of the ranks that have the same rows makes, on all of them. Collective.

    Raises:
      RewardError: `make` raised it on a rank; raised on every rank.
    """
    value = None
    problem = None
    if mesh.index("tensor") == 0:
        try:
            value = make()
        except RewardError as error:
            problem = str(error)
    raise_everywhere(problem, (), mesh)
    return collectives.from_first(value, mesh, "tensor")


def with_source_numbers(batch: Batch, examples: Sequence[Example], form: RowForm) -> Batch:
    """The batch with the numbers that the form has of the source of each row's prompt.

    Args:
      batch: its groups are numbered as the prompts.
      examples: the prompts of all rows.
      form: of the rows.
    """
    for name, field, number_of in form.numbers:
        number_P = torch.tensor([number_of(x) for x in examples], device=batch.group.device)
        batch = declare(batch, {name: field})._replace(**{name: number_P[batch.group]})
    return batch


def with_kept(rows: Rows, own: Sequence[Sequence[Span]], device: torch.device) -> Rows:
    """Rows with the tokens that could be sampled at each of their trained tokens.

    Args:
      own: spans of this rank's rows.

    Raises:
      ValueError: an engine has not recorded them.
    """
    empty = torch.zeros(0, dtype=TOKEN_INT)
    counts = torch.zeros(_shape_of(own), dtype=TOKEN_INT)
    ids = [[empty] for _ in own]
    for row, begin, span in _placed_spans(own):
        if span.numbers is None:
            continue
        if span.kept is None:
            raise ValueError("the engine has not recorded what it could have sampled: record_kept=True")
        counts[row, begin : begin + len(span.tokens)] = span.kept.counts_N
        ids[row].append(span.kept.ids_M)
    kept = Ragged(*(x.to(device) for x in ragged(list(map(torch.cat, ids)), empty)))
    return rows.declaring(KEPT_FIELDS).with_fields(kept=kept, kept_counts=counts.to(device))


def _placed_spans(rows: Sequence[Sequence[Span]]) -> Iterator[tuple[int, int, Span]]:
    """Yield each span with the number of its row and the place of its first token."""
    for row, spans in enumerate(rows):
        begin = 0
        for span in spans:
            yield row, begin, span
            begin += len(span.tokens)


def _shape_of(rows: Sequence[Sequence[Span]]) -> tuple[int, int]:
    """Shape of fields per token of this rank's rows, right-padded to a multiple of 8 tokens."""
    longest = max((sum(len(span.tokens) for span in spans) for spans in rows), default=1)
    return len(rows), math.ceil(longest / 8) * 8


def token_fields(rows: Sequence[Sequence[Span]], form: RowForm, device: torch.device) -> dict[str, Any]:
    """Fields per token of this rank's rows, right-padded to a multiple of 8 tokens, and the digests of their weights.

    Raises:
      ValueError: the form has digests, and an engine has recorded none.
    """
    shape = _shape_of(rows)
    tokens = torch.full(shape, form.pad, dtype=TOKEN_INT)
    mask = torch.zeros(shape, dtype=torch.bool)
    rollout_logp = torch.zeros(shape, dtype=form.dtype)
    version = torch.zeros(shape, dtype=TOKEN_INT)
    routes = torch.full((*shape, form.choices), -1, dtype=TOKEN_INT)
    for row, begin, span in _placed_spans(rows):
        here = slice(begin, begin + len(span.tokens))
        tokens[row, here] = torch.as_tensor(span.tokens, dtype=TOKEN_INT)
        if span.numbers is not None:
            mask[row, here] = True
            rollout_logp[row, here] = span.numbers.raw_logp if form.raw else span.numbers.sampling_logp
            version[row, here] = torch.as_tensor(span.numbers.versions, dtype=TOKEN_INT)
        if span.routes is not None and form.choices:
            routes[row, : len(span.routes)] = span.routes.to(TOKEN_INT)
    fields: dict[str, Any] = {"tokens": tokens, "mask": mask, "rollout_logp": rollout_logp}
    if form.versions:
        fields["version"] = version
    if form.choices:
        fields["routes"] = routes
    if form.digests:
        fields["digests"] = digest_lines(rows)
    return trees.map(lambda x: x.to(device), fields)


def digest_lines(rows: Sequence[Sequence[Span]]) -> Ragged:
    """First token, version and digest of each run of tokens of one digest, of this rank's rows."""
    runs = [np.zeros((0, 3), np.int64)]
    counts = np.zeros(len(rows), np.int64)
    for row, begin, span in _placed_spans(rows):
        if span.numbers is None:
            continue
        if span.numbers.digests is None:
            raise ValueError("the engine has not recorded what sampled its tokens: record_digests=True")
        versions = span.numbers.versions.numpy()
        digests = span.numbers.digests.numpy()
        changed = (versions[1:] != versions[:-1]) | (digests[1:] != digests[:-1])
        first = np.flatnonzero(np.append(True, changed)[: len(digests)])
        runs.append(np.stack([begin + first, versions[first], digests[first]], 1))
        counts[row] += len(first)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Ragged(torch.from_numpy(np.concatenate(runs)), torch.from_numpy(offsets))


def first_texts(
    done: Rollout, numbers: Sequence[int], decode: Callable[[list[int]], str], before: Sequence[int]
) -> list[str]:
    """Texts of some rows, which may be on any rank. Collective.

    Args:
      numbers: of the rows.
      decode, before: as in `completion_texts`, with `before` of these rows.
    """
    own = done.own
    mine = [i for i, number in enumerate(numbers) if number in own]
    some = [done.completions[place].written for place in np.searchsorted(own, [numbers[i] for i in mine])]
    own_texts = dict(zip(mine, completion_texts(some, decode, [before[i] for i in mine]), strict=True))
    texts = ChainMap(*collectives.gather_objects(own_texts, done.mesh))
    return [texts[i] for i in range(len(numbers))]


def raise_everywhere(problem: str | None, numbers: Sequence[float], mesh: Mesh) -> list[float]:
    """Maximum of each number over all ranks; if any rank has a problem, every rank raises it.

    That way no rank is left waiting in a collective.
    """
    everyone = tuple(mesh.sizes)
    ours = torch.tensor([float(problem is not None), *numbers], dtype=torch.float64, device=mesh.device)
    failed, *largest = collectives.pmax(ours, mesh, everyone).tolist()
    if not failed:
        return largest
    raise RewardError(next(p for p in collectives.gather_objects(problem, mesh) if p is not None))
