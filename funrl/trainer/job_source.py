"""The source of a job: its prompts, rewards and engine, or its texts; and the workers that run its rewards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.checking import learns_alone
from funrl.algos.core import Algorithm, Filter, reads
from funrl.algos.filters.by_row import every, rewarded
from funrl.batch import select
from funrl.data.supervised import mismatched, text_batch
from funrl.data.text_lengths import check_lengths
from funrl.data.tokenizer import load_tokenizer
from funrl.mesh.launch import cores, local_ranks
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import gather_table
from funrl.models.generation_config import GENERATION
from funrl.rewards.pool import Pool, open_pool
from funrl.rollout.engine import awake
from funrl.rollout.sampling_parameters import Sampling
from funrl.tasks import arithmetic
from funrl.trainer.build import Parts
from funrl.trainer.checks import difficulty_of
from funrl.trainer.clock import Clock
from funrl.trainer.completion_scores import as_read, with_completion_scores, with_step_scores
from funrl.trainer.curriculum import weighing
from funrl.trainer.generation import Example, Rollout, fulfilled, generating_ranks, rollout, text_after
from funrl.trainer.job import Job, Task, inherited
from funrl.trainer.job_data import Texts, has_workers
from funrl.trainer.judging import with_verdicts
from funrl.trainer.own_texts import Reader, read_steps, read_texts, reads_tokens
from funrl.trainer.pair_rows import pair_source
from funrl.trainer.partial import Budgeted, partial_source
from funrl.trainer.prompt_data import step_separator
from funrl.trainer.roles import READERS, Role, RoleState
from funrl.trainer.scorers import scorers_of
from funrl.trainer.settings import scoring_budget
from funrl.trainer.sources import Generation, Show, Source, prompt_source, text_source
from funrl.trainer.step_rows import Rows, rows_of
from funrl.trainer.text_samples import TOKENS, greedy_continuations, held_out_prompts

MOST_WORKERS = 16  # of a rank, where no flag says how many
LONGEST_REMARK = 1000  # characters of a failure's message
REWARD_TIMEOUT_S = 600.0  # where no flag says
Scorer = Callable[[Rows, Sequence[Example]], Rows]


def open_rewards(job: Job, rank: int) -> contextlib.AbstractContextManager[Pool | None]:
    """A rank's reward workers, for as long as the context lasts; None where it has none.

    Enter it before the rank has process groups, threads or a device; see `open_pool`. Only the first tensor rank of a
    replica asks for rewards, so only it has workers.
    """
    settings, task = job.settings, job.task
    asks = Mesh(job.generate_sizes, rank).index("tensor") == 0
    if not isinstance(task, Task) or not asks or not has_workers(settings, task.rewards):
        return contextlib.nullcontext()
    workers = share_of_cores(job) if settings.reward_workers is None else settings.reward_workers
    timeout_s = REWARD_TIMEOUT_S if settings.reward_timeout is None else settings.reward_timeout
    most = MOST_WORKERS if settings.reward_workers is None else workers
    return open_pool(task.rewards, workers, timeout_s, most)


def share_of_cores(job: Job) -> int:
    """The cores of this machine for each of its ranks that ask for rewards, within bounds."""
    ranks = local_ranks(Mesh(job.sizes).world) / job.generate_sizes["tensor"]
    return max(1, min(MOST_WORKERS, int(cores() / max(ranks, 1))))


def make_source(job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show) -> Source:
    """The source of the rows that a job trains on."""
    settings, task = job.settings, job.task
    if not isinstance(task, Task):
        for remark in (*task.remarks, *remarks_on_batch(settings.batch_prompts, len(task.examples), "texts")):
            show.note(remark)
        to_rows = functools.partial(text_rows, job, parts.mesh)
        return text_source(
            task.examples, task.heldout, to_rows, parts.roles, frozen, settings.batch_prompts, settings.seed,
            scoring_budget(settings), clock, show, job.algorithm.advantage, text_samples(job, parts, frozen, show),
        )  # fmt: skip
    generation = generation_of(job, parts, frozen, clock, show)
    repeated = remarks_on_batch(settings.batch_prompts, len(task.prompts), "prompts")
    alone = remarks_on_groups(job.sampling.samples, job.algorithm)
    for remark in (*task.remarks, *repeated, *alone, *remarks_on_sampling(job, "eval_")):
        show.note(remark)
    if settings.new_tokens_per_step is None:
        source = prompt_source(generation, clock, show)
    else:
        budget = budgeted(job, parts, generation.decode, show, settings.new_tokens_per_step)
        source = partial_source(generation, budget, clock, show)
    if job.algorithm.example == "pair":
        source = pair_source(source, job.reward_names)
    assert parts.generator is not None
    working = awake(parts.generator.engine)  # beyond it the memory of its cache is the trainer's
    return source._replace(draw=working(source.draw), evaluate=working(source.evaluate))


def remarks_on_batch(batch: int, examples: int, what: str) -> list[str]:
    """A remark where a step draws more examples than there are to train on.

    Args:
      what: name of the examples.
    """
    there = f"there are {examples} {what}" if examples > 1 else f"there is 1 {what.removesuffix('s')}"
    said = f"--batch_prompts={batch}: {there} to train on, so a step has some more than once"
    return [said] if batch > examples else []


def remarks_on_groups(samples: int, algorithm: Algorithm) -> list[str]:
    """A remark where completions are compared with others of their prompt, and there are none.

    Args:
      samples: completions of a prompt.
    """
    said = (
        f"--samples_per_prompt={samples}: the algorithm compares completions of the same prompt, and learns nothing "
        "from the reward of a single one; give 2 or more"
    )
    return [said] if samples == 1 and (algorithm.example == "pair" or not learns_alone(algorithm)) else []


def remarks_on_sampling(job: Job, prefix: str) -> list[str]:
    """Remarks on what evaluation takes from the model's generation_config.json.

    Args:
      prefix: of the flags that would come before it.
    """
    taken = inherited(job)
    how = ", ".join(f"{name} {value}" for name, value in taken.items())
    said = f"evaluation: {how}, as the model's {GENERATION} says; --{prefix}{next(iter(taken), '')} overrides it"
    return [said] if taken else []


def generation_of(job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show) -> Generation:
    """Everything that the source of a job's prompts needs."""
    settings, task = job.settings, job.task
    assert isinstance(task, Task)
    decode = functools.partial(job.tokenizer.decode, skip_special_tokens=True)
    return Generation(
        roll=functools.partial(roll, job, parts, decode, show),
        decode=decode,
        prompts=task.prompts,
        heldout=task.heldout,
        solved=verdicts(task.weights[: len(task.rewards)]) if task.rewards else None,
        sampling=job.sampling,
        eval_sampling=job.eval_sampling,
        rescore=rescoring(job, parts, frozen, clock, show),
        filter=filter_of(job),
        pad=job.pad,
        batch_prompts=settings.batch_prompts,
        max_refills=settings.max_refills,
        greedy_baseline="greedy_score" in reads(job.algorithm).required,
        reward_names=job.reward_names,
        skips_failed=settings.on_reward_error == "skip",
        seed=settings.seed,
        shows=lambda step: step in (1, settings.steps) or step % settings.sample_every == 0,
        weighing=weighing(
            task.prompts, task.curriculum, None if settings.difficulty is None else difficulty_of(settings.difficulty),
            task.weights[: len(task.rewards)], parts.mesh,
        ),
        choices=job.model.config.choices if settings.router_replay else 0,
    )  # fmt: skip


