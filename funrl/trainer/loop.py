"""The loop: source, score, advantages, learn, sync.

    rows -> score -> advantages -> learn -> sync -> (next step)

It runs on every rank alike, for reinforcement, supervised and preference learning: what differs is the source. What a
rank holds of a model are its shards. The boxes are functions of files beside this one, which can be called alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from funrl import trees
from funrl.mesh import heartbeat
from funrl.mesh.mesh import Mesh
from funrl.mesh.processes import stops_when_asked
from funrl.rewards.load import RewardError
from funrl.rewards.pool import Pool
from funrl.rollout.certificate import SyncError, certify
from funrl.trainer import offload, warmstart
from funrl.trainer.advantage_phase import advantages, describe
from funrl.trainer.base_model import adapter_facts, keep_base, kept_already, own_base
from funrl.trainer.build import Parts, build, first_state, first_weights, frozen_weights, sync
from funrl.trainer.clock import Clock, memory_metrics
from funrl.trainer.curriculum import CurriculumError
from funrl.trainer.job import Job
from funrl.trainer.job_source import make_source
from funrl.trainer.learn import learn
from funrl.trainer.micro import plan_epoch, ranks_of_groups, row_cost, token_ranks
from funrl.trainer.observing import Observer
from funrl.trainer.profiling import StepProfiler
from funrl.trainer.rescue import WholeState, saved_on_failure
from funrl.trainer.roles import BASE, weights_of
from funrl.trainer.saver import Evaluations, Saver, shared_folder
from funrl.trainer.score import score
from funrl.trainer.settings import scoring_budget
from funrl.trainer.skipped import Skips
from funrl.trainer.sources import Source
from funrl.trainer.state import State
from funrl.trainer.step import NotFiniteError
from funrl.trainer.step_rows import Rows, moved, on_cpu
from funrl.trainer.weight_digests import role_digests

MakeSource = Callable[[Job, Parts, Mapping[str, trees.Tree], Clock, Observer], Source]


class Outcome(NamedTuple):
    """End of a run.

    Attributes:
      first, last: the evaluations at the start and the end.
      error: what ended it early; None: nothing did.
      stopped: the step after which it stopped, as SIGTERM had asked; None: it did not.
    """

    first: dict[str, float]
    last: dict[str, float]
    error: str | None
    stopped: int | None = None


class Trainer(NamedTuple):
    """Everything that a run needs on this rank beside its state.

    Attributes:
      frozen: weights of the roles that do not learn.
      skips: takes note of updates that are left out; None: such an update is an error.
      folder: of the checkpoints; None: the run has no directory.
    """

    job: Job
    parts: Parts
    source: Source
    frozen: Mapping[str, trees.Tree]
    clock: Clock
    skips: Skips | None = None
    folder: str | None = None


def train_loop(
    job: Job, mesh: Mesh, observer: Observer, source: MakeSource = make_source, pool: Pool | None = None
) -> Outcome:
    """The whole trainer, on this rank.

    Args:
      job: what to do; the same on every rank.
      mesh: to train on.
      observer: told what happens, and given the model at the end.
      source: makes the source.
      pool: this rank's reward workers, of `open_rewards`; None: it has none, and runs the functions itself.

    Returns: how it ended. A reward function that fails, gradients that are not finite one after the other, or an engine
      that does not hold the trainer's weights ends the run too, with everything learned so far saved.
    """
    with heartbeat.phase("load"):
        trainer, state = begin_run(job, mesh, observer, source, pool=pool)
        frozen = role_digests(trainer.parts.roles, trainer.frozen, mesh) if trainer.folder is not None else {}
        adapters = {}
        if job.lora is not None and trainer.folder is not None:
            adapters = adapter_facts(job, trainer.parts, trainer.frozen[BASE])
    with (
        Saver(job, trainer.parts, trainer.source, state, trainer.folder, observer, frozen, adapters) as saver,
        stops_when_asked(),
        saved_on_failure(saver) as held,
    ):
        state, evaluations = saver.resumed(state)
        outcome, state = run_steps(trainer, state, saver, evaluations, observer, held)
        if outcome.stopped is None:
            role = trainer.parts.roles[job.lead]
            with heartbeat.phase("finish"):
                observer.finish(role.placed, role.whole(state.roles[job.lead].params, trainer.frozen), outcome.error)
            saver.wait()  # here, where a save that fails is made elsewhere
    return outcome


def run_steps(
    trainer: Trainer, state: State, saver: Saver, evaluations: Evaluations | None, observer: Observer, held: WholeState
) -> tuple[Outcome, State]:
    """All steps that are left, and the state at the end, with its weights where they can be saved.

    Args:
      evaluations: so far, of a run that goes on; None: it begins.
      held: given the state whenever it is whole.
    """
    settings, parts = trainer.job.settings, trainer.parts
    begun = state if evaluations is None else state._replace(version=state.version - 1)
    state = sync(parts, begun, frozen=trainer.frozen)
    move = offload.mover(settings.offload, parts, observer.note)
    done, before = evaluations or Evaluations({}, {}), state._replace(roles={})
    error = stopped = None

    def place(trainer: Trainer, state: State, stage: str) -> tuple[Trainer, State]:
        """Both with what a stage needs where it is needed; the state before the step is held, but for an update."""
        held.release()
        trainer, state = move(trainer, state, stage)
        if stage != "update":
            held.keep(before._replace(roles=state.roles), done)
        return trainer, state

    run_dir = None if trainer.folder is None else os.path.dirname(trainer.folder)
    profiler = StepProfiler(settings, parts.mesh, run_dir, observer.note)
    try:
        checked = verify(trainer, state, True)
        if evaluations is None:
            first = trainer.source.evaluate(state.roles, state.step)
            done = Evaluations(first, first)
        for step in range(state.step + 1, settings.steps + 1):
            heartbeat.at_step(step)
            profiler.begin(step)
            trainer, state = place(trainer, state, "generate")
            drawn, state, metrics = draw_batch(trainer, state)
            trainer, state = place(trainer, state, "score")
            rows, state, scored = score_batch(trainer, state, drawn)
            trainer, state = place(trainer, state, "update")
            state, learned = learn_batch(trainer, state, rows)
            state = sync(parts, state, trainer.clock, trainer.frozen)
            stages = {"drawn": metrics, "scored": scored, "learned": learned}
            metrics = metrics | scored | learned | verify(trainer, state)
            if step == 1:  # as it was before the first update
                metrics = checked | metrics | done.first
            if step % settings.eval_every == 0 or step == settings.steps:
                done = done._replace(last=trainer.source.evaluate(state.roles, step))
                metrics |= done.last
            state = state._replace(source=trainer.source.observed(state.source, metrics))
            metrics |= memory_metrics(parts.mesh)
            before = state._replace(roles={})
            held.keep(state, done, metrics)
            if saver.rows.due(step):
                with trainer.clock.phase("save_rollouts"):
                    saver.rows.save(state, drawn, rows, stages)
            profiler.end(step)
            observer.step(step, metrics, trainer.clock.take())
            if trainer.skips is not None:
                trainer.skips.check()
            if saver.after_step(state, metrics, done):
                stopped = step
                break
    except (RewardError, CurriculumError, NotFiniteError, SyncError) as failure:
        error = str(failure)
        if held.state is not None:  # the weights are still those after the step before
            saver.save(held.state, done)
    finally:
        profiler.close()
    return Outcome(*done, error, stopped), to_save(trainer, state, move, held, done)


def to_save(trainer: Trainer, state: State, move: offload.Mover, held: WholeState, done: Evaluations) -> State:
    """The state with its weights where they can be saved; if it is whole, so it is held."""
    whole = held.state
    held.release()
    _, state = move(trainer, state, "save")
    if whole is not None:
        held.keep(whole._replace(roles=state.roles), done)
    return state


def begin_run(
    job: Job,
    mesh: Mesh,
    observer: Observer,
    source: MakeSource = make_source,
    clock: Clock | None = None,
    pool: Pool | None = None,
) -> tuple[Trainer, State]:
    """Everything that is made once, and the state before the first step. The engine has no weights yet: see `sync`."""
    clock, parts = clock or Clock(), build(job, mesh, observer.note)._replace(pool=pool)
    weights = first_weights(job, parts, first_base(job, parts, observer))
    frozen = frozen_weights(parts, weights)
    made = source(job, parts, frozen, clock, observer)
    folder = shared_folder(observer, mesh)
    skips = Skips(job.settings.max_skipped, mesh, folder, observer.note)
    return Trainer(job, parts, made, frozen, clock, skips, folder), first_state(job, parts, weights, made.init())


def first_base(job: Job, parts: Parts, observer: Observer) -> trees.Tree:
    """The weights that a run begins with; those that adapters stand on are kept beside the run where it made them."""
    if job.lora is None:
        return warmstart.initial_weights(job, parts.begin, observer)
    kept = own_base(job, shared_folder(observer, parts.mesh))
    if job.settings.resume and kept_already(kept, parts.mesh):
        return warmstart.initial_weights(job, parts.begin, observer, kept)
    begin = warmstart.initial_weights(job, parts.begin, observer)
    if kept is not None:
        keep_base(kept, job, parts, begin)
    return begin


def draw_batch(trainer: Trainer, state: State) -> tuple[Rows, State, dict[str, float]]:
    """The rows of the next step, on the ranks that score and train them; the state with the source's place; metrics."""
    rows, at, metrics = trainer.source.draw(state.source, state.step + 1)
    return settled(trainer, rows, state.step + 1), state._replace(source=at), metrics


