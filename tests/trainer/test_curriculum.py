"""Curricula and difficulty: which prompts a step takes, the same on every mesh and after a resumption."""

import dataclasses

import numpy as np
import pytest
import torch
from small_runs import GRPO, Quiet, begin, small_job
from test_checkpoint import assert_equal_steps, run, run_to_resume

from funrl.data.order import places_in_order
from funrl.data.prompts import Example
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.trainer.phases import draw_batch
from funrl.trainer.settings.checks import Difficulty, difficulty_of
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources.curriculum import CurriculumError, names_taken, weighing

PROMPTS = [Example([1] * n, str(n), {"level": n % 3}) for n in range(1, 7)]
FILE = """
def short_first(prompts, metrics, step, state, pass_rates):
    longest = state.get("longest", 5) + (metrics.get("reward/mean", 0) > 0.1)
    assert len(pass_rates) == len(prompts) and all("answer" in one for one in prompts)
    return [float(len(one["prompt"]) <= longest) for one in prompts], {"longest": longest, "seen": sorted(metrics)[:3]}
"""
PARTIAL = {"max_new_tokens": 12, "new_tokens_per_step": 3, "minibatches": 1}


def weigh(function, **given):
    return weighing(PROMPTS, function, given.pop("difficulty", None), given.pop("weights", (1.0,)), single())


def test_a_function_is_given_what_it_names_and_its_state_comes_back():
    def by_level(prompts, state, step):
        assert prompts[2] == {"prompt": "3", "level": 0}
        return [prompt["level"] == len(state.get("steps", [])) for prompt in prompts], {
            "steps": [*state.get("steps", []), step]
        }

    made = weigh(by_level)
    memory = made.init()
    for step, level in ((1, 0), (2, 1), (3, 2)):
        weights, memory, metrics = made.weights(memory, step)
        assert weights.tolist() == [example.fields["level"] == level for example in PROMPTS]
        assert metrics == {"curriculum/chosen_share": pytest.approx(1 / 3)}
        memory = made.observed(memory, {"x": 1.0})
    assert all(isinstance(x, torch.Tensor) for x in memory.values())


def test_metrics_are_those_of_the_last_step_and_of_the_newest_evaluation():
    seen = []
    made = weigh(lambda metrics: seen.append(dict(metrics)) or np.ones(6))
    state = made.init()
    for step, metrics in enumerate(({"a": 1.0, "eval/reward": 0.5}, {"a": 2.0}, {"b": float("nan")}), 1):
        _, state, _ = made.weights(state, step)
        state = made.observed(state, metrics)
    made.weights(state, 4)
    assert seen[:3] == [{}, {"a": 1.0, "eval/reward": 0.5}, {"a": 2.0, "eval/reward": 0.5}]
    assert seen[3]["eval/reward"] == 0.5 and np.isnan(seen[3]["b"]) and "a" not in seen[3]


def test_pass_rates_are_measured_and_forgotten_by_halves():
    rates = []
    made = weigh(lambda pass_rates: rates.append(pass_rates.tolist()) or np.ones(6), weights=(2.0, -1.0))
    state = made.init()
    scores = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.5, 0.0], [1.0, 2.0], [1.0, 0.0], [1.0, 0.0]])
    state = made.measured(state, np.array([1, 4, 1]), scores)  # the same prompt twice
    state = made.measured(state, np.array([4]), torch.tensor([[1.0, 0.0], [1.0, float("nan")]]))
    made.weights(state, 1)
    nan = float("nan")
    assert np.allclose(rates, [[nan, 0.75, nan, nan, (0.5 / 2 + 2) / (1 + 2), nan]], equal_nan=True)


def test_prompts_outside_of_the_difficulty_have_less_weight():
    made = weigh(None, difficulty=Difficulty(0.25, 0.75, 0.1))
    state = made.init()
    assert made.weights(state, 1)[0].tolist() == [1.0] * 6  # nothing is measured yet
    state = made.measured(state, np.arange(4), torch.tensor([0.0, 0, 0, 1, 1, 1, 0.5, 0])[:, None])
    weights, _, metrics = made.weights(state, 2)
    assert weights.tolist() == [0.1, 1.0, 0.1, 1.0, 1.0, 1.0]
    assert metrics == {"difficulty/measured_share": pytest.approx(4 / 6), "difficulty/outside_share": 0.5}
    both = weighing(PROMPTS, lambda: np.arange(6), Difficulty(0.25, 0.75, 0.1), (1.0,), single())
    assert both.weights({**state, "curriculum": torch.zeros(0, dtype=torch.uint8)}, 2)[0][[0, 2, 5]].tolist() == [
        0,
        0.2,
        5,
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompts: [1.0], r"gave weights of shape \[1\]; 6 finite numbers"),
        (lambda prompts: [-1.0] * 6, "of at least 0 are needed"),
        (lambda prompts: 1 / 0, "failed at step 3:\nTraceback(.|\n)*ZeroDivisionError"),
        (lambda state: ([1.0] * 6, {1, 2}), "not JSON serializable"),
        (lambda prompts: [0] * 6, "step 3: every prompt has weight 0"),
    ],
)
def test_a_curriculum_that_fails_says_why(function, message):
    """In its own frames: those of funrl explain nothing."""
    made = weigh(function)
    with pytest.raises(CurriculumError, match=message) as caught:
        made.weights(made.init(), 3)
    assert "trainer/sources/curriculum.py" not in str(caught.value)


