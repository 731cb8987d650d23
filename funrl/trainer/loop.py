"""The loop: source, score, advantages, learn, sync.

    rows -> score -> advantages -> learn -> sync -> (next step)

It runs on every rank alike, for reinforcement, supervised and preference learning: what differs is the source. What a
rank holds of a model are its shards. The boxes are functions of files beside this one, which can be called alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.rewards.load import RewardError
from funrl.trainer import checkpoint, offload, warmstart
from funrl.trainer.advantages import advantages
from funrl.trainer.build import Parts, build, first_state, first_weights, sync
from funrl.trainer.clock import Clock, peak_memory_gb
from funrl.trainer.job_source import make_source
from funrl.trainer.job import Job
from funrl.trainer.learn import learn
from funrl.trainer.observing import Observer
from funrl.trainer.score import score
from funrl.trainer.sources import Source
from funrl.trainer.state import State
from funrl.trainer.step import Divergence


class Outcome(NamedTuple):
    """How a run ended: the evaluations at the start and the end, and what stopped it, if something did."""

    first: dict[str, float]
    last: dict[str, float]
    error: str | None


def train(job: Job, mesh: Mesh, observer: Observer, own_source: Callable[..., Source] | None = None) -> Outcome:
    """The whole run, on this rank.

    Args:
      job: what to do; the same on every rank.
      mesh: to train on.
      observer: told what happens, and given the model at the end.
      own_source: makes the source, instead of `make_source` and with its arguments.

    Returns: how it ended. A reward function that fails, or a gradient that is not finite, ends the run too, with
      everything learned so far saved.
    """
    clock, parts = Clock(), build(job, mesh, observer.note)
    begin = warmstart.initial_weights(job, parts.begin, observer)
    weights = first_weights(job, parts, begin)
    frozen = {name: tree for name, tree in weights.items() if parts.roles[name].loss is None}
    source = (own_source or make_source)(job, parts, frozen, clock, observer)
    state = first_state(job, parts, weights, source.init())
    del begin, weights
    folder = checkpoint.shared_folder(observer, mesh)
    state = checkpoint.resumed(job, parts, state, folder, observer)
    place = offload.mover(job.settings.offload, parts, observer.note)
    state = sync(parts, state)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    error = None
    try:
        first = last = source.evaluate(state.roles, state.step)
        for step in range(state.step + 1, job.settings.steps + 1):
            state, metrics = one_step(job, parts, source, state, frozen, place, clock)
            if step == 1:  # as it was before the first update
                metrics |= first
            if step % job.settings.eval_every == 0 or step == job.settings.steps:
                last = source.evaluate(state.roles, step)
                metrics |= last
            observer.step(step, metrics | {"memory/peak_gb": peak_memory_gb(mesh)}, clock.take())
            checkpoint.save_when_due(job, parts, state, folder)
    except (RewardError, Divergence) as failure:
        error = str(failure)
    state, _ = place(state, frozen, ("params",))
    lead = parts.roles[job.lead].placed
    observer.finish(lead, state.roles[job.lead].params, error)
    return Outcome(first, last, error)


def one_step(
    job: Job,
    parts: Parts,
    source: Source,
    state: State,
    frozen: Mapping[str, trees.Tree],
    place: offload.Mover,
    clock: Clock,
) -> tuple[State, dict[str, float]]:
    """One step of a run: the state after it, and its metrics."""
    settings, step = job.settings, state.step + 1
    state, frozen = place(state, frozen, offload.NEEDS["generate"])
    batch, at, metrics = source.draw(state.source, step)
    state, frozen = place(state, frozen, offload.NEEDS["score"])
    params = {name: role.params for name, role in state.roles.items()}
    batch = score(parts.roles, {**frozen, **params}, batch, settings.token_budget, clock)
    with clock.phase("advantage"):
        batch, chain, told = advantages(job.algorithm, state.advantage, batch)
    state, frozen = place(state, frozen, offload.NEEDS["update"])
    roles, learned = learn(
        parts.roles, state.roles, batch, step, job.settings.epochs, job.settings.minibatches, settings.seed, settings.token_budget, clock
    )
    state = state._replace(roles=roles, advantage=chain, source=at, step=step)
    return sync(parts, state, clock), metrics | told | learned
