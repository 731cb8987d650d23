"""Every named algorithm takes the same step on four ranks as on one: samples, gradients and weights to 1e-9."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import typing

import pytest
import torch
from small_runs import SIZES, assert_same, small_job, steps_program

import funrl.algos
from funrl.algos.core import Algorithm, needs_of
from funrl.mesh.launch import launch
from funrl.models import decoder, hf
from funrl.tasks import arithmetic
from funrl.trainer.job import BY_TEACHER

MODULES = {m.name: importlib.import_module(f"funrl.algos.{m.name}") for m in pkgutil.iter_modules(funrl.algos.__path__)}
MAKERS = {name: getattr(module, name) for name, module in MODULES.items() if hasattr(module, name)}
NAMED = {
    name: make
    for name, make in MAKERS.items()
    if inspect.isfunction(make) and typing.get_type_hints(make)["return"] is Algorithm
}
NAMED["distillation over likely tokens"] = functools.partial(NAMED["distillation"], kind="forward")
ROWS = {"batch_prompts": 4, "samples_per_prompt": 3, "minibatches": 2, "token_budget": 64, "teacher_top_k": 5}


def _jobs(mesh, teacher):
    for name, make in NAMED.items():
        judged = bool(BY_TEACHER & needs_of(make()))
        yield name, small_job(make, mesh=mesh, teacher=teacher if judged else None, max_refills=1, **ROWS)


def _one_step_each(jobs, mesh):
    return {name: steps_program(job, 1)(mesh) for name, job in jobs}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """What a step of every algorithm gives, on one rank and on four."""
    folder = tmp_path_factory.mktemp("teacher")
    config = dataclasses.replace(arithmetic.model_config(), **SIZES)
    hf.save(folder, config, decoder.init(config, torch.Generator().manual_seed(9)), arithmetic.tokenizer())
    found = []
    for mesh in ("dp1", "dp2,tp2"):
        jobs = list(_jobs(mesh, str(folder)))
        found.append(launch(functools.partial(_one_step_each, jobs), jobs[0][1].sizes, "cpu"))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("name", NAMED)
def test_a_step_is_the_same_on_every_mesh(name, steps):
    alone, four = (of[name] for of in steps)
    for one in (alone, four):  # an untrained reward model says 0 of every row: its accuracy is a matter of rounding
        one["metrics"][0].pop("reward/accuracy", None)
    assert_same(four, alone, 1e-9)
