"""Metrics of episodes: of all of them, and of each source of prompts."""

import dataclasses

import numpy as np
import pytest
import torch
from small_runs import GRPO, MEASURED, Quiet, begin
from test_episode_runs import Branching, episode_job

from funrl.data.prompts import Example
from funrl.environments.run import EpisodeSpending
from funrl.mesh.launch import launch
from funrl.rollout.episodes import Episode, Node, Trajectory
from funrl.trainer.sources.episode_totals import (
    EpisodeTable,
    episode_metrics,
    numbers_by_source,
    table_totals,
    totals_of_rank,
)
from funrl.trainer.sources.evaluation import source_of
from funrl.trainer.sources.pending_rewards import add_totals

EXAMPLES = [Example([1], "p", {"data_source": name}) for name in ("math", "games/chess", "math")]


def episode(context, counts, parts):
    """Two tokens of the policy after some of context."""
    none = torch.zeros(2)
    root = Node(None, [5] * context, sampled=False)
    leaf = Node(root, [6, 7], True, none, none, none.long(), finish="stop")
    return Episode([Trajectory("policy", leaf)], {"policy": 1.0}, parts=parts, counts=counts)


EPISODES = [
    episode(1, {"tool_calls": 2.0, "forks/thinking": 1.0}, {"form": 1.0}),
    episode(2, {"tool_calls": 0.0}, {}),
    episode(3, {"tool_calls": 3.0}, {"board": 0.5}),
    episode(4, {}, {"board": 0.0}),
    episode(5, {"forks/thinking": 2.0, "call_errors": 1.0}, {"form": 0.0}),
    episode(6, {}, {"form": 0.5}),
]
COSTS = [EpisodeSpending(float(n), n * 10) for n in range(6)]
NAN = float("nan")
TABLE = EpisodeTable(
    np.zeros(6, np.int64),
    torch.tensor([[1.0], [NAN], [0.25], [0.75], [0.0], [NAN]], dtype=torch.float64),
    failed=torch.tensor([False, True, False, False, False, False]),
    finished=torch.ones(6, dtype=torch.bool),
    turns=torch.tensor([1, 2, 3, 4, 5, 6]),
    tokens=torch.tensor([3, 4, 5, 6, 7, 8]),
)


def test_each_source_has_means_of_its_own_episodes_whatever_rank_ran_them():
    sources = numbers_by_source(source_of(EXAMPLES), EXAMPLES, 2)
    assert {name: numbers.tolist() for name, numbers in sources.items()} == {
        "math": [0, 1, 4, 5],
        "games_chess": [2, 3],
    }
    own = list(enumerate(EPISODES))
    ranks = [totals_of_rank(own[a:b], COSTS[a:b], (), sources) for a, b in ((0, 4), (4, 6))]
    metrics = episode_metrics({**table_totals(TABLE, sources), **add_totals(*ranks)})
    assert metrics == episode_metrics({**table_totals(TABLE, sources), **totals_of_rank(own, COSTS, (), sources)})
    math = {name.removeprefix("source/math/"): x for name, x in metrics.items() if name.startswith("source/math/")}
    assert math == {
        "turns": 14 / 4,
        "tokens": 22 / 4,
        "failed": 0.25,
        "unscored": 0.25,
        "reward": 0.5,
        "tool_calls": 0.5,
        "forks/thinking": 0.75,
        "call_errors": 0.25,
        "context_tokens": 14 / 4,
        "environment_s": 10 / 4,
        "recomputed_tokens": 100 / 4,
        "reward/form": 0.5,
    }
    assert metrics["source/games_chess/reward"] == 0.5 and metrics["source/games_chess/reward/board"] == 0.25
    assert "source/games_chess/forks/thinking" not in metrics and metrics["episodes/forks/thinking"] == 0.5
    assert metrics["episodes/environment_s"] == 15 / 6 and metrics["episodes/turns"] == 21 / 6


def test_an_evaluation_has_them_beside_the_rewards_of_its_sources():
    sources = numbers_by_source(source_of(EXAMPLES), EXAMPLES, 2)
    metrics = episode_metrics({**table_totals(TABLE, sources), **add_totals()}, "eval/")
    assert metrics["eval/math/turns"] == 3.5 and metrics["eval/episodes/turns"] == 3.5
    assert "eval/math/reward" not in metrics  # is over prompts, in `metrics_of`


def test_one_source_has_no_metrics_of_its_own():
    assert source_of(EXAMPLES[::2]) is None and numbers_by_source(None, EXAMPLES, 2) == {}
    files = [Example([1], "p", {}, source=f"data/{name}.jsonl, line 3") for name in "aba"]
    assert numbers_by_source(source_of(files), files, 1)["b"].tolist() == [1]
    assert source_of([Example([1], "p", {"data_source": str(n)}) for n in range(33)]) is None


def mixed(examples):
    return [x._replace(fields={**x.fields, "data_source": "ab"[n % 2]}) for n, x in enumerate(examples)]


def metrics_of_a_step(mesh):
    job = episode_job(GRPO, Branching(), mesh=mesh, batch_prompts=8)
    task = job.task._replace(prompts=mixed(job.task.prompts), heldout=mixed(job.task.heldout))
    job = dataclasses.replace(job, task=task)

    def program(mesh):
        run, state = begin(job, mesh, Quiet())
        _, _, metrics = run.source.next_rows(state.source, 1)
        metrics |= run.source.evaluate(state.roles, 1)
        return {name: x for name, x in metrics.items() if not name.endswith(MEASURED)}

    return launch(program, job.sizes, "cpu")


@pytest.mark.slow
@pytest.mark.gloo
def test_a_run_of_two_sources_has_the_metrics_of_each_on_every_mesh():
    metrics = metrics_of_a_step("dp1")
    assert metrics_of_a_step("dp2") == pytest.approx(metrics)
    names = {"turns", "tokens", "context_tokens", "reward", "reward/left", "failed", "unscored"}
    assert {f"source/{source}/{name}" for source in "ab" for name in names} <= metrics.keys()
    assert {"eval/a/reward", "eval/b/turns"} <= metrics.keys()
    turns = metrics["source/a/turns"], metrics["source/b/turns"]
    assert min(turns) < metrics["episodes/turns"] < max(turns)
