"""A run of episodes again: on its saved rows, and generated with the logged answers of its environment."""

import dataclasses
import functools
import json
import shutil

import pytest
from selection import quick
from small_runs import Quiet
from test_agents import Rivals, job_of
from test_episode_runs import Branching, Fails, episode_job
from test_replay import replayed, unlike

from funrl.algos.recipes.remax import remax
from funrl.environments.logged import LoggedEnvironment
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.rewards.call import RewardError
from funrl.rollout.episodes import to_record
from funrl.trainer.checkpoints.saved_episodes import read_episodes
from funrl.trainer.loop import train_loop
from funrl.trainer.replay import replay
from funrl.trainer.storage.shard_server import CheckpointError, DamagedError

SAVED = {"steps": 2, "save_rollouts": 1, "save_every": "1", "eval_every": 2, "minibatches": 2}


def job(environment, **settings):
    return job_of(environment, **SAVED | settings)


def trained(folder, environment, **settings):
    """Train two steps; the run's folder."""
    job_of_run = job(environment, **settings)
    launch(lambda mesh: train_loop(job_of_run, mesh, Quiet(str(folder / "checkpoints"))), job_of_run.sizes, "cpu")
    return folder


def generated(folder, names, step=None, **settings):
    """All steps again; the environment of the job is a log."""
    logged = LoggedEnvironment(names)
    again = job(logged, **settings)
    return launch(lambda mesh: replay(again, folder, step, mesh, Quiet(), logged), again.sizes, "cpu")


class Named(Rivals):
    """The state of each turn has a name, and the environment has counts of its own."""

    async def run(self, policy, example, seed):
        episode = await super().run(policy, example, seed)
        sampled = [node for end in episode.ends for node in end.nodes() if node.sampled]
        states = {node: f"round {n}" for n, node in enumerate(sampled)}
        return dataclasses.replace(episode, states=states, counts={"forks/thinking": 1.0})


RUNS = {
    "states": (Named, ("policy", "rival"), {"agents": None}),
    "failures": (Fails, ("policy",), {"agents": None}),
    "frozen": (Rivals, ("policy", "rival"), {"agents": "rival:frozen:2"}),
}


@pytest.fixture(scope="module", params=quick(RUNS, ["frozen"]))
def run(request, tmp_path_factory):
    environment, agents, settings = RUNS[request.param]
    return trained(tmp_path_factory.mktemp("run"), environment(), **settings), agents, settings


@pytest.mark.slow
def test_generated_again_every_bit_is_the_same(run):
    folder, agents, settings = run
    done = generated(folder, agents, **settings)
    assert [item.step for item in done] == [1, 2] and unlike(done) == []
    turns = [part for part in done[1].differences if part.kind == "turns"]
    assert turns[0].total == sum(
        node["sampled"] for logged in read_episodes(folder / "rollouts", 2) for node in to_record(logged.episode).nodes
    )
    compared = {part.name for step_again in done for part in step_again.differences}
    assert {"tokens", "rollout_logp", "weights of policy by their digests", "state of the checkpoint"} <= compared


@pytest.mark.parametrize("run", ["frozen"], indirect=True)
def test_one_step_is_generated_again_from_a_checkpoint(run):
    folder, agents, settings = run
    done = generated(folder, agents, step=2, **settings)
    assert [item.step for item in done] == [2] and unlike(done) == []


@pytest.mark.slow
def test_greedy_episodes_have_seeds_of_their_own_and_are_generated_again(tmp_path):
    settings = {"save_rollouts": 1, "steps": 2, "minibatches": 1, "eval_every": 9, "seed": 0}
    compose = functools.partial(remax, kl_coef=0.0)
    logged = LoggedEnvironment(Branching.agents)
    first, again = (episode_job(compose, environment, **settings) for environment in (Branching(), logged))
    train_loop(first, single(), Quiet(str(tmp_path / "checkpoints")))
    seeds = [episode.seed for episode in read_episodes(tmp_path / "rollouts", 1)]
    assert len(set(seeds)) == len(seeds) > 0
    assert unlike(replay(again, tmp_path, None, single(), Quiet(), logged)) == []


