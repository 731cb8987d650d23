"""PPO steps with fixed seeds, in float64 on the CPU, against numbers in tests/golden: of all weights, and of adapters.

A change of the program that is meant to keep the numbers keeps them on every mesh. One that is meant to change them
writes them anew, and the difference is looked at:

    python tests/trainer/test_golden.py
"""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch
from small_runs import PPO, small_job, steps_program

from funrl import trees
from funrl.api.warm_start import warm_started
from funrl.mesh.launch import launch

pytestmark = pytest.mark.versions

FOLDER = Path(__file__).parent.parent / "golden"
FILE = FOLDER / "ppo.json"
STEPS = 5
RUNS = {"ppo": {}, "lora": {"lora_rank": 3, "lora_alpha": 6.0, "lr": 0.1, "steps": 3}}  # further flags of each file
METRICS = (
    "reward/mean",
    "reward/max",
    "response_length/mean",
    "critic/advantages/max",
    "critic/returns/mean",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/entropy",
    "critic/vf_loss",
    "critic/grad_norm",
    "rollout/logprob_gap_max",
)


def golden_run(mesh, name="ppo", count=None, **more):
    """Metrics of each step, or of the first `count`, and of the sampled tokens and the last weights what tells them
    apart."""
    compose = functools.partial(PPO, entropy_coef=0.01, kl_coef=0.05)
    settings = {
        "batch_prompts": 8,
        "samples_per_prompt": 4,
        "max_new_tokens": 6,
        "warmstart_steps": 40,
        "epochs": 2,
        "lr_schedule": "linear",
        "lr_warmup_steps": 2,
        "weight_decay": 0.01,
        "token_budget": 160,
        "steps": STEPS,
    }
    job = small_job(compose, mesh=mesh, reward=None, **settings | RUNS[name] | more)
    job = dataclasses.replace(job, task=job.task._replace(rewards=(answer_reward,)))
    with warm_started(job) as job:
        program = steps_program(job, count or job.settings.run.steps, with_gradients=False)
        done = launch(program, job.sizes, "cpu")
    steps = []
    for metrics, batch in zip(done["metrics"], done["batches"], strict=True):
        tokens = batch.tokens[batch.mask]
        number = int((tokens * torch.arange(1, len(tokens) + 1)).sum())
        steps.append(
            {"sampled/count": len(tokens), "sampled/number": number} | {k: metrics[k] for k in sorted(said(metrics))}
        )
    ends = {name: norms(tree) for name, tree in done["weights"].items()}
    return {"written by": "python tests/trainer/test_golden.py", "steps": steps, "end": ends}


def said(metrics):
    return [k for k in metrics if k in METRICS or "kl" in k]


def norms(tree):
    """The Euclidean norm of every leaf."""
    return {name: x.norm().item() for name, x in trees.named(tree)}


def answer_reward(prompt, completion, answer, **fields):
    """The share of places that hold the right digit, less a little for each that is too many or too few."""
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return right / len(answer) - 0.1 * abs(len(completion) - len(answer))


def test_five_steps_of_ppo():
    assert_golden(golden_run("dp1"), FILE, STEPS, 1e-12)


@pytest.mark.gloo
@pytest.mark.slow
def test_two_of_them_on_a_mesh():
    golden = json.loads(FILE.read_text())["steps"]
    assert_equal_steps(golden_run("dp2,tp2", count=2)["steps"], golden[:2], 1e-12)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh,more",
    [
        ("dp1", {}),
        pytest.param("dp2", {"fsdp": True}, marks=pytest.mark.slow),
    ],
)
def test_three_steps_of_ppo_with_adapters(mesh, more):
    # Some gradients of adapters are 0 at first: Adam divides their rounding by itself, and last bits grow to 1e-9.
    assert_golden(golden_run(mesh, "lora", **more), FOLDER / "lora.json", 3, 1e-8)


def assert_equal_steps(steps, golden, tolerance):
    for step, (ours, theirs) in enumerate(zip(steps, golden, strict=True), 1):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=tolerance, abs=tolerance), f"step {step}, {name}"


def assert_golden(run, file, steps, tolerance):
    golden = json.loads(file.read_text())
    assert len(golden["steps"]) == steps
    assert_equal_steps(run["steps"], golden["steps"], tolerance)
    assert run["end"].keys() == golden["end"].keys()
    for model, values in golden["end"].items():
        assert run["end"][model] == pytest.approx(values, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", RUNS)
def test_the_golden_run_is_one_that_would_notice(name):
    """It samples, clips, moves and rewards: no number is the same at every step or 0 throughout."""
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    steps = golden["steps"]
    for metric in {*METRICS, "sampled/number"} - {"reward/max"}:
        values = [step[metric] for step in steps]
        assert len(set(values)) > 1 and max(map(abs, values)) > 0, metric
    assert all(norm > 0 for values in golden["end"].values() for norm in values.values())
    assert max(step["actor/pg_clipfrac"] for step in steps) > 0.01
    assert max(step["rollout/logprob_gap_max"] for step in steps) < 1e-10


if __name__ == "__main__":
    import os

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # the warm start is part of the run
        for name in RUNS:
            (FOLDER / f"{name}.json").write_text(json.dumps(golden_run("dp1", name), indent=1) + "\n")
