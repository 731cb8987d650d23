"""Sources of rows: prompts that the policy completes, or texts that are given."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Advantage, Filter
from funrl.data.order import Drawn, order_digest, places_in_order, take_next
from funrl.rewards.call import RewardError
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.advantage_phase import advantages
from funrl.trainer.clock import Clock
from funrl.trainer.curriculum import UNWEIGHTED, Weighing
from funrl.trainer.evaluation import evaluated, metrics_of, parts_of_scores, table_of
from funrl.trainer.generation import Example, Rollout, first_texts, to_rows
from funrl.trainer.learn import denominators
from funrl.trainer.micro import own_micro_batches, row_cost
from funrl.trainer.observing import Show
from funrl.trainer.roles import Role, RoleState, weights_of
from funrl.trainer.row_shards import HeldRows
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
      saved: source's state -> the same as a checkpoint has it.
      rows: such a state -> its leaves that are rows, of which each rank has its own; None: all is alike on every rank.
      restored: a state that was read from a checkpoint, of whose rows each rank has a share -> the source's state.
      observed: (source's state, metrics of a step) -> the source's state after it. All ranks call it together.
      spread: whether ranks have different parts of the state.
    """

    init: Callable[[], trees.Tree]
    draw: Callable[[trees.Tree, int], tuple[Rows, trees.Tree, dict[str, float]]]
    evaluate: Callable[[Mapping[str, RoleState], int], dict[str, float]]
    saved: Callable[[trees.Tree], trees.Tree] = lambda state: state
    rows: Callable[[trees.Tree], HeldRows | None] = lambda state: None
    restored: Callable[[trees.Tree], trees.Tree] = lambda state: state
    observed: Callable[[trees.Tree, Mapping[str, float]], trees.Tree] = lambda state, metrics: state
    spread: bool = False


class Generation(NamedTuple):
    """Everything that generation needs.

    Attributes:
      roll: (examples, sampling, seed) -> completions, rewarded.
      decode: token ids without the stop token -> text.
      prompts, heldout: to train on, and to evaluate on.
      solved: scores [R, K] -> [R] bool, completions that count as solved in an evaluation, or None where
        scores are no verdicts; None: that is not told.
      sampling, eval_sampling: how completions are drawn.
      rescore: (rows, prompts, phase) -> rows with what models say of them, in phases of the models or in the one that
        is named; None: there are none.
      filter: batch -> [B] bool, rows worth training on; None: all.
      pad: id of the padding token.
      batch_prompts: prompts of a batch.
      max_refills: so many times `batch_prompts` prompts are sampled at most for a batch.
      greedy_baseline: whether rows have the score of a greedy completion.
      reward_names: of the parts of a completion's score.
      skips_failed: whether rows are left out on which a reward function failed; `filter` leaves them out too.
      seed: of everything random.
      shows: step -> whether samples are shown.
      weighing: weights of the prompts before each step.
      table_prompts: held-out prompts whose completions an evaluation shows, at most; None: all.
      eval_seed: of evaluations.
      choices: experts of each token that the engine records; 0: none.
    """

    roll: Callable[[Sequence[Example], Sampling, int], Rollout]
    decode: Callable[[list[int]], str]
    prompts: Sequence[Example]
    heldout: Sequence[Example]
    solved: Callable[[Tensor], Tensor | None] | None
    sampling: Sampling
    eval_sampling: Sampling
    rescore: Callable[[Rows, Sequence[Example], str], Rows] | None = None
    filter: Filter | None = None
    pad: int = 0
    batch_prompts: int = 128
    max_refills: int = 8
    greedy_baseline: bool = False
    reward_names: tuple[str, ...] = ()
    skips_failed: bool = False
    seed: int = 0
    shows: Callable[[int], bool] = lambda step: False
    weighing: Weighing = UNWEIGHTED
    table_prompts: int | None = 32
    eval_seed: int = EVAL_SEED
    choices: int = 0


