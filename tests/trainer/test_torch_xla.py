"""Steps on a device of torch_xla, the one of PJRT for CPUs, against those in torch."""

import json
import os
import subprocess
import sys

import pytest

os.environ.setdefault("PJRT_DEVICE", "CPU")
pytest.importorskip("torch_xla", reason="torch_xla has an environment of its own: .ci/setup_torch_xla")
from small_runs import GRPO, MEASURED, PPO, begin, gradients, one_step, relative, scored_batch, small_job

from funrl.mesh.mesh import single
from funrl.trainer.lowered.xla_device import TorchXlaPrograms

TOLERANCE = {"float64": 1e-12, "float32": 1e-6}


def on_device(run, state):
    """The run with its steps on the device."""
    programs = TorchXlaPrograms()
    roles = {name: role._replace(programs=programs) for name, role in run.parts.roles.items()}
    return run._replace(parts=run.parts._replace(roles=roles)), state


def steps_of(run, state):
    """The state after two steps, and their metrics."""
    metrics = []
    for _ in range(2):
        state, numbers = one_step(run, state)
        metrics.append({name: x for name, x in numbers.items() if not name.endswith(MEASURED)})
    return state, metrics


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_of_the_embedded_model_are_those_of_torch(dtype):
    run, state = begin(small_job(GRPO, sizes=None, dtype=dtype), single())
    rows, state, _ = scored_batch(run, state)
    lowered, _ = on_device(run, state)
    wanted, found = gradients(run, state, rows), gradients(lowered, state, rows)
    for name, want in wanted.items():
        assert relative(found[name].tree, want.tree) < TOLERANCE[dtype]
        assert abs(found[name].loss - want.loss) < TOLERANCE[dtype]


def test_scores_and_updates_of_two_roles_are_those_of_torch():
    job = small_job(PPO)
    found, others = steps_of(*on_device(*begin(job, single())))  # first: autograd counts devices once
    wanted, numbers = steps_of(*begin(job, single()))
    for want, other in zip(numbers, others, strict=True):
        assert other == pytest.approx(want, abs=1e-9)
    for name, role in wanted.roles.items():
        assert relative(found.roles[name].params, role.params) < 1e-9


def losses_of(folder, device):
    """Losses and norms of the gradient in a run of the command on two ranks."""
    words = ["--steps=2", "--token_budget=256", "--dtype=float64", "--compile=off", "--mesh=dp2", f"--device={device}"]
    command = [sys.executable, "-m", "funrl.cli.main", "sft", *words, f"--run_dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [x for step in steps for name, x in step.items() if name.endswith(("loss", "grad_norm"))]


def test_the_command_on_two_ranks_has_the_losses_of_torch(tmp_path):
    wanted = losses_of(tmp_path / "cpu", "cpu")
    assert len(wanted) >= 4 and losses_of(tmp_path / "xla", "xla") == pytest.approx(wanted, abs=1e-9)
