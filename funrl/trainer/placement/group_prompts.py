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
from funrl.rollout.ledger import Ledger
from funrl.rollout.requests import request_seed
from funrl.rollout.sampling_parameters import Sampling
from funrl.seeds import derived_seed
from funrl.trainer.sources.curriculum import PromptSchedule
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.prompts import BASELINE_SEED
from funrl.trainer.sources.source import DroppedPrompt
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
      weighed: whether the trainer ranks choose the prompts of each batch, by weights.
    """

    def __init__(self, board: GroupBoard, *, weighed: bool = False) -> None:
        """Begin before the first group, with the board of the run."""
        self.weighed = weighed
        self._board = board
        self._ledger: Ledger | None = None

    def is_open(self) -> bool:
        """True once the trainer ranks have opened the ledger."""
        self._ledger = self._ledger or self._board.opened()
        return self._ledger is not None

    @property
    def ledger(self) -> Ledger:
        """The ledger as it was opened. Raises: RuntimeError, it is not open yet."""
        if self._ledger is None:
            raise RuntimeError("the ledger of the groups is not open yet")
        return self._ledger

    @property
    def filters(self) -> bool:
        """True if this replica filters what it writes; else the trainer ranks ask for what replaces a prompt."""
        return self.ledger.rule.prompts > 1 and not self.ledger.rule.scores

    def begin(self, number: int) -> GroupPrompt:
        """The prompt of a new group."""
        rule = self.ledger.rule
        if rule.prompts > 1:
            return self._next()
        if self.weighed:
            batch, place = divmod(number, rule.places)
            position = self._board.prompts_of(batch)[place]
            return GroupPrompt(position, first=position)
        base = self.ledger.prompts - self.ledger.version * rule.places
        return GroupPrompt(base + number, base + number // rule.places * rule.places)

    def take_again(self) -> int | None:
        """The place of a group that the trainer ranks have dropped, for another prompt; None: there is none."""
        return self._board.take_again() if self.ledger.rule.scores else None

    def replace(self, number: int) -> GroupPrompt | None:
        """The prompt that takes the place of a group's; None: its batch has had as many as it may."""
        rule = self.ledger.rule
        return self._next() if self._board.take_replacement(number // rule.places) < rule.refills else None

    def _next(self) -> GroupPrompt:
        position = self.ledger.prompt_of(self._board.take_prompt())
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
