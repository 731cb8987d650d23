"""Observers of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from funrl import trees
from funrl.data.prompts import Example
from funrl.environments.conversation import conversation_of
from funrl.mesh import collectives
from funrl.models.placed import Placed
from funrl.trainer.sources.episode_rows import Transcript, outcome_rows
from funrl.trainer.sources.evaluation import EvalRow, parts_of_scores
from funrl.trainer.sources.generation import Rollout, first_texts
from funrl.trainer.steps.step_rows import Rows

SHOWN_PROMPTS = 8  # of a step or an evaluation, each with its first sample


class ShownSample(NamedTuple):
    """A completion or an episode, as it is shown.

    Attributes:
      prompt, text: what it begins with, and what follows.
      score: None where nothing rewards it, and of an episode that failed or is unscored.
      parts: the score of each reward function that applies, if there are several.
      conversation: of an episode, as `conversation_of` makes it; None: a completion.
      example: the prompt with what it owns, such as pictures; None: it owns nothing.
    """

    prompt: str
    text: str
    score: float | None = None
    parts: Mapping[str, float] = {}
    conversation: Mapping[str, object] | None = None
    example: Example | None = None


class GroupGradient(NamedTuple):
    """Gradient of the rows of a group beside that of all rows of a step.

    Attributes:
      prompt, completion: of its first row.
      rewards: of its rows, or of each agent of its episodes.
      norm: of the gradient, with the denominators of all rows.
      cosine: of the angle between the two.
      share: of the group in the whole; shares of all groups add up to 1.
    """

    prompt: str
    completion: str
    rewards: Sequence[float]
    norm: float
    cosine: float
    share: float


class Show(Protocol):
    """Observer of a source's completions and remarks."""

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None: ...

    def evaluated(self, rows: Sequence[EvalRow]) -> None:
        """Take some more rows of an evaluation's table."""
        ...

    def note(self, text: str) -> None: ...


class Observer(Show, Protocol):
    """Observer of a run. Every rank has one; rank 0's shows and writes what happens."""

    def step(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None: ...

    def groups(self, step: int, groups: Sequence[GroupGradient]) -> None:
        """Take the groups of the largest gradients of a step."""
        ...

    def resumed(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Forget the steps after `step`, which are repeated.

        Args:
          step: the step that the run resumes after.
          metrics: of that step, in case the run failed before it wrote them.
        """
        ...

    def began(self, step: int, inputs: Mapping[str, str]) -> None:
        """Record the digests of the files and weights that the run begins with after `step`.

        Called only for a run with a directory, once its checkpoint has been accepted.
        """
        ...

    def checkpoint_folder(self) -> str | None:
        """Folder for rank 0's checkpoints; None: no checkpoints."""
        ...

    def finish(self, placed: Placed, params: trees.Tree, error: str | None) -> None:
        """Take the weights of the trained model. Collective."""
        ...


def shows_samples(steps: int, every: int, step: int) -> bool:
    """True if a step shows samples: the first, the last and every `every`-th step do."""
    return step in (1, steps) or step % every == 0


def shown_samples(
    done: Rollout,
    rows: Rows,
    examples: Sequence[Example],
    samples: int,
    *,
    decode: Callable[[list[int]], str],
    names: Sequence[str],
) -> list[ShownSample]:
    """The first sample of each of the first prompts. Collective.

    Args:
      done: completions of these and further prompts.
      rows: of the completions.
      examples: the first prompts.
      samples: completions of each prompt.
      decode: token ids -> text.
      names: of the reward functions.
    """
    numbers = [i * samples for i in range(len(examples))]
    texts = first_texts(done, numbers, decode, before=[e.tokens[-1] for e in examples])
    scored = outcome_rows(done, rows)
    score_B = scored.batch.get("score")
    scores = [None] * len(texts) if score_B is None else score_B[torch.tensor(numbers)].tolist()
    parts = parts_of_scores(names, scored, numbers)
    conversations = {}
    if rows.examples is not None:
        conversations = _conversations(done, numbers, decode)
        absent = [False] * len(numbers) if done.failed is None else done.failed[torch.tensor(numbers)].tolist()
        scores = [None if none else score for none, score in zip(absent, scores, strict=True)]
    return [
        ShownSample(example.text, text, score, part, conversations.get(number), example)
        for example, text, score, part, number in zip(examples, texts, scores, parts, numbers, strict=True)
    ]


def with_scores(shown: Mapping[int, ShownSample], rows: Rows, samples: int, names: Sequence[str]) -> list[ShownSample]:
    """Samples of completions with the scores of their rows.

    Args:
      shown: the first sample of some of the prompts, by the prompt's number.
      rows: of the completions of these and further prompts.
      samples, names: as of `shown_samples`.
    """
    numbers = [place * samples for place in shown]
    scores = rows.batch.score[torch.tensor(numbers, dtype=torch.int64)].tolist()
    parts = parts_of_scores(names, rows, numbers)
    scored = zip(shown.values(), scores, parts, strict=True)
    return [sample._replace(score=score, parts=part) for sample, score, part in scored]


def _conversations(
    done: Rollout, numbers: Sequence[int], decode: Callable[[list[int]], str]
) -> dict[int, dict[str, object]]:
    """Conversations of some episodes, which may be on any rank, by their numbers. Collective."""
    transcripts = [x for x in done.completions if isinstance(x, Transcript)]
    shown = [transcript for transcript in transcripts if transcript.number in numbers]
    own = {x.number: conversation_of(x.episode, decode, x.pictures) for x in shown}
    everywhere: dict[int, dict[str, object]] = {}
    for others in collectives.gather_objects(own, done.mesh):
        everywhere |= others
    return everywhere