class Unasked:
    """No method may be called."""

    def __init__(self, agents):
        self.agents = agents

    async def run(self, policy, example, seed):
        raise AssertionError("the environment is called")


def test_rows_are_trained_on_without_an_environment(run):
    folder, agents, settings = run
    done = replayed(folder, job(Unasked(agents), **settings), None)
    assert [item.step for item in done] == [1, 2] and unlike(done) == []


@pytest.mark.gloo
@pytest.mark.slow
def test_on_another_mesh_the_numbers_are_nearly_the_same(tmp_path):
    environment, agents, settings = RUNS["frozen"]
    settings = settings | {"steps": 1}
    folder = trained(tmp_path, environment(), mesh="dp2", **settings)
    for done in (generated(folder, agents, **settings), replayed(folder, job(Unasked(agents), **settings), None)):
        assert [name for name in unlike(done, 1e-9) if "digests" not in name[1]] == []
    assert unlike(generated(folder, agents, mesh="dp2", **settings)) == []


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The folder of a run of one step, the names of its agents, and its settings."""
    environment, agents, settings = RUNS["frozen"]
    settings = settings | {"steps": 1}
    return trained(tmp_path_factory.mktemp("short"), environment(), **settings), agents, settings


@pytest.mark.slow
def test_a_differing_token_is_named(short, tmp_path):
    folder, agents, settings = short
    folder = shutil.copytree(folder, tmp_path / "other")
    file = folder / "rollouts/step-1/episodes-0.jsonl"
    lines = file.read_text().splitlines()
    number, seed, record = json.loads(lines[4])
    place = [i for i, node in enumerate(record[0]) if node["sampled"]][1]
    tokens = record[0][place]["tokens"]
    tokens[-1] = (tokens[-1] + 1) % 10
    lines[4] = json.dumps([number, seed, record])
    file.write_text("\n".join(lines))
    differences = [part for part in generated(folder, agents, **settings)[0].differences if part.count]
    turns = [part.name for part in differences if part.kind == "turns"]
    assert str(differences[0]) == turns[0]
    assert turns[0].startswith(f"episode {number} ('") and f", token {len(tokens) - 1}: " in turns[0]
    assert f"{tokens[-1]} in the log" in turns[0] and "turn 1 of policy" in turns[0]


def test_weights_of_another_digest_are_named(short, tmp_path):
    folder, agents, settings = short
    folder = shutil.copytree(folder, tmp_path / "other")
    file = folder / "rollouts/step-1/record.json"
    record = json.loads(file.read_text())
    leaf = next(iter(record["weights"]["policy"]))
    record["weights"]["policy"][leaf] = "0"
    file.write_text(json.dumps(record))
    differences = replayed(folder, job(Unasked(agents), **settings), 1)[0].differences
    assert [(part.kind, part.where) for part in differences if part.count] == [("digests", leaf)]


def test_episodes_that_are_not_there_or_damaged(tmp_path):
    with pytest.raises(CheckpointError, match="step-1 has no episodes"):
        read_episodes(tmp_path, 1)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/episodes-0.jsonl").write_text("{}\n")
    with pytest.raises(DamagedError, match=r"episodes-0\.jsonl: it cannot be read"):
        read_episodes(tmp_path, 1)


def test_an_episode_that_the_log_lacks_is_named(short):
    folder, agents, settings = short
    with pytest.raises(RewardError, match="the log has no episode of the prompt "):
        generated(folder, agents, **settings | {"seed": 5})


def test_what_is_saved_is_all_of_an_episode(short):
    folder, _, _ = short
    episodes = read_episodes(folder / "rollouts", 1)
    assert sorted(logged.number for logged in episodes) == list(range(12))
    for logged in episodes:
        for end in logged.episode.ends:
            for node in end.nodes():
                assert node.tokens
                if node.sampled:
                    assert node.sampling is not None and node.seed is not None and node.finish
                    assert len(node.raw_logp) == len(node.sampling_logp) == len(node.versions) == len(node.tokens)
        assert set(logged.episode.rewards) == {"policy", "rival"}
