"""The loop: source, score, advantages, learn, sync.

    rows -> score -> advantages -> learn -> sync -> (next step)

It is the same on every rank, for reinforcement, supervised and preference learning: what differs is the source. What a
rank holds of a model are its shards. The boxes are functions of files beside this one, which can be called alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.models.compiling.compile_cache import CompileCache
from funrl.models.deployed import deployed
from funrl.processes import heartbeat
from funrl.processes.processor import products_problem
from funrl.processes.workers import stops_when_asked
from funrl.rewards.load import RewardError
from funrl.rewards.pool import Pool
from funrl.rollout.certificate import SyncError, certify, sync_digests
from funrl.trainer import offload
from funrl.trainer.checkpoints.base_model import adapter_facts, keep_base, kept_already, own_base
from funrl.trainer.checkpoints.rescue import RecoverableState, saved_on_failure
from funrl.trainer.checkpoints.saver import Evaluations, Saver, shared_folder
from funrl.trainer.checkpoints.weight_digests import FrozenDigests, agent_digests, role_digests, with_first_digests
from funrl.trainer.compile_phase import compile_ahead, loaded_cache
from funrl.trainer.evaluator import Evaluator
from funrl.trainer.gap import GapCheck, GapError, gap_check
from funrl.trainer.initial_weights import initial_weights
from funrl.trainer.jobs.build import (
    Parts,
    build_run,
    first_state,
    first_weights,
    frozen_weights,
    proof_metrics,
    renewed,
    settle_proof,
    sync,
    verify_base,
)
from funrl.trainer.jobs.generator import resumed_proof
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import make_source
from funrl.trainer.jobs.sharding import learns_sharded
from funrl.trainer.profiling import StepProfiler
from funrl.trainer.recovery import Recovery
from funrl.trainer.settings.settings import scoring_budget
from funrl.trainer.sources.curriculum import CurriculumError
from funrl.trainer.sources.observing import Observer
from funrl.trainer.sources.pair_rows import SAMPLED_PAIRS
from funrl.trainer.sources.selection import FilterError, check_usable, nothing_learned
from funrl.trainer.sources.source import Source, closed_at_end, is_skipped
from funrl.trainer.steps.advantage_phase import advantages, describe
from funrl.trainer.steps.clock import Clock, memory_metrics
from funrl.trainer.steps.learn import UpdateMonitor, learn_apart
from funrl.trainer.steps.micro import plan_epoch, ranks_of_groups, row_cost
from funrl.trainer.steps.roles import sums_over_episodes, weights_of
from funrl.trainer.steps.score import RemoteScores, score
from funrl.trainer.steps.skipped import Skips
from funrl.trainer.steps.state import State
from funrl.trainer.steps.step import NotFiniteError
from funrl.trainer.steps.step_rows import SINGLE_ROWS, Epoch, Rows, RowUnits, UpdatePlan, on_cpu

MakeSource = Callable[[Job, Parts, Mapping[str, trees.Tree], Clock, Observer], Source]
Enter = Callable[["Trainer", State, str], tuple["Trainer", State]]
ENDING = (RewardError, CurriculumError, FilterError, NotFiniteError, SyncError, GapError)  # what was learned is kept


class Outcome(NamedTuple):
    """End of a run.

    Attributes:
      first, last: evaluations at the start and the end; `last` is empty where there was only the first.
      error: what ended it early; None: nothing did.
      stopped: the step after which it stopped, as a signal had asked; None: it did not.
      cause: the exception of which `error` is the text; on several ranks without what led to it.
    """

    first: dict[str, float]
    last: dict[str, float]
    error: str | None
    stopped: int | None = None
    cause: Exception | None = None


class Trainer(NamedTuple):
    """Everything that a run needs on this rank beside its state.

    Attributes:
      frozen: weights of the roles that do not learn.
      skips: takes note of updates that are left out; None: such an update is an error.
      folder: of the checkpoints; None: the run has no directory.
      compile_cache: keeps the code of compiled layers; None: no layer is compiled.
      gap_check: of rows and metrics in which engine and trainer should agree to the bit; None: they may differ.
    """

    job: Job
    parts: Parts
    source: Source
    frozen: Mapping[str, trees.Tree]
    clock: Clock
    skips: Skips | None = None
    folder: str | None = None
    compile_cache: CompileCache | None = None
    gap_check: GapCheck | None = None


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

    Returns: how it ended. What is in `ENDING` ends the run too, with everything learned so far saved.
    """
    with heartbeat.phase("load"):
        trainer, state = begin_run(job, mesh, observer, source, pool=pool)
        digests = FrozenDigests()
        if trainer.folder is not None:
            adapters = adapter_facts(job, trainer.parts, trainer.frozen)
            own = role_digests(trainer.parts.roles, trainer.frozen, mesh)
            digests = FrozenDigests(own, adapters, agent_digests(trainer.parts))
            job = with_first_digests(job, trainer.parts, state.roles[job.main_role].params, digests)
    parts = trainer.parts
    folder = trainer.folder
    with (
        Saver(job, parts, trainer.source, state=state, folder=folder, observer=observer, digests=digests) as saver,
        stops_when_asked(),
        closed_at_end(trainer.source),
        saved_on_failure(saver) as recoverable,
    ):
        state, evaluations = saver.resumed(state)
        if folder is not None:
            observer.began(state.step, job.provenance.inputs)
        outcome, state = run_steps(trainer, state, saver, evaluations, observer, recoverable)
        if outcome.stopped is None and not (outcome.error and nothing_learned(state.source, state.step)):
            with heartbeat.phase("finish"):
                params = parts.roles[job.main_role].whole(state.roles[job.main_role].params, trainer.frozen)
                observer.finish(parts.roles[job.main_role].placed, params, outcome.error)
            saver.wait()  # here, where a save that fails is made elsewhere
    return outcome


