"""Models of agents where some ranks train and others generate: earlier selves, directories and second policies."""

import functools

import pytest
import torch
from selection import quick
from small_runs import SIZES, SMALL, resized
from test_agents import Rivals
from test_asynchronous_replay import STEPS, check_resumed, repeated, trained
from test_placement_runs import assert_same_runs, check_ages, rank_of

from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.environments.logged import LoggedEnvironment
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.models.huggingface import directories as hf
from funrl.trainer.checkpoints.saved_episodes import read_episodes
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.placement.logged import sampled_nodes
from funrl.trainer.settings.scorers import Given
from funrl.trainer.settings.settings import settings_of

pytestmark = pytest.mark.gloo


def job_of(compose, environment=None, **settings):
    given = Given(environment=environment or Rivals(), records=[{"prompt": f"{n}+{n}="} for n in range(24)])
    return resized(prepare(settings_of(**SMALL | {"samples_per_prompt": 3} | settings), compose, given), SIZES)


def run(compose, **settings):
    job = job_of(compose, **settings)
    return launch(functools.partial(rank_of, job), job.launched, "cpu")


GRPO = functools.partial(grpo, kl_coef=0.0)
AGENTS = {
    "renewed self": "rival:frozen:2",
    "second policy": "rival:policy:second",
}


@pytest.mark.slow
@pytest.mark.parametrize(("agents", "steps"), [("renewed self", 3), ("second policy", 2)])
def test_apart_they_give_the_same_bits(agents, steps):
    flags = {"agents": AGENTS[agents], "steps": steps}
    assert_same_runs(run(GRPO, place="generate:1", **flags), run(GRPO, **flags))


@pytest.mark.slow
def test_so_does_a_model_of_a_directory(tmp_path):
    job = job_of(GRPO, seed=3)
    params = job.model.init(torch.Generator().manual_seed(7), torch.float64)
    hf.save(tmp_path / "model", job.model, params, job.tokenizer)
    flags = {"agents": f"rival:{tmp_path / 'model'}", "steps": 2}
    assert_same_runs(run(GRPO, place="generate:1", **flags), run(GRPO, **flags))


WINDOW = {"place": "train:dp1 generate:dp2", "window": 3}
AHEAD = {
    "renewed self": WINDOW | {"lora_rank": 2, "steps": 5},
    "second policy": {"place": "train:dp1 generate:tp2"},
}
WRITTEN = {"minibatches": 1, "steps": 4, "staleness": 2, "eval_every": 9}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(AHEAD, ["renewed self"]))
def test_written_ahead_they_are_repeated_with_the_same_bits(name, tmp_path):
    agents, settings = AGENTS[name], AHEAD[name]
    job = job_of(rollout_is, agents=agents, save_rollouts=1, **WRITTEN | settings)
    count = job.settings.run.steps
    error, steps = launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    assert error is None and len(steps) == count
    check_ages([metrics for _, metrics in steps], 2 + ("window" in settings))
    assert max(metrics["age/max"] for _, metrics in steps) > 0
    rivals = [
        torch.as_tensor(node.versions)
        for step in range(1, count + 1)
        for logged in read_episodes(tmp_path / "rollouts", step)
        for node, agent in sampled_nodes(logged.episode).items()
        if agent == "rival"
    ]
    assert len(torch.cat(rivals).unique()) > 1
    adapters = {name: value for name, value in settings.items() if name == "lora_rank"}
    again = job_of(rollout_is, LoggedEnvironment(Rivals.agents), agents=agents, minibatches=1, steps=count, **adapters)
    done = repeated(tmp_path, again, single())
    assert [(item.step, str(part)) for item in done for part in item.differences if not part.agrees(0.0)] == []
    turns = [part.total for step_again in done for part in step_again.differences if part.kind == "turns"]
    assert turns == [4 * 3 * 4] * count, "the turns of both agents are compared"


@pytest.mark.slow
def test_a_resumed_run_takes_each_group_once(tmp_path):
    settings = WRITTEN | {"place": "generate:1", "agents": AGENTS["renewed self"], "steps": STEPS}
    check_resumed(tmp_path, functools.partial(job_of, rollout_is, **settings))
