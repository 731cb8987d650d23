"""Sources of rows: prompts that the policy completes, or texts that are given."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Filter
from funrl.batch import Batch, select
from funrl.data.prompts import prompt_batch
from funrl.rollout.completions import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.advantage_phase import on_cpu
from funrl.trainer.clock import Clock
from funrl.trainer.generation import Example, Rollout, completion_texts, to_batch
from funrl.trainer.micro import own_micro_batches
from funrl.trainer.roles import Role, RoleState
from funrl.trainer.score import score
from funrl.trainer.step import NotFiniteError, loss_value

EVAL_SEED = 1 << 40  # of evaluations; no training step has it


class Source(NamedTuple):
    """A source of rows.

    Attributes:
      init: () -> the source's state before the first step.
      draw: (source's state, step) -> (rows, source's state, metrics).
      evaluate: (states of the roles, step) -> metrics on held-out data.
    """

    init: Callable[[], trees.Tree]
    draw: Callable[[trees.Tree, int], tuple[Batch, trees.Tree, dict[str, float]]]
    evaluate: Callable[[Mapping[str, RoleState], int], dict[str, float]]


class Show(Protocol):
    """Observer of a source's completions and remarks."""

    def samples(
        self, step: int, examples: Sequence[Example], texts: Sequence[str], scores: Sequence[float | None]
    ) -> None: ...

    def note(self, text: str) -> None: ...


class PromptGroup(NamedTuple):
    """The rewarded completions of one prompt; `kept` [S] bool, the rows that the filter keeps."""

    example: Example
    rows: Rollout
    kept: Tensor


class Generation(NamedTuple):
    """Everything that generation needs.

    Attributes:
      roll: (examples, sampling, seed) -> completions, rewarded.
      decode: token ids without the stop token -> text.
      prompts, heldout: to train on, and to evaluate on.
      solved: scores [R, K] -> [R] bool, completions that count as solved in an evaluation; None: that is not told.
      sampling, eval_sampling: how completions are drawn.
      rescore: adds what a reward model gives; None: there is none.
      filter: batch -> [B] bool, rows worth training on; None: all.
      pad: id of the padding token.
      batch_prompts: prompts of a batch.
      max_refills: batches that are sampled at most to fill one.
      greedy_baseline: whether rows have the score of a greedy completion.
      seed: of everything random.
      shows: step -> whether samples are shown.
    """

    roll: Callable[[Sequence[Example], Sampling, int], Rollout]
    decode: Callable[[list[int]], str]
    prompts: Sequence[Example]
    heldout: Sequence[Example]
    solved: Callable[[Tensor], Tensor] | None
    sampling: Sampling
    eval_sampling: Sampling
    rescore: Callable[[Rollout, Sequence[Example]], Rollout] | None = None
    filter: Filter | None = None
    pad: int = 0
    batch_prompts: int = 128
    max_refills: int = 8
    greedy_baseline: bool = False
    seed: int = 0
    shows: Callable[[int], bool] = lambda step: False


def prompt_source(generation: Generation, clock: Clock, show: Show) -> Source:
    """Rows that the policy writes: prompts in a shuffled order, completed and rewarded.

    Prompts of which the filter keeps no row are replaced, within bounds. What is sampled and not used is counted:
    prompts that the filter dropped, prompts that it kept and the batch had no room for, and rows that it dropped of the
    prompts that are used.
    """
    g = generation

    def draw(state: trees.Tree, step: int) -> tuple[Batch, trees.Tree, dict[str, float]]:
        consumed, groups, sampled, passed = state["prompts_consumed"], list[PromptGroup](), 0, 0
        for refill in range(g.max_refills if g.filter else 1):
            drawn = prompt_batch(g.prompts, g.batch_prompts, g.seed, consumed)
            done = _rolled(g, clock, drawn, g.sampling, derived_seed(g.seed, consumed))
            if refill == 0 and g.shows(step):
                _show(g, show, step, drawn[:8], done, g.sampling.samples)
            found = _groups(g, drawn, done)
            useful = [group for group in found if group.kept.any()]
            consumed, sampled, passed = consumed + len(drawn), sampled + len(drawn), passed + len(useful)
            groups += useful[: g.batch_prompts - len(groups)]
            if len(groups) == g.batch_prompts:
                break
        metrics = {
            "filter_groups/kept_share": passed / sampled,
            "filter_groups/sampled_prompts": sampled,
            "filter_groups/dropped_prompts": sampled - passed,
            "filter_groups/surplus_prompts": passed - len(groups),
            "filter_groups/dropped_rows": sum(int((~group.kept).sum()) for group in groups),
        }
        if not groups:
            show.note(f"step {step}: the filter dropped all of {sampled} prompts; the last batch is used as it is")
            groups = [group._replace(kept=torch.ones_like(group.kept)) for group in found]
        elif len(groups) < g.batch_prompts:
            show.note(
                f"step {step}: the filter kept {passed} of {sampled} prompts; the batch has {len(groups)} and not "
                f"{g.batch_prompts}; a --max_refills above {g.max_refills} may fill it"
            )
        batch = _join(g, groups, consumed, clock)
        return batch, {"prompts_consumed": consumed}, metrics if g.filter else {}

    def evaluate(states: Mapping[str, RoleState], step: int) -> dict[str, float]:
        done = _rolled(g, clock, g.heldout, g.eval_sampling, EVAL_SEED, "eval")
        _show(g, show, step, g.heldout[:8], done, 1)
        told = {"eval/reward": done.score.mean().item()} if done.scored else {}
        return told if g.solved is None else told | {"eval/accuracy": g.solved(done.scores).double().mean().item()}

    return Source(lambda: {"prompts_consumed": 0}, draw, evaluate)


