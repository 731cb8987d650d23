"""Contracts of a source of rows and of generator ranks, and settings of a source of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from funrl import trees
from funrl.algos.terms import Filter
from funrl.data.prompts import Example
from funrl.environments.logged import LoggedEpisode
from funrl.mesh.mesh import Mesh
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.sources.curriculum import PromptSchedule
from funrl.trainer.sources.episode_rows import EpisodeSetup
from funrl.trainer.sources.evaluation import PromptEvaluation
from funrl.trainer.sources.generation import PLAIN_FORM, RewardedEngine, Rollout, RowForm
from funrl.trainer.sources.observing import Show, ShownSample
from funrl.trainer.sources.pending_rewards import Totals
from funrl.trainer.steps.roles import RoleState
from funrl.trainer.steps.step_rows import Rows, moved
from funrl.trainer.storage.row_shards import HeldRows

# Metric of a source: 1 if the filter kept nothing, so that the step trains on nothing.
SKIPPED = "filter_groups/skipped"
EMPTY = "episodes/skipped"  # the same where no episode could be trained on, so that there is no row


def is_skipped(metrics: Mapping[str, float]) -> bool:
    """True if a source's metrics say that the step trains on nothing."""
    return bool(metrics.get(SKIPPED) or metrics.get(EMPTY))


class StoredState(NamedTuple):
    """The form of a source's state in a checkpoint.

    Attributes:
      saved: (source's state, number of this rank -> the largest of all ranks) -> the form that a checkpoint stores.
      rows: stored state -> its leaves that hold rows, different on each rank; None: the state is the same everywhere.
      restored: state read from a checkpoint, with a share of its rows on each rank -> the source's state.
      spread: whether each rank holds a different part of the state.
    """

    saved: Callable[[trees.Tree, Callable[[int], int]], trees.Tree] = lambda state, largest: state
    rows: Callable[[trees.Tree], HeldRows | None] = lambda state: None
    restored: Callable[[trees.Tree], trees.Tree] = lambda state: state
    spread: bool = False


class StepLog(NamedTuple):
    """Facts of the newest step for the log of a run.

    Attributes:
      episodes: of this replica, where they are kept.
      write_episodes: (folder) -> bytes of the files to which other ranks have written the episodes, collective; None:
        this rank has them in `episodes`.
      groups: () -> the groups that were written ahead; None: there are none.
    """

    episodes: Sequence[LoggedEpisode] = ()
    write_episodes: Callable[[Path], int] | None = None
    groups: Callable[[], list[tuple[object, ...]] | None] = lambda: None


StepRows = tuple[Rows, trees.Tree, dict[str, float]]  # rows of a step, the source's state after it, and metrics
NextRows = Callable[[trees.Tree, int], StepRows]


class Source(NamedTuple):
    """A source of rows.

    Attributes:
      init: () -> the source's state before the first step.
      next_rows: (source's state, step) -> (rows, source's state, metrics). Do not train on the rows where `is_skipped`.
      evaluate: (states of the roles, step) -> metrics on held-out data.
      observed: (source's state, metrics of a step) -> the state after that step. Collective.
      move: (rows of `next_rows`, ranks [B], mesh) -> the rows on these ranks of the mesh; as `moved`.
      close: ends everything that runs between steps.
      begin_evaluation: (step) -> a function that waits for the metrics of `evaluate`, which other ranks compute with
        the weights of now. Both are collective, and one evaluation runs at a time. None: none is concurrent.
      stored: its state in a checkpoint.
      log: of the newest step.
      has_digests: whether rows of generated completions have digests of the weights that sampled them, where engines
        record these; False: the source leaves them out, and nothing compares them.
    """

    init: Callable[[], trees.Tree]
    next_rows: NextRows
    evaluate: Callable[[Mapping[str, RoleState], int], dict[str, float]]
    observed: Callable[[trees.Tree, Mapping[str, float]], trees.Tree] = lambda state, metrics: state
    move: Callable[[Rows, np.ndarray, Mesh], Rows] = moved
    close: Callable[[], None] = lambda: None
    begin_evaluation: Callable[[int], Callable[[], dict[str, float]]] | None = None
    stored: StoredState = StoredState()
    log: StepLog = StepLog()
    has_digests: bool = True


class DroppedPrompt(NamedTuple):
    """A prompt whose rows the filter dropped where they were written, and whose place another prompt took.

    Attributes:
      position: of the prompt in the order of prompts.
      failed: rows on which a reward function failed.
      entries, episodes: totals of its rows, as in `Rollout`.
    """

    position: int
    failed: int
    entries: Totals
    episodes: Totals