def roll(
    job: Job, parts: Parts, decode: Any, show: Show, examples: Sequence[Example], sampling: Sampling, seed: int
) -> Rollout:
    """Completions of prompts by the engine, rewarded by the task's functions."""
    assert parts.generator is not None and isinstance(job.task, Task)
    pool, weights = parts.pool or Pool(job.task.rewards), job.task.weights[: len(job.task.rewards)]
    engine, mesh, _ = parts.generator
    how = job.settings.queue, job.settings.on_reward_error
    return with_remark(show, rollout(engine, examples, sampling, seed, pool, decode, mesh, weights, *how))


def with_remark(show: Show, done: Rollout) -> Rollout:
    """The completions, after a remark where reward functions failed on some."""
    if done.failed is not None and done.problem:
        count, rows = int(done.failed.sum()), len(done.failed)
        show.note(
            f"a reward function failed on {count} of {rows} completions, such as: {done.problem[:LONGEST_REMARK]}"
        )
    return done


def filter_of(job: Job) -> Filter | None:
    """The rows that are worth training on, among those that have rewards."""
    filter = job.algorithm.filter
    if job.settings.on_reward_error != "skip":
        return filter
    return rewarded() if filter is None else every(rewarded(), filter)


def budgeted(job: Job, parts: Parts, decode: Any, show: Show, tokens: int) -> Budgeted:
    """The engine and the rewards as rows need them that are written a part at a time."""
    assert parts.generator is not None and isinstance(job.task, Task)
    pool, weights = parts.pool or Pool(job.task.rewards), job.task.weights[: len(job.task.rewards)]
    engine, mesh, _ = parts.generator

    def fulfil(groups: Any, own: Any, examples: Sequence[Example], rows: int) -> Rollout:
        how = job.settings.queue, rows, job.settings.on_reward_error
        return with_remark(show, fulfilled(engine, groups, own, examples, pool, decode, mesh, weights, *how))

    none = torch.zeros(0, dtype=torch.int64, device=mesh.device)
    scores = torch.zeros(0, len(weights), dtype=torch.float64, device=mesh.device)
    dtype = torch.promote_types(engine.weights.dtype, torch.float32)
    nothing = Rollout((), none, none.bool(), scores.sum(1), scores, np.zeros(0, dtype=np.int64), mesh, dtype)
    if job.settings.on_reward_error != "stop":
        nothing = nothing._replace(failed=none.bool())
    return Budgeted(fulfil, lambda: engine.version or 0, nothing, tokens)


