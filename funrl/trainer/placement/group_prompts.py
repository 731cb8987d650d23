"""The groups that trainer ranks ask for, with their prompts, and the prompts that weights choose ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.data.order import take_next
from funrl.rollout.requests import request_seed
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.sources.curriculum import PromptSchedule
from funrl.trainer.sources.prompts import BASELINE_SEED, baseline_sampling


class GroupPrompt(NamedTuple):
    """The prompt of a group.

    Attributes:
      index: among the prompts of the job.
      seed: of the noise of all prompts that are asked for together.
      number: of the prompt among these.
      position: in the order of prompts; -1: the trainer ranks take a step's prompts from the order when it begins.
    """

    index: int
    seed: int
    number: int
    position: int = -1

    def seeds(self, samples: int) -> list[int]:
        """Seeds of the samples.

        Args:
          samples: their number.
        """
        begin = self.number * samples
        return [request_seed(self.seed, begin + sample) for sample in range(samples)]

    @property
    def baseline_seed(self) -> int:
        """Seed of the greedy completion or episode that is written beside the samples."""
        return request_seed(BASELINE_SEED, self.position)


def prompts_at(schedule: PromptSchedule, positions: Sequence[int], firsts: Sequence[int]) -> list[GroupPrompt]:
    """Prompts at some positions of the order.

    Args:
      schedule: of the run.
      positions: of the prompts.
      firsts: for each the position from which the samples are numbered, whose seeds depend on both.
    """
    indices = schedule.numbers_at(np.array(positions, dtype=np.int64)).tolist()
    return [
        GroupPrompt(index, derived_seed(schedule.seed, first), position - first, position)
        for index, position, first in zip(indices, positions, firsts, strict=True)
    ]


class GroupWork(NamedTuple):
    """A group that the trainer ranks ask for.

    Attributes:
      number: under which its rows are kept; no other group of the run has it.
      place: in the ledger; None: a greedy completion or episode alone, which belongs to a group that has a place.
      prompt: of the group.
      weights: version of the weights that all replicas hold before it begins.
      baseline: whether its samples come with the greedy completion or episode of the prompt.
    """

    number: int
    place: int | None
    prompt: GroupPrompt
    weights: int = 0
    baseline: bool = False


class GroupPart(NamedTuple):
    """Completions or episodes of a group that are rewarded together: its samples, or its greedy baseline.

    Attributes:
      sampling: of them.
      seeds: of each.
    """

    sampling: Sampling
    seeds: list[int]


def group_parts(work: GroupWork, sampling: Sampling) -> list[GroupPart]:
    """Completions or episodes of a group, each part rewarded by itself.

    Args:
      sampling: of the samples.
    """
    prompt = work.prompt
    greedy = baseline_sampling(sampling)
    if work.place is None:
        return [GroupPart(greedy, prompt.seeds(1))]
    parts = [GroupPart(sampling, prompt.seeds(sampling.samples))]
    return [*parts, GroupPart(greedy, [prompt.baseline_seed])] if work.baseline else parts


HELDOUT = (1 << 31) - 1  # number under which each replica keeps its rows of an evaluation


def baseline_of(number: int) -> int:
    """Number under which a replica keeps the greedy completion or episode that it has written with a group."""
    return number + (1 << 30)  # above the groups of any run


class ChosenPrompts(NamedTuple):
    """Prompts of batches that weights have chosen ahead of their training.

    Attributes:
      positions: [n P] in the order of prompts, of the next batch and of those after it.
      end: position after the last one.
    """

    positions: Tensor
    end: int = 0

    def extended(
        self, schedule: PromptSchedule, memory: trees.Tree, steps: Sequence[int]
    ) -> tuple[ChosenPrompts, trees.Tree, dict[str, float]]:
        """The prompts with those of further batches, the memory of the weights, and metrics of the last batch.

        Args:
          schedule: of the prompts, with their weights.
          memory: of the weights.
          steps: that are chosen, from the next one on; those of `positions` are left out.
        """
        prompts, places, seed, weighing = schedule
        positions, end = self
        metrics: dict[str, float] = {}
        for step in steps[len(positions) // places :]:
            weights, memory, metrics = weighing.weights(memory, step)
            taken = take_next(prompts, places, seed, position=end, weights=weights)
            metrics["curriculum/passed_over"] = taken.end - end - places
            positions = torch.cat([positions, torch.from_numpy(taken.positions)])
            end = taken.end
        return ChosenPrompts(positions, end), memory, metrics
