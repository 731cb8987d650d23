"""The loop of a run, and who waits for whom.

    engines                    trainer ranks, all in step                          beside the loop
    -------                    --------------------------                          ---------------
    prompts, completions ----> draw      rows of the next step
                                 |
                               score     roles write fields   <----------------->  scorer ranks (`remote_scorers`)
                                 |
                               advantages, learn              ------ metrics --->  observer
                                 |
    new weights         <----- sync      begins a proof: the engine holds them
                                 |
                               evaluate  if due               <----------------->  engines, until the next commit
                                 |
                               save      if due               ------ shards ---->  writer process
                                 |
                                 +--- next step

    draw      waits for the engines: for all rows of the step, or with --staleness for those of earlier weights. It also
              waits for the proof of the newest sync.
    score     waits for scorer ranks where a role has ranks of its own.
    sync      waits for no generation, only for engines that copy weights before they generate again.
    evaluate  runs beside the next step where other ranks generate; commit, save and the end of the run wait for it.
    save      waits for the save before it. The state is copied at once; files are written beside the loop.
    stop      SIGTERM and a failed save are agreed on by all ranks after each step, in one small sum.

It is the same on every rank, for reinforcement, supervised and preference learning: what differs is the source. The
boxes are functions of `phases`, which can be called alone.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from funrl.mesh.mesh import Mesh
from funrl.processes import heartbeat
from funrl.processes.workers import stops_when_asked
from funrl.rewards.pool import Pool
from funrl.trainer import phases
from funrl.trainer.checkpoints.rescue import RecoverableState, saved_on_failure
from funrl.trainer.checkpoints.saver import Evaluations, Saver
from funrl.trainer.compile_phase import compile_ahead
from funrl.trainer.evaluator import ENDING, Enter, Evaluator, Recovery
from funrl.trainer.jobs.job import Job
from funrl.trainer.profiling import StepProfiler
from funrl.trainer.sources.observing import Observer
from funrl.trainer.sources.source import is_skipped
from funrl.trainer.startup import MakeSource, begin_run, first_digests, make_source
from funrl.trainer.steps.roles import State, keep_copies
from funrl.trainer.steps.step_rows import StepRecord
from funrl.trainer.steps.sync import resumed_proof, sync


class Outcome(NamedTuple):
    """End of a run.

    Attributes:
      first, last: evaluations at the start and the end; `last` is empty where there was only the first.
      error: what ended it early; None: nothing did.
      stopped: the step after which it stopped, as a signal had asked; None: it did not.
      cause: the exception of `error`; on several ranks without its own cause.
    """

    first: dict[str, float]
    last: dict[str, float]
    error: str | None
    stopped: int | None = None
    cause: Exception | None = None


def train_loop(
    job: Job, mesh: Mesh, observer: Observer, source: MakeSource = make_source, pool: Pool | None = None
) -> Outcome:
    """The whole trainer, on this rank.

    Args:
      job: what to do; the same on every rank.
      mesh: to train on.
      observer: receives what happens, and the model at the end.
      source: makes the source.
      pool: this rank's reward workers, of `open_rewards`; None: it has none, and runs the functions itself.

    Returns: how it ended. An exception of `ENDING` ends the run too, with everything learned so far saved.
    """
    with heartbeat.phase("load"):
        trainer, state = begin_run(job, mesh, observer, source, pool=pool)
        job, frozen = first_digests(trainer, state)
    folder = trainer.folder
    with (
        Saver(
            job, trainer.parts, trainer.source, state=state, folder=folder, observer=observer, frozen=frozen
        ) as saver,
        stops_when_asked(),
        contextlib.ExitStack() as ending,
        saved_on_failure(saver) as recoverable,
    ):
        ending.callback(trainer.source.close)
        state, evaluations = saver.resumed(state)
        keep_copies(trainer.parts.roles, state.roles)
        if folder is not None:
            observer.began(state.step, job.provenance.inputs)
        outcome, state = run_steps(trainer, state, saver, evaluations, observer, recoverable)
        if outcome.stopped is None and phases.finish(trainer, state, observer, outcome.error):
            saver.wait()  # here, so that a failed save does not count as the caller's error
    return outcome


def run_steps(
    trainer: phases.Trainer,
    state: State,
    saver: Saver,
    evaluations: Evaluations | None,
    observer: Observer,
    recoverable: RecoverableState,
) -> tuple[Outcome, State]:
    """Run all steps that are left; returns the state at the end, with its weights where they can be saved.

    Args:
      evaluations: so far, of a resumed run; None: it begins.
      recoverable: receives the state whenever it is complete.
    """
    settings = trainer.job.settings
    mesh = trainer.parts.mesh
    resumed = evaluations is not None
    first = state._replace(version=state.version - 1) if resumed else state
    state = sync(trainer.parts, first, frozen=trainer.frozen)
    recovery = Recovery(recoverable, trainer, state, evaluations or Evaluations({}, {}), observer.note)
    evaluator = Evaluator(trainer.source, observer, recovery, settings)
    profiler = StepProfiler(settings, mesh, trainer.folder, observer.note)
    failure = stopped = None
    try:
        trainer, state, compiled = compile_ahead(trainer, state, recovery.enter)
        proof = phases.prove_sync(trainer, state, first=True)
        once = compiled | (resumed_proof(settings, state.step, proof) if resumed else proof)
        evaluator.begin_run(state)
        for step in range(state.step + 1, settings.run.steps + 1):
            heartbeat.at_step(step)
            profiler.begin(step)
            trainer, state, record = one_step(trainer, state, recovery.enter)
            state = evaluator.end_step(trainer.parts, state, record.metrics, once)
            once = {}
            saver.rows.save(state, record, trainer.source, trainer.clock)
            profiler.end(step)
            evaluator.show(step, trainer.clock.take())
            if trainer.skips is not None:
                trainer.skips.check()
            if saver.after_step(state, evaluator.complete):
                stopped = step
                break
        evaluator.complete()
        phases.end_steps(trainer, state)
    except ENDING as error:
        # A rank's result is pickled, and what a reward function gave or raised may refuse that.
        failure = error if mesh.world == 1 else type(error)(str(error))
        evaluator.end_early()
        recovery.save_last(saver)
    finally:
        profiler.close()
    done = evaluator.done
    outcome = Outcome(done.first, done.last, None if failure is None else str(failure), stopped, failure)
    return outcome, recovery.to_save(trainer, state)


def one_step(trainer: phases.Trainer, state: State, enter: Enter) -> tuple[phases.Trainer, State, StepRecord]:
    """Run one step: draw rows, score them, learn from them, and give the engine the new weights.

    Args:
      enter: called as `enter(trainer, state, stage)` before the stages "generate", "score" and "update"; returns both
        with each tensor where the stage needs it.
    """
    trainer, state = enter(trainer, state, "generate")
    drawn, state, metrics = phases.draw_batch(trainer, state)
    trainer, state = enter(trainer, state, "score")
    if is_skipped(metrics):
        state, scored = phases.skip_batch(trainer, state, drawn)
        return trainer, state, StepRecord(drawn, drawn, {"drawn": metrics, "scored": scored, "learned": {}}, {})
    rows, state, scored = phases.score_batch(trainer, state, drawn)
    if trainer.gap_check is not None:
        trainer.gap_check.scored(rows, scored)
    trainer, state = enter(trainer, state, "update")
    rows, explained = phases.explain_batch(trainer, state, rows)
    state, learned, engine = phases.update_batch(trainer, state, rows)
    stages = {"drawn": metrics, "scored": scored, "learned": explained | learned}
    return trainer, state, StepRecord(drawn, rows, stages, engine)
