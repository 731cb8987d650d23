"""Gradients on meshes of JAX's devices: each mesh in a process of its own, as JAX fixes their number when it starts."""

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
    "dp2": {"all-reduce"},
    "tp2": {"all-reduce"},
    "dp2,tp2": {"all-reduce"},
    "dp2+fsdp": {"all-gather", "reduce-scatter"},
    "sp2": {"all-to-all"},
    "ep2": {"all-gather", "reduce-scatter"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradient_of_a_mesh_is_that_of_torch_on_one_device(mesh):
    command = [sys.executable, str(HERE / "lowered_meshes.py"), mesh]
    environment = os.environ | DEVICES | {"PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, gap, *collectives = done.stdout.split()
    assert float(gap) < 1e-12 and set(collectives) >= MESHES[mesh]
