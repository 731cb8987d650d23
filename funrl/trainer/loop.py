"""The loop: source, score, advantages, learn, sync.

    rows -> score -> advantages -> learn -> sync -> (next step)

It runs on every rank alike, for reinforcement, supervised and preference learning: what differs is the source. What a
rank holds of a model are its shards. The boxes are functions of files beside this one, which can be called alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from funrl import trees
from funrl.batch import Batch
from funrl.mesh.mesh import Mesh
from funrl.rewards.load import RewardError
from funrl.trainer import checkpoint, offload, warmstart
from funrl.trainer.advantage_phase import advantages, describe, on_cpu
from funrl.trainer.build import Parts, build, first_state, first_weights, sync
from funrl.trainer.clock import Clock, peak_memory_gb
from funrl.trainer.job import Job
from funrl.trainer.job_source import make_source
from funrl.trainer.learn import learn
from funrl.trainer.observing import Observer
from funrl.trainer.score import score
from funrl.trainer.sources import Source
from funrl.trainer.state import State
from funrl.trainer.step import NotFiniteError

MakeSource = Callable[[Job, Parts, Mapping[str, trees.Tree], Clock, Observer], Source]


class Outcome(NamedTuple):
    """End of a run: the evaluations at the start and the end, and what stopped it, if something did."""

    first: dict[str, float]
    last: dict[str, float]
    error: str | None


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


def train_loop(job: Job, mesh: Mesh, observer: Observer, source: MakeSource = make_source) -> Outcome:
    """The whole trainer, on this rank.

    Args:
      job: what to do; the same on every rank.
      mesh: to train on.
      observer: told what happens, and given the model at the end.
      source: makes the source.

    Returns: how it ended. A reward function that fails, or a gradient that is not finite, ends the run too, with
      everything learned so far saved.
    """
    settings = job.settings
    trainer, state = begin_run(job, mesh, observer, source)
    folder = checkpoint.shared_folder(observer, mesh)
    state = sync(trainer.parts, checkpoint.resumed(job, trainer.parts, state, folder, observer))
    place = offload.mover(settings.offload, trainer.parts, observer.note)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    error = None
    try:
        first = last = trainer.source.evaluate(state.roles, state.step)
        for step in range(state.step + 1, settings.steps + 1):
            trainer, state = place(trainer, state, "generate")
            batch, state, metrics = draw_batch(trainer, state)
            trainer, state = place(trainer, state, "score")
            batch, state, scored = score_batch(trainer, state, batch)
            trainer, state = place(trainer, state, "update")
            state, learned = learn_batch(trainer, state, batch)
            state = sync(trainer.parts, state, trainer.clock)
            metrics |= scored | learned
            if step == 1:  # as it was before the first update
                metrics |= first
            if step % settings.eval_every == 0 or step == settings.steps:
                last = trainer.source.evaluate(state.roles, step)
                metrics |= last
            observer.step(step, metrics | {"memory/peak_gb": peak_memory_gb(mesh)}, trainer.clock.take())
            checkpoint.save_when_due(job, trainer.parts, state, folder)
    except (RewardError, NotFiniteError) as failure:
        error = str(failure)
    _, state = place(trainer, state, "save")
    observer.finish(trainer.parts.roles[job.lead].placed, state.roles[job.lead].params, error)
    return Outcome(first, last, error)


def begin_run(
    job: Job, mesh: Mesh, observer: Observer, source: MakeSource = make_source, clock: Clock | None = None
) -> tuple[Trainer, State]:
    """Everything that is made once, and the state before the first step. The engine has no weights yet: see `sync`."""
    clock, parts = clock or Clock(), build(job, mesh, observer.note)
    weights = first_weights(job, parts, warmstart.initial_weights(job, parts.begin, observer))
    frozen = {name: tree for name, tree in weights.items() if parts.roles[name].loss is None}
    made = source(job, parts, frozen, clock, observer)
    return Trainer(job, parts, made, frozen, clock), first_state(job, parts, weights, made.init())


def draw_batch(trainer: Trainer, state: State) -> tuple[Batch, State, dict[str, float]]:
    """The rows of the next step; the state with the source's place; metrics."""
    batch, at, metrics = trainer.source.draw(state.source, state.step + 1)
    return batch, state._replace(source=at), metrics


def score_batch(trainer: Trainer, state: State, batch: Batch) -> tuple[Batch, State, dict[str, float]]:
    """The rows with what the roles write, and with advantages; the state with the chain's; metrics."""
    weights = {**trainer.frozen, **{name: role.params for name, role in state.roles.items()}}
    batch = score(trainer.parts.roles, weights, batch, trainer.job.settings.token_budget, trainer.clock)
    if trainer.job.algorithm.advantage is None:
        here = on_cpu(batch)
        return batch, state, describe(here, here) if trainer.job.generates else {}
    with trainer.clock.phase("advantage"):
        batch, chain, metrics = advantages(trainer.job.algorithm.advantage, state.advantage, batch)
    return batch, state._replace(advantage=chain), metrics


def learn_batch(trainer: Trainer, state: State, batch: Batch) -> tuple[State, dict[str, float]]:
    """The state after the step's updates, and their metrics."""
    settings, step = trainer.job.settings, state.step + 1
    roles, metrics = learn(
        trainer.parts.roles, state.roles, batch, step, settings.epochs, settings.minibatches, settings.seed,
        settings.token_budget, trainer.clock, trainer.frozen,
    )  # fmt: skip
    return state._replace(roles=roles, step=step), metrics