def run_steps(
    trainer: Trainer,
    state: State,
    saver: Saver,
    evaluations: Evaluations | None,
    observer: Observer,
    recoverable: RecoverableState,
) -> tuple[Outcome, State]:
    """All steps that are left, and the state at the end, with its weights where they can be saved.

    Args:
      evaluations: so far, of a run that goes on; None: it begins.
      recoverable: receives the state whenever it is complete.
    """
    settings = trainer.job.settings
    parts = trainer.parts
    first = state if evaluations is None else state._replace(version=state.version - 1)
    state = sync(parts, first, frozen=trainer.frozen)
    done = evaluations or Evaluations({}, {})
    recovery = Recovery(recoverable, offload.mover(settings.devices.offload, parts, observer.note), state, done)
    evaluator = Evaluator(trainer.source, observer, recovery, settings)
    run_dir = None if trainer.folder is None else os.path.dirname(trainer.folder)
    profiler = StepProfiler(settings, parts.mesh, run_dir, observer.note)
    failure = stopped = None
    try:
        trainer, state, compiled = compile_ahead(trainer, state, recovery.enter)
        proof = verify(trainer, state, True)
        if evaluations is not None:
            proof = resumed_proof(settings, state.step, proof)
        evaluator.begin_run(state)
        for step in range(state.step + 1, settings.run.steps + 1):
            heartbeat.at_step(step)
            profiler.begin(step)
            trainer, state, record = one_step(trainer, state, recovery.enter)
            evaluator.finish()
            metrics = proof | record.metrics | (evaluator.done.first if step == 1 else {}) | compiled
            compiled = proof = {}
            metrics |= evaluator.begin_if_due(state)
            metrics = proof_metrics(parts) | metrics
            state = state._replace(source=trainer.source.observed(state.source, metrics))
            evaluator.commit(state, metrics | memory_metrics(parts.mesh))
            save_rollouts(trainer, saver, state, record)
            profiler.end(step)
            evaluator.show(step, trainer.clock.take())
            if trainer.skips is not None:
                trainer.skips.check()
            if saver.after_step(state, evaluator.settled):
                stopped = step
                break
        evaluator.settled()
        check_usable(state.source, state.step)
        settle_proof(parts)
    except ENDING as error:
        failure = error
        evaluator.end_early()
        recovery.save_last(saver)
    finally:
        profiler.close()
    return ended(evaluator.done, failure, stopped, parts.mesh), recovery.to_save(trainer, state)


def ended(done: Evaluations, failure: Exception | None, stopped: int | None, mesh: Mesh) -> Outcome:
    """The end of a run as its caller receives it."""
    if failure is None:
        return Outcome(done.first, done.last, None, stopped)
    # A rank's result is pickled, and what a reward function gave or raised may refuse that.
    cause = failure if mesh.world == 1 else type(failure)(str(failure))
    return Outcome(done.first, done.last, str(failure), stopped, cause)


