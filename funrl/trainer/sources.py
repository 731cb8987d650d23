"""Sources of rows: prompts that the policy completes, or texts that are given."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Filter
from funrl.data.prompts import Drawn, drawn_places, prompt_batch
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.clock import Clock
from funrl.trainer.generation import Example, Rollout, first_texts, to_rows
from funrl.trainer.learn import denominators
from funrl.trainer.micro import own_micro_batches, row_cost
from funrl.trainer.roles import Role, RoleState, weights_of
from funrl.trainer.score import score
from funrl.trainer.step import NotFiniteError, loss_value
from funrl.trainer.step_rows import Rows, join_rows, on_cpu, take

EVAL_SEED = 1 << 40  # of evaluations; no training step has it


class Source(NamedTuple):
    """A source of rows.

    Attributes:
      init: () -> the source's state before the first step.
      draw: (source's state, step) -> (rows, source's state, metrics).
      evaluate: (states of the roles, step) -> metrics on held-out data.
      gathered: source's state -> as a checkpoint has it: whole on the first rank. All ranks call it together.
      shared: a state that each rank has read from a checkpoint -> this rank's part of it.
    """

    init: Callable[[], trees.Tree]
    draw: Callable[[trees.Tree, int], tuple[Rows, trees.Tree, dict[str, float]]]
    evaluate: Callable[[Mapping[str, RoleState], int], dict[str, float]]
    gathered: Callable[[trees.Tree], trees.Tree] = lambda state: state
    shared: Callable[[trees.Tree], trees.Tree] = lambda state: state


class Show(Protocol):
    """Observer of a source's completions and remarks."""

    def samples(
        self, step: int, examples: Sequence[Example], texts: Sequence[str], scores: Sequence[float | None]
    ) -> None: ...

    def note(self, text: str) -> None: ...


class Generation(NamedTuple):
    """Everything that generation needs.

    Attributes:
      roll: (examples, sampling, seed) -> completions, rewarded.
      decode: token ids without the stop token -> text.
      prompts, heldout: to train on, and to evaluate on.
      solved: scores [R, K] -> [R] bool, completions that count as solved in an evaluation, or None where
        scores are no verdicts; None: that is not told.
      sampling, eval_sampling: how completions are drawn.
      rescore: (rows, prompts) -> rows with what a reward model gives; None: there is none.
      filter: batch -> [B] bool, rows worth training on; None: all.
      pad: id of the padding token.
      batch_prompts: prompts of a batch.
      max_refills: so many times `batch_prompts` prompts are sampled at most for a batch.
      greedy_baseline: whether rows have the score of a greedy completion.
      seed: of everything random.
      shows: step -> whether samples are shown.
    """

    roll: Callable[[Sequence[Example], Sampling, int], Rollout]
    decode: Callable[[list[int]], str]
    prompts: Sequence[Example]
    heldout: Sequence[Example]
    solved: Callable[[Tensor], Tensor | None] | None
    sampling: Sampling
    eval_sampling: Sampling
    rescore: Callable[[Rows, Sequence[Example]], Rows] | None = None
    filter: Filter | None = None
    pad: int = 0
    batch_prompts: int = 128
    max_refills: int = 8
    greedy_baseline: bool = False
    seed: int = 0
    shows: Callable[[int], bool] = lambda step: False


