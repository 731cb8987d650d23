"""Runs whose steps JAX computes: --backend=xla."""

import subprocess
import sys

import pytest
import torch
from small_runs import GRPO, PPO, begin, one_step, small_job

from funrl import trees
from funrl.mesh.mesh import single
from funrl.trainer.jobs.build import sync
from funrl.trainer.lowered import backend
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of

pytestmark = pytest.mark.xla

RECIPES = {"grpo": GRPO, "ppo": PPO}


def steps_of_run(recipe, steps, **settings):
    run, state = begin(small_job(RECIPES[recipe], **settings), single())
    metrics = []
    for _ in range(steps):
        state, numbers = one_step(run, state)
        metrics.append(numbers)
    return metrics


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype,tolerance", [("float64", 1e-9), ("float32", 1e-3)])
def test_a_run_in_jax_has_the_numbers_of_one_in_torch(recipe, dtype, tolerance):
    pytest.importorskip("jax")
    lr = 1e-2 if dtype == "float64" else 1e-3  # of a gradient of about 0 Adam makes a step of that size
    wanted, found = (steps_of_run(recipe, 5, dtype=dtype, lr=lr, backend=name) for name in ("torch", "xla"))
    for want, numbers in zip(wanted, found, strict=True):
        assert numbers.keys() == want.keys()
        assert numbers == pytest.approx(want, rel=tolerance, abs=tolerance)


@pytest.mark.slow
def test_a_run_goes_on_in_the_other_backend():
    pytest.importorskip("jax")
    runs = {name: begin(small_job(GRPO, backend=name), single()) for name in ("torch", "xla")}
    (run, state), (lowered, other) = runs["torch"], runs["xla"]
    for _ in range(2):
        state, _ = one_step(run, state)
        other, _ = one_step(lowered, other)
    for name, x in trees.named(other.roles):
        assert type(x) is torch.Tensor and x.is_contiguous(), name
    _, want = one_step(run, state)
    _, numbers = one_step(run, sync(run.parts, other, frozen=run.frozen))
    assert numbers == pytest.approx(want, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    "flags,says",
    [
        ({"mesh": "sp2", "sequence_parallel": "ring"}, "query heads of the policy on a device, and no ring"),
        ({"mesh": "dp4", "generate_mesh": "dp4"}, "from one process, which generates too: leave --generate_mesh=dp4"),
        ({"mesh": "ep2"}, "--mesh=ep2: ep2: a dense decoder has nothing to split over the expert axis"),
        ({"remat": "selective"}, "--backend=xla has --remat=none and --remat=full"),
    ],
    ids=["ring", "generate", "dense", "remat"],
)
def test_flags_that_the_backend_lacks_are_refused(flags, says):
    pytest.importorskip("jax")
    with pytest.raises(SettingsError, match=says):
        small_job(GRPO, backend="xla", **flags)


def test_layers_of_other_code_are_refused():
    pytest.importorskip("jax")
    settings = settings_of(backend="xla", model="somewhere", model_code="hf")
    with pytest.raises(SettingsError, match="--backend=xla lowers funrl's own layers: leave --model_code=hf out"):
        backend.check_backend(settings, "cpu")


def test_jax_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"--backend=xla needs jax, .* pip install 'funrl\[xla\]'"):
        small_job(GRPO, backend="xla")


def test_nothing_of_jax_is_imported_without_the_flag():
    code = "import sys, funrl.trainer.loop, funrl.trainer.jobs.prepare; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
