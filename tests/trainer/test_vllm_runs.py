"""Runs that generate with vLLM inside of the trainer's processes: its log-probabilities are the trainer's."""

import importlib.util

import pytest
from small_runs import GRPO, PPO, run_steps, small_job

from funrl.trainer.declaration import SettingsError

SIZES = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 32, "mlp": 48}
VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not VLLM, reason="no vLLM here: ./test --all makes .venv-vllm for it")


@needs_vllm
@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["tp2", "dp1"])
def test_steps_of_ppo_have_the_trainers_log_probabilities(mesh):
    settings = {"dtype": "float32", "mesh": mesh, "generate_mesh": mesh, "temperature": 0.8, "max_new_tokens": 8}
    done, peer = (run_steps(3, compose=PPO, sizes=SIZES, engine=engine, **settings) for engine in ("vllm", "native"))
    assert all(0 < told["rollout/logprob_gap_max"] < 1e-4 for told in done["metrics"])
    # The noise is the same, so the native engine draws the same tokens, and learns the same.
    for one, other in zip(done["batches"], peer["batches"], strict=True):
        assert one.tokens.equal(other.tokens)
        assert (one.rollout_logp - other.rollout_logp).abs().max() < 1e-4


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
