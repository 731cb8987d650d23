"""The source whose rows the policy writes: prompts, completed and rewarded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.algos.terms import Filter
from funrl.data.order import order_digest, take_next
from funrl.data.prompts import Example
from funrl.rewards.call import RewardError
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.sources.curriculum import PromptSchedule
from funrl.trainer.sources.empty_steps import count_empty, filter_metrics, skips_empty
from funrl.trainer.sources.episode_rows import (
    EpisodeSetup,
    kept_samples,
    outcome_rows,
    rewarded_episodes,
    rows_of_samples,
)
from funrl.trainer.sources.episode_totals import episode_metrics
from funrl.trainer.sources.evaluation import evaluated, metrics_of, source_of, table_of, unscored_metrics
from funrl.trainer.sources.generation import RewardedEngine, Rollout, rollout, to_rows
from funrl.trainer.sources.observing import Show, ShownSample, shown_samples, with_scores
from funrl.trainer.sources.pending_rewards import Totals, add_totals, entry_metrics
from funrl.trainer.sources.source import SKIPPED, Elsewhere, Source, same_order
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.roles import RoleState
from funrl.trainer.steps.step_rows import Rows, failed_rows, join_rows, on_cpu, take

WriteRows = Callable[..., tuple[Rollout, Rows]]
EVAL_SEED = 1 << 40  # of evaluations; no training step has it
BASELINE_SEED = 1 << 41  # of greedy completions and episodes; neither has it


class RowSelection(NamedTuple):
    """Selection of the rows to train on.

    Attributes:
      filter: batch -> [B] bool, rows worth training on; None: all.
      when_empty: "skip", "stop" or "use", for a step of which the filter keeps nothing.
      max_refills: bound on the prompts sampled for a batch, in batches.
    """

    filter: Filter | None = None
    when_empty: str = "skip"
    max_refills: int = 8

    @property
    def rounds(self) -> int:
        """Bound on the prompts sampled for each place of a batch."""
        return self.max_refills if self.filter else 1


class PromptEvaluation(NamedTuple):
    """The evaluation of completions of held-out prompts.

    Attributes:
      heldout: the prompts.
      sampling: of their completions.
      solved: scores [R, K] -> [R] bool, completions that count as solved, or None if scores are not verdicts; None:
        unknown.
      seed: of the completions.
      table_prompts: bound on the prompts whose completions are shown; None: all.
    """

    heldout: Sequence[Example]
    sampling: Sampling
    solved: Callable[[Tensor], Tensor | None] | None = None
    seed: int = EVAL_SEED
    table_prompts: int | None = 32


class Generation(NamedTuple):
    """Settings of a source of completions.

    Attributes:
      engine: engine and rewards.
      schedule: prompts to train on and their order.
      sampling: of their completions.
      evaluation: on held-out prompts.
      selection: which rows are trained on.
      rescore: (rows, prompts, phase) -> rows with the scores of reward models and judges, timed under `phase` ("": a
        phase for each model); None: there are none, or ranks `elsewhere` have added them.
      demonstrate: (rows, their prompts) -> the rows with the prompts' demonstrations added; None: there are none.
      reward_names: names of the columns of `scores`.
      greedy_baseline: whether rows get the score of a greedy completion of their prompt.
      shows: step -> whether to show samples.
      pad: id of the padding token.
      choices: experts recorded for each token; 0: none.
      episodes: how prompts become episodes; None: each is completed once.
      versions: whether rows have the versions of the weights that sampled their tokens.
      elsewhere: other ranks, which generate and reward; None: this one does.
    """

    engine: RewardedEngine
    schedule: PromptSchedule
    sampling: Sampling
    evaluation: PromptEvaluation
    selection: RowSelection = RowSelection()
    rescore: Callable[[Rows, Sequence[Example], str], Rows] | None = None
    demonstrate: Callable[[Rows, Sequence[Example]], Rows] | None = None
    reward_names: tuple[str, ...] = ()
    greedy_baseline: bool = False
    shows: Callable[[int], bool] = lambda step: False
    pad: int = 0
    choices: int = 0
    episodes: EpisodeSetup | None = None
    versions: bool = False
    elsewhere: Elsewhere | None = None


def prompt_source(generation: Generation, clock: Clock, show: Show) -> Source:
    """Rows that the policy writes: prompts in a shuffled order, completed and rewarded.

    Prompts of which the filter keeps no row are replaced by further ones until the batch is full, within a bound. No
    completion that the filter keeps is thrown away. Metrics count the prompts and rows that it drops.
    """
    sampling = generation.sampling
    prompts, batch_size, seed, weighing = generation.schedule
    selection = generation.selection
    refilled = generation.elsewhere is not None and generation.elsewhere.refills
    most = batch_size * (1 if refilled else selection.rounds)
    log = [] if generation.episodes is None or generation.episodes.log is None else generation.episodes.log

    def next_rows(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        begin = consumed = state["prompts_consumed"]
        log.clear()
        weights, measured, weighed = weighing.weights(state["curriculum"], step)
        batches: list[Chosen] = []
        sampled = dropped_rows = failed = 0
        totals: list[tuple[Totals, Totals]] = []  # of rewards' further numbers, and of facts about episodes
        room = batch_size
        spare: tuple[list[Example], Rows] | None = None
        while room and sampled < most:
            taken = take_next(prompts, min(room, most - sampled), seed, position=consumed, weights=weights)
            with clock.phase("generate"):
                places = taken.places if generation.elsewhere is None else generation.elsewhere.order(taken.places)
            selected = [prompts[place] for place in places.tolist()]
            noise = derived_seed(seed, consumed)
            done, rows = rewarded_rows(generation, clock, selected, sampling=sampling, seed=noise)
            if not sampled and generation.shows(step):
                show.samples(step, first_samples(generation, selected[:8], done, rows=rows, samples=sampling.samples))
            measured = weighing.measured(measured, places, done.scores, done.failed)
            replaced = () if generation.elsewhere is None else generation.elsewhere.dropped()
            failed += failed_rows(rows) + sum(prompt.failed for prompt in replaced)
            totals += [*((prompt.entries, prompt.episodes) for prompt in replaced), (done.entries, done.episodes)]
            if spare is None or len(rows.owner):  # where all episodes failed there are no rows
                spare = selected, rows
            kept_PS = filter_samples(generation, rows, len(selected))
            useful = kept_prompts(generation, kept_PS)
            consumed = taken.end + len(replaced)
            sampled += len(selected) + len(replaced)
            room -= len(useful)
            batches.append(chosen_rows(selected, rows, useful, kept_PS=kept_PS))
            dropped_rows += int((~kept_PS[useful]).sum())
        if weights is not None:
            weighed["curriculum/passed_over"] = consumed - begin - sampled
        metrics = filter_metrics(sum(len(chosen.examples) for chosen in batches), sampled, dropped_rows)
        assert spare is not None
        batches, skipped = _batches(generation, batches, spare, (step, sampled), show)
        unusable = 0 if batches[0].examples else sampled * sampling.samples
        entries, facts = (add_totals(*parts) for parts in zip(*totals, strict=True))
        state, emptiness = count_empty(state, step, unusable, facts, show)
        baseline = generation.greedy_baseline and not skipped
        batch = one_step_of(generation, batches, begin, clock=clock, baseline=baseline)
        batch = batch if skipped else with_demonstrations(generation, batch, batches)
        metrics[SKIPPED] = float(skipped)
        failures = {} if rows.batch.get("failed") is None else {"reward/failed": float(failed)}
        state = {**state, "prompts_consumed": consumed, "curriculum": measured}
        further = entry_metrics(entries) | episode_metrics(facts) | emptiness
        return batch, state, weighed | failures | further | (metrics if selection.filter else {})

    order = order_digest(prompts, seed, [len(example.tokens) for example in prompts])
    first = {"prompts_consumed": 0, "order": order, "curriculum": weighing.init()}
    if generation.episodes is not None:
        first["empty_steps"] = 0

    def restored(state: trees.Tree) -> trees.Tree:
        return same_order(order, show, {**state, "curriculum": trees.map(lambda x: x.cpu(), state["curriculum"])})

    def observed(state: trees.Tree, metrics: Mapping[str, float]) -> trees.Tree:
        return {**state, "curriculum": weighing.observed(state["curriculum"], metrics)}

    def evaluate(states: Mapping[str, RoleState], step: int) -> dict[str, float]:
        return evaluate_heldout(generation, clock, show, step=step)

    return Source(lambda: dict(first), next_rows, evaluate, restored=restored, observed=observed, episodes=log)


def with_demonstrations(generation: Generation, batch: Rows, batches: Sequence[Chosen]) -> Rows:
    """The batch with demonstrations of its prompts, if the run has them."""
    if generation.demonstrate is None:
        return batch
    return generation.demonstrate(batch, [example for chosen in batches for example in chosen.examples])


def _batches(
    generation: Generation,
    batches: Sequence[Chosen],
    spare: tuple[list[Example], Rows],
    numbers: tuple[int, int],
    show: Show,
) -> tuple[list[Chosen], bool]:
    """Batches with prompts, or what can be trained on of the spare one; and whether the step is to be skipped.

    Args:
      batches: of the step.
      spare: prompts and all of their rows.
      numbers: the step's number, and the number of prompts sampled in it.
    """
    step, sampled = numbers
    useful = [chosen for chosen in batches if chosen.examples]
    if useful:
        count = sum(len(chosen.examples) for chosen in useful)
        note_short_batch(generation, show, step, kept=count, sampled=sampled)
        return useful, False
    chosen = unfiltered_rows(generation, *spare)
    when_empty = generation.selection.when_empty
    return [chosen], not chosen.examples or skips_empty(when_empty, step, sampled, show)


def note_short_batch(generation: Generation, show: Show, step: int, kept: int, sampled: int) -> None:
    """Show a remark if the filter kept fewer prompts than the batch needs.

    Args:
      generation: as of the source.
      show: receives the remark.
      step: number of the step.
      kept, sampled: prompts.
    """
    wanted = generation.schedule.batch
    if kept < wanted and generation.selection.filter is not None:
        elsewhere = generation.elsewhere
        fixed = elsewhere is not None and elsewhere.refills and generation.rescore is not None  # --max_refills=1
        advice = "" if fixed else f"; a --max_refills above {generation.selection.max_refills} may fill it"
        show.note(f"step {step}: the filter kept {kept} of {sampled} prompts, the batch needs {wanted}{advice}")


def evaluate_heldout(
    generation: Generation, clock: Clock, show: Show, step: int, write: WriteRows | None = None
) -> dict[str, float]:
    """Complete the held-out prompts, by `write` or `rewarded_rows`, show some completions, and return their metrics."""
    if generation.elsewhere is not None:
        with clock.phase("eval"):
            return generation.elsewhere.evaluate(step, show)
    heldout, sampling, solved, seed, table_prompts = generation.evaluation
    if generation.episodes is not None:
        episodes = generation.episodes._replace(log=None, source_of=source_of(heldout))
        generation = generation._replace(episodes=episodes)
    write = write or rewarded_rows
    done, rows = write(generation, clock, heldout, sampling=sampling, seed=seed, phase="eval")
    show.samples(step, first_samples(generation, heldout[:8], done, rows=rows, samples=sampling.samples))
    decode = generation.engine.decode
    rows = outcome_rows(done, rows)
    scores = evaluated(heldout, done, rows, solved=solved, decode=decode, names=generation.reward_names)
    for part in table_of(scores, heldout, done, decode=decode, step=step, prompts=table_prompts):
        show.evaluated(part)
    further = entry_metrics(done.entries, "eval/reward") | episode_metrics(done.episodes, "eval/")
    if done.episodes:
        further |= unscored_metrics(scores)
    return metrics_of(scores, heldout) | further


def rewarded_rows(
    generation: Generation, clock: Clock, examples: Sequence[Example], sampling: Sampling, seed: int, phase: str = ""
) -> tuple[Rollout, Rows]:
    """Completions, and their rows with all rewards.

    Args:
      generation: as of the source.
      clock: times "generate", "reward" and a phase for each scoring model, or only `phase` if that is given.
      examples: prompts, the same on every rank.
      sampling: of the completions.
      seed: of their noise.
      phase: clock phase for all of it.
    """
    with clock.phase(phase or "generate"):
        if generation.elsewhere is not None:
            done, rows = generation.elsewhere.rewarded_rows(examples, sampling, seed)
        elif generation.episodes is not None:
            return rewarded_episodes(generation.episodes, generation.engine, examples, sampling, seed)
        else:
            done = rollout(generation.engine, examples, sampling, seed=seed)
            rows = to_rows(examples, done, sampling, generation.pad, generation.versions, choices=generation.choices)
    if done.reward_s and not phase and generation.elsewhere is None:
        clock.move(done.reward_s, "generate", "reward")
    return done, rows if generation.rescore is None else generation.rescore(rows, examples, phase)


def filter_samples(generation: Generation, rows: Rows, prompts: int) -> np.ndarray:
    """[prompts, samples] bool, rows that the filter keeps."""
    samples = generation.sampling.samples
    if generation.episodes is not None:
        kept_E = kept_samples(on_cpu(rows), generation.selection.filter, prompts * samples)
        return kept_E.reshape(prompts, samples)
    if generation.selection.filter is None:
        return np.ones((prompts, samples), dtype=bool)
    return generation.selection.filter(on_cpu(rows).batch).cpu().numpy().reshape(prompts, samples)


def rewarded_samples(generation: Generation, rows: Rows, prompts: int) -> np.ndarray:
    """[prompts, samples] bool, rows that can be trained on, regardless of the filter.

    Raises:
      RewardError: a reward function failed on all of them.
    """
    failed_B = rows.batch.get("failed")
    if generation.episodes is not None:
        kept_E = kept_samples(on_cpu(rows), None, prompts * generation.sampling.samples)
        return kept_E.reshape(prompts, -1)
    if failed_B is None or generation.engine.on_error != "skip":
        return np.ones((prompts, generation.sampling.samples), dtype=bool)
    if failed_B.all():
        raise RewardError(f"a reward function failed on each of {len(failed_B)} completions; none is left to train on")
    return ~failed_B.cpu().numpy().reshape(prompts, generation.sampling.samples)


def kept_prompts(generation: Generation, kept_PS: np.ndarray) -> np.ndarray:
    """Numbers of the newest prompts of which the filter keeps a row; ranks `elsewhere` learn them."""
    prompts = np.flatnonzero(kept_PS.any(1))
    if generation.elsewhere is not None:
        generation.elsewhere.keep(prompts)
    return prompts


class Chosen(NamedTuple):
    """Prompts taken for the batch, their kept rows, and the number of kept rows of each prompt."""

    examples: list[Example]
    rows: Rows
    counts: np.ndarray


def chosen_rows(examples: Sequence[Example], rows: Rows, prompts: np.ndarray, kept_PS: np.ndarray) -> Chosen:
    """The kept rows of some prompts."""
    samples = kept_PS.shape[1]
    numbers = (prompts[:, None] * samples + np.arange(samples))[kept_PS[prompts]]
    kept = take(rows, rows_of_samples(rows, numbers))
    own_samples = numbers if kept.examples is None else kept.examples
    counts = np.bincount(own_samples // samples, minlength=len(kept_PS))[prompts]
    return Chosen([examples[i] for i in prompts], kept, counts)


def unfiltered_rows(generation: Generation, examples: Sequence[Example], rows: Rows) -> Chosen:
    """All rows of some prompts that can be trained on, regardless of the filter."""
    kept_PS = rewarded_samples(generation, rows, len(examples))
    return chosen_rows(examples, rows, np.flatnonzero(kept_PS.any(1)), kept_PS=kept_PS)


def one_step_of(generation: Generation, chosen: Sequence[Chosen], begin: int, clock: Clock, baseline: bool) -> Rows:
    """Join the chosen rows into one step, with group numbers that continue those of earlier steps.

    Args:
      generation: as of the source.
      chosen: prompts with their rows.
      begin: number of the first group.
      clock: of the phases.
      baseline: whether to add the scores of greedy completions.
    """
    rows = join_rows([part.rows for part in chosen])
    counts = np.concatenate([part.counts for part in chosen])
    device = rows.batch.group.device
    places = rows.batch.group.unique_consecutive().cpu().numpy()
    group_B = torch.from_numpy(begin + np.repeat(np.arange(len(counts)), counts)).to(device)
    rows = rows.with_fields(group=group_B, failed=None, episode=_episode_numbers(chosen, device))
    if not baseline:
        return rows
    greedy = None if generation.elsewhere is None else generation.elsewhere.baseline_rows(places)
    examples = [example for part in chosen for example in part.examples]
    if greedy is None:
        sampling = baseline_sampling(generation.sampling)
        _, greedy = rewarded_rows(generation, clock, examples, sampling=sampling, seed=BASELINE_SEED)
    elif generation.rescore is not None:
        greedy = generation.rescore(greedy, examples, "")
    if generation.episodes is not None:
        return _compared_with_greedy(rows, np.repeat(np.arange(len(counts)), counts), greedy)
    scores = greedy.batch.score.repeat_interleave(torch.from_numpy(counts).to(device))
    rows = rows.with_fields(greedy_score=scores.to(rows.batch.score))
    if not (generation.engine.on_error == "skip" and failed_rows(greedy)):
        return rows
    if greedy.batch.failed.all():
        raise RewardError("a reward function failed on the greedy completions of all prompts, which are the baseline")
    return take(rows, np.flatnonzero(np.repeat(~greedy.batch.failed.cpu().numpy(), counts)))


def baseline_sampling(sampling: Sampling) -> Sampling:
    """Sampling of the greedy completion that the samples of a prompt are compared with."""
    return dataclasses.replace(sampling, greedy=True, samples=1)


def _compared_with_greedy(rows: Rows, prompt_B: np.ndarray, greedy: Rows) -> Rows:
    """Rows of episodes with the score that their agent has in the greedy episode of their prompt, if it has one.

    Args:
      rows: of episodes.
      prompt_B: number of each row's prompt.
      greedy: rows of one episode of each prompt, without those of unscored agents and of episodes that failed.

    Raises:
      RewardError: no row is left.
    """
    agent_B = rows.batch.agent.cpu().numpy()
    keys_G = np.stack([greedy.batch.episode.cpu().numpy(), greedy.batch.agent.cpu().numpy()], 1).tolist()
    places = {(prompt, agent): place for place, (prompt, agent) in enumerate(keys_G)}
    place_B = np.array([places.get(key, -1) for key in zip(prompt_B.tolist(), agent_B.tolist(), strict=True)])
    kept = np.flatnonzero(place_B >= 0)
    if not len(kept):
        raise RewardError("the greedy episodes of all prompts, which are the baseline, failed or are unscored")
    compared = take(rows, kept)
    score_B = greedy.batch.score[torch.from_numpy(place_B[kept]).to(greedy.batch.score.device)]
    return compared.with_fields(greedy_score=score_B.to(rows.batch.score))


def _episode_numbers(chosen: Sequence[Chosen], device: torch.device) -> Tensor | None:
    """[B] a number for the episode of each row, different in all parts; None: rows are no episodes'."""
    numbers = []
    begin = 0
    for part in chosen:
        episode_B = part.rows.examples
        if episode_B is None:
            return None
        numbers.append(begin + episode_B)
        begin = 1 + int(numbers[-1].max(initial=begin - 1))
    return torch.from_numpy(np.concatenate(numbers)).to(device)


def first_samples(
    generation: Generation, examples: Sequence[Example], done: Rollout, rows: Rows, samples: int
) -> list[ShownSample]:
    """The first sample of each of the first prompts; see `shown_samples`. Collective."""
    if generation.elsewhere is not None:
        shown = generation.elsewhere.samples(len(examples))
        if generation.rescore is None:
            return list(shown.values())
        return with_scores(shown, rows, samples, generation.reward_names)
    decode = generation.engine.decode
    return shown_samples(done, rows, examples, samples, decode=decode, names=generation.reward_names)
