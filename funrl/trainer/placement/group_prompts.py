"""The groups that replicas write, with their prompts, and the prompts that weights choose ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.data.order import take_next
from funrl.rollout.ledger import Ledger
from funrl.rollout.requests import request_seed
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.sources.curriculum import PromptSchedule
from funrl.trainer.sources.prompts import BASELINE_SEED, baseline_sampling


class GroupPrompt(NamedTuple):
    """The prompt of a group.

    Attributes:
      position: in the order of prompts.
      first: position from which the samples are numbered, whose seeds depend on both.
    """

    position: int
    first: int

    def seeds(self, seed: int, samples: int) -> list[int]:
        """Seeds of the samples.

        Args:
          seed: of the run.
          samples: their number.
        """
        own = derived_seed(seed, self.first)
        begin = (self.position - self.first) * samples
        return [request_seed(own, begin + sample) for sample in range(samples)]

    @property
    def baseline_seed(self) -> int:
        """Seed of the greedy completion or episode."""
        return request_seed(BASELINE_SEED, self.position)


class GroupPart(NamedTuple):
    """Completions or episodes of a group that are rewarded together: its samples, or its greedy baseline.

    Attributes:
      sampling: of them.
      seeds: of each.
    """

    sampling: Sampling
    seeds: list[int]


class AskedPrompt(NamedTuple):
    """The prompt of a group that the trainer ranks ask for.

    Attributes:
      place: of the prompt in those of the job.
      seed: of the noise of all prompts that are asked for together.
      number: of the prompt among these.
      greedy: whether its greedy completion or episode is asked for, and not its samples.
    """

    place: int
    seed: int
    number: int
    greedy: bool = False


def prompt_of_place(
    ledger: Ledger, place: int, *, take: Callable[[], int], chosen: Callable[[int], Sequence[int]] | None = None
) -> GroupPrompt:
    """The prompt with which a place begins that the trainer ranks have not asked for.

    Args:
      ledger: as it was opened.
      place: of the group.
      take: gives the numbers of prompts in their order, where a filter may drop some.
      chosen: batch -> positions of its prompts, where weights choose them; None: they do not.
    """
    rule = ledger.rule
    if rule.prompts > 1:
        position = ledger.prompt_of(take())
        return GroupPrompt(position, first=position)
    batch, index = divmod(place, rule.places)
    if chosen is not None:
        position = chosen(batch)[index]
        return GroupPrompt(position, first=position)
    first = ledger.prompts + (batch - ledger.version) * rule.places
    return GroupPrompt(first + index, first)


class GroupWork(NamedTuple):
    """A group that a replica writes.

    Attributes:
      number: under which it is delivered and its rows are kept; that of its place, unless the trainer ranks number the
        groups that they ask for.
      place: in the ledger; None: a greedy completion or episode, which belongs to a group that has one.
      attempt: how often the place has begun, this time included.
      version: of the ledger, with whose weights it begins.
      prompt: of the group; None: the next one of the order, where the trainer ranks have asked.
    """

    number: int
    place: int | None
    attempt: int = 1
    version: int = 0
    prompt: GroupPrompt | AskedPrompt | None = None

    @property
    def known_prompt(self) -> GroupPrompt | AskedPrompt:
        """`prompt` of a group that a replica has taken. Raises: RuntimeError, it has none yet."""
        if self.prompt is None:
            raise RuntimeError(f"group {self.number} has no prompt yet")
        return self.prompt


def baseline_of(number: int) -> int:
    """Number under which a replica keeps the greedy completion or episode that it has written with a group."""
    return number + (1 << 30)  # above the places of any run


def group_parts(prompt: GroupPrompt | AskedPrompt, seed: int, sampling: Sampling, *, baseline: bool) -> list[GroupPart]:
    """Completions or episodes of a group, each part rewarded by itself.

    Args:
      prompt: of the group.
      seed: of the run.
      sampling: of the samples.
      baseline: whether samples come with the greedy completion or episode of their prompt.
    """
    samples = sampling.samples
    greedy = baseline_sampling(sampling)
    if isinstance(prompt, AskedPrompt):
        if prompt.greedy:
            return [GroupPart(greedy, [request_seed(prompt.seed, prompt.number)])]
        begin = prompt.number * samples
        return [GroupPart(sampling, [request_seed(prompt.seed, begin + sample) for sample in range(samples)])]
    parts = [GroupPart(sampling, prompt.seeds(seed, samples))]
    return [*parts, GroupPart(greedy, [prompt.baseline_seed])] if baseline else parts


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
