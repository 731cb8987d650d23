"""Runs by the clock of their engines are the same twice, whatever waits: no log is needed."""

import asyncio
import contextlib
import functools
import json
import random
import time
from unittest import mock

import pytest
import torch
from small_runs import MEASURED, Quiet, small_job
from test_episode_runs import episode_job
from test_placement_runs import Ended, check_ages

from funrl import trees
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.mesh.launch import launch
from funrl.mesh.pools.transfer import WeightReceiver, WeightSender
from funrl.rollout.episodes import Episode
from funrl.rollout.native.engine import NativeEngine
from funrl.trainer import phases
from funrl.trainer.placement.logged import read_groups
from funrl.trainer.placement.paced import PacedWriter
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.settings.declaration import SettingsError

pytestmark = pytest.mark.gloo
OWN = ("memory/", "sync/bytes", "sync/hidden_share", "wait/")
SETTINGS = {
    "minibatches": 1,
    "steps": 4,
    "staleness": 2,
    "clock": "tokens",
    "max_new_tokens": 12,
    "decode_rows": 3,
    "eval_every": 2,
    "place": "train:dp1 generate:dp2",
}


def sleepy(function, pauses, longest_s):
    """The function, before whose calls the process sleeps now and then."""

    @functools.wraps(function)
    def after_a_pause(*args, **kwargs):
        if pauses.random() < 0.3:
            time.sleep(pauses.uniform(0, longest_s))
        return function(*args, **kwargs)

    return after_a_pause


SLEEPS = (
    (NativeEngine, "step", 0.01),
    (WeightSender, "_attempt", 0.2),
    (WeightReceiver, "_receive_next", 0.2),
    (phases, "learn_batch", 0.3),
)


def slowed(job, seed, folder, mesh, pool=None):
    """A run of this rank whose parts sleep at random."""
    observer = Quiet(folder)
    with contextlib.ExitStack() as stack:
        for place, (owner, name, longest_s) in enumerate(SLEEPS if seed else ()):
            pauses = random.Random(1000 * seed + 100 * place + mesh.rank)
            stack.enter_context(mock.patch.object(owner, name, sleepy(getattr(owner, name), pauses, longest_s)))
        outcome = run_rank(job, mesh, observer, pool=pool)
    weights = getattr(observer, "params", None)
    observer.params = None
    return Ended(outcome, observer, weights)


def run(seed, folder, **settings):
    settings = {"save_rollouts": 1} | SETTINGS | settings
    job = small_job(rollout_is, **settings)
    return launch(functools.partial(slowed, job, seed, str(folder / "checkpoints")), job.launched, "cpu")


def differences(first, other):
    """What two runs differ in: samples, tables, metrics that are no seconds and weights, to the bit."""
    assert first.outcome.error is None and other.outcome.error is None
    results = [name for name in ("shown", "table") if getattr(first.observer, name) != getattr(other.observer, name)]
    for (step, a), (_, b) in zip(first.observer.steps, other.observer.steps, strict=True):
        names = [name for name in a | b if not name.startswith(OWN) and not name.endswith((*MEASURED, "_s"))]
        results += [f"{name} of step {step}" for name in names if a.get(name) != b.get(name)]
    weights = zip(trees.named(first.weights), trees.leaves(other.weights), strict=True)
    return results + [name for (name, a), b in weights if not torch.equal(a, b)]


def differing_files(folders, steps):
    """Saved rows and groups that differ: tokens, versions, log-probabilities, and who wrote which group when."""
    results = []
    for step in range(1, steps + 1):
        paths = [folder / "rollouts" / f"step-{step}" for folder in folders]
        names = [path.name for path in paths[0].glob("*.safetensors")]
        assert "rows-0.safetensors" in names
        results += [f"{name} of step {step}" for name in names if len({(p / name).read_bytes() for p in paths}) > 1]
        records = [json.loads((path / "record.json").read_text()) for path in paths]
        assert len(records[0]["groups"]) == 4
        results += [f"{name} of step {step}" for name in ("groups", "weights") if records[0][name] != records[1][name]]
    return results


