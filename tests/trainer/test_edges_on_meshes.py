"""Real runs at the edges, the same on every mesh: uneven rows, fewer rows than ranks, one row, none to learn from."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from small_runs import GRPO, PPO, SIZES, assert_same, begin, scored_batch, small_job, steps_of, uneven
from torch.utils._python_dispatch import TorchDispatchMode

from funrl.algos import corrected, filtered, mask_truncated, not_truncated, recipe
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.models import decoder_model, with_fields, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic
from funrl.trainer.phases import learn_batch

pytestmark = pytest.mark.gloo
SPLIT = (  # a row with few tokens or none for a rank; fewer rows than ranks is met on dp2
    "ppo, uneven rows",
    "grpo, empty completions",
    "grpo, no token left",
    "dpo, one pair",
    "reward_model, one pair",
)


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
    return dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, stop=stop))


def rows(prompts, samples, minibatches=1, **more):
    return {"batch_prompts": prompts, "samples_per_prompt": samples, "minibatches": minibatches, **more}


def texts(count, **more):
    return {"batch_prompts": count, "reward": None, **more}


def equal(prompt, completion, **fields):
    return 0.5


def unequal_lengths(batch, metrics):
    return batch.length.max() > 2 * batch.length.min() and metrics["perf/total_num_tokens"] > 3 * 24


EDGES = {
    "ppo, uneven rows": Edge(PPO, rows(3, 2, 2, epochs=2, token_budget=24), unequal_lengths, uneven),
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
        rows(2, 2, 2, max_refills=2, reward=equal, empty_filter="use"),
        lambda batch, metrics: len(batch.length) == metrics["filter_groups/dropped_prompts"] == 4,
    ),
    "dpo, uneven pairs": Edge(recipe("dpo"), texts(5, token_budget=24), unequal_lengths, uneven),
    "dpo, one pair": Edge(recipe("dpo"), texts(1), lambda batch, _: len(batch.length) == 1),
    "reward_model, one pair": Edge(recipe("reward_model"), texts(1), lambda batch, _: batch.segments.max() == 2),
}


@functools.cache
def jobs(mesh, reward_model):
    results = {}
    for name in SPLIT if mesh == "sp2" else EDGES:
        edge = EDGES[name]
        settings = dict(edge.settings)
        if settings.get("reward_model"):
            settings |= {"reward_model": reward_model, "fsdp": mesh == "dp2"}
        results[name] = edge.change(small_job(edge.make, mesh=mesh, eval_prompts=1, **settings))
    return results


def evaluated_step(job, mesh):
    """An evaluation by one prompt or text, and a step."""
    run, state = begin(job, mesh)
    return {"held out": run.source.evaluate(state.roles, 0)} | steps_of(run, state, 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """mesh -> what every run at an edge gives on it."""
    model, folder = decoder_model(with_fields(arithmetic.model_config(), **SIZES)), tmp_path_factory.mktemp("m")
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
    record = runs("dp1")[name]
    (batch,), (metrics,) = record["batches"], record["metrics"]
    assert EDGES[name].holds(batch, metrics)
    assert all(math.isfinite(value) for value in metrics.values()), metrics


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [*((name, "dp2") for name in EDGES), *((name, "sp2") for name in SPLIT)])
def test_a_run_at_an_edge_is_the_same_on_every_mesh(name, mesh, runs):
    row, many = runs("dp1")[name], runs(mesh)[name]
    assert_same(many, row, 1e-9)
    assert many["held out"] == pytest.approx(row["held out"], rel=1e-9)


class Collectives(TorchDispatchMode):
    """Counts of the collectives that this rank calls."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("_c10d_functional", "c10d"):
            self.found[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(job, mesh):
    run, state = begin(job, mesh)
    with Collectives() as seen:
        batch, state, _ = scored_batch(run, state)
        learn_batch(run, state, batch)
    return gather_objects(seen.found, mesh)


@pytest.mark.slow
def test_a_step_calls_no_more_collectives_on_more_ranks():
    """From prompts to updated weights; tests/cost has the trainer's part on more ranks than are here."""
    results = []
    for mesh in ("dp2", "dp3"):
        job = small_job(PPO, mesh=mesh, fsdp=True, minibatches=1, batch_prompts=3, max_new_tokens=2)
        results += launch(functools.partial(collectives_of_a_step, job), job.sizes, "cpu")
    assert len(results) == 5 and sum(results[0].values()) > 50
    assert all(item == results[0] for item in results)