def settled(trainer: Trainer, rows: Rows, step: int) -> Rows:
    """The rows on the ranks that score them."""
    to = scoring_ranks(trainer.job, trainer.parts, rows.lengths, rows.batch.get("group"), step)
    return moved(rows, to, trainer.parts.mesh)


def scoring_ranks(job: Job, parts: Parts, lengths: np.ndarray, group: Tensor | None, step: int) -> np.ndarray:
    """[B] the ranks where the first pass over the rows is balanced; or whole groups where advantages need these.

    Args:
      lengths: [B] tokens of each row.
      group: [B] of each row.
    """
    mesh, settings, chain = parts.mesh, job.settings, job.algorithm.advantage
    ranks, cost = mesh.size(mesh.row_axes), row_cost(parts.roles[job.lead].placed)
    if chain is not None and chain.whole_groups:
        assert group is not None
        return ranks_of_groups(lengths, group.cpu().numpy(), ranks, scoring_budget(settings), cost)
    how = (settings.minibatches, settings.seed, step, 0, settings.token_budget, cost, token_ranks(mesh))
    return plan_epoch(lengths, ranks, *how).to


def score_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[Rows, State, dict[str, float]]:
    """The rows with what the roles write, and with advantages; the state with the chain's; metrics."""
    weights = weights_of(trainer.parts.roles, state.roles, trainer.frozen)
    rows = score(trainer.parts.roles, weights, rows, scoring_budget(trainer.job.settings), trainer.clock)
    if trainer.job.algorithm.advantage is None:
        here, names = on_cpu(rows), trainer.job.reward_names
        pairs = trainer.job.algorithm.example == "pair"  # which the source has told of
        return rows, state, describe(here, here.batch, names) if trainer.job.generates and not pairs else {}
    with trainer.clock.phase("advantage"):
        chain, names = trainer.job.algorithm.advantage, trainer.job.reward_names
        rows, chain, metrics = advantages(chain, state.advantage, rows, names)
    return rows, state._replace(advantage=chain), metrics


