"""Evaluation of completions: from rewarded rows to metrics with their intervals, and to a table of samples."""

from __future__ import annotations

import math
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.data.prompts import Example
from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh
from funrl.rewards.answers import final_answer
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.sources.eval_statistics import best_at, interval, majority_at, mean_over_samples, sample_counts
from funrl.trainer.sources.generation import Rollout, completion_texts
from funrl.trainer.steps.step_rows import Rows

TABLE_ROWS = 256  # rows of the table whose texts are in memory at a time
MOST_SETS = 32  # sets of held-out prompts that can have metrics of their own
EVAL_SEED = 1 << 40  # of evaluations; no training step has it
FEWEST_VOTES = 3  # with two, the first decides


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


class HeldoutText(NamedTuple):
    """Text of a completion of a held-out prompt.

    Attributes:
      answer: that majority votes compare.
      text: the whole of it; "" of a prompt that the table of samples does not show.
    """

    answer: str
    text: str


class EvalRow(NamedTuple):
    """A row of the table of samples.

    Attributes:
      step: number of training steps before it.
      sample: number of the completion among those of its prompt.
      source: file, and line or row, of the prompt.
      answer: the answer that majority votes compare.
      correct: None where rewards are not verdicts, and where there is no reward.
      reward: None without rewards, and of an episode that failed or is unscored.
      tokens: of the completion.
      finished: whether the model ended it, and not the limit.
      rewards: score of each reward function by name, if there are several.
    """

    step: int
    source: str
    sample: int
    prompt: str
    completion: str
    answer: str
    reward: float | None
    correct: bool | None
    tokens: int
    finished: bool
    rewards: Mapping[str, float]


class Evaluated(NamedTuple):
    """Result of an evaluation, the same on every rank: P prompts with N samples each.

    Attributes:
      reward_PN: None without rewards; NaN for an episode that failed or is unscored.
      correct_PN: verdicts of 0 and 1, NaN as in `reward_PN`; None where rewards are not verdicts.
      majority: k -> [P] verdict on the most frequent answer of k samples; NaN where fewer have a reward.
      tokens_PN, finished_PN: as in `EvalRow`.
      parts: of the P * N completions, as in `EvalRow.rewards`.
    """

    reward_PN: np.ndarray | None
    correct_PN: np.ndarray | None
    majority: Mapping[int, np.ndarray]
    tokens_PN: np.ndarray
    finished_PN: np.ndarray
    parts: Sequence[Mapping[str, float]]


def table_places(evaluation: PromptEvaluation) -> list[int]:
    """Places of the held-out prompts that the table of samples shows, spread evenly over all."""
    count = len(evaluation.heldout)
    most = count if evaluation.table_prompts is None else min(count, evaluation.table_prompts)
    return list(range(count)) if most == count else np.linspace(0, count - 1, most).astype(int).tolist()


