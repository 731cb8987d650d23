"""Runs whose steps JAX computes: --backend=xla."""

import importlib.util
import shutil
import subprocess
import sys

import pytest
from small_runs import GRPO, MEASURED, PPO, Quiet, begin, one_step, small_job

from funrl.mesh.mesh import single
from funrl.trainer.loop import train_loop
from funrl.trainer.lowered import backend
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of

pytestmark = pytest.mark.xla


def steps_of_run(recipe, steps, **settings):
    run, state = begin(small_job(recipe, **settings), single())
    metrics = []
    for _ in range(steps):
        state, numbers = one_step(run, state)
        metrics.append(numbers)
    return metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe,steps,settings,tolerance",
    [
        (PPO, 3, {}, 1e-9),
        (PPO, 1, {"dtype": "bfloat16", "lr": 1e-3}, 2e-2),
        (GRPO, 2, {"lora_rank": 2, "remat": "full"}, 1e-9),
    ],
    ids=["float64", "bfloat16", "adapters"],
)
def test_a_run_in_jax_has_the_numbers_of_one_in_torch(recipe, steps, settings, tolerance):
    """tests/trainer/test_lowered_meshes.py has float32."""
    pytest.importorskip("jax")
    wanted, found = (steps_of_run(recipe, steps, **settings, backend=name) for name in ("torch", "xla"))
    for want, numbers in zip(wanted, found, strict=True):
        assert numbers.keys() == want.keys()
        assert numbers == pytest.approx(want, rel=tolerance, abs=tolerance)


class Stopping(Quiet):
    """An observer that ends the run in its third step, before the checkpoint of that step is written."""

    def step(self, step, metrics, seconds):
        super().step(step, metrics, seconds)
        if step == 3:
            raise FloatingPointError("the machine is gone")


@pytest.mark.slow
def test_a_checkpoint_of_jax_is_continued_by_torch(tmp_path):
    """A run that generates; `test_lowered_meshes` has the reverse too."""
    pytest.importorskip("jax")
    whole = Quiet(str(tmp_path / "whole"))
    train_loop(small_job(GRPO, steps=4), single(), whole)
    with pytest.raises(FloatingPointError, match="the machine is gone"):
        train_loop(small_job(GRPO, steps=4, save_every="1", backend="xla"), single(), Stopping(str(tmp_path / "run")))
    shutil.rmtree(tmp_path / "run" / "step-3", ignore_errors=True)  # which the run saves when it fails
    again = Quiet(str(tmp_path / "run"))
    train_loop(small_job(GRPO, steps=4, resume=True, run_dir="x"), single(), again)
    assert any("resumed after step 2" in note for note in again.notes)
    assert [step for step, _ in again.steps] == [3, 4]
    for (_, numbers), (_, want) in zip(again.steps, whole.steps[2:], strict=True):
        kept = [name for name in want if not name.startswith(("memory/", "time_s/")) and not name.endswith(MEASURED)]
        assert [numbers[name] for name in kept] == pytest.approx([want[name] for name in kept], rel=1e-9, abs=1e-9)


def test_the_engine_of_one_device_decodes_in_jax():
    pytest.importorskip("jax")
    from funrl.trainer.lowered.decoding import XlaBackend

    settings = settings_of(backend="xla", compile="on")
    assert backend.make_engine_backend(settings, settings.devices.train.chosen) is XlaBackend


@pytest.mark.parametrize(
    "flags,says",
    [
        ({"mesh": "sp2", "sequence_parallel": "ring"}, "query heads of the policy on a device, and no ring"),
        (
            {"mesh": "dp4", "generate_mesh": "dp4"},
            "--generate_mesh=dp4: with --backend=xla the engine decodes in torch",
        ),
        (
            {"mesh": "dp3", "generate_mesh": "tp3", "compile": "on"},
            "embed of the policy has a dim of 16, which does not",
        ),
        ({"mesh": "ep2"}, "--mesh=ep2: ep2: a dense decoder has nothing to split over the expert axis"),
        ({"remat": "selective"}, "--backend=xla has --remat=none and --remat=full"),
    ],
    ids=["ring", "generate", "heads", "dense", "remat"],
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


def test_torch_xla_is_named_where_it_is_missing():
    if importlib.util.find_spec("torch_xla") is not None:
        pytest.skip("torch_xla is installed")
    with pytest.raises(SettingsError, match="--device=xla: torch_xla is not installed; --backend=xla computes in JAX"):
        small_job(GRPO, device="xla")


@pytest.mark.parametrize(
    "flags,says",
    [
        ({"mesh": "dp2,tp2"}, "--mesh=dp2,tp2: with --device=xla each rank has whole models"),
        ({"mesh": "dp2", "fsdp": True}, "--fsdp: with --device=xla each rank has whole models"),
        ({"remat": "full"}, "--remat=full: with --device=xla"),
        ({"backend": "xla"}, "--device=xla is of torch_xla, and --backend=xla is JAX: leave one of them out"),
    ],
    ids=["tensor", "fsdp", "remat", "jax"],
)
def test_flags_that_devices_of_torch_xla_lack_are_refused(flags, says, monkeypatch):
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(SettingsError, match=says):
        small_job(GRPO, device="xla", **flags)


def test_nothing_of_jax_is_imported_without_the_flag():
    code = "import sys, funrl.trainer.loop, funrl.trainer.jobs.prepare; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
