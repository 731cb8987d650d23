"""The weights that a run begins with: random ones of the seed, or those of a directory."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import Quiet, begin, gap, small_job

from funrl import trees
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.mesh.reshard import unshard
from funrl.models.huggingface import directories as hf
from funrl.trainer.jobs.build import build
from funrl.trainer.startup import initial_weights


def start(job):
    """Whole weights after `initial_weights` on the job's mesh, as rank 0 ends with them, and the observer."""

    def program(mesh):
        placed, show = build(job, mesh, print).begin, Quiet()
        return unshard(initial_weights(job, placed, show.note), placed.stored, mesh), show

    return launch(program, job.sizes, "cpu")


def test_without_a_directory_they_are_those_of_the_seed():
    a, b, c = (start(small_job(seed=seed))[0] for seed in (0, 0, 1))
    assert gap(a, b) == 0 and gap(a, c) > 0.01


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp1", "dp2,tp2"])
def test_weights_from_a_directory(mesh, tmp_path):
    job = small_job(mesh=mesh)
    first, _ = start(small_job(seed=5))
    hf.save(tmp_path / "model", job.model, first, job.tokenizer)
    loaded, _ = start(dataclasses.replace(job, start=str(tmp_path / "model")))
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(loaded), trees.leaves(first), strict=True))


@pytest.mark.gloo
def test_a_warm_start_is_read_by_the_first_rank_alone(tmp_path):
    job = small_job(mesh="dp2")
    whole, _ = start(small_job(seed=5))
    hf.save(tmp_path / "model", job.model, whole, job.tokenizer)

    def program(mesh):
        folder = str(tmp_path / "model") if mesh.rank == 0 else None
        started = dataclasses.replace(job, start=folder, warmstart_steps=1)
        placed = build(started, mesh, print).begin
        return unshard(initial_weights(started, placed, print), placed.stored, mesh)

    loaded = launch(program, job.sizes, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(loaded), trees.leaves(whole), strict=True))


def test_weights_that_are_read_as_something_else_are_said(tmp_path):
    job, file = small_job(), tmp_path / "model" / "model.safetensors"
    hf.save(tmp_path / "model", job.model, start(job)[0], job.tokenizer)
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.tensor(0.5)}
    save_file(tensors, file)
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
    loaded, show = start(dataclasses.replace(job, start=str(tmp_path / "model")))
    assert [note.startswith("the files have weights in FP8") for note in show.notes] == [True]
    assert torch.equal(loaded["layers"][0]["mlp"]["up"], tensors[name].double() / 2)


def test_bfloat16_keeps_float32_weights():
    run, state = begin(small_job(dtype="bfloat16"), single())
    for role in state.roles.values():
        assert {x.dtype for x in trees.leaves(role.params)} == {torch.float32}
    assert dict(run.parts.generator.engine.held_weights())["norm"].dtype == torch.bfloat16
