"""Runs that generate with vLLM inside of the trainer's processes: its log-probabilities are the trainer's."""

import functools
import importlib.util
import random
import socket
import subprocess
import sys

import pytest
import torch
from small_runs import GRPO, PPO, Quiet, begin, run_steps, scored_batch, small_job
from test_episode_runs import episode_job

from funrl.algos import (
    Algorithm,
    add,
    apply_advantage,
    chain,
    clipped_surrogate,
    group_center,
    importance_weights,
    masked_importance,
    reduce,
    sequence_mean,
    sequence_ratio,
    to_tokens,
    weighted,
)
from funrl.batch import with_rows_spread
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.rollout.episodes import Episode
from funrl.rollout.vllm.client import EngineServerError
from funrl.tasks.calculator import calculator_environment
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.settings.declaration import SettingsError

SIZES = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 32, "mlp": 48}
VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not VLLM, reason="no vLLM here: ./test --all makes .venv-vllm for it")


@needs_vllm
@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["tp2", "dp1"])
def test_steps_of_ppo_have_the_trainers_log_probabilities(mesh):
    settings = {"dtype": "float32", "mesh": mesh, "generate_mesh": mesh, "temperature": 0.8, "max_new_tokens": 8}
    done, peer = (run_steps(3, compose=PPO, sizes=SIZES, engine=engine, **settings) for engine in ("vllm", "native"))
    assert all(0 < reported["rollout/logprob_gap_max"] < 1e-4 for reported in done["metrics"])
    # The noise is the same, so the native engine draws the same tokens, and learns the same.
    for one, other in zip(done["batches"], peer["batches"], strict=True):
        assert one.tokens.equal(other.tokens)
        assert (one.rollout_logp - other.rollout_logp).abs().max() < 1e-4