def learn_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[State, dict[str, float]]:
    """The state after the step's updates, and their metrics."""
    settings, step = trainer.job.settings, state.step + 1
    roles, metrics = learn(
        trainer.parts.roles, state.roles, rows, step, settings.epochs, settings.minibatches, settings.seed,
        settings.token_budget, trainer.clock, trainer.frozen, row_cost(trainer.parts.roles[trainer.job.lead].placed),
        trainer.skips,
    )  # fmt: skip
    return state._replace(roles=roles, step=step), metrics | (trainer.skips.take() if trainer.skips else {})


def verify(trainer: Trainer, state: State, first: bool = False) -> dict[str, float]:
    """Metrics of the proof, after a sync, that the engine holds the policy's weights; none where no proof is due.

    Args:
      first: this is the first sync of the run.

    Raises:
      SyncError: it does not.
    """
    settings, generator = trainer.job.settings, trainer.parts.generator
    every = settings.probe_sync_every
    probes = every > 0 and (first or state.step % every == 0)
    if generator is None or not (settings.verify_sync or probes):
        return {}
    role = trainer.parts.roles["policy"]
    params = role.whole(state.roles["policy"].params, trainer.frozen)
    with trainer.clock.phase("verify"):
        return certify(role.placed, params, generator.engine, state.version, settings.verify_sync, probes)
