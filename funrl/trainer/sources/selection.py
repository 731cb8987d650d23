"""Rows that a step is trained on, and steps without any: the filter kept none, or no episode can be trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.data.prompts import Example
from funrl.kinds import line_places
from funrl.rewards.call import RewardError
from funrl.trainer.sources.episode_rows import kept_samples, rows_of_samples
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.pending_rewards import Totals
from funrl.trainer.sources.source import EMPTY, SKIPPED, Generation, SampledPrompts
from funrl.trainer.steps.step_rows import Rows, failed_rows, join_rows, take

MOST_EMPTY = 5  # steps in a row


class FilterError(RuntimeError):
    """The algorithm's filter kept no row of a step."""


class Chosen(NamedTuple):
    """Prompts taken for the batch and their places, their kept rows, and the number of kept rows of each prompt."""

    examples: list[Example]
    places: np.ndarray
    rows: Rows
    counts: np.ndarray

    @property
    def prompt_B(self) -> np.ndarray:
        """[B] number of each row's prompt among these."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


class SamplingRound(NamedTuple):
    """Result of a round of sampling for a step, without the rows that the filter drops.

    Attributes:
      chosen: the prompts with a row that the filter keeps, and these rows.
      kept: their indices among the sampled prompts.
      end: next position in the order of the prompts.
      sampled: number of prompts, including prompts that `remote` ranks have replaced.
      dropped_rows: number of rows of the chosen prompts that the filter drops.
      failed: number of rows on which a reward function failed; None: a failure ends the run.
      totals: of rewards' further numbers, and of facts about episodes: of each replaced prompt, and of all others.
    """

    chosen: Chosen
    kept: np.ndarray
    end: int
    sampled: int
    dropped_rows: int
    failed: int | None
    totals: Sequence[tuple[Totals, Totals]]


class StepChoice(NamedTuple):
    """Rows that a step is trained on.

    Attributes:
      rounds: of its sampling.
      chosen: prompts with their rows.
      skipped: whether the step trains on nothing.
    """

    rounds: Sequence[SamplingRound]
    chosen: Sequence[Chosen]
    skipped: bool


def filtered_round(generation: Generation, prompts: SampledPrompts, end: int) -> SamplingRound:
    """Filter the rows of sampled prompts.

    Args:
      generation: as of the source.
      prompts: the prompts.
      end: next position in the order of the prompts.
    """
    _, _, done, rows, replaced = prompts
    count = len(prompts.examples)
    kept_PS = filter_samples(generation, rows, count)
    kept = np.flatnonzero(kept_PS.any(1))
    failed = failed_rows(rows) + sum(prompt.failed for prompt in replaced)
    return SamplingRound(
        chosen_rows(prompts, kept_PS),
        kept,
        end,
        sampled=count + len(replaced),
        dropped_rows=int((~kept_PS[kept]).sum()),
        failed=None if rows.batch.get("failed") is None else failed,
        totals=[*((prompt.entries, prompt.episodes) for prompt in replaced), (done.entries, done.episodes)],
    )


def filter_samples(generation: Generation, rows: Rows, prompts: int) -> np.ndarray:
    """[prompts, samples] bool, rows that the filter keeps."""
    samples = generation.sampling.samples
    return kept_samples(rows, generation.selection.filter, prompts * samples).reshape(prompts, samples)


def chosen_rows(prompts: SampledPrompts, kept_PS: np.ndarray) -> Chosen:
    """The kept rows of the prompts that have some."""
    examples, places, _, rows, _ = prompts
    samples = kept_PS.shape[1]
    useful = np.flatnonzero(kept_PS.any(1))
    numbers = np.flatnonzero(kept_PS)
    kept = take(rows, rows_of_samples(rows, numbers))
    own_samples = numbers if kept.examples is None else kept.examples
    counts = np.bincount(own_samples // samples, minlength=len(kept_PS))[useful]
    return Chosen([examples[i] for i in useful], places[useful], kept, counts)


def rewarded_samples(generation: Generation, rows: Rows, prompts: int) -> np.ndarray:
    """[prompts, samples] bool, rows that can be trained on, regardless of the filter."""
    failed_B = rows.batch.get("failed")
    if generation.episodes is None and failed_B is not None and generation.engine.on_error == "skip":
        return ~failed_B.cpu().numpy().reshape(prompts, generation.sampling.samples)
    return kept_samples(rows, None, prompts * generation.sampling.samples).reshape(prompts, -1)


def chosen_of_step(
    generation: Generation,
    rounds: Sequence[SamplingRound],
    spare: Sequence[SampledPrompts],
    step: int,
    show: Show,
) -> StepChoice:
    """Choose the rows that a step is trained on, or those of the spare prompts that can be, and whether to skip it.

    Args:
      generation, show: as of the source.
      rounds: of the step.
      spare: prompts that were sampled in it.
      step: its number.

    Raises:
      RewardError: a reward function failed on all completions.
      FilterError: as of `skips_empty`.
    """
    sampled = sum(part.sampled for part in rounds)
    useful = [part.chosen for part in rounds if part.chosen.examples]
    if useful:
        kept = sum(len(chosen.examples) for chosen in useful)
        wanted = generation.schedule.batch
        if kept < wanted and generation.selection.filter is not None:
            remote = generation.remote
            rescored = generation.rewards.rescore is not None and generation.greedy_baseline
            fixed = remote is not None and remote.refills and rescored  # --max_refills=1
            advice = "" if fixed else f"; a --max_refills above {generation.selection.max_refills} may fill it"
            show.note(f"step {step}: the filter kept {kept} of {sampled} prompts, the batch needs {wanted}{advice}")
        return StepChoice(rounds, useful, False)
    rewarded = [chosen_rows(part, rewarded_samples(generation, part.rows, len(part.examples))) for part in spare]
    usable = any(chosen.examples for chosen in rewarded)
    if not usable and generation.episodes is None:
        count = sum(len(part.rows.owner) for part in spare)
        raise RewardError(f"a reward function failed on each of {count} completions; none is left to train on")
    skipped = not usable or skips_empty(generation.selection.when_empty, step, sampled, show)
    return StepChoice(rounds, rewarded, skipped)


def join_chosen(parts: Sequence[Chosen]) -> Chosen:
    """Join prompts with their rows; no two episodes have the same number."""
    rows = join_rows([part.rows for part in parts])
    return Chosen(
        [example for part in parts for example in part.examples],
        np.concatenate([part.places for part in parts]),
        rows.with_fields(episode=_episode_numbers([part.rows for part in parts])),
        np.concatenate([part.counts for part in parts]),
    )


def first_chosen(chosen: Chosen, most: int) -> Chosen:
    """The first prompts by their places, in this order."""
    order = np.argsort(chosen.places)[:most]
    begins = np.cumsum(chosen.counts) - chosen.counts
    rows = take(chosen.rows, line_places(begins[order], chosen.counts[order]).numpy())
    episode_B = rows.batch.get("episode")
    if episode_B is not None:
        rows = rows.with_fields(episode=episode_B.unique_consecutive(return_inverse=True)[1])
    return Chosen([chosen.examples[i] for i in order], chosen.places[order], rows, chosen.counts[order])


def _episode_numbers(parts: Sequence[Rows]) -> Tensor | None:
    """[B] a number for the episode of each row, different in all parts; None: rows are no episodes'."""
    numbers = [part.examples for part in parts if part.examples is not None]
    if not numbers:
        return None
    begins = np.cumsum([0, *(1 + episode_B.max(initial=-1) for episode_B in numbers[:-1])])
    joined = np.concatenate([begin + episode_B for begin, episode_B in zip(begins, numbers, strict=True)])
    return torch.from_numpy(joined).to(parts[0].batch.group.device)