def text_source(
    examples: Sequence[Any],
    heldout: Sequence[Any],
    to_rows: Callable[[Sequence[Any]], Batch],
    roles: Mapping[str, Role],
    frozen: Mapping[str, trees.Tree],
    batch_examples: int,
    seed: int,
    token_budget: int,
    clock: Clock,
) -> Source:
    """Rows of given texts, in a shuffled order; evaluated by the loss of the one role that learns.

    Args:
      examples, heldout: to train on, and to evaluate on.
      to_rows: examples -> batch.
      roles, frozen: of the run; the weights of those that do not learn.
      batch_examples: of a batch.
    """
    (name, role), *_ = [(n, r) for n, r in roles.items() if r.loss is not None]
    scoring = {n: r for n, r in roles.items() if n in frozen}
    held = score(scoring, frozen, to_rows(heldout), token_budget)

    def draw(state: trees.Tree, step: int) -> tuple[Batch, trees.Tree, dict[str, float]]:
        consumed = state["examples_consumed"]
        rows = to_rows(prompt_batch(examples, batch_examples, seed, consumed))
        tokens = {"perf/total_num_tokens": float(rows.length.sum())}
        return rows, {"examples_consumed": consumed + batch_examples}, tokens

    def evaluate(states: Mapping[str, RoleState], step: int) -> dict[str, float]:
        assert role.loss is not None
        with clock.phase("eval"):
            pieces = [piece for _, piece in own_micro_batches(held, role.placed.mesh, token_budget)]
            beside = None if role.companion is None else frozen[role.companion.name]
            metrics, value = loss_value(role, states[name].params, pieces, role.loss.denominators(held), beside)
        if not math.isfinite(value):
            when = f"after step {step}; a lower --lr may prevent it" if step else "before the first step"
            raise NotFiniteError(f"the held-out loss is {value.item()} {when}")
        told = {f"eval/{key.rsplit('/', 1)[-1]}": metric.item() for key, metric in metrics.items()}
        return {"eval/loss": value.item()} | told

    return Source(lambda: {"examples_consumed": 0}, draw, evaluate)


def _rolled(
    g: Generation, clock: Clock, examples: Sequence[Example], sampling: Sampling, seed: int, phase: str = ""
) -> Rollout:
    """Completions with all their rewards. Phases of the clock are "generate" and "score_reward_model", or the one."""
    with clock.phase(phase or "generate"):
        done = g.roll(examples, sampling, seed)
    if g.rescore is None:
        return done
    with clock.phase(phase or "score_reward_model"):
        return g.rescore(done, examples)


def _groups(g: Generation, examples: Sequence[Example], done: Rollout) -> list[PromptGroup]:
    """The completions by prompt, with the rows that the filter keeps."""
    samples = g.sampling.samples
    kept = torch.ones(len(done.score), dtype=torch.bool)
    if g.filter is not None:
        kept = g.filter(on_cpu(to_batch(examples, done, g.sampling, g.pad, 0)))
    kept = kept.to(done.score.device).view(len(examples), samples)
    rows = [trees.map(lambda x, i=i: x[i * samples : (i + 1) * samples], done) for i in range(len(examples))]
    return [PromptGroup(*group) for group in zip(examples, rows, kept, strict=True)]


def _join(g: Generation, groups: Sequence[PromptGroup], first_group: int, clock: Clock) -> Batch:
    """The kept rows of the groups as a batch."""
    examples = [group.example for group in groups]
    done = trees.map(lambda *xs: torch.cat(xs), *[group.rows for group in groups])
    batch = to_batch(examples, done, g.sampling, g.pad, first_group)
    if g.greedy_baseline:
        greedy = _rolled(g, clock, examples, dataclasses.replace(g.sampling, greedy=True, samples=1), 0)
        batch = batch._replace(greedy_score=greedy.score.to(batch.score).repeat_interleave(g.sampling.samples))
    kept = torch.cat([group.kept for group in groups])
    return batch if kept.all() else select(batch, kept)


def _show(g: Generation, show: Show, step: int, examples: Sequence[Example], done: Rollout, samples: int) -> None:
    """The first sample of each of the first prompts."""
    first = trees.map(lambda x: x[: len(examples) * samples : samples], done)
    texts = completion_texts(first.completions, g.decode, [e.tokens[-1] for e in examples])
    show.samples(step, examples, texts, first.score.tolist() if first.scored else [None] * len(texts))