def test_what_cannot_work_is_refused():
    with pytest.raises(
        SettingsError, match="takes 'model'; its arguments may be prompts, metrics, step, pass_rates, state"
    ):
        names_taken(lambda prompts, model: 0)
    with pytest.raises(SettingsError, match="need a --reward of positive weight"):
        weigh(None, difficulty=Difficulty(0.1, 0.9, 0.1), weights=(-1.0,))
    assert difficulty_of("0.1,0.9") == (0.1, 0.9, 0.1) and difficulty_of("0,1,0") == (0, 1, 0)
    for text in ("", "0.5", "0.9,0.1", "0,2", "0,1,1", "a,b", "0,1,0,0"):
        with pytest.raises(SettingsError, match="write LOW,HIGH or LOW,HIGH,WEIGHT"):
            difficulty_of(text)


def drawn_texts(job, steps=3):
    """The prompts of some steps' batches, and their metrics."""
    started, state = begin(job, single())
    results = []
    for _ in range(steps):
        rows, state, metrics = draw_batch(started, state)
        batch = rows.batch
        texts = [
            job.tokenizer.decode(row[~mask][: text.index("=") + 1].tolist())
            for row, mask, text in zip(
                batch.tokens, batch.mask, map(job.tokenizer.decode, batch.tokens.tolist()), strict=True
            )
        ]
        results.append((sorted(texts), metrics))
    return results


@pytest.mark.parametrize("more", [{}, PARTIAL], ids=["whole", "partial"])
def test_a_step_takes_the_prompts_that_the_weights_choose(more):
    job = small_job(GRPO, batch_prompts=3, **more)
    longest = max(len(prompt.text) for prompt in job.task.prompts)
    chosen = dataclasses.replace(
        job,
        task=job.task._replace(
            curriculum=lambda prompts: [float(len(prompt["prompt"]) == longest) for prompt in prompts]
        ),
    )
    plain, weighted = drawn_texts(job), drawn_texts(chosen)
    assert any(len(text) < longest for texts, _ in plain for text in texts)
    assert all(len(text) == longest for texts, _ in weighted for text in texts)
    assert weighted[0][1]["curriculum/passed_over"] > 0
    everything = dataclasses.replace(job, task=job.task._replace(curriculum=lambda prompts: np.full(len(prompts), 3.0)))
    assert [texts for texts, _ in drawn_texts(everything)] == [texts for texts, _ in plain]


@pytest.mark.parametrize("more", [{}, PARTIAL], ids=["whole", "partial"])
def test_prompts_that_are_solved_are_left_alone_from_then_on(more):
    def solved(prompt, completion, **fields):
        return float(len(prompt) % 2)

    job = small_job(GRPO, reward=solved, batch_prompts=6, difficulty="0.1,0.9,0", **more)
    job = dataclasses.replace(job, task=job.task._replace(prompts=job.task.prompts[:40]))
    started, state = begin(job, single())
    seen = []
    for _ in range(3):
        before = state.source["prompts_consumed"]
        _, state, metrics = draw_batch(started, state)
        after = state.source["prompts_consumed"]
        measured = state.source["curriculum"]["samples"].nonzero().flatten().tolist()
        assert set(seen) <= set(measured)
        seen, passed = measured, metrics["curriculum/passed_over"]
        assert passed == 0 or after - before > passed
    assert metrics["difficulty/outside_share"] == 1.0 and len(seen) >= 18  # every prompt is new
    assert len(set(places_in_order(job.task.prompts, 18, 0, 0).tolist())) == 18


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_prompts_bit_for_bit(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    settings = {"compose": GRPO, "curriculum": f"{tmp_path}/own.py:short_first", "difficulty": "0.2,0.8", **PARTIAL}
    _, steps, _, weights = run_to_resume(tmp_path / "run", **settings)
    assert sum(metrics["curriculum/passed_over"] for _, metrics in steps) > 3
    _, resumed, notes, ends = run(tmp_path / "run", resume=True, run_dir="x", **settings)
    assert_equal_steps(resumed, steps[1:])
    assert all(map(torch.equal, ends, weights)) and not any("different order" in note for note in notes)


@pytest.mark.slow
def test_a_resumed_run_with_other_prompts_is_told(tmp_path):
    (tmp_path / "own.py").write_text(
        "def score(prompt, completion, **fields):\n    return float(len(completion) % 2)\n"
    )
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "1+1="}\n' * 12)
    settings = {"compose": GRPO, "prompts": str(prompts), "reward": f"{tmp_path}/own.py:score"}
    run_to_resume(tmp_path / "run", steps=2, **settings)
    prompts.write_text('{"prompt": "1+1="}\n' * 30)
    _, _, notes, _ = run(tmp_path / "run", resume=True, run_dir="x", **settings)
    assert any("the run continues at the same position of a different order" in note for note in notes)


@pytest.mark.gloo
def test_every_rank_takes_the_prompts_that_the_first_one_chooses():
    def random(prompts):  # of numbers that differ by rank
        return np.random.random(len(prompts))

    job = small_job(GRPO, mesh="dp2")
    job = dataclasses.replace(job, task=job.task._replace(curriculum=random))

    def program(mesh):
        started, state = begin(job, mesh, Quiet())
        _, state, _ = draw_batch(started, state)
        return gather_objects(state.source["prompts_consumed"], mesh)

    first, second = launch(program, job.sizes, "cpu")
    assert first == second
