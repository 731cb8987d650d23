"""The loop: generate, reward, score, advantage, update, reshard.

    prompts -> generate -> reward -> score -> advantage -> update -> reshard -> (next step)

It runs on every rank alike. What a rank holds of a model are its shards; what it knows of a batch is the whole batch.
The boxes are in `phases.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from funrl.mesh.mesh import Mesh
from funrl.mesh.reshard import export_weights
from funrl.models import hf
from funrl.rewards.load import RewardError
from funrl.track.observe import Observer
from funrl.trainer import ensemble, offload, phases, warmstart
from funrl.trainer.job import Job
from funrl.trainer.spmd import Clock, peak_memory_gb
from funrl.trainer.step import Divergence


class Outcome(NamedTuple):
    """How a run ended: the evaluations at the start and the end, and what stopped it, if something did."""

    first: dict[str, float]
    last: dict[str, float]
    error: str | None


def train(job: Job, mesh: Mesh, run_dir: str | None) -> Outcome:
    """The whole run, on this rank.

    Args:
      job: what to do; the same on every rank.
      mesh: the train mesh.
      run_dir: where rank 0 writes.

    Returns: how it ended. A reward function that fails, or a gradient that is not finite, ends the run too, with
      everything learned so far saved.
    """
    settings, clock = job.settings, Clock()
    with Observer(job, run_dir if mesh.rank == 0 else None) as observer:
        models = ensemble.build(job, mesh, observer.note)
        weights = warmstart.initial_weights(job, mesh, models.policy_layouts, models.layer, observer)
        state = phases.start(job, models, weights)
        away = offload.parse(settings.offload)
        if away and mesh.device.type == "cpu":
            observer.note(f"--offload={settings.offload} does nothing here: on a CPU there is no other memory to use")
        place = functools.partial(offload.place, away=away, plan=models.to_generate, device=mesh.device)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        error = None
        try:
            first = last = phases.evaluate(job, models, 0, clock, observer)
            for step in range(1, settings.steps + 1):
                state = place(state, offload.NEEDS["generate"])
                batch, state, metrics = phases.collect(job, models, state, step, clock, observer)
                state = place(state, offload.NEEDS["score"])
                batch, state, scored = phases.score_batch(job, models, state, batch, clock)
                state = place(state, offload.NEEDS["update"])
                state, learned = phases.learn(job, models, state, batch, step, clock)
                phases.sync(job, models, state, clock)
                metrics |= scored | learned
                if step == 1:  # as it was before the first update
                    metrics |= first
                if step % settings.eval_every == 0 or step == settings.steps:
                    last = phases.evaluate(job, models, step, clock, observer)
                    metrics |= last
                observer.step(step, metrics | {"memory/peak_gb": peak_memory_gb(mesh)}, clock.take())
        except (RewardError, Divergence) as failure:
            error = str(failure)
        state = place(state, ("params",))
        names = hf.hf_names(job.config)
        observer.finish(export_weights(state.policy.params, models.policy_layouts, mesh, names), error)
    return Outcome(first, last, error)
