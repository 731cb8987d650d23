"""Requests of the trainer ranks to generator ranks, and the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from funrl.trainer.sources.evaluation import EvalRow
from funrl.trainer.sources.observing import ShownSample


class SendGroupsRequest(NamedTuple):
    """Hand over rows of groups, and let go of some groups. Its answer is empty.

    Attributes:
      origins: [B] of the rows, as `origins_of` numbers them, by their groups.
      owner: [B] the rank that has each row, by its index over the row axes of the mesh to generate on.
      lengths: [B] tokens of each row.
      to: [B] the rank that gets each row, by its index over the row axes of the mesh to train on.
      groups: numbers of those whose rows nobody asks for any more.
      unlogged: numbers of those whose episodes nobody asks for any more.
    """

    origins: np.ndarray
    owner: np.ndarray
    lengths: np.ndarray
    to: np.ndarray
    groups: Sequence[int]
    unlogged: Sequence[int]


class EpisodesRequest(NamedTuple):
    """Write the episodes of groups of the newest step to files. Its answer is `WrittenFiles`.

    Attributes:
      folder: for the files, which all ranks see.
      groups: numbers of groups that were written together, in their order, and the episodes of each.
    """

    folder: str
    groups: Sequence[tuple[Sequence[int], int]]


class WrittenFiles(NamedTuple):
    """Files that the generator ranks have written.

    Attributes:
      nbytes: of all of them.
      problem: of the first rank that cannot write; "" without one.
    """

    nbytes: int
    problem: str


class BeginEvaluationRequest(NamedTuple):
    """Begin to evaluate on the held-out prompts, beside groups, after `step`. Its answer is empty, once it has begun.

    Attributes:
      step: that has ended.
      version: of the weights, which stay until each replica has written its part.
    """

    step: int
    version: int


class EndEvaluationRequest(NamedTuple):
    """End the evaluation that was begun.

    Its answer is `HeldoutEvaluation`. Where models on the trainer ranks score completions it is `WrittenRows` of the
    group HELDOUT, and `ScoresRequest` follows.
    """


class ScoresRequest(NamedTuple):
    """End an evaluation with the scores of models. Its answer is `HeldoutEvaluation`.

    Attributes:
      score, scores: fields of all rows.
    """

    score: Tensor
    scores: Tensor


class PoolAnswer(NamedTuple):
    """Answer to any request but a `LoadRequest`.

    Attributes:
      value: as the request says; None where there is a problem.
      notes: remarks since the answer before.
      problem: message of the `RewardError` that ends the run; None without one.
    """

    value: Any
    notes: Sequence[str] = ()
    problem: str | None = None


class HeldoutEvaluation(NamedTuple):
    """Evaluation on the held-out prompts.

    Attributes:
      metrics: of it.
      samples: some completions.
      table: rows of the table of samples.
    """

    metrics: Mapping[str, float]
    samples: Sequence[ShownSample]
    table: Sequence[EvalRow]