class SampledPrompts(NamedTuple):
    """Prompts that were sampled together, with all of their rows.

    Attributes:
      examples: [P] the prompts.
      places: [P] their indices among all, or their positions in the order of the prompts.
      done, rows: their completions or episodes, and the rows.
      replaced: prompts whose places these took where they were written.
    """

    examples: list[Example]
    places: np.ndarray
    done: Rollout
    rows: Rows
    replaced: Sequence[DroppedPrompt] = ()


class RemoteGenerators(Protocol):
    """Client of generator ranks, which write and reward rows for trainer ranks. All methods are collective.

    Attributes:
      refills: whether these ranks replace prompts that the filter drops, so that a step asks for rows once.
    """

    refills: bool

    def write(self, places: np.ndarray, sampling: Sampling, seed: int) -> SampledPrompts:
        """As many prompts as these: others may have overtaken some. Completions have no tokens, and rows may not."""
        ...

    def keep(self, prompts: np.ndarray) -> None:
        """Learn which of the prompts of the newest rows the filter keeps, by their numbers among these."""

    def baseline_rows(self, groups: np.ndarray, places: np.ndarray, sampling: Sampling) -> Rows:
        """Rows of the greedy completions or episodes of some groups of the newest rows.

        Args:
          groups: their numbers among these.
          places: of their prompts.
          sampling: of the completions.
        """
        ...

    def samples(self) -> dict[int, ShownSample]:
        """The first sample of some of the first prompts of the newest rows, by the prompt's number among these."""
        return {}

    def begin_evaluation(self, step: int) -> Callable[[], dict[str, float]]:
        """Begin an evaluation; returns a function that waits for its metrics and shows some completions."""
        return dict


class RowSelection(NamedTuple):
    """Selection of the rows to train on.

    Attributes:
      filter: batch -> [B] bool, rows worth training on; None: all.
      when_empty: "skip", "stop" or "use", for a step whose rows the filter drops.
      max_refills: bound on the prompts sampled for a batch, in batches.
    """

    filter: Filter | None = None
    when_empty: str = "skip"
    max_refills: int = 8

    @property
    def rounds(self) -> int:
        """Bound on the prompts sampled for each place of a batch."""
        return self.max_refills if self.filter else 1


class ScoreColumns(NamedTuple):
    """Rewards of rows.

    Attributes:
      names: of the columns of `scores`.
      rescore: (rows, prompts, phase) -> rows with the scores of reward models and judges, timed under `phase` ("": a
        phase for each model); None: there are none.
    """

    names: tuple[str, ...] = ()
    rescore: Callable[[Rows, Sequence[Example], str], Rows] | None = None


class Generation(NamedTuple):
    """Settings of a source of completions.

    Attributes:
      engine: engine and rewards.
      schedule: prompts to train on and their order.
      sampling: of their completions.
      evaluation: on held-out prompts.
      selection: which rows are trained on.
      demonstrate: (rows, their prompts) -> the rows with the prompts' demonstrations added; None: there are none.
      rewards: names, and the models that score completions.
      greedy_baseline: whether rows get the score of a greedy completion of their prompt.
      expects: whether rows get the score that their prompt's earlier samples let expect.
      shows: step -> whether to show samples.
      form: of the rows of completions.
      episodes: how prompts become episodes; None: each is completed once.
      remote: other ranks, which generate and reward; None: this one does.
    """

    engine: RewardedEngine
    schedule: PromptSchedule
    sampling: Sampling
    evaluation: PromptEvaluation
    selection: RowSelection = RowSelection()
    demonstrate: Callable[[Rows, Sequence[Example]], Rows] | None = None
    rewards: ScoreColumns = ScoreColumns()
    greedy_baseline: bool = False
    expects: bool = False
    shows: Callable[[int], bool] = lambda step: False
    form: RowForm = PLAIN_FORM
    episodes: EpisodeSetup | None = None
    remote: RemoteGenerators | None = None

    @property
    def untrained(self) -> Generation:
        """The settings for rows that are scored alone: evaluations and baselines have no teacher and no objective."""
        episodes = self.episodes
        if episodes is not None:
            episodes = episodes._replace(form=episodes.form._replace(numbers=()))
        return self._replace(form=self.form._replace(context=None, numbers=(), teacher_tokens=None), episodes=episodes)

    @property
    def setup(self) -> EpisodeSetup:
        """`episodes` of a run with an environment. Raises: TypeError, prompts are completed once."""
        if self.episodes is None:
            raise TypeError("the run has no environment: its prompts are completed once")
        return self.episodes


def same_order(order: int, show: Show, state: trees.Tree) -> trees.Tree:
    """A checkpoint's state; shows a remark if its prompts or texts were in another order."""
    if state["order"] != order:
        show.note(
            "--resume: the data or --seed have changed: the run continues at the same position of a different order"
        )
    return {**state, "order": order}
