"""Programs on meshes of JAX's devices, in processes of their own, as JAX fixes their number when it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

pytestmark = pytest.mark.xla

HERE = Path(__file__).parent
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
MESHES = {  # the collectives that its program must have
    "dp2,tp2": {"all-reduce"},
    "dp2+fsdp": {"all-gather", "reduce-scatter"},
    "sp2": {"all-to-all"},
    "ep2": {"all-gather", "reduce-scatter"},
}
ENGINES = [("float64", "dp2,tp2+lora"), ("float64", "dp2+states"), ("bfloat16", "dp2,tp2")]
RUNS = [
    ("float64", "ppo:dp2,tp2", "grpo:ep2+fsdp"),
    ("float64", "ppo:dp2+fsdp", "ppo:sp2"),
    ("float32", "ppo:dp2,tp2", "sft:dp2+fsdp"),
    ("bfloat16", "sft:dp2,tp2"),
]
DECODED = ("float64", "grpo:dp2+fsdp+on=tp2")
METRICS = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 2e-2}
STEPS = {"bfloat16": "1"}


@pytest.mark.slow
def test_the_gradient_of_a_mesh_is_that_of_torch_on_one_device():
    lines = output_of("lowered_meshes.py", *MESHES).splitlines()
    assert [line.split()[0] for line in lines] == list(MESHES)
    for line in lines:
        mesh, gap, *collectives = line.split()
        assert float(gap) < 1e-12 and set(collectives) >= MESHES[mesh], line


@pytest.mark.slow
@pytest.mark.parametrize("runs", RUNS, ids=" ".join)
def test_a_run_on_a_mesh_has_the_metrics_of_torch_s_ranks(runs):
    dtype, *texts = runs
    lines = output_of("lowered_runs.py", dtype, STEPS.get(dtype, "5"), *texts).splitlines()
    assert [line.split()[0] for line in lines] == texts
    for line in lines:
        assert float(line.split()[1]) < METRICS[dtype], line


@pytest.mark.slow
@pytest.mark.parametrize("dtype,mesh", ENGINES, ids=" ".join)
def test_completions_of_an_engine_on_a_mesh_are_those_of_torch(dtype, mesh):
    resharded, line = output_of("lowered_engines.py", dtype, mesh).splitlines()
    assert resharded == "resharded by the devices"
    _, gap, rounding, *most, other = line.split(" ")
    assert float(gap) < (1e-12 if dtype == "float64" else 2 * float(rounding))
    assert not other
    assert min(map(int, most)) > 0  # both lanes have had pages


@pytest.mark.slow
def test_a_run_that_decodes_on_a_mesh_has_the_metrics_of_torch_s_ranks():
    dtype, text = DECODED
    _, gap, name = output_of("lowered_runs.py", dtype, "2", text).split()
    assert float(gap) < METRICS[dtype], name


@pytest.mark.slow
def test_a_checkpoint_of_a_mesh_is_continued_by_the_other_backend(tmp_path):
    lines = output_of("lowered_resumed.py", "dp2,tp2", str(tmp_path)).splitlines()
    assert [line.split()[:2] for line in lines] == [["torch", "xla"], ["xla", "torch"]]
    for line in lines:
        assert float(line.split()[2]) < 1e-9, line


def output_of(program, *args):
    """Output of a program beside this file."""
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))
    environment = os.environ | DEVICES | {"PYTHONPATH": path}
    command = [sys.executable, str(HERE / program), *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
