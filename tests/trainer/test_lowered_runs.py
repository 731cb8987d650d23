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
        (PPO, 2, {}, 1e-9),
        (PPO, 1, {"dtype": "bfloat16", "lr": 1e-3}, 2e-2),
    ],
    ids=["float64", "bfloat16"],
)
def test_a_run_in_jax_has_the_numbers_of_one_in_torch(recipe, steps, settings, tolerance):
    """tests/trainer/test_lowered_meshes.py has float32, and the test below has adapters."""
    pytest.importorskip("jax")
    wanted, result = (steps_of_run(recipe, steps, **settings, backend=name) for name in ("torch", "xla"))
    for want, numbers in zip(wanted, result, strict=True):
        assert numbers.keys() == want.keys()
        assert numbers == pytest.approx(want, rel=tolerance, abs=tolerance)


class Stopping(Quiet):
    """An observer that ends the run in one of its steps, before the checkpoint of that step is written."""

    def __init__(self, folder, last):
        super().__init__(str(folder))
        self.last = last

    def step(self, step, metrics, seconds):
        super().step(step, metrics, seconds)
        if step == self.last:
            raise FloatingPointError("the machine is gone")


def run_until(last, folder, job):
    """The observer of a run that ends within a step and leaves no checkpoint of it."""
    observer = Stopping(folder, last)
    with pytest.raises(FloatingPointError, match="the machine is gone"):
        train_loop(job, single(), observer)
    shutil.rmtree(folder / f"step-{last}", ignore_errors=True)  # which the run saves when it fails
    return observer


def learned(steps):
    """The metrics of steps that do not depend on the machine."""
    uncounted = ("memory/", "time_s/")
    return [
        {name: x for name, x in numbers.items() if not name.startswith(uncounted) and not name.endswith(MEASURED)}
        for _, numbers in steps
    ]


@pytest.mark.slow
def test_a_run_of_adapters_in_jax_is_continued_by_torch(tmp_path):
    """A run that generates; its second step is JAX's too, and the third one depends on the state of the optimizer."""
    pytest.importorskip("jax")
    settings = {"steps": 3, "lora_rank": 2, "remat": "full"}
    whole = Quiet(str(tmp_path / "whole" / "steps"))
    train_loop(small_job(GRPO, **settings), single(), whole)
    steps = tmp_path / "run" / "steps"
    before = run_until(2, steps, small_job(GRPO, **settings, save_every="1", backend="xla"))
    again = Quiet(str(steps))
    train_loop(small_job(GRPO, **settings, resume=True, run_dir="x"), single(), again)
    assert any("resumed after step 1" in note for note in again.notes)
    assert [step for step, _ in again.steps] == [2, 3]
    result = learned(before.steps + again.steps)
    for numbers, want in zip(result, learned(whole.steps[:2] + whole.steps[1:]), strict=True):
        assert numbers == pytest.approx(want, rel=1e-9, abs=1e-9)


def test_the_engine_of_one_device_decodes_in_jax():
    pytest.importorskip("jax")
    from funrl.trainer.lowered.decoding import XlaBackend

    settings = settings_of(backend="xla", compile="on")
    assert backend.make_engine_backend(settings, settings.devices.train.chosen).func is XlaBackend


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
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
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
    monkeypatch.setattr(backend, "find_spec", lambda name: True)
    with pytest.raises(SettingsError, match=says):
        small_job(GRPO, device="xla", **flags)


def test_nothing_of_jax_is_imported_without_the_flag():
    code = "import sys, funrl.trainer.loop, funrl.trainer.jobs.prepare; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
