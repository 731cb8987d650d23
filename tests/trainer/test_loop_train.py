"""`train` with a run directory: the same lines on every mesh, a model that loads, an end by a failing reward."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import GRPO, gap, run_steps, small_job

from funrl.algos import clipped_surrogate, token_mean
from funrl.algos.core import reduce, scale
from funrl.data.prompts import prompt_batch
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.models.huggingface import directories as hf
from funrl.track.observe import RunObserver
from funrl.track.records.run_directory import open_run
from funrl.trainer.loop import train_loop

pytestmark = pytest.mark.gloo
MEASURED = ("time_s/", "perf/tokens_per_s", "memory/")  # these differ from run to run


def train_in(folder, **settings):
    """The outcome, the lines of metrics and the run directory of a run of three steps."""
    job = small_job(eval_every=2, sample_every=2, **settings)
    run_dir = str(open_run(str(folder), "ppo", {"seed": 0}).path)

    def program(mesh):
        with RunObserver(job, run_dir, mesh.rank) as observer:
            return train_loop(job, mesh, observer)

    outcome = launch(program, job.sizes, "cpu")
    return outcome, lines_of(Path(run_dir) / "metrics.jsonl"), Path(run_dir)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train_in(tmp_path_factory.mktemp("runs") / "one")


def test_a_run_writes_a_line_a_step_and_evaluates_first_and_last(alone):
    outcome, lines, run_dir = alone
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert ["eval/reward" in line for line in lines] == [True, True, True]
    assert not any("eval/accuracy" in line for line in lines)  # its reward is no verdict
    assert (lines[0]["eval/reward"], lines[2]["eval/reward"]) == (
        outcome.first["eval/reward"],
        outcome.last["eval/reward"],
    )
    assert outcome.error is None
    for name in (
        "reward/mean",
        "actor/pg_loss",
        "actor/ppo_kl",
        "actor/grad_norm",
        "critic/vf_loss",
        "time_s/step",
        "time_s/reward",
        "response_length/mean",
        "rollout/logprob_gap_max",
        "perf/tokens_per_s",
        "memory/peak_gb",
    ):
        assert all(isinstance(line[name], float) for line in lines), name
    samples = lines_of(run_dir / "samples.jsonl")
    assert {s["step"] for s in samples} == {0, 1, 2, 3}


@pytest.mark.slow
def test_the_same_lines_and_samples_on_every_mesh(alone, tmp_path):
    _, expected, first = alone
    _, lines, run_dir = train_in(tmp_path / "other", mesh="dp2")
    for a, b in zip(lines, expected, strict=True):
        assert a.keys() == b.keys()
        kept = [k for k in b if not k.startswith(MEASURED)]
        assert {k: a[k] for k in kept} == pytest.approx({k: b[k] for k in kept}, rel=1e-9, abs=1e-9)
    results = [
        s | {"reward": pytest.approx(s["reward"])} if "reward" in s else s for s in lines_of(first / "samples.jsonl")
    ]
    assert lines_of(run_dir / "samples.jsonl") == results


def test_the_saved_model_is_the_one_that_was_trained(alone):
    """`run_steps` is the loop without observer and evaluations: these change nothing."""
    model, saved = hf.load(alone[2] / "model", torch.float64)
    assert model.config.embed == 16
    assert gap(saved, run_steps(3)["weights"]["policy"]) < 1e-9


@pytest.mark.slow
def test_what_goes_wrong_is_said_once_and_not_again_by_a_resumed_run(tmp_path, capsys):
    def notes_of(steps):
        job = small_job(GRPO, steps=steps, reward=lambda prompt, completion, **fields: 0.5)
        with RunObserver(job, str(tmp_path), 0) as observer:
            observer.resumed(steps - 4)
            train_loop(job, single(), observer)
        return capsys.readouterr().out

    (tmp_path / "model").mkdir()
    first = notes_of(4)
    assert first.count("step 3: every reward of the last three steps was 0.5") == 1, first
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [line["reward/equal_groups"] for line in lines] == [1.0] * 4
    assert "every reward" not in notes_of(8)


@pytest.mark.slow
def test_a_reward_that_fails_ends_the_run_with_what_was_trained(tmp_path):
    """Prompts 4 to 7 are those of step 2; the reward fails at one of them, on one rank."""
    bad = prompt_batch(small_job().task.prompts, 4, 0, 4)[1].text

    def reward(prompt, completion, **fields):
        return float("nan") if prompt == bad else len(completion) / 4

    outcome, lines, run_dir = train_in(tmp_path / "run", mesh="dp2", compose=GRPO, reward=reward)
    assert repr(bad) in outcome.error and "nan" in outcome.error.lower()
    assert [line["step"] for line in lines] == [1]
    _, saved = hf.load(run_dir / "model", torch.float64)
    trained = run_steps(1, compose=GRPO, reward=lambda prompt, completion, **fields: len(completion) / 4)
    assert gap(saved, trained["weights"]["policy"]) < 1e-9


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_not_applied(tmp_path):
    def broken():
        return replace(GRPO(), losses={"policy": reduce(scale(math.inf, clipped_surrogate()), token_mean())})

    outcome, lines, run_dir = train_in(tmp_path / "run", mesh="dp2", compose=broken, minibatches=1, max_skipped=2)
    assert outcome.error.startswith("step 2, policy: the gradient's norm is nan") and "--lr" in outcome.error
    assert "2 in a row were left out (--max_skipped=2)" in outcome.error
    assert [(line["step"], line["update/skipped"], "actor/pg_loss" in line) for line in lines] == [
        (1, 1, False),
        (2, 1, False),
    ]
    _, saved = hf.load(run_dir / "model", torch.float64)
    assert gap(saved, run_steps(0)["weights"]["policy"]) == 0