def skips_empty(when_empty: str, step: int, prompts: int, show: Show) -> bool:
    """True if a step whose rows were all dropped by the filter has no update; shows a remark.

    Args:
      when_empty: "skip", "stop" or "use".
      step: its number.
      prompts: sampled in the step.
      show: receives the remark.

    Raises:
      FilterError: `when_empty` is "stop".
    """
    dropped = f"step {step}: the filter dropped all of {prompts} prompts"
    if when_empty == "stop":
        raise FilterError(f"{dropped} (--empty_filter=stop)")
    used = "the last of them are used unfiltered" if when_empty == "use" else "the step has no update"
    show.note(f"{dropped}; {used} (--empty_filter={when_empty})")
    return when_empty == "skip"


def count_empty(
    state: Mapping[str, Any], step: int, unusable: int, facts: Totals, show: Show
) -> tuple[dict[str, Any], dict[str, float]]:
    """Count steps in a row without a usable episode, which have no update; shows a remark.

    Args:
      state: of a source; without "empty_steps" it has no episodes, and stays as it is.
      step: number of the step.
      unusable: episodes that were run in it if none of them can be trained on; else 0.
      facts: totals of the step's episodes; "failed" and "unscored" are shown.
      show: receives the remark.

    Returns: the state, and metrics.

    Raises:
      RewardError: there have been `MOST_EMPTY` of them in a row.
    """
    if "empty_steps" not in state:
        return dict(state), {}
    count = state["empty_steps"] + 1 if unusable else 0
    failed, unscored = (int(facts.get(name, (0.0, 0))[0]) for name in ("failed", "unscored"))
    problem = f"step {step}: none of {unusable} episodes can be trained on: {failed} failed, {unscored} are unscored"
    if failed:
        problem += "; a failed one leaves out its group"
    if unscored:
        problem += "; one that a limit ends before any reward is unscored, return 0.0 to count it as a failure"
    if count >= MOST_EMPTY:
        raise RewardError(
            f"{problem}; the {count - 1} steps before had none either: see the remarks on failed episodes, and try the "
            "environment with funrl generate --env"
        )
    if count:
        show.note(f"{problem}; the step has no update, and the run ends after {MOST_EMPTY} such steps in a row")
    return {**state, "empty_steps": count}, {EMPTY: float(count > 0)}


