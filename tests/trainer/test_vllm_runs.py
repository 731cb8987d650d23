"""Runs that generate with vLLM inside of the trainer's processes: its log-probabilities are the trainer's."""

import importlib.util
import socket
import subprocess
import sys

import pytest
from small_runs import GRPO, PPO, begin, run_steps, small_job

from funrl.mesh.mesh import single
from funrl.rollout.vllm.client import EngineServerError
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
