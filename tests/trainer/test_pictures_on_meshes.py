"""Whole steps on rows with pictures on meshes, in float64, against one process."""

import functools

import pytest
from picture_runs import picture_job, picture_steps
from selection import quick
from small_runs import GRPO, assert_same

from funrl import trees
from funrl.mesh.launch import launch

pytestmark = pytest.mark.gloo
MESHES = {
    "dp2": {"mesh": "dp2"},
    "tp2": {"mesh": "tp2"},
    "fsdp2": {"mesh": "dp2", "fsdp": True},
    "fsdp2 small micro-batches": {"mesh": "dp2", "fsdp": True, "token_budget": 32},
    "tp2 split": {"mesh": "tp2", "split_residual": "on"},
    "sp2": {"mesh": "sp2", "generate_mesh": "dp2"},
    "dp2,tp2": {"mesh": "dp2,tp2", "fsdp": True},
}


def steps_on(mesh, **more):
    job = picture_job(functools.partial(GRPO, entropy_coef=0.01), mesh=mesh, steps=2, **more)
    return launch(picture_steps(job, 2), job.sizes, "cpu")


@functools.cache
def alone():
    return steps_on("dp1")


@pytest.mark.parametrize("case", quick(MESHES, ("fsdp2",)))
def test_steps_are_those_of_one_process(case):
    assert_same(steps_on(**MESHES[case]), alone(), 1e-9)


def test_the_tower_learns_and_the_engine_sees_what_the_trainer_sees():
    one = alone()
    tower = [x for name, x in trees.named(one["grads"][0]["policy"].tree) if name.startswith("vision/")]
    assert len(tower) == 30 and all(x.abs().max() > 1e-9 for x in tower)
    assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for metrics in one["metrics"])
