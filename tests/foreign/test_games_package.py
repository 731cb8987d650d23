"""Training on games of textarena and a task of reasoning-gym, where they are installed (.ci/setup_environments)."""

import pytest
from foreign_runs import page_module

import funrl

small_model = page_module("small_model")


@pytest.mark.slow
@pytest.mark.parametrize(
    "env,arguments",
    [
        ("env_textarena.py:textarena_game", {"name": "GuessTheNumber-v0", "games": 8}),
        ("env_textarena.py:textarena_game", {"name": "KuhnPoker-v0", "players": 2, "games": 8}),
        ("env_reasoning_gym.py:reasoning_task", {"name": "chain_sum", "size": 8, "max_terms": 2, "attempts": 2}),
    ],
)
def test_a_random_model_is_trained_on_a_game(env, arguments, tmp_path, monkeypatch):
    package = env.removeprefix("env_").partition(".py:")[0]
    pytest.importorskip(package, reason="it is not installed: .ci/setup_environments")
    monkeypatch.chdir(tmp_path)
    small_model.save_small_model()
    run = funrl.train(
        "grpo",
        model="MODEL_DIR",
        env=f"examples/{env}",
        env_args=arguments,
        run_dir="game",
        episode_turns=3,
        env_workers=2,
        **small_model.SHORT | {"steps": 2},
    )
    assert len(run.metrics) == 2
    for metrics in run.metrics:
        assert metrics["rollout/logprob_gap_max"] == 0 and metrics["episodes/failed"] == 0
        assert 1 <= metrics["episodes/turns"] <= 3
