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
from funrl.trainer.ahead.side_thread import SideThread
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import filter_of, make_source, remarked_generation, source_of_generation
from funrl.trainer.sources.generation import request_groups
from funrl.trainer.sources.heldout import HeldoutWriter
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.source import Generation, Source, StepRows
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts
from funrl.trainer.steps.step_rows import Rows, with_stale


def write_ahead(job: RLJob, engine: JoinedEngine, episodes: EpisodesAhead | None, consumed: int, step: int) -> None:
    """Ask generators for the rows of the --staleness steps after `step`, this replica's share.

    Where a filter may take further prompts for a step, only the next one's prompts are known.

    Args:
      job: the run, with --staleness.
      engine: of its generators.
      episodes: those of its prompts; None: a prompt is completed once.
      consumed: prompts taken up to `step`.
      step: whose rows are complete.
    """
    run = job.settings.run
    staleness = job.settings.asynchrony.staleness
    known = staleness if filter_of(job) is None else min(staleness, 1)
    mesh = engine.mesh
    for _ in range(min(known, run.steps - step)):
        taken = take_next(job.task.prompts, run.batch_prompts, run.seed, position=consumed)
        examples = [job.task.prompts[place] for place in taken.places.tolist()]
        seed = derived_seed(run.seed, consumed)
        consumed = taken.end
        if episodes is not None:
            episodes.begin(examples, seed)
            continue
        groups = request_groups(examples, job.sampling, seed)
        share = own_range(len(groups), mesh, mesh.row_axes)
        for group in groups[share.start : share.stop]:
            engine.write_ahead(group)


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
    return _with_rows_ahead(source, job, engine, episodes)


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


def _with_rows_ahead(source: Source, job: RLJob, engine: JoinedEngine, episodes: EpisodesAhead | None) -> Source:
    groups: list[tuple[object, ...]] = []  # of the newest step

    def next_rows(state: trees.Tree, step: int) -> StepRows:
        consumed = state["prompts_consumed"]
        if episodes is not None:
            episodes.taken.clear()
        rows, state, metrics = source.next_rows(state, step)
        if episodes is not None:
            groups[:] = episodes.groups(consumed, job.settings.run.seed)
        write_ahead(job, engine, episodes, state["prompts_consumed"], step)
        return rows, state, metrics

    def move(rows: Rows, to: np.ndarray, mesh: Mesh) -> Rows:
        return with_stale(source.move(rows, to, mesh), engine.version or 0, job.settings.asynchrony.staleness)

    written = source._replace(next_rows=next_rows, move=move)
    if episodes is None:
        return written
    return written._replace(log=source.log._replace(groups=lambda: list(groups)))