def prompt_source(generation: Generation, clock: Clock, show: Show) -> Source:
    """Rows that the policy writes: prompts in a shuffled order, completed and rewarded.

    As many more prompts as the filter keeps no row of are sampled until the batch is full, within bounds: no completion
    that the filter keeps is thrown away. What it drops is counted: prompts, and rows of the prompts that are used.
    """
    g = generation

    def draw(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        begin = consumed = state["prompts_consumed"]
        weights, told, weighed = g.weighing.weights(state["told"], step)
        found: list[Chosen] = []
        sampled = dropped_rows = failed = 0
        most, room = g.batch_prompts * (g.max_refills if g.filter else 1), g.batch_prompts
        while room and sampled < most:
            taken = take_next(g.prompts, min(room, most - sampled), g.seed, consumed, weights)
            drawn = [g.prompts[place] for place in taken.places.tolist()]
            done, rows = _rolled(g, clock, drawn, g.sampling, derived_seed(g.seed, consumed))
            if not sampled and g.shows(step):
                show_samples(g, show, step, drawn[:8], done, rows, g.sampling.samples)
            told = g.weighing.measured(told, taken.places, done.scores, done.failed)
            failed += failed_rows(rows)
            kept_PS = filtered_samples(g, rows, len(drawn))
            useful = np.flatnonzero(kept_PS.any(1))
            consumed, sampled, room = taken.end, sampled + len(drawn), room - len(useful)
            found.append(chosen_rows(drawn, rows, useful, kept_PS))
            dropped_rows += int((~kept_PS[useful]).sum())
        count = sum(len(one.examples) for one in found)
        if weights is not None:
            weighed["curriculum/passed_over"] = consumed - begin - sampled
        metrics = {
            "filter_groups/kept_share": count / sampled,
            "filter_groups/sampled_prompts": sampled,
            "filter_groups/dropped_prompts": sampled - count,
            "filter_groups/dropped_rows": dropped_rows,
        }
        if not count:
            show.note(f"step {step}: the filter dropped all of {sampled} prompts; the last batch is used as it is")
            kept_PS = rewarded_samples(g, rows, len(drawn))
            found = [chosen_rows(drawn, rows, np.flatnonzero(kept_PS.any(1)), kept_PS)]
        elif count < g.batch_prompts:
            show.note(
                f"step {step}: the filter kept {count} of {sampled} prompts, the batch needs {g.batch_prompts}; a "
                f"--max_refills above {g.max_refills} may fill it"
            )
        batch = one_step_of(g, [one for one in found if one.examples], begin, clock)
        failures = {} if rows.batch.get("failed") is None else {"reward/failed": float(failed)}
        state = {**state, "prompts_consumed": consumed, "told": told}
        return batch, state, weighed | failures | (metrics if g.filter else {})

    def evaluate(states: Mapping[str, RoleState], step: int) -> dict[str, float]:
        done, rows = _rolled(g, clock, g.heldout, g.eval_sampling, g.eval_seed, "eval")
        show_samples(g, show, step, g.heldout[:8], done, rows, g.eval_sampling.samples)
        found = evaluated(g.heldout, done, rows, g.solved, g.decode, g.reward_names)
        for part in table_of(found, g.heldout, done, g.decode, step, g.table_prompts):
            show.evaluated(part)
        return metrics_of(found, g.heldout)

    order = order_digest(g.prompts, g.seed, [len(one.tokens) for one in g.prompts])
    first = {"prompts_consumed": 0, "order": order, "told": g.weighing.init()}

    def restored(state: trees.Tree) -> trees.Tree:
        return same_order(order, show, {**state, "told": trees.map(lambda x: x.cpu(), state["told"])})

    def observed(state: trees.Tree, metrics: Mapping[str, float]) -> trees.Tree:
        return {**state, "told": g.weighing.observed(state["told"], metrics)}

    return Source(lambda: dict(first), draw, evaluate, restored=restored, observed=observed)


def same_order(order: int, show: Show, state: trees.Tree) -> trees.Tree:
    """The state of a checkpoint, with a remark where it was in another order of prompts or texts."""
    if state["order"] != order:
        show.note(
            "--resume: the data, or --seed, are not those that the run has had so far: it goes on at the same place of "
            "another order"
        )
    return {**state, "order": order}


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
    show: Show,
    chain: Advantage | None = None,
    sample: Callable[[Mapping[str, RoleState], int], None] = lambda states, step: None,
) -> Source:
    """Rows of given texts, in a shuffled order; evaluated by the loss of the one role that learns.

    Args:
      examples, heldout: to train on, and to evaluate on.
      to_rows: examples -> rows.
      roles, frozen: of the run; the weights of those that do not learn.
      batch_examples: of a batch.
      chain: what is to be done with the rows before the loss; None: nothing.
      sample: called with the states of the roles and the step at every evaluation.
    """
    (name, role), *_ = [(n, r) for n, r in roles.items() if r.loss is not None]
    scoring = {n: r for n, r in roles.items() if r.loss is None}
    held = score(scoring, weights_of(scoring, {}, frozen), to_rows(heldout), token_budget)

    def draw(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        consumed = state["examples_consumed"]
        rows = to_rows(Drawn(examples, places_in_order(examples, batch_examples, seed, consumed).tolist()))
        tokens = {"perf/total_num_tokens": float(rows.batch.length.sum())}
        return rows, {**state, "examples_consumed": consumed + batch_examples}, tokens

    def evaluate(states: Mapping[str, RoleState], step: int) -> dict[str, float]:
        assert role.loss is not None
        with clock.phase("eval"):
            rows = held
            if chain is not None:
                scored = score({name: role}, weights_of({name: role}, states, frozen), held, token_budget)
                rows, _, _ = advantages(chain, chain.init(), scored)
            pieces = (piece.batch for piece in own_micro_batches(rows, token_budget, row_cost(role.placed)))
            ((dens, _),) = (total[name] for total in denominators({name: role}, rows, [np.arange(len(rows.owner))]))
            metrics, value = loss_value(role, states[name].params, pieces, dens, frozen)
        if not math.isfinite(value):
            when = f"after step {step}; a lower --lr may prevent it" if step else "before the first step"
            raise NotFiniteError(f"the held-out loss is {value.item()} {when}")
        with clock.phase("eval"):
            sample(states, step)
        told = {f"eval/{key.rsplit('/', 1)[-1]}": metric.item() for key, metric in metrics.items()}
        return {"eval/loss": value.item()} | told

    order = order_digest(examples, seed)
    first = {"examples_consumed": 0, "order": order}
    return Source(lambda: dict(first), draw, evaluate, restored=functools.partial(same_order, order, show))


def _rolled(
    g: Generation, clock: Clock, examples: Sequence[Example], sampling: Sampling, seed: int, phase: str = ""
) -> tuple[Rollout, Rows]:
    """Completions, and their rows with all rewards. Phases are "generate", "reward" and those of models that score, or
    `phase`."""
    with clock.phase(phase or "generate"):
        done = g.roll(examples, sampling, seed)
        rows = to_rows(examples, done, sampling, g.pad, choices=g.choices)
    if done.reward_s and not phase:
        clock.move(done.reward_s, "generate", "reward")
    return done, rows if g.rescore is None else g.rescore(rows, examples, phase)


def filtered_samples(g: Generation, rows: Rows, prompts: int) -> np.ndarray:
    """[prompts, samples] bool, the rows that the filter keeps."""
    if g.filter is None:
        return np.ones((prompts, g.sampling.samples), dtype=bool)
    return g.filter(on_cpu(rows).batch).cpu().numpy().reshape(prompts, g.sampling.samples)


def rewarded_samples(g: Generation, rows: Rows, prompts: int) -> np.ndarray:
    """[prompts, samples] bool, the rows that can be trained on whatever the filter says.

    Raises:
      RewardError: there is none.
    """
    failed_B = rows.batch.get("failed")
    if failed_B is None or not g.skips_failed:
        return np.ones((prompts, g.sampling.samples), dtype=bool)
    if failed_B.all():
        raise RewardError(f"a reward function failed on each of {len(failed_B)} completions; none is left to train on")
    return ~failed_B.cpu().numpy().reshape(prompts, g.sampling.samples)


def failed_rows(rows: Rows) -> int:
    """Rows on which a reward function failed."""
    failed_B = rows.batch.get("failed")
    return 0 if failed_B is None else int(failed_B.sum())


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
    group_B = torch.from_numpy(begin + np.repeat(np.arange(len(counts)), counts)).to(device)
    rows = rows.with_fields(group=group_B, failed=None)
    if not g.greedy_baseline:
        return rows
    examples = [example for one in found for example in one.examples]
    _, greedy = _rolled(g, clock, examples, dataclasses.replace(g.sampling, greedy=True, samples=1), 0)
    scores = greedy.batch.score.repeat_interleave(torch.from_numpy(counts).to(device))
    rows = rows.with_fields(greedy_score=scores.to(rows.batch.score))
    if not (g.skips_failed and failed_rows(greedy)):
        return rows
    if greedy.batch.failed.all():
        raise RewardError("a reward function failed on the greedy completions of all prompts, which are the baseline")
    return take(rows, np.flatnonzero(np.repeat(~greedy.batch.failed.cpu().numpy(), counts)))


def show_samples(
    g: Generation, show: Show, step: int, examples: Sequence[Example], done: Rollout, rows: Rows, samples: int
) -> None:
    """The first sample of each of the first prompts."""
    numbers = [i * samples for i in range(len(examples))]
    texts = first_texts(done, numbers, g.decode, [e.tokens[-1] for e in examples])
    score_B = rows.batch.get("score")
    scores = [None] * len(texts) if score_B is None else score_B[torch.tensor(numbers)].tolist()
    show.samples(step, examples, texts, scores, parts_of_scores(g.reward_names, rows, numbers))