def heldout_texts(
    evaluation: PromptEvaluation, completions: Sequence[Any], decode: Callable[[list[int]], str], first: int = 0
) -> dict[int, HeldoutText]:
    """Texts of completions by their numbers, as far as votes or the table read them.

    Args:
      completions: or transcripts of episodes.
      decode: token ids -> text.
      first: place of the prompt of the completion of number 0.
    """
    samples = evaluation.sampling.samples
    shown = frozenset(table_places(evaluation))
    numbered = [(first * samples + completion.number, completion.written) for completion in completions]
    votes = evaluation.solved is not None and samples >= FEWEST_VOTES
    read = [(n, written) for n, written in numbered if votes or n // samples in shown]
    before = [evaluation.heldout[n // samples].tokens[-1] for n, _ in read]
    texts = completion_texts([written for _, written in read], decode, before)
    return {
        n: HeldoutText(final_answer(text), text if n // samples in shown else "")
        for (n, _), text in zip(read, texts, strict=True)
    }


def evaluated(
    evaluation: PromptEvaluation,
    done: Rollout,
    rows: Rows,
    texts: Mapping[int, HeldoutText],
    names: Sequence[str] = (),
) -> Evaluated:
    """Evaluate completions and their rewards. Collective.

    Args:
      evaluation: of P prompts.
      done: N completions of each.
      rows: of them, with all rewards.
      texts: of this rank's completions.
      names: of the rewards.
    """
    solved = evaluation.solved
    score_R = rows.batch.get("score")
    scores_RK = rows.batch.get("scores")
    right_R = None if solved is None or scores_RK is None else solved(scores_RK.double())
    unscored_R = done.failed if done.episodes else None  # of completions, a reward function that fails gives 0

    def by_prompt(x_R: Tensor | None) -> np.ndarray | None:
        if x_R is None:
            return None
        x_R = x_R.double()
        scored_R = x_R if unscored_R is None else torch.where(unscored_R.to(x_R.device), math.nan, x_R)
        return scored_R.cpu().numpy().reshape(shape)

    shape = (len(evaluation.heldout), -1)
    correct_PN = by_prompt(right_R)
    return Evaluated(
        by_prompt(score_R),
        correct_PN,
        {} if correct_PN is None else _votes(texts, correct_PN, done.mesh),
        tokens_PN=done.lengths.cpu().numpy().reshape(shape),
        finished_PN=done.finished.cpu().numpy().reshape(shape),
        parts=parts_of_scores(names, rows, range(len(done.lengths))),
    )


def _votes(texts: Mapping[int, HeldoutText], correct_PN: np.ndarray, mesh: Mesh) -> dict[int, np.ndarray]:
    """Verdicts on the most frequent answers, each computed by the rank that holds the prompt's samples."""
    samples = correct_PN.shape[1]
    counts = [k for k in sample_counts(samples) if k >= FEWEST_VOTES]
    if not counts:
        return {}
    verdict_PK = np.zeros((len(correct_PN), len(counts)))
    for first in (number for number in texts if number % samples == 0):
        own = [texts[number].answer for number in range(first, first + samples)]
        correct_N = correct_PN[first // samples]
        verdict_PK[first // samples] = [majority_at(own, correct_N, k) for k in counts]
    summed = collectives.psum(torch.from_numpy(verdict_PK).to(mesh.device), mesh, mesh.row_axes)
    return dict(zip(counts, summed.cpu().numpy().T, strict=True))


def metrics_of(scores: Evaluated, examples: Sequence[Example]) -> dict[str, float]:
    """Metrics "eval/...": means over prompts with intervals, and means by reward and by file or `data_source`.

    A mean is over the prompts that have a value: a prompt without a scored episode has none, nor has one with fewer
    than k for pass@k. A metric that no prompt has a value of is left out.
    """
    metrics: dict[str, float] = {"eval/examples": float(len(examples))}
    columns = _columns(scores)
    for name, (values_P, verdicts) in columns.items():
        values_P = values_P[~np.isnan(values_P)]
        if not len(values_P):
            continue
        metrics[f"eval/{name}"] = float(values_P.mean())
        if (spread := interval(values_P, verdicts)) is not None:
            metrics |= {f"eval/{name}_ci_low": spread.low, f"eval/{name}_ci_high": spread.high}
    for name in dict.fromkeys(name for part in scores.parts for name in part):
        metrics[f"eval/reward/{name}"] = float(np.mean([part[name] for part in scores.parts if name in part]))
    for name, places in sets_of(examples).items():
        for column in ("reward", "accuracy"):
            values_P = columns[column][0][places] if column in columns else np.array([np.nan])
            if not np.isnan(values_P).all():
                metrics[f"eval/{name}/{column}"] = float(np.nanmean(values_P))
    metrics["eval/response_length"] = float(scores.tokens_PN.mean())
    metrics["eval/clip_ratio"] = float(1 - scores.finished_PN.mean())
    return metrics


def _columns(scores: Evaluated) -> dict[str, tuple[np.ndarray, bool]]:
    """For each reported metric, its [P] values and whether they lie between 0 and 1."""
    columns: dict[str, tuple[np.ndarray, bool]] = {}
    right = scores.correct_PN
    rewards = scores.reward_PN
    if rewards is not None:
        shares = right is not None and bool(((rewards >= 0) & (rewards <= 1) | np.isnan(rewards)).all())
        columns["reward"] = mean_over_samples(rewards), shares
    if right is not None:
        columns["accuracy"] = mean_over_samples(right), True
        columns |= {f"pass@{k}": (best_at(right, k), True) for k in sample_counts(right.shape[1])}
        columns |= {f"maj@{k}": (values_P, True) for k, values_P in scores.majority.items()}
    elif rewards is not None:
        columns |= {f"best@{k}": (best_at(rewards, k), False) for k in sample_counts(rewards.shape[1])}
    return columns


def sets_of(examples: Sequence[Example]) -> dict[str, list[int]]:
    """Indices of the prompts of each `data_source`, or of each file; empty if there is only one set, or too many."""
    places_by_set = defaultdict[str, list[int]](list)
    if (name_of := source_of(examples)) is not None:
        for place, example in enumerate(examples):
            places_by_set[name_of(example)].append(place)
    return places_by_set


def source_of(examples: Sequence[Example]) -> Callable[[Example], str] | None:
    """A function that names the `data_source` of one of the prompts, or its file.

    Returns: None if there is only one, or too many.
    """
    name_of = source_names(examples)
    return name_of if 1 < len({name_of(example) for example in examples}) <= MOST_SETS else None


def source_names(examples: Sequence[Example]) -> Callable[[Example], str]:
    """A function that names the `data_source` of one of the prompts, or where some have none, its file."""
    whole = all(isinstance(example.fields.get("data_source"), str) for example in examples)

    def name_of(example: Example) -> str:
        if whole:
            return str(example.fields["data_source"]).replace("/", "_")
        return Path(example.source.rpartition(", ")[0]).stem  # of the file; "" if it was read from none

    return name_of


def table_of(
    scores: Evaluated, evaluation: PromptEvaluation, texts: Mapping[int, HeldoutText], mesh: Mesh, step: int
) -> Iterator[list[EvalRow]]:
    """Yield the table of samples, up to `TABLE_ROWS` rows at a time. Collective.

    Args:
      texts: of this rank's completions.
      mesh: of the ranks that have them.
      step: number of training steps before it.
    """
    samples = scores.tokens_PN.shape[1]
    numbers = [place * samples + n for place in table_places(evaluation) for n in range(samples)]
    for begin in range(0, len(numbers), TABLE_ROWS):
        part = numbers[begin : begin + TABLE_ROWS]
        own = {number: texts[number] for number in part if number in texts}
        everywhere = ChainMap(*collectives.gather_objects(own, mesh))
        yield [_row(scores, evaluation.heldout, n, text=everywhere[n], step=step) for n in part]


def _row(scores: Evaluated, examples: Sequence[Example], number: int, text: HeldoutText, step: int) -> EvalRow:
    place, sample = divmod(number, scores.tokens_PN.shape[1])

    def value_of(values_PN: Any) -> Any:
        value = None if values_PN is None else values_PN[place, sample].item()
        return None if value is None or math.isnan(value) else value

    correct = value_of(scores.correct_PN)

    return EvalRow(
        step,
        examples[place].source,
        sample,
        prompt=examples[place].text,
        completion=text.text,
        answer=text.answer,
        reward=value_of(scores.reward_PN),
        correct=None if correct is None else correct > 0,
        tokens=value_of(scores.tokens_PN),
        finished=value_of(scores.finished_PN),
        rewards=scores.parts[number],
    )


def parts_of_scores(names: Sequence[str], rows: Rows, numbers: Sequence[int]) -> list[dict[str, float]]:
    """For each of some rows, its scores by reward name; {} unless there are several rewards."""
    scores_BK = rows.batch.get("scores")
    if scores_BK is None or len(names) < 2:
        return [{} for _ in numbers]
    parts = scores_BK[torch.tensor(list(numbers), dtype=torch.int64, device=scores_BK.device)].tolist()
    return [{name: x for name, x in zip(names, row, strict=True) if not math.isnan(x)} for row in parts]


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