def rescoring(
    job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show
) -> Callable[[Rows, Sequence[Example], str], Rows] | None:
    """A function that adds to rows what models say of them; None where the run has no such model."""
    names = scorers_of(job.settings)
    if not names:
        return None
    assert isinstance(job.task, Task)
    weights = job.task.weights[len(job.task.rewards) :]
    scorers = [
        verdict_scorer(job, parts, weight, show)
        if name == "judge"
        else model_scorer(job, parts.roles[name], name, frozen[name], weight)
        for name, weight in zip(names, weights, strict=True)
    ]

    def rescore(rows: Rows, examples: Sequence[Example], phase: str) -> Rows:
        for name, scorer in zip(names, scorers, strict=True):
            with clock.phase(phase or f"score_{name}"):
                rows = scorer(rows, examples)
        return rows

    return rescore


def verdict_scorer(job: Job, parts: Parts, weight: float, show: Show) -> Scorer:
    """Scores by the verdicts of a judge, the first of which is shown."""
    assert parts.judge is not None
    told: list[str] = []

    def note(text: str) -> None:
        if not told:
            show.note(text)
        told.append(text)

    decode = functools.partial(job.tokenizer.decode, skip_special_tokens=True)
    return functools.partial(with_verdicts, judge=parts.judge, weight=weight, decode=decode, note=note)


def model_scorer(job: Job, role: Role, name: str, params: trees.Tree, weight: float) -> Scorer:
    """Scores by a reward model, of the whole completion or of its steps."""
    assert isinstance(job.task, Task)
    settings, config = job.settings, role.placed.model.config
    tokenizer = load_tokenizer(job.directories[name])
    pads = (config.pad, tokenizer.pad_token_id, job.pad)
    pad = next(pad for pad in pads if pad is not None)
    reader = Reader(
        name.replace("_", " "), tokenizer, functools.partial(job.tokenizer.decode, skip_special_tokens=True), pad,
        config.max_positions, step_separator(settings, job.task.demonstrations is not None),
    )  # fmt: skip
    common = {"role": role, "params": params, "weight": weight, "budget": scoring_budget(settings)}
    if name == "process_reward_model":
        each = "token_reward" in reads(job.algorithm).optional
        how = settings.process_reward or ("each" if each else "min")
        return functools.partial(with_step_scores, how=how, read=functools.partial(read_steps, reader), **common)
    if reads_tokens(tokenizer, job.tokenizer, job.task.prompts):
        return functools.partial(with_completion_scores, read=lambda rows, _: as_read(rows, pad), **common)
    return functools.partial(with_completion_scores, read=functools.partial(read_texts, reader), **common)


