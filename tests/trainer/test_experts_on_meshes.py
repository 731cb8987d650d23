"""Whole steps with experts on meshes, in float64, against one process: samples, losses, gradients and parameters."""

import functools

import pytest
from small_runs import GRPO, SIZES, assert_same, small_job, steps_program

from funrl import trees
from funrl.mesh.launch import launch
from funrl.models.config import Experts

pytestmark = pytest.mark.gloo
EXPERTS = SIZES | {"experts": Experts(count=4, per_token=2, mlp=8, dense=(0,))}
FEW = SIZES | {"experts": Experts(count=4, per_token=1, mlp=8, normalized=False)}
LOSSES = {"router_aux_coef": 0.1, "router_z_coef": 0.01}
SPLIT = {"split_residual": "on"}
MESHES = {
    "ep2": ("ep2", EXPERTS, LOSSES),  # gathered: a token has as many experts as there are ranks
    "ep4": ("ep4", EXPERTS, LOSSES | {"generate_mesh": "dp2,tp2"}),  # ragged
    "ep2 ragged": ("ep2", FEW, {"remat": "full"}),
    "dp2,ep2": ("dp2,ep2", EXPERTS, LOSSES | {"fsdp": True, "generate_mesh": "ep2,tp2"}),
    "ep2,tp2": ("ep2,tp2", EXPERTS, LOSSES | {"fsdp": True, "remat": "selective", **SPLIT}),
    "ep2,tp2 ragged": ("ep2,tp2", FEW, SPLIT),
    "dp2,ep2 whole": ("dp2,ep2", FEW, {}),
    "ep2,sp2": ("ep2,sp2", EXPERTS, LOSSES | {"fsdp": True}),
    "ep2,sp2,tp2": ("ep2,sp2,tp2", EXPERTS, LOSSES | {"remat": "full", "generate_mesh": "ep2,dp2,tp2"}),
}


def steps_on(mesh, sizes, **more):
    how = {"task": "arithmetic_moe", "token_budget": 48, "steps": 2, "minibatches": 2} | more
    job = small_job(functools.partial(GRPO, entropy_coef=0.01), sizes, mesh=mesh, **how)
    return launch(steps_program(job, 2), job.sizes, "cpu")


@functools.cache
def alone(few):
    return steps_on("dp1", FEW) if few else steps_on("dp1", EXPERTS, **LOSSES)


WIDE = ("ep2,sp2,tp2", "ep4", "ep2,tp2 ragged", "dp2,ep2 whole")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in WIDE else c for c in MESHES])
def test_steps_are_those_of_one_process(case):
    mesh, sizes, more = MESHES[case]
    one = alone(sizes is FEW)
    assert_same(steps_on(mesh, sizes, **more), one, 1e-9)
    experts = [x for name, x in _grads(one) if "expert_" in name or "router" in name]
    assert len(experts) == 4 * (2 if sizes is FEW else 1) and all(x.abs().max() > 1e-6 for x in experts)


def _grads(run):
    return trees.named(run["grads"][0]["policy"].tree)
