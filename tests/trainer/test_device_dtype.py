"""The dtype that a run computes in where no flag says, and the note that names it."""

import pytest
import torch
from small_runs import small_job

from funrl.compiled_kernels import flash_kernel
from funrl.mesh.mesh import single
from funrl.trainer.jobs import build, models
from funrl.trainer.settings.settings import settings_of


@pytest.mark.parametrize(
    ("flags", "sees_gpu", "dtype"),
    [
        ({}, False, "float32"),
        ({}, True, "bfloat16"),
        ({"device": "cpu"}, True, "float32"),
        ({"device": "cuda"}, False, "bfloat16"),
        ({"dtype": "float32"}, True, "float32"),
        ({"dtype": "float64", "device": "cuda"}, True, "float64"),
    ],
)
def test_the_device_decides_the_dtype_unless_a_flag_does(flags, sees_gpu, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    assert models.located(settings_of(**flags)).models.dtype == dtype


def test_a_job_on_a_cpu_computes_in_float32():
    job = small_job(dtype="auto")
    assert job.dtype == torch.float32
    assert job.settings.models.dtype == "float32"


@pytest.mark.parametrize(("dtype", "by"), [("bfloat16", "attention by torch"), ("float32", "many times slower")])
def test_a_gpu_run_says_its_dtype_and_what_computes_attention(dtype, by, monkeypatch):
    class Built(Exception):
        pass

    def stop(*args, **kwargs):
        raise Built

    monkeypatch.setattr(flash_kernel, "_flash_attn", lambda: None)
    monkeypatch.setattr(build, "compile_layer", stop)
    flash_kernel.flash_kernel.cache_clear()
    notes = []
    with pytest.raises(Built):
        build.build(small_job(dtype=dtype), single("cuda:0"), notes.append)
    flash_kernel.flash_kernel.cache_clear()
    (line,) = notes
    assert line.startswith(f"computing in {dtype}; ") and by in line