@pytest.mark.slow
def test_two_runs_have_the_same_bits_whatever_sleeps(tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    first, other = (run(seed, folder, window=3, probe_sync_every=2) for seed, folder in enumerate(folders, 1))
    assert differences(first, other) + differing_files(folders, 4) == []
    log = read_groups(folders[0])
    assert log is not None
    switches = [sample for groups in log.by_step.values() for group in groups for sample in group.switches]
    assert any(len(sample) > 1 for sample in switches), "no completion is of several versions"
    steps = [metrics for _, metrics in first.observer.steps]
    check_ages(steps, 2 + 1)
    assert max(metrics["age/max"] for metrics in steps) > 0, "nothing was written during an update"


EPISODES = {"task": "calculator", "reward": None, "episode_turns": 3, "save_rollouts": 0}


@pytest.mark.slow
def test_so_have_two_runs_with_an_environment_in_workers(tmp_path):
    settings = EPISODES | {"place": "generate:1", "steps": 3, "env_workers": 1}
    first, other = (run(seed, tmp_path / str(seed), **settings) for seed in (1, 2))
    assert differences(first, other) == []
    assert max(metrics["age/max"] for _, metrics in first.observer.steps) > 0


class Late:
    """An environment of one to four turns whose answers take time, each as long as it likes."""

    delay_steps = 2

    async def run(self, policy, example, seed):
        trajectory = policy.start(example.tokens)
        for _ in range(1 + sum(example.tokens) % 4):
            await asyncio.sleep(random.SystemRandom().uniform(0, 0.02))
            _, trajectory = await policy.sample(trajectory, max_tokens=3)
        return Episode([trajectory], {"policy": float(trajectory.leaf.tokens[0] % 2)})


def noting_evaluations(file, job, seed, mesh, pool=None):
    """`slowed`, with the iterations that this rank's engine took for evaluations in a file."""
    close = PacedWriter.close

    def noted(writer):
        file.write_text(str(writer._heldout.tick))
        close(writer)

    with mock.patch.object(PacedWriter, "close", noted):
        return slowed(job, seed, None, mesh, pool)


@pytest.mark.slow
def test_the_engine_waits_for_late_answers(tmp_path):
    runs = {}
    for delay, seeds in {1: (1,), 20: (1, 2)}.items():
        environment = Late()
        environment.delay_steps = delay
        settings = SETTINGS | {"staleness": 1, "place": "generate:1", "decode_rows": 8, "steps": 3}
        job = episode_job(rollout_is, environment, **settings)
        programs = [functools.partial(noting_evaluations, tmp_path / str(seed), job, seed) for seed in seeds]
        runs[delay] = [launch(program, job.launched, "cpu") for program in programs]
    assert differences(*runs[20]) == []
    assert (tmp_path / "1").read_text() == (tmp_path / "2").read_text() != "0"
    ages = [[metrics["age/mean"] for _, metrics in item.observer.steps] for item, *_ in runs.values()]
    assert ages[0] != ages[1], "a switch of weights does not stand at another token where answers take longer"


def test_joined_generators_have_no_clock():
    with pytest.raises(SettingsError, match="--clock=tokens with --place=generate:join: generators join when they"):
        small_job(rollout_is, **SETTINGS | {"place": "generate:join"})
    with pytest.raises(SettingsError, match="--clock=tokens does nothing without --staleness"):
        small_job(rollout_is, clock="tokens")


@pytest.mark.parametrize("delay", [-1, 0.5, "2"])
def test_answers_take_whole_iterations(delay, monkeypatch):
    settings = SETTINGS | {"task": "calculator", "reward": None}
    environment = small_job(rollout_is, **settings).task.environment
    monkeypatch.setattr(type(environment), "delay_steps", delay, raising=False)
    with pytest.raises(SettingsError, match=f"--clock=tokens: the environment's delay_steps is {delay!r}; give"):
        small_job(rollout_is, **settings)
    small_job(rollout_is, **settings | {"clock": "wall"})