@needs_vllm
def test_steps_with_a_server_are_those_of_the_native_engine():
    command = [sys.executable, "-m", "funrl.rollout.vllm.server", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        try:
            flags = {"engine": "vllm_server", "engine_url": url}
            done = run_steps(2, compose=GRPO, sizes=SIZES, dtype="float32", **flags)
        finally:
            server.kill()
    peer = run_steps(2, compose=GRPO, sizes=SIZES, dtype="float32")
    for one, other in zip(done["batches"], peer["batches"], strict=True):
        assert one.tokens.equal(other.tokens)
        assert (one.rollout_logp - other.rollout_logp).abs().max() < 1e-4


@needs_vllm
@pytest.mark.gloo
def test_a_server_generates_for_ranks_that_only_generate():
    command = [sys.executable, "-m", "funrl.rollout.vllm.server", "--port=0"]
    settings = {"sizes": SIZES, "dtype": "float32", "place": "train:dp1 generate:dp1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        try:
            served = placed_steps(engine="vllm_server", engine_url=url, **settings)
        finally:
            server.kill()
    native = placed_steps(**settings)
    assert len(served) == 3 and [x["reward/mean"] for x in served] == [x["reward/mean"] for x in native]
    assert all(0 < metrics["rollout/logprob_gap_max"] < 1e-4 for metrics in served)


def placed_steps(**settings):
    """Metrics of the steps of a run whose ranks train or generate."""
    job = small_job(GRPO, **settings)
    return launch(functools.partial(steps_of_rank, job), job.launched, "cpu")


def steps_of_rank(job, mesh):
    observer = Quiet()
    outcome = run_rank(job, mesh, observer)
    assert outcome.error is None
    return [metrics for _, metrics in observer.steps]


class Tree:
    """Branches and retries that the example decides, two agents, and rewards by turn."""

    agents = ("policy", "judge")

    async def run(self, policy, example, seed):
        chance = random.Random(seed)
        ends = [(await policy.sample(policy.start(example.tokens), max_tokens=4))[1]]
        for _ in range(4):
            heard = policy.extend(chance.choice(ends), [5, 6][: chance.randint(1, 2)])
            ends.append((await policy.sample(heard, max_tokens=chance.randint(1, 5)))[1])
        verdict = (await policy.sample(policy.start([7, *example.tokens], agent="judge"), max_tokens=2))[1]
        rewards = {"policy": chance.random(), "judge": chance.choice([None, 0.5])}
        return Episode([*ends, verdict], rewards, {ends[0].leaf: 0.25})


ENVIRONMENTS = {"calculator": calculator_environment, "tree": Tree}


def bounded():
    """A loss with the engine's log-probabilities in it, by token and by episode."""
    advantage = chain(importance_weights("geometric", 0.5, 2.0), group_center(), to_tokens())
    term = weighted(clipped_surrogate(ratio=sequence_ratio()))
    return Algorithm(advantage, {"policy": reduce(add(term, masked_importance()), sequence_mean())})


def golden(algorithm, batch):
    """Loss and gradient of rows, as numbers."""
    made = apply_advantage(algorithm.advantage, algorithm.advantage.init(), batch)[0]
    logp = (made.old_logp.double() + 0.1 * torch.arange(made.mask.shape[1]).sin()).requires_grad_()
    loss, _ = algorithm.losses["policy"](logp, with_rows_spread(made))
    (gradient,) = torch.autograd.grad(loss, logp)
    return torch.stack([loss.detach(), gradient.norm(), gradient.abs().max()])


@needs_vllm
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_episodes_have_the_trainers_log_probabilities_and_the_native_engines_numbers(name):
    """On what vLLM sampled: a draw within rounding of a boundary may give another token than the native engine's."""
    settings = {"dtype": "float32", "samples_per_prompt": 4, "max_new_tokens": 6, "sizes": SIZES}
    made = {}
    for engine in ("vllm", "native"):
        run, state = begin(episode_job(bounded, ENVIRONMENTS[name](), engine=engine, **settings), single())
        rows, _, _ = scored_batch(run, state)
        made[engine] = rows.batch
    batch = made["vllm"]
    gap = (batch.rollout_logp - batch.old_logp)[batch.mask].abs()
    assert 0 < gap.max() < 1e-5 and batch.mask.sum() > 60
    assert name == "calculator" or (not batch.episode_first.all() and batch.agent.max() == 1)
    exact = batch._replace(rollout_logp=batch.old_logp)  # a native engine's, whose gap is 0
    chosen = bounded()
    torch.testing.assert_close(golden(chosen, batch), golden(chosen, exact), rtol=1e-5, atol=1e-5)
    peer = made["native"]
    same = batch.tokens.shape == peer.tokens.shape and batch.tokens.equal(peer.tokens)
    if same:  # no draw was so close
        assert (batch.rollout_logp - peer.rollout_logp).abs().max() < 1e-5
        torch.testing.assert_close(golden(chosen, batch), golden(chosen, peer), rtol=1e-5, atol=1e-5)


def test_the_servers_of_a_run_are_one_for_each_data_rank():
    flags = {"engine": "vllm_server", "dtype": "float32", "engine_url": "http://a:1,http://b:2"}
    assert small_job(GRPO, mesh="dp2", **flags)
    for more, message in (
        ({"mesh": "dp1"}, "2 servers, which hold whole models, .* each of its 1 data ranks"),
        ({"mesh": "dp2,tp2", "generate_mesh": "dp2,tp2"}, "a --generate_mesh without tp"),
        ({"engine_url": "http://a"}, "http://a is not http://HOST:PORT"),
        ({"engine_url": None}, "--engine=vllm_server needs --engine_url"),
        ({"engine": "native"}, "does nothing without --engine=vllm_server"),
        ({"engine_url": None, "engine": "native", "engine_timeout": 3.0}, "--engine_timeout=3.0 does nothing"),
    ):
        with pytest.raises(SettingsError, match=message):
            small_job(GRPO, **{"mesh": "dp2"} | flags | more)


def test_a_run_waits_for_its_server_and_names_it():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        flags = {"engine": "vllm_server", "dtype": "float32", "engine_url": url, "engine_timeout": 0.2}
        with pytest.raises(EngineServerError, match=f"{url} has not answered for 0.2 s"):
            begin(small_job(GRPO, **flags), single())


@pytest.mark.skipif(VLLM, reason="vLLM is installed here")
def test_without_vllm_a_run_says_what_to_install():
    with pytest.raises(SettingsError, match=r"--engine=vllm: vLLM is not installed beside funrl: .*setup_vllm"):
        small_job(GRPO, engine="vllm", dtype="float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, "vLLM has no float64; use --dtype=float32 or bfloat16"),
        ({"dtype": "float32", "kv_cache_gb": 1e-5}, "a cache of 1e-05 GB is too small: .* 64 tokens, 0.00026 GB"),
        ({"dtype": "float32", "dry_run": True}, "--dry_run counts the native engine"),
    ],
)
def test_a_run_that_vllm_cannot_generate_for_is_refused(settings, message):
    with pytest.raises(SettingsError, match=f"--engine=vllm: .*{message}"):
        small_job(GRPO, engine="vllm", **settings)