def nothing_learned(state: object, steps: int) -> bool:
    """True if a run has done no step, or none with a usable episode.

    Args:
      state: of a source.
      steps: of the run.
    """
    return isinstance(state, Mapping) and state.get("empty_steps", 0) >= steps if steps else True


def check_usable(state: object, steps: int) -> None:
    """Raise RewardError if no step of a run that ends had a usable episode. Args: as of `nothing_learned`."""
    if steps and nothing_learned(state, steps):
        raise RewardError(
            f"none of the run's {steps} steps had an episode that can be trained on: see the remarks on failed "
            "episodes, and try the environment with funrl generate --env"
        )


def rounds_metrics(generation: Generation, rounds: Sequence[SamplingRound], skipped: bool) -> dict[str, float]:
    """Metrics of failed rewards, unless a failure ends the run, and of the filter.

    Args:
      generation: as of the source.
      rounds: of a step.
      skipped: whether the step trains on nothing.
    """
    metrics = {}
    if rounds[-1].failed is not None:
        metrics["reward/failed"] = float(sum(part.failed or 0 for part in rounds))
    if generation.selection.filter:
        kept = sum(len(part.kept) for part in rounds)
        sampled = sum(part.sampled for part in rounds)
        metrics |= {
            "filter_groups/kept_share": kept / sampled,
            "filter_groups/sampled_prompts": sampled,
            "filter_groups/dropped_prompts": sampled - kept,
            "filter_groups/dropped_rows": sum(part.dropped_rows for part in rounds),
            SKIPPED: float(skipped),
        }
    return metrics