def verdicts(weights: Sequence[float]) -> Callable[[Tensor], Tensor | None]:
    """A function of scores [R, K]: mask of the completions that have all that the reward functions can give.

    It gives None from the first score on that is no verdict: neither 0 nor 1, nor NaN, where a function does not apply.

    Args:
      weights: of the functions, whose scores come first.
    """
    counting = list(weights) if any(weights) else [1.0] * len(weights)  # 0 each: they only watch a reward model
    full = sum(max(weight, 0.0) for weight in counting) - 1e-9
    graded = False

    def solved(scores_RK: Tensor) -> Tensor | None:
        nonlocal graded
        own_RK = scores_RK[:, : len(weights)]
        graded = graded or not bool(((own_RK == 0) | (own_RK == 1) | own_RK.isnan()).all())
        factors = torch.tensor(counting, dtype=own_RK.dtype, device=own_RK.device)
        return None if graded else (own_RK * factors).nansum(1) >= full

    return solved


def text_samples(
    job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], show: Show
) -> Callable[[Mapping[str, RoleState], int], None]:
    """A function that shows how the policy continues held-out prompts, where a policy learns: at the first and the last
    evaluation, and at those of a step that --sample_every divides."""
    settings, task = job.settings, job.task
    assert isinstance(task, Texts)
    count = TOKENS if task.readable is None else arithmetic.MAX_NEW_TOKENS
    prompts = held_out_prompts(task.heldout, job.tokenizer, job.model.config.max_positions - count)
    decode = functools.partial(job.tokenizer.decode, skip_special_tokens=True)

    def sample(states: Mapping[str, RoleState], step: int) -> None:
        if step % settings.sample_every and step != settings.steps:
            return
        role, ids = parts.roles["policy"], [prompt.tokens for prompt in prompts]
        params = role.whole(states["policy"].params, frozen)
        found = greedy_continuations(role.placed, params, ids, count, job.sampling.stop, job.pad)
        texts = [
            text_after(decode([prompt[-1]]), prompt[-1], written, decode)
            for prompt, written in zip(ids, found, strict=True)
        ]
        show.samples(step, prompts, texts, [None] * len(texts), [{}] * len(texts))

    return sample if job.lead == "policy" and prompts else lambda states, step: None


def text_rows(job: Job, mesh: Mesh, examples: Sequence[Any]) -> Rows:
    """Given texts as rows, one an example; each rank reads its own part, and no other.

    Where the algorithm reads `mismatched`, as many rows follow, each with the prompt of an example and the completion
    of the next one.

    Raises:
      DataError: a text has more tokens than it may, or cannot be read.
    """
    assert isinstance(job.task, Texts)
    most, count = job.task.most or job.model.config.max_positions, len(examples)
    further = count if "mismatched" in reads(job.algorithm).required else 0
    owner = generating_ranks(count + further, 1, mesh.size(mesh.row_axes))
    places = np.flatnonzero(owner == int(mesh.index(mesh.row_axes))).tolist()
    own = [examples[i] for i in places if i < count]
    check_lengths(own, most, job.tokenizer)
    own += [mismatched(examples[i - count], examples[(i + 1) % count], most) for i in places if i >= count]
    # A rank without texts has the same fields of no rows.
    some = text_batch(own or [examples[0]], job.pad, job.lead in READERS, mesh.device, job.task.kind == "steps")
    mine = select(some, slice(len(own)))
    margin = mine.get("margin")
    mine = mine if margin is None else mine._replace(margin=margin.to(job.master))
    if further:
        mine = mine._replace(mismatched=torch.arange(count + further, device=mesh.device) >= count)
    table = gather_table({"length": mine.length}, owner, mesh, mesh.row_axes)
    return rows_of(mine._replace(length=table["length"]), owner, mesh)