def prompt_source(generation: Generation, clock: Clock, show: Show) -> Source:
    """Rows that the policy writes: prompts in a shuffled order, completed and rewarded.

    As many more prompts as the filter keeps no row of are sampled until the batch is full, within bounds: no completion
    that the filter keeps is thrown away. What it drops is counted: prompts, and rows of the prompts that are used.
    """
    g = generation

    def draw(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        begin = consumed = state["prompts_consumed"]
        found: list[Chosen] = []
        sampled = dropped_rows = 0
        most, room = g.batch_prompts * (g.max_refills if g.filter else 1), g.batch_prompts
        while room and sampled < most:
            drawn = prompt_batch(g.prompts, min(room, most - sampled), g.seed, consumed)
            done, rows = _rolled(g, clock, drawn, g.sampling, derived_seed(g.seed, consumed))
            if not sampled and g.shows(step):
                show_samples(g, show, step, drawn[:8], done, rows, g.sampling.samples)
            kept_PS = filtered_samples(g, rows, len(drawn))
            useful = np.flatnonzero(kept_PS.any(1))
            consumed, sampled, room = consumed + len(drawn), sampled + len(drawn), room - len(useful)
            found.append(chosen_rows(drawn, rows, useful, kept_PS))
            dropped_rows += int((~kept_PS[useful]).sum())
        count = sum(len(one.examples) for one in found)
        metrics = {
            "filter_groups/kept_share": count / sampled,
            "filter_groups/sampled_prompts": sampled,
            "filter_groups/dropped_prompts": sampled - count,
            "filter_groups/dropped_rows": dropped_rows,
        }
        if not count:
            show.note(f"step {step}: the filter dropped all of {sampled} prompts; the last batch is used as it is")
            found = [chosen_rows(drawn, rows, np.arange(len(drawn)), np.ones_like(kept_PS))]
        elif count < g.batch_prompts:
            show.note(
                f"step {step}: the filter kept {count} of {sampled} prompts, the batch needs {g.batch_prompts}; a "
                f"--max_refills above {g.max_refills} may fill it"
            )
        batch = one_step_of(g, [one for one in found if one.examples], begin, clock)
        return batch, {"prompts_consumed": consumed}, metrics if g.filter else {}

    def evaluate(states: Mapping[str, RoleState], step: int) -> dict[str, float]:
        done, rows = _rolled(g, clock, g.heldout, g.eval_sampling, EVAL_SEED, "eval")
        show_samples(g, show, step, g.heldout[:8], done, rows, 1)
        scores, told = rows.batch.get("scores"), {}
        if scores is not None:
            told["eval/reward"] = rows.batch.score.double().mean().item()
        if g.solved is not None and scores is not None and (right := g.solved(scores.double())) is not None:
            told["eval/accuracy"] = right.double().mean().item()
        return told

    return Source(lambda: {"prompts_consumed": 0}, draw, evaluate)


def text_source(
    examples: Sequence[Any],
    heldout: Sequence[Any],
    to_rows: Callable[[Sequence[Any]], Rows],
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
      to_rows: examples -> rows.
      roles, frozen: of the run; the weights of those that do not learn.
      batch_examples: of a batch.
    """
    (name, role), *_ = [(n, r) for n, r in roles.items() if r.loss is not None]
    scoring = {n: r for n, r in roles.items() if r.loss is None}
    held = score(scoring, weights_of(scoring, {}, frozen), to_rows(heldout), token_budget)

    def draw(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        consumed = state["examples_consumed"]
        rows = to_rows(Drawn(examples, drawn_places(len(examples), batch_examples, seed, consumed)))
        tokens = {"perf/total_num_tokens": float(rows.batch.length.sum())}
        return rows, {"examples_consumed": consumed + batch_examples}, tokens

    def evaluate(states: Mapping[str, RoleState], step: int) -> dict[str, float]:
        assert role.loss is not None
        with clock.phase("eval"):
            pieces = (piece.batch for piece in own_micro_batches(held, token_budget, row_cost(role.placed)))
            ((dens, _),) = (total[name] for total in denominators({name: role}, held, [np.arange(len(held.owner))]))
            metrics, value = loss_value(role, states[name].params, pieces, dens, frozen)
        if not math.isfinite(value):
            when = f"after step {step}; a lower --lr may prevent it" if step else "before the first step"
            raise NotFiniteError(f"the held-out loss is {value.item()} {when}")
        told = {f"eval/{key.rsplit('/', 1)[-1]}": metric.item() for key, metric in metrics.items()}
        return {"eval/loss": value.item()} | told

    return Source(lambda: {"examples_consumed": 0}, draw, evaluate)


def _rolled(
    g: Generation, clock: Clock, examples: Sequence[Example], sampling: Sampling, seed: int, phase: str = ""
) -> tuple[Rollout, Rows]:
    """Completions, and their rows with all rewards. Phases are "generate", "reward" and "score_reward_model", or
    `phase`."""
    with clock.phase(phase or "generate"):
        done = g.roll(examples, sampling, seed)
        rows = to_rows(examples, done, sampling, g.pad)
    if done.reward_s and not phase:
        clock.move(done.reward_s, "generate", "reward")
    if g.rescore is None:
        return done, rows
    with clock.phase(phase or "score_reward_model"):
        return done, g.rescore(rows, examples)


def filtered_samples(g: Generation, rows: Rows, prompts: int) -> np.ndarray:
    """[prompts, samples] bool, the rows that the filter keeps."""
    if g.filter is None:
        return np.ones((prompts, g.sampling.samples), dtype=bool)
    return g.filter(on_cpu(rows).batch).cpu().numpy().reshape(prompts, g.sampling.samples)


class Chosen(NamedTuple):
    """Prompts that the batch takes, their rows, and the samples of each that are kept."""

    examples: list[Example]
    rows: Rows
    samples: np.ndarray


def chosen_rows(examples: Sequence[Example], rows: Rows, prompts: np.ndarray, kept_PS: np.ndarray) -> Chosen:
    """The kept rows of some prompts."""
    samples = kept_PS.shape[1]
    numbers = (prompts[:, None] * samples + np.arange(samples))[kept_PS[prompts]]
    return Chosen([examples[i] for i in prompts], take(rows, numbers), kept_PS[prompts].sum(1))


def one_step_of(g: Generation, found: Sequence[Chosen], begin: int, clock: Clock) -> Rows:
    """All chosen rows as those of one step; groups are numbered on from the prompts of earlier steps."""
    rows, counts = join_rows([one.rows for one in found]), np.concatenate([one.samples for one in found])
    device = rows.batch.group.device
    rows = rows.with_fields(group=torch.from_numpy(begin + np.repeat(np.arange(len(counts)), counts)).to(device))
    if not g.greedy_baseline:
        return rows
    examples = [example for one in found for example in one.examples]
    _, greedy = _rolled(g, clock, examples, dataclasses.replace(g.sampling, greedy=True, samples=1), 0)
    scores = greedy.batch.score.repeat_interleave(torch.from_numpy(counts).to(device))
    return rows.with_fields(greedy_score=scores.to(rows.batch.score))


def show_samples(
    g: Generation, show: Show, step: int, examples: Sequence[Example], done: Rollout, rows: Rows, samples: int
) -> None:
    """The first sample of each of the first prompts."""
    numbers = [i * samples for i in range(len(examples))]
    texts = first_texts(done, numbers, g.decode, [e.tokens[-1] for e in examples])
    score_B = rows.batch.get("score")
    scores = [None] * len(texts) if score_B is None else score_B[torch.tensor(numbers)].tolist()
    show.samples(step, examples, texts, scores)
