"""The loop: source, score, advantages, learn, sync.

    rows -> score -> advantages -> learn -> sync -> (next step)

It runs on every rank alike, for reinforcement, supervised and preference learning: what differs is the source. What a
rank holds of a model are its shards. The boxes are functions of files beside this one, which can be called alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.mesh.processes import stops_when_asked
from funrl.rewards.load import RewardError
from funrl.rewards.pool import Pool
from funrl.rollout.certificate import SyncError, certify
from funrl.trainer import offload, warmstart
from funrl.trainer.advantage_phase import advantages, describe
from funrl.trainer.base_model import keep_base, kept_already, own_base
from funrl.trainer.build import Parts, build, first_state, first_weights, frozen_weights, sync
from funrl.trainer.clock import Clock, memory_metrics
from funrl.trainer.job import Job
from funrl.trainer.job_source import make_source
from funrl.trainer.learn import learn
from funrl.trainer.micro import plan_epoch, ranks_of_groups, row_cost
from funrl.trainer.observing import Observer
from funrl.trainer.roles import BASE, weights_of
from funrl.trainer.saver import Evaluations, Saver, shared_folder
from funrl.trainer.score import score
from funrl.trainer.settings import scoring_budget
from funrl.trainer.shard_server import CheckpointError
from funrl.trainer.sources import Source
from funrl.trainer.state import State
from funrl.trainer.step import NotFiniteError
from funrl.trainer.step_rows import Rows, moved, on_cpu

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
    """

    job: Job
    parts: Parts
    source: Source
    frozen: Mapping[str, trees.Tree]
    clock: Clock


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

    Returns: how it ended. A reward function that fails, a gradient that is not finite, or an engine that does not hold
      the trainer's weights ends the run too, with everything learned so far saved.
    """
    trainer, state = begin_run(job, mesh, observer, source, pool=pool)
    folder = shared_folder(observer, mesh)
    base = trainer.frozen.get(BASE)
    with Saver(job, trainer.parts, trainer.source, state, folder, observer, base) as saver, stops_when_asked():
        state, evaluations = saver.resumed(state)
        outcome, state = run_steps(trainer, state, saver, evaluations, observer)
    if outcome.stopped is None:
        role = trainer.parts.roles[job.lead]
        observer.finish(role.placed, role.whole(state.roles[job.lead].params, trainer.frozen), outcome.error)
    return outcome


def run_steps(
    trainer: Trainer, state: State, saver: Saver, evaluations: Evaluations | None, observer: Observer
) -> tuple[Outcome, State]:
    """All steps that are left, and the state at the end, with its weights where they can be saved.

    Args:
      evaluations: so far, of a run that goes on; None: it begins.
    """
    settings, parts = trainer.job.settings, trainer.parts
    before = state if evaluations is None else state._replace(version=state.version - 1)
    state = sync(parts, before, frozen=trainer.frozen)
    place = offload.mover(settings.offload, parts, observer.note)
    done, whole = evaluations or Evaluations({}, {}), state._replace(roles={})
    error = stopped = None
    try:
        checked = verify(trainer, state, True)
        if evaluations is None:
            first = trainer.source.evaluate(state.roles, state.step)
            done = Evaluations(first, first)
        for step in range(state.step + 1, settings.steps + 1):
            trainer, state = place(trainer, state, "generate")
            rows, state, metrics = draw_batch(trainer, state)
            trainer, state = place(trainer, state, "score")
            rows, state, scored = score_batch(trainer, state, rows)
            trainer, state = place(trainer, state, "update")
            whole = None
            state, learned = learn_batch(trainer, state, rows)
            state = sync(parts, state, trainer.clock, trainer.frozen)
            metrics |= scored | learned | verify(trainer, state)
            if step == 1:  # as it was before the first update
                metrics = checked | metrics | done.first
            if step % settings.eval_every == 0 or step == settings.steps:
                done = done._replace(last=trainer.source.evaluate(state.roles, step))
                metrics |= done.last
            observer.step(step, metrics | memory_metrics(parts.mesh), trainer.clock.take())
            whole = state._replace(roles={})
            if saver.after_step(state, metrics, done):
                stopped = step
                break
    except (RewardError, NotFiniteError, SyncError) as failure:
        error = str(failure)
        if whole is not None:  # the weights are still those after the step before
            saver.save(whole._replace(roles=state.roles), done)
    except Exception:
        if whole is not None and parts.mesh.world == 1:  # of several ranks the others wait elsewhere
            with contextlib.suppress(CheckpointError):  # which would hide the failure
                saver.save(whole._replace(roles=state.roles), done)
        raise
    _, state = place(trainer, state, "save")
    return Outcome(*done, error, stopped), state


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
    return Trainer(job, parts, made, frozen, clock), first_state(job, parts, weights, made.init())


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
    return plan_epoch(lengths, ranks, settings.minibatches, settings.seed, step, 0, settings.token_budget, cost).to


def score_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[Rows, State, dict[str, float]]:
    """The rows with what the roles write, and with advantages; the state with the chain's; metrics."""
    weights = weights_of(trainer.parts.roles, state.roles, trainer.frozen)
    rows = score(trainer.parts.roles, weights, rows, scoring_budget(trainer.job.settings), trainer.clock)
    if trainer.job.algorithm.advantage is None:
        here = on_cpu(rows)
        return rows, state, describe(here, here.batch) if trainer.job.generates else {}
    with trainer.clock.phase("advantage"):
        rows, chain, metrics = advantages(trainer.job.algorithm.advantage, state.advantage, rows)
    return rows, state._replace(advantage=chain), metrics


def learn_batch(trainer: Trainer, state: State, rows: Rows) -> tuple[State, dict[str, float]]:
    """The state after the step's updates, and their metrics."""
    settings, step = trainer.job.settings, state.step + 1
    roles, metrics = learn(
        trainer.parts.roles, state.roles, rows, step, settings.epochs, settings.minibatches, settings.seed,
        settings.token_budget, trainer.clock, trainer.frozen, row_cost(trainer.parts.roles[trainer.job.lead].placed),
    )  # fmt: skip
    return state._replace(roles=roles, step=step), metrics


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
