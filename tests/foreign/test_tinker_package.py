"""Environments of the package tinker-cookbook, where it is installed (.ci/setup_environments)."""

import pytest
from env_tinker import tinker_environment
from foreign_runs import LIMITS, LONG, page_module, page_source
from small_chats import TOKENIZER, ScriptedEngine, examples_of, text

import funrl
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE

types = pytest.importorskip("tinker_cookbook.rl.types", reason="tinker-cookbook is not installed: setup_environments")
small_model = page_module("small_model")


def group_of(environment, *replies, count=2, **fields):
    left = list(replies)
    engine = ScriptedEngine(lambda prompt: left.pop(0) if len(left) > 1 else left[0])
    groups = episode_groups(examples_of("go", **fields), count, 0)
    return [episode for _, episode in run_episodes(engine, SINGLE, environment, groups, LONG, LIMITS).episodes]


def problems(question, answer, tokenizer):
    """A builder of the package's own problems, by its plainest renderer."""
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder

    class Problem(ProblemEnv):
        def get_question(self):
            return question

        def check_answer(self, sample_str):
            return answer in sample_str

        def check_format(self, sample_str):
            return True

        def get_reference_answer(self):
            return answer

    renderer = get_renderer("role_colon", tokenizer)
    return ProblemGroupBuilder(env_thunk=lambda: Problem(renderer), num_envs=2)


def test_problems_of_the_package_with_its_renderer():
    first, second = group_of(tinker_environment(problems), "4", "5", question="2+2?", answer="4")
    # ProblemEnv takes 0.1 off where a reply does not end with the renderer's own stop text.
    assert first.rewards["policy"] == pytest.approx(0.9) and second.rewards["policy"] == pytest.approx(-0.1)
    assert first.parts["correct"] == 1.0 and second.parts["correct"] == 0.0
    (end,) = first.ends
    assert text(end.token_ids()).startswith("User: 2+2?\n\nAssistant:4")


def test_group_rewards_get_the_records_of_the_package():
    seen = []

    class Compared(types.EnvGroupBuilder):
        async def make_envs(self):
            return await problems("2+2?", "4", TOKENIZER).make_envs()

        async def compute_group_rewards(self, trajectory_group, env_group):
            assert all(isinstance(element, types.Trajectory) for element in trajectory_group)
            seen.extend(entry.transitions[0].ac.logprobs for entry in trajectory_group)
            return [(float(len(item.transitions[0].ac.tokens)), {}) for item in trajectory_group]

    _, second = group_of(tinker_environment([Compared()]), "4", "55", group=0)
    assert second.rewards["policy"] - second.turn_rewards[second.ends[0].leaf] == 3.0
    assert [len(logp) for logp in seen] == [2, 3]


def test_the_example_of_the_page_trains_with_tokens_that_the_engine_sampled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "riddles.py").write_text(page_source("riddles"))
    small_model.save_small_model()
    run = funrl.train(
        "grpo",
        model="MODEL_DIR",
        prompts=[{"prompt": "go", "question": f"{n}+{n}?", "answer": str(2 * n)} for n in range(8)],
        env="examples/env_tinker.py:tinker_environment",
        env_args={"name": "riddles.py:Riddles"},
        run_dir="riddles",
        **small_model.SHORT | {"steps": 2},
    )
    assert run.metrics[-1]["rollout/logprob_gap_max"] == 0 and run.metrics[-1]["episodes/failed"] == 0
    assert run.metrics[-1]["episodes/turns"] >= 1 and run.metrics[-1]["reward/mean"] >= 0.05
