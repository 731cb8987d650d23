"""Real runs of ppo, grpo, dpo and others at the edges: uneven rows, one row, none to learn from; on all meshes."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from small_runs import GRPO, PPO, SIZES, assert_same, begin, small_job, steps_of, uneven

from funrl.algos import corrected, filtered, mask_truncated, not_truncated, recipe
from funrl.mesh.launch import launch
from funrl.models import decoder_model, hf, with_value_head
from funrl.tasks import arithmetic

pytestmark = pytest.mark.gloo
MESHES = ("dp2", "tp2", "dp4,tp2")


class Edge(NamedTuple):
    """A run at an edge.

    Attributes:
      make: of the algorithm.
      settings: of the job.
      change: of the job.
      holds: (batch, metrics) of a step -> whether the edge was met.
    """

    make: Callable
    settings: dict[str, Any]
    holds: Callable[[Any, dict[str, float]], Any]
    change: Callable = lambda job: job


def stops_at_once(job):
    """Every token stops: completions are empty but for it."""
    stop = tuple(range(job.model.config.vocab))
    return job._replace(sampling=dataclasses.replace(job.sampling, stop=stop))


def rows(prompts, samples, minibatches=1, **more):
    return {"batch_prompts": prompts, "samples_per_prompt": samples, "minibatches": minibatches, **more}


def equal(prompt, completion, **fields):
    return 0.5


def unequal_lengths(batch, metrics):
    return batch.length.max() > 2 * batch.length.min() and metrics["perf/total_num_tokens"] > 3 * 24


EDGES = {
    "ppo, uneven rows": Edge(PPO, rows(5, 2, 3, epochs=2, token_budget=24), unequal_lengths, uneven),
    "ppo, one row": Edge(PPO, rows(1, 1), lambda batch, _: len(batch.length) == 1),
    "ppo, one row, a reward model": Edge(
        PPO, rows(1, 1, reward_model=True, token_budget=8), lambda batch, _: batch.scores.shape == (1, 2)
    ),
    "grpo, mini-batches of a row": Edge(GRPO, rows(1, 3, 2), lambda batch, _: batch.advantage.abs().max() > 0.1),
    "grpo, empty completions": Edge(
        GRPO, rows(2, 2), lambda batch, _: (batch.mask.sum(1) == 1).all() and not batch.truncated.any(), stops_at_once
    ),
    "grpo, no token left": Edge(
        lambda: corrected(GRPO(), mask_truncated()),
        rows(2, 2, 2, max_new_tokens=1),
        lambda batch, metrics: not batch.mask.any() and metrics["actor/grad_norm"] == 0,
    ),
    "dapo, no group left": Edge(
        lambda: filtered(recipe("dapo")(), not_truncated()),
        rows(2, 2, 2, max_refills=2, reward=equal),
        lambda batch, metrics: len(batch.length) == metrics["filter_groups/dropped_prompts"] == 4,
    ),
    "dpo, uneven pairs": Edge(recipe("dpo"), {"batch_prompts": 5, "token_budget": 24, "reward": None}, unequal_lengths, uneven),
    "dpo, one pair": Edge(recipe("dpo"), {"batch_prompts": 1, "reward": None}, lambda batch, _: len(batch.length) == 1),
    "reward_model, one pair": Edge(
        recipe("reward_model"), {"batch_prompts": 1, "reward": None}, lambda batch, _: batch.segments.max() == 2
    ),
}  # fmt: skip


@functools.cache
def jobs(mesh, reward_model):
    found = {}
    for name, edge in EDGES.items():
        settings = dict(edge.settings)
        if settings.get("reward_model"):
            settings |= {"reward_model": reward_model, "fsdp": "dp" in mesh[:2] and mesh != "dp1"}
        found[name] = edge.change(small_job(edge.make, mesh=mesh, eval_prompts=1, **settings))
    return found


def evaluated_step(job, mesh):
    """An evaluation by one prompt or text, and a step."""
    run, state = begin(job, mesh)
    return {"held out": run.source.evaluate(state.roles, 0)} | steps_of(run, state, 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """mesh -> what every run at an edge gives on it."""
    model, folder = decoder_model(dataclasses.replace(arithmetic.model_config(), **SIZES)), tmp_path_factory.mktemp("m")
    valued = with_value_head(model)
    params = valued.init(torch.Generator().manual_seed(3), torch.float64)
    hf.save(folder, valued, params | {"value": torch.ones_like(params["value"])}, arithmetic.tokenizer())

    @functools.cache
    def on(mesh):
        made = jobs(mesh, str(folder))
        sizes = next(iter(made.values())).sizes
        return launch(lambda at: {name: evaluated_step(job, at) for name, job in made.items()}, sizes, "cpu")

    return on


@pytest.mark.parametrize("name", EDGES)
def test_the_edge_is_met_and_every_number_is_finite(name, runs):
    found = runs("dp1")[name]
    (batch,), (metrics,) = found["batches"], found["metrics"]
    assert EDGES[name].holds(batch, metrics)
    assert all(math.isfinite(value) for value in metrics.values()), metrics


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", EDGES)
def test_a_run_at_an_edge_is_the_same_on_every_mesh(name, mesh, runs):
    one, many = runs("dp1")[name], runs(mesh)[name]
    assert_same(many, one, 1e-9)
    assert many["held out"] == pytest.approx(one["held out"], rel=1e-9)
