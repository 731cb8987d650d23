"""Sampling weights of prompts: from a user's function of the metrics, and from measured pass rates.

The memory (two numbers per prompt, and the function's own state) is part of the source's state, so checkpoints have it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.data.order import places_in_order
from funrl.data.prompts import Example
from funrl.loading import user_trace
from funrl.mesh.collectives import from_first_rank
from funrl.mesh.mesh import Mesh
from funrl.trainer.settings.checks import Difficulty
from funrl.trainer.settings.declaration import SettingsError

GIVEN = ("prompts", "metrics", "step", "pass_rates", "state")  # arguments that a function may take
KEPT = 0.5  # weight of earlier measurements relative to a new one


class CurriculumError(ValueError):
    """A curriculum failed or returned unusable weights; raised on every rank."""


MemoryTree = trees.Tree  # of a weighing
PromptWeights = tuple[np.ndarray | None, MemoryTree, dict[str, float]]  # see `Weighing.weights`


class Weighing(NamedTuple):
    """Sampling weights of all prompts before each step. `memory` is what it remembers.

    Attributes:
      init: () -> memory before the first step.
      weights: (memory, step) -> weights [N] (None: all equal), memory, metrics. Collective.
      measured: (memory, indices [P] of prompts, scores [P * S, K] of their samples or None, mask [P * S] of the samples
        on which a reward function failed or None) -> memory.
      observed: (memory, metrics of a step) -> memory. Collective.
      expected: (memory, indices [P] of prompts) -> score [P] that earlier samples let expect.
    """

    init: Callable[[], dict[str, trees.Tree]] = lambda: {}
    weights: Callable[[MemoryTree, int], PromptWeights] = lambda memory, step: (None, memory, {})
    measured: Callable[[MemoryTree, np.ndarray, Tensor | None, Tensor | None], MemoryTree] = (
        lambda memory, places, scores_RK, failed_R: memory
    )
    observed: Callable[[MemoryTree, Mapping[str, float]], MemoryTree] = lambda memory, metrics: memory
    expected: Callable[[MemoryTree, np.ndarray], Tensor] = lambda memory, places: torch.zeros(len(places))


UNWEIGHTED = Weighing()


class PromptSchedule(NamedTuple):
    """Prompts to train on, and their order.

    Attributes:
      prompts: all of them.
      batch: prompts of a batch.
      seed: of everything random.
      weighing: weights of the prompts before each step.
    """

    prompts: Sequence[Example]
    batch: int = 128
    seed: int = 0
    weighing: Weighing = UNWEIGHTED

    def numbers_at(self, positions: np.ndarray) -> np.ndarray:
        """Indices of the prompts at some positions of the order."""
        if not len(positions):
            return positions
        first = int(positions.min())
        count = int(positions.max()) + 1 - first
        return places_in_order(self.prompts, count, self.seed, position=first)[positions - first]

    def examples_at(self, positions: Sequence[int] | np.ndarray) -> list[Example]:
        """The prompts at some positions of the order."""
        return [self.prompts[number] for number in self.numbers_at(np.asarray(positions)).tolist()]


def as_chosen(schedule: PromptSchedule) -> PromptSchedule:
    """The schedule without weights, of prompts that others have chosen by them; it measures what the weights read."""
    return schedule._replace(weighing=schedule.weighing._replace(weights=UNWEIGHTED.weights))


def weighing(
    prompts: Sequence[Example],
    function: Callable[..., object] | None,
    difficulty: Difficulty | None,
    reward_weights: Sequence[float],
    mesh: Mesh,
    *,
    expects: bool = False,
) -> Weighing:
    """Weights from a user's function, times weights from the measured pass rates.

    The function is called on the first rank before each step, with any of these keyword arguments: `prompts`, a list of
    dicts with the text as "prompt" and the other fields; `metrics` of the previous step, or with `--staleness=S` of the
    one S steps before that, and of the latest evaluation ({} before there are any); `step`, from 1; `pass_rates` [N],
    NaN where not measured; `state`, the state that it returned last, {} at first. It returns N weights, or, if it takes
    `state`, a pair of weights and its next state, which must be JSON.

    The pass rate of a prompt is the mean over its samples of score / (sum of the positive reward weights), clamped to
    0..1. Each new measurement halves the weight of the earlier ones.

    Args:
      prompts: all of them.
      function: the user's; None: there is none.
      difficulty: bounds on pass rates; prompts outside get the weight `difficulty.rest`. None: no bounds.
      reward_weights: of the reward functions, whose scores are the first columns.
      mesh: of the trainer.
      expects: whether the algorithm compares scores with those that are expected.

    Raises:
      SettingsError: the function has an unknown argument, or there is no score to measure.
    """
    names = names_taken(function) if function is not None else ()
    rates = difficulty is not None or "pass_rates" in names or expects
    if rates and sum(max(weight, 0.0) for weight in reward_weights) <= 0:
        raise SettingsError(
            "pass rates (--difficulty, a curriculum that takes pass_rates, or an algorithm that reads prompt_value, as "
            "spo does) need a --reward of positive weight"
        )
    if not rates and function is None:
        return UNWEIGHTED
    records = [{"prompt": prompt.text, **prompt.fields} for prompt in prompts] if "prompts" in names else []
    curriculum = _Curriculum(
        len(prompts),
        function,
        names,
        records=records,
        rates=rates,
        difficulty=difficulty,
        reward_weights=tuple(reward_weights),
        mesh=mesh,
        expects=expects,
    )
    weights = UNWEIGHTED.weights if difficulty is None and function is None else curriculum.weights
    return Weighing(curriculum.init, weights, curriculum.measured, curriculum.observed, curriculum.expected)


class _Curriculum(NamedTuple):
    """Inputs of the weights.

    Attributes:
      count: number of prompts.
      function, names: the user's function and the arguments that it takes; None and () without one.
      records: the prompts in the form that it receives.
      rates: whether pass rates are measured.
      difficulty, reward_weights, mesh, expects: as in `weighing`.
    """

    count: int
    function: Callable[..., object] | None
    names: tuple[str, ...]
    records: list[dict[str, object]]
    rates: bool
    difficulty: Difficulty | None
    reward_weights: tuple[float, ...]
    mesh: Mesh
    expects: bool = False

    def init(self) -> dict[str, trees.Tree]:
        """Memory before the first step."""
        names = (*(("passes", "samples") if self.rates else ()), *(("totals",) if self.expects else ()))
        measured = {name: torch.zeros(self.count, dtype=torch.float64) for name in names}
        return measured | ({} if self.function is None else {"curriculum": torch.zeros(0, dtype=torch.uint8)})

    def weights(self, memory: MemoryTree, step: int) -> PromptWeights:
        """Weights of a step; see `Weighing`."""
        weight_N = np.ones(self.count)
        metrics = {}
        rate_N = (memory["passes"] / memory["samples"]).numpy() if self.rates else None
        if self.difficulty is not None and rate_N is not None:
            weight_N, metrics = _weights_by_rate(self.difficulty, rate_N)
        if self.function is not None:
            before = _unpacked(memory["curriculum"])
            given = {"prompts": self.records, "metrics": before["metrics"], "step": step, "pass_rates": rate_N}
            own_N, state = _called(
                self.function,
                self.names,
                given | {"state": before["state"]},
                count=self.count,
                mesh=self.mesh,
            )
            weight_N = weight_N * own_N
            memory = {**memory, "curriculum": _packed(before["metrics"], state)}
            metrics["curriculum/chosen_share"] = float((own_N > 0).mean())
        if not weight_N.any():
            raise CurriculumError(
                f"step {step}: every prompt has weight 0; let the curriculum give some a positive weight, or give "
                "--difficulty wider bounds or a third number above 0"
            )
        return weight_N, memory, metrics

    def measured(
        self, memory: MemoryTree, places: np.ndarray, scores_RK: Tensor | None, failed_R: Tensor | None = None
    ) -> MemoryTree:
        """Memory after the scores of some prompts; see `Weighing`."""
        if not self.rates or scores_RK is None:
            return memory
        own_RK = scores_RK[:, : len(self.reward_weights)].double().cpu()
        weights = list(self.reward_weights)
        full = sum(max(weight, 0.0) for weight in weights)
        score_R = (own_RK * torch.tensor(weights, dtype=torch.float64)).nansum(1)
        sums = {"passes": (score_R / full).clamp(0, 1)} | ({"totals": score_R} if self.expects else {})
        scored_R = torch.ones(len(scores_RK)) if failed_R is None else (~failed_R).cpu()
        return {**memory, **_counted(memory, places, sums, scored_R=scored_R.double())}

    def expected(self, memory: MemoryTree, places: np.ndarray) -> Tensor:
        """Expected scores of some prompts; a prompt without a sample has the mean of the others, or half a score."""
        mean_N = memory["totals"] / memory["samples"]
        known = ~mean_N.isnan()
        full = sum(max(weight, 0.0) for weight in self.reward_weights)
        prior = mean_N[known].mean() if known.any() else torch.tensor(0.5 * full, dtype=torch.float64)
        return torch.where(known, mean_N, prior)[torch.from_numpy(np.asarray(places))]

    def observed(self, memory: MemoryTree, metrics: Mapping[str, float]) -> MemoryTree:
        """Memory after the metrics of a step; see `Weighing`."""
        if self.function is None:
            return memory
        before = _unpacked(memory["curriculum"])
        held_out = {name: value for name, value in before["metrics"].items() if name.startswith("eval/")}
        newest = from_first_rank({name: float(value) for name, value in metrics.items()}, self.mesh)
        return {**memory, "curriculum": _packed(held_out | newest, before["state"])}


def _weights_by_rate(difficulty: Difficulty, rate_N: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """Weights from pass rates (NaN: not measured), and metrics."""
    weight_N = np.ones(len(rate_N))
    outside_N = (rate_N < difficulty.low) | (rate_N > difficulty.high)  # false for NaN
    weight_N[outside_N] = difficulty.rest
    measured = int((~np.isnan(rate_N)).sum())
    return weight_N, {
        "difficulty/measured_share": measured / len(rate_N),
        "difficulty/outside_share": int(outside_N.sum()) / max(1, measured),
    }


def _counted(
    memory: Mapping[str, Tensor], places: np.ndarray, sums: Mapping[str, Tensor], scored_R: Tensor
) -> dict[str, Tensor]:
    """Update the sums and samples of all prompts with new rows.

    Args:
      memory: sums and samples so far.
      places: [P] indices of the prompts of the rows; each prompt has the same number of rows, one after another.
      sums: by name a number of each row [R], such as its pass rate.
      scored_R: 1 where a row has a score, else 0.
    """
    scored_PS = scored_R.reshape(len(places), -1)
    place_P = torch.from_numpy(np.asarray(places))
    seen_P = torch.from_numpy(np.unique(places))
    counted = {}
    for name, x_R in {**sums, "samples": torch.ones_like(scored_R)}.items():
        counted[name] = memory[name].clone()
        counted[name][seen_P] *= KEPT
        counted[name].index_add_(0, place_P, (x_R.reshape(scored_PS.shape) * scored_PS).sum(1))
    return counted


def names_taken(function: Callable[..., object]) -> tuple[str, ...]:
    """Names of the arguments of a curriculum. Raises: SettingsError, one of them is unknown."""
    taken = inspect.signature(function).parameters
    unknown = [name for name, parameter in taken.items() if name not in GIVEN and parameter.default is parameter.empty]
    if unknown:
        raise SettingsError(
            f"--curriculum: {function.__name__} takes {unknown[0]!r}; its arguments may be {', '.join(GIVEN)}"
        )
    return tuple(name for name in taken if name in GIVEN)


def _called(
    function: Callable[..., Any], names: Sequence[str], given: Mapping[str, object], count: int, mesh: Mesh
) -> tuple[np.ndarray, object]:
    """Call the function on the first rank, and give its weights and state to every rank.

    Raises:
      CurriculumError: it failed, or returned something else.
    """
    outcome: Any = None
    if mesh.rank == 0:
        try:
            result = function(**{name: given[name] for name in names})
            weights, state = result if "state" in names else (result, {})
            outcome = _checked(np.asarray(weights, dtype=np.float64), count), json.loads(json.dumps(state))
        except Exception as error:
            outcome = user_trace(error)
    outcome = from_first_rank(outcome, mesh)
    if isinstance(outcome, str):
        raise CurriculumError(f"the curriculum {function.__name__} failed at step {given['step']}:\n{outcome.rstrip()}")
    return outcome


def _checked(weights: np.ndarray, count: int) -> np.ndarray:
    if weights.shape != (count,) or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(
            f"it gave weights of shape {list(weights.shape)}; {count} finite numbers of at least 0 are needed, one "
            "per prompt (followed by a state if it takes `state`)"
        )
    return weights


def _packed(metrics: Mapping[str, float], state: object) -> Tensor:
    """JSON as bytes, for a checkpoint."""
    return torch.tensor(list(json.dumps({"metrics": metrics, "state": state}).encode()), dtype=torch.uint8)


def _unpacked(held: Tensor) -> dict[str, Any]:
    return json.loads(bytes(held.tolist()).decode()) if len(held) else {"metrics": {}, "state": {}}
