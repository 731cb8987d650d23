"""Steps on a device of torch_xla, the one of PJRT for CPUs, against those in torch."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

os.environ.setdefault("PJRT_DEVICE", "CPU")
pytest.importorskip("torch_xla", reason="torch_xla has an environment of its own: .ci/setup_torch_xla")
from small_runs import GRPO, MEASURED, PPO, begin, gradients, one_step, relative, scored_batch, small_job

from funrl.cli import main as cli
from funrl.mesh.mesh import single
from funrl.trainer.lowered.programs import with_programs
from funrl.trainer.lowered.torch_xla_steps import torch_xla_device


def on_device(run, state):
    """The run with its steps on the device."""
    roles = with_programs(run.parts.roles, torch_xla_device(run.parts.roles))
    return run._replace(parts=dataclasses.replace(run.parts, roles=roles)), state


def steps_of(run, state):
    """The state after two steps, and their metrics."""
    metrics = []
    for _ in range(2):
        state, numbers = one_step(run, state)
        metrics.append({name: x for name, x in numbers.items() if not name.endswith(MEASURED)})
    return state, metrics


def test_gradients_of_the_embedded_model_in_float32_are_those_of_torch():
    """The test below has float64."""
    run, state = begin(small_job(GRPO, sizes=None, dtype="float32"), single())
    rows, state, _ = scored_batch(run, state)
    lowered, _ = on_device(run, state)
    wanted, result = gradients(run, state, rows), gradients(lowered, state, rows)
    for name, want in wanted.items():
        assert relative(result[name].tree, want.tree) < 1e-6
        assert abs(result[name].loss - want.loss) < 1e-6


def test_scores_and_updates_of_two_roles_are_those_of_torch():
    job = small_job(PPO)
    result, others = steps_of(*on_device(*begin(job, single())))  # first: autograd counts devices once
    wanted, numbers = steps_of(*begin(job, single()))
    for want, other in zip(numbers, others, strict=True):
        assert other == pytest.approx(want, abs=1e-9)
    for name, role in wanted.roles.items():
        assert relative(result.roles[name].params, role.params) < 1e-9


def losses_of(folder):
    """Losses and norms of the gradient in a run."""
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [x for step in steps for name, x in step.items() if name.endswith(("loss", "grad_norm"))]


def test_the_command_on_two_ranks_has_the_losses_of_torch_on_one(tmp_path):
    words = ["sft", "--steps=2", "--token_budget=256", "--dtype=float64", "--compile=off"]
    command = [sys.executable, "-m", "funrl.cli.main", *words, "--mesh=dp2", "--device=xla", "--run_dir=xla"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(SystemExit) as ended:
        cli.main(["funrl", *words, "--mesh=dp1", "--device=cpu", f"--run_dir={tmp_path / 'cpu'}"])
    assert not ended.value.code
    wanted = losses_of(tmp_path / "cpu")
    assert len(wanted) >= 4 and losses_of(tmp_path / "xla") == pytest.approx(wanted, abs=1e-9)
