"""The prompts of groups that replicas write without a break, also where a filter drops some and others replace them.

Without replacements group i has the i-th prompt of the run, or of the prompts that trainer ranks choose by weights and
publish. With them a replica takes the next prompt of the order when it begins a group, and again for the same place
when the filter keeps no row of it: by itself, or where models reward completions when the trainer ranks ask. Groups
b P to (b + 1) P - 1, the places of a batch, have at most as many prompts as a batch of a run by turns: they share the
replacements. A later group that overtakes one of them brings its own to their batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.data.order import take_next
from funrl.rollout.group_board import GroupBoard
from funrl.rollout.ledger import Ledger, LedgerRule
from funrl.rollout.requests import request_seed
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.sources.curriculum import UNWEIGHTED, PromptSchedule
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.prompts import BASELINE_SEED
from funrl.trainer.sources.source import DroppedPrompt, Generation
from funrl.trainer.steps.step_rows import Rows


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


class GroupResult(NamedTuple):
    """A group that has ended.

    Attributes:
      done, rows: its completions or episodes, and their rows.
      prompt: of the group.
      dropped: the prompts before it in this place.
      baseline: the greedy completion or episode of the prompt, with its rows; None: there is none.
    """

    done: Rollout
    rows: Rows
    prompt: GroupPrompt
    dropped: Sequence[DroppedPrompt]
    baseline: tuple[Rollout, Rows] | None


class GroupPrompts:
    """The prompts of a replica's groups.

    Attributes:
      replaced: whether a prompt may be replaced.
      filters: whether this replica filters what it writes. Else the trainer ranks ask for what replaces a prompt.
      weighed: whether the trainer ranks choose the prompts of each batch, by weights.
    """

    def __init__(self, rule: LedgerRule, most: int, board: GroupBoard) -> None:
        """Begin before the first group.

        Args:
          rule: of the ledger.
          most: prompts of a batch for each of its places; 1: none is replaced.
          board: of the run.
        """
        self.replaced = most > 1
        self.filters = self.replaced
        self.weighed = False
        self._rule = rule
        self._most = most
        self._board = board

    def begin(self, number: int, ledger: Ledger) -> GroupPrompt:
        """The prompt of a new group."""
        if self.replaced:
            return self._next(ledger)
        places = self._rule.places
        if self.weighed:
            batch, place = divmod(number, places)
            position = self._board.prompts_of(batch)[place]
            return GroupPrompt(position, first=position)
        base = ledger.prompts - ledger.version * places
        return GroupPrompt(base + number, base + number // places * places)

    def leave_to_trainers(self, generation: Generation) -> None:
        """Leave to the trainer ranks the choice of prompts by weights, and a filter where models reward groups."""
        self.weighed = generation.schedule.weighing is not UNWEIGHTED
        self.filters &= generation.rewards.rescore is None

    def take_again(self) -> int | None:
        """The place of a group that the trainer ranks have dropped, for another prompt; None: there is none."""
        return self._board.take_again() if self.replaced and not self.filters else None

    def replace(self, number: int, ledger: Ledger) -> GroupPrompt | None:
        """The prompt that takes the place of a group's; None: its batch has had as many as it may."""
        if self._board.take_replacement(number // self._rule.places) >= self._rule.places * (self._most - 1):
            return None
        return self._next(ledger)

    def _next(self, ledger: Ledger) -> GroupPrompt:
        position = ledger.prompt_of(self._board.take_prompt())
        return GroupPrompt(position, first=position)


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