class StepRecord(NamedTuple):
    """Rows and metrics of one step.

    Attributes:
      drawn, rows: before and after scoring.
      stages: metrics of "drawn", "scored" and "learned" rows.
      engine: metrics of the engine after the sync.
    """

    drawn: Rows
    rows: Rows
    stages: Mapping[str, dict[str, float]]
    engine: dict[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics of the step."""
        return {name: value for part in (*self.stages.values(), self.engine) for name, value in part.items()}


def one_step(trainer: Trainer, state: State, enter: Enter) -> tuple[Trainer, State, StepRecord]:
    """Run one step: draw rows, score them, learn from them, and give the engine the new weights.

    Args:
      enter: called as `enter(trainer, state, stage)` before the stages "generate", "score" and "update"; returns both
        with each tensor where the stage needs it.
    """
    trainer, state = enter(trainer, state, "generate")
    drawn, state, metrics = draw_batch(trainer, state)
    trainer, state = enter(trainer, state, "score")
    if is_skipped(metrics):
        rows, state, scored = skipped_batch(trainer, state, drawn)
        return trainer, state, StepRecord(drawn, rows, {"drawn": metrics, "scored": scored, "learned": {}}, {})
    rows, state, scored = score_batch(trainer, state, drawn)
    if trainer.gap_check is not None:
        trainer.gap_check.scored(rows, scored)
    trainer, state = enter(trainer, state, "update")
    state, learned, engine = update_batch(trainer, state, rows)
    return trainer, state, StepRecord(drawn, rows, {"drawn": metrics, "scored": scored, "learned": learned}, engine)


def save_rollouts(trainer: Trainer, saver: Saver, state: State, record: StepRecord) -> None:
    """Save the rows of the step that has just ended, if --save_rollouts keeps it."""
    if saver.rows.due(state.step) and len(record.rows.owner):
        with trainer.clock.phase("save_rollouts"):
            saver.rows.save(state, record.drawn, record.rows, record.stages, trainer.source)


def begin_run(
    job: Job,
    mesh: Mesh,
    observer: Observer,
    source: MakeSource = make_source,
    clock: Clock | None = None,
    pool: Pool | None = None,
) -> tuple[Trainer, State]:
    """Everything that is made once, and the state before the first step. The engine has no weights yet: see `sync`."""
    if problem := products_problem():
        observer.note(problem)
    if learns_sharded(job.settings, job.algorithm.losses):
        observer.note(f"--fsdp: gradients are summed over ranks in {str(job.reduce_dtype).removeprefix('torch.')}")
    clock = clock or Clock(mesh.device)
    parts = build_run(job, mesh, observer.note, pool)
    cache = None if parts.compilations is None else loaded_cache(job, mesh, observer.note)
    folder = shared_folder(observer, mesh)
    weights = first_weights(job, parts, first_base(job, parts, observer, folder))
    frozen = frozen_weights(parts, weights)
    rows_source = source(job, parts, frozen, clock, observer)
    skips = Skips(job.settings.updates.max_skipped, mesh, folder, observer.note)
    check = gap_check(job, parts, observer.note)
    trainer = Trainer(job, parts, rows_source, frozen, clock=clock, skips=skips, folder=folder)
    trainer = trainer._replace(compile_cache=cache, gap_check=check)
    return trainer, first_state(job, parts, weights, rows_source.init())


def first_base(job: Job, parts: Parts, observer: Observer, folder: str | None) -> trees.Tree:
    """The weights that a run begins with; those that adapters stand on are kept beside the run where it made them.

    Args:
      folder: of the checkpoints; None: the run has no directory.
    """
    kept = own_base(job, folder)
    if job.settings.run.resume and kept_already(kept, parts.mesh):
        return initial_weights(job, parts.begin, observer.note, kept)
    begin = initial_weights(job, parts.begin, observer.note)
    if kept is not None:
        keep_base(kept, job, parts, begin)
    return begin


def draw_batch(trainer: Trainer, state: State) -> tuple[Rows, State, dict[str, float]]:
    """The rows of the next step, on the ranks that score and train them; the state with the source's place; metrics."""
    rows, source, metrics = trainer.source.next_rows(state.source, state.step + 1)
    settle_proof(trainer.parts)
    rows = balance_rows(trainer, rows.declaring(trainer.job.algorithm.fields), state.step + 1)
    return rows, state._replace(source=source), metrics


def balance_rows(trainer: Trainer, rows: Rows, step: int) -> Rows:
    """Move rows to the ranks that score them."""
    group = rows.batch.get("group")
    units = rows.units(sums_over_episodes(trainer.job.algorithm.losses.values()))
    to, epoch = scoring_ranks(trainer.job, trainer.parts, rows.lengths, group, step, units)
    return trainer.source.move(rows, to, trainer.parts.mesh)._replace(epoch=epoch)


def update_plan(job: Job, parts: Parts, step: int) -> UpdatePlan:
    """Division of a step's rows into updates, as the flags say."""
    settings = job.settings
    cost = row_cost(parts.roles[job.main_role].placed)
    return UpdatePlan(
        step,
        settings.run.seed,
        settings.updates.epochs,
        settings.updates.minibatches,
        settings.updates.token_budget,
        cost,
    )


def scoring_ranks(
    job: Job, parts: Parts, lengths: np.ndarray, group: Tensor | None, step: int, units: RowUnits = SINGLE_ROWS
) -> tuple[np.ndarray, Epoch | None]:
    """Ranks [B] on which the first pass over the rows is balanced, with that pass.

    Where advantages need whole groups, they are the ranks of the groups, without a pass.

    Args:
      lengths, group: [B] tokens and group of each row.
      units: what the rows belong to.
    """
    mesh = parts.mesh
    chain = job.algorithm.advantage
    if chain is not None and chain.whole_groups:
        assert group is not None
        cost = row_cost(parts.roles[job.main_role].placed)
        ranks = mesh.size(mesh.row_axes)
        return ranks_of_groups(lengths, group.cpu().numpy(), ranks, scoring_budget(job.settings), cost), None
    epoch = plan_epoch(lengths, mesh, update_plan(job, parts, step), units=units)
    return epoch.to, epoch


def score_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[Rows, State, dict[str, float]]:
    """The rows with what the roles write, and with advantages; the state with the chain's; metrics."""
    job = trainer.job
    weights = weights_of(trainer.parts.roles, state.roles, trainer.frozen)
    elsewhere = RemoteScores(trainer.parts.elsewhere, rows, state.step + 1)
    rows = score(trainer.parts.roles, weights, rows, scoring_budget(job.settings), trainer.clock, trainer.parts.agents)
    rows = elsewhere.finish(rows, trainer.clock)
    if job.algorithm.advantage is None:
        pairs = job.algorithm.example in SAMPLED_PAIRS  # which the source has reported
        return rows, state, described_rows(trainer, rows) if isinstance(job, RLJob) and not pairs else {}
    with trainer.clock.phase("advantage"):
        rows, chain, metrics = advantages(job.algorithm.advantage, state.advantage, rows, job.reward_names)
    return rows, state._replace(advantage=chain), metrics


def skipped_batch(trainer: Trainer, state: State, drawn: Rows) -> tuple[Rows, State, dict[str, float]]:
    """A step without an update, as the source asks for (`is_skipped`): its rows, the state, metrics of the rows.

    Weights, optimizers, the advantage chain's state and the engine stay what they are.
    """
    state = renewed(trainer.parts, state._replace(step=state.step + 1), trainer.frozen)
    described = len(drawn.owner) and trainer.job.algorithm.example != "pair"  # whose source says them
    return drawn, state, described_rows(trainer, drawn) if described else {}


def described_rows(trainer: Trainer, rows: Rows) -> dict[str, float]:
    """Metrics of rows without advantages."""
    return describe(on_cpu(rows), on_cpu(rows).batch, trainer.job.reward_names)


def update_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[State, dict[str, float], dict[str, float]]:
    """The state after the step's updates with the engine's weights renewed; metrics of the updates and the engine."""
    state, learned = learn_batch(trainer, state, rows)
    if trainer.gap_check is not None:
        trainer.gap_check.learned(learned)
    state = sync(trainer.parts, state, trainer.clock, trainer.frozen)
    return state, learned, verify(trainer, state)


def learn_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[State, dict[str, float]]:
    """The state after the step's updates, and their metrics."""
    plan = update_plan(trainer.job, trainer.parts, state.step + 1)
    monitor = UpdateMonitor(trainer.clock, trainer.skips)
    frozen = trainer.frozen
    parts = trainer.parts
    roles, metrics = learn_apart(parts.roles, state.roles, rows, plan, parts.agents, frozen=frozen, monitor=monitor)
    if trainer.skips is not None:
        metrics |= trainer.skips.take()
    return renewed(parts, state._replace(roles=roles, step=plan.step), frozen), metrics


def verify(trainer: Trainer, state: State, first: bool = False) -> dict[str, float]:
    """Begin the proof, after a sync, that the engine holds the policy's weights; `settle_proof` ends it.

    Where a probe is due, which generates, the proof is complete at once; so it is where the weights may move meanwhile:
    those of an engine that keeps copies, and the factors of merged adapters. A base of adapters is compared once.

    Args:
      first: this is the first sync of the run.

    Returns: metrics of the complete proof; none where it has begun, or none is due.

    Raises:
      SyncError: the engine does not hold the weights, as a complete proof finds.
    """
    settings = trainer.job.settings
    generator = trainer.parts.generator
    every = settings.engines.probe_sync_every
    probes = every > 0 and (first or state.step % every == 0)
    if generator is None or not (settings.engines.verify_sync or probes):
        return {}
    role = trainer.parts.roles[trainer.parts.main_role]
    params = role.whole(state.roles[trainer.parts.main_role].params, trainer.frozen)
    source = deployed(role.placed, params, merge=not generator.engine.weights.adapters)
    with trainer.clock.phase("verify"):
        if first and settings.engines.verify_sync:
            verify_base(trainer.parts, trainer.frozen)
        if probes or source.merged or generator.engine.weights.streamed:
            return certify(role.placed, params, generator.engine, state.version, settings.engines.verify_sync, probes)
        generator.proof.begin(sync_digests(source, generator.engine, state.version))
    return {}
