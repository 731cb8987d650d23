"""Rows of later steps, and evaluations, which generators of other jobs write during the update of this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from funrl import trees
from funrl.data.order import take_next
from funrl.mesh.mesh import Mesh
from funrl.mesh.sums import own_range
from funrl.rollout.joined.engine import JoinedEngine
from funrl.rollout.resident import run_beside
from funrl.seeds import derived_seed
from funrl.trainer.ahead.episodes import EpisodesAhead
from funrl.trainer.ahead.heldout import HeldoutWriter
from funrl.trainer.ahead.side_thread import SideThread
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import filter_of, make_source, remarked_generation, source_of_generation
from funrl.trainer.sources.generation import request_groups
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.source import Generation, Source, StepRows
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts
from funrl.trainer.steps.step_rows import Rows, with_stale


class RowsAhead:
    """Rows of later steps, until the step that they are for."""

    def __init__(self, job: RLJob, engine: JoinedEngine, episodes: EpisodesAhead | None) -> None:
        """Begin with none.

        Args:
          job: the run, with --staleness.
          engine: of its generators.
          episodes: those of its prompts; None: a prompt is completed once.
        """
        self.job = job
        self.engine = engine
        self.episodes = episodes

    def write(self, consumed: int, step: int) -> None:
        """Ask generators for the rows of the --staleness steps after `step`, this replica's share.

        Where a filter may take further prompts for a step, only the next one's prompts are known.

        Args:
          consumed: prompts taken up to `step`.
          step: whose rows are complete.
        """
        run = self.job.settings.run
        staleness = self.job.settings.asynchrony.staleness
        known = staleness if filter_of(self.job) is None else min(staleness, 1)
        mesh = self.engine.mesh
        for _ in range(min(known, run.steps - step)):
            taken = take_next(self.job.task.prompts, run.batch_prompts, run.seed, position=consumed)
            examples = [self.job.task.prompts[place] for place in taken.places.tolist()]
            seed = derived_seed(run.seed, consumed)
            consumed = taken.end
            if self.episodes is not None:
                self.episodes.begin(examples, seed)
                continue
            groups = request_groups(examples, self.job.sampling, seed)
            share = own_range(len(groups), mesh, mesh.row_axes)
            for group in groups[share.start : share.stop]:
                self.engine.write_ahead(group)


def source_ahead(
    job: RLJob, parts: GeneratingParts, engine: JoinedEngine, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show
) -> Source:
    """The source of a job, which with --staleness lets generators write rows of later steps and evaluations meanwhile.

    Args:
      job, parts, frozen, clock, show: as of any source.
      engine: of the generators.
    """
    if not job.settings.asynchrony.staleness:
        return make_source(job, parts, frozen, clock, show)
    generation = remarked_generation(job, parts, frozen, clock, show)
    thread = SideThread(engine)
    evaluation = evaluation_beside(generation, thread, clock, show)
    episodes = None
    if generation.episodes is not None:
        episodes = EpisodesAhead(engine, thread, generation.episodes, job.sampling)
        generation = generation._replace(episodes=generation.episodes._replace(run=episodes.run))
    source = source_of_generation(job, parts, generation, clock, show)
    source = source._replace(begin_evaluation=evaluation, close=thread.close)
    return _with_rows_ahead(source, RowsAhead(job, engine, episodes))


def evaluation_beside(
    generation: Generation, thread: SideThread, clock: Clock, show: Show
) -> Callable[[int], Callable[[], dict[str, float]]]:
    """`Source.begin_evaluation` of a run whose generators are other jobs.

    Args:
      generation: of the source.
      thread: asks them for this replica's part.
      clock: times the wait for it.
      show: receives some completions.
    """
    proved = generation._replace(engine=generation.engine._replace(proof=None))  # the next rows settle the proof

    def begin(step: int) -> Callable[[], dict[str, float]]:
        heldout = HeldoutWriter(proved, step)
        program = thread.begin(lambda engine: run_beside(engine, engine.mesh, heldout.write))

        def metrics() -> dict[str, float]:
            with clock.phase("eval"):
                part = thread.result(program)
            return heldout.evaluate(part, show, clock)

        return metrics

    return begin


def _with_rows_ahead(source: Source, ahead: RowsAhead) -> Source:
    episodes = ahead.episodes
    groups: list[tuple[object, ...]] = []  # of the newest step

    def next_rows(state: trees.Tree, step: int) -> StepRows:
        consumed = state["prompts_consumed"]
        if episodes is not None:
            episodes.taken.clear()
        rows, state, metrics = source.next_rows(state, step)
        if episodes is not None:
            groups[:] = episodes.groups(consumed, ahead.job.settings.run.seed)
        ahead.write(state["prompts_consumed"], step)
        return rows, state, metrics

    def move(rows: Rows, to: np.ndarray, mesh: Mesh) -> Rows:
        staleness = ahead.job.settings.asynchrony.staleness
        return with_stale(source.move(rows, to, mesh), ahead.engine.version or 0, staleness)

    written = source._replace(next_rows=next_rows, move=move)
    if episodes is None:
        return written
    return written._replace(log=source.log._replace(groups=lambda: list(groups)))
