"""Whole steps on rows with pictures on meshes, in float64, against one process."""

import dataclasses
import functools
import re

import pytest
import torch
from picture_runs import (
    DEEP_TOWER,
    EXPERTS,
    SQUARE_GRIDS,
    SQUARE_TOWER,
    TILED_GRIDS,
    TILED_TOWER,
    TOWER,
    picture_job,
    picture_steps,
)
from selection import quick
from small_runs import GRPO, assert_same, begin

from funrl import trees
from funrl.algos.recipes import recipe
from funrl.mesh.launch import launch
from funrl.mesh.mesh import MeshError, single
from funrl.models import with_value_head
from funrl.trainer.jobs.sharding import check_layouts
from funrl.trainer.phases import draw_batch
from funrl.trainer.settings.checks import check_together
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import with_flags
from funrl.trainer.startup import random_weights
from funrl.trainer.steps.optimizer import check_freeze, is_frozen

pytestmark = pytest.mark.gloo
MESHES = {
    "tp2": {"mesh": "tp2"},
    "tp2 split": {"mesh": "tp2", "split_residual": "on"},
    "fsdp2": {"mesh": "dp2", "fsdp": True, "token_budget": 32},  # small micro-batches
    "sp2": {"mesh": "sp2", "generate_mesh": "dp2"},
    "dp2,tp2": {"mesh": "dp2,tp2", "fsdp": True},
    "dp2": {"mesh": "dp2"},
}


def steps_on(mesh, steps=2, with_gradients=False, **more):
    job = picture_job(functools.partial(GRPO, entropy_coef=0.01), mesh=mesh, steps=steps, **{"freeze": "none"} | more)
    return launch(picture_steps(job, steps, with_gradients), job.sizes, "cpu")


MODELS = {  # a step each: what follows an update is with adapters below
    "windows": {"steps": 1},
    "deep": {"tower": DEEP_TOWER, "steps": 1},
    "deep, experts": {"tower": DEEP_TOWER, "experts": EXPERTS, "steps": 1},
    "square": {"tower": SQUARE_TOWER, "grids": SQUARE_GRIDS, "steps": 1},
    "tiled": {"tower": TILED_TOWER, "grids": TILED_GRIDS, "steps": 1},
}
CASES = [  # each mesh, and each model on one
    ("windows", "sp2"),
    ("deep", "fsdp2"),
    ("deep, experts", "tp2 split"),
    ("square", "tp2"),
    ("deep", "tp2 split"),
    ("square", "dp2"),
    ("tiled", "sp2"),
    ("windows", "dp2,tp2"),
]


def assert_same_numbers(first, other):
    """`assert_same` of two runs, without gradients, whose norms are among the metrics."""
    assert_same(first | {"grads": []}, other | {"grads": []}, 1e-9)


@functools.cache
def alone(model="windows"):
    return steps_on("dp1", with_gradients=True, **MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    quick(CASES, [("deep", "fsdp2")]),
    ids=", ".join,
)
def test_steps_are_those_of_one_process(case):
    model, mesh = case
    assert_same_numbers(steps_on(**MESHES[mesh], **MODELS[model]), alone(model))


# what is added behind the last layer, to tokens of pictures, reaches no text; a bias of all keys changes no weights
@pytest.mark.parametrize(
    "model,weights,idle",
    [
        ("windows", 30, "none"),
        ("deep", 45, "vision/deep_mergers/1/"),
        ("square", 39, r"vision/layers/\d/key_bias"),
        ("tiled", 42, r"vision/(layers/\d/key_bias|embed/idle_norm)"),
    ],
)
def test_the_tower_learns_and_the_engine_sees_what_the_trainer_sees(model, weights, idle):
    row = alone(model)
    tower = {name: x for name, x in trees.named(row["grads"][0]["policy"].tree) if name.startswith("vision/")}
    assert len(tower) == weights
    assert all(bool(x.abs().max() > 1e-9) != bool(re.match(idle, name)) for name, x in tower.items())
    assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for metrics in row["metrics"])


def test_tokens_that_see_later_ones_are_not_split_over_sp():
    job = picture_job(GRPO, **MODELS["square"])
    with pytest.raises(MeshError, match="whose tokens of a picture see one another, so that its tokens are not split"):
        check_layouts({"policy": job.model}, job.settings, {**job.sizes, "sequence": 2}, job.sizes)


@pytest.mark.slow
def test_a_frozen_tower_stays_and_its_projector_learns():
    steps = steps_on("dp1", freeze=None)
    assert_same_numbers(steps_on("dp2", freeze=None), steps)
    learned = steps["weights"]["policy"]["vision"]
    first = random_weights(picture_job(GRPO))["vision"]
    same = {name: torch.equal(x, y) for (name, x), (_, y) in zip(trees.named(first), trees.named(learned), strict=True)}
    assert {name.split("/")[0] for name, equal in same.items() if equal} == {"embed", "layers"}
    assert not any(equal for name, equal in same.items() if name.startswith("merger"))


WRONG = {"visoin": "begins with 'visoin'", "vision,embed,layers,norm,unembed,vision/merger": "nothing would learn"}


@pytest.mark.parametrize("given", WRONG)
def test_what_cannot_be_frozen_is_refused(given):
    job = picture_job(GRPO)
    with pytest.raises(SettingsError, match=WRONG[given]):
        check_freeze(with_flags(job.settings, freeze=given), {"policy": job.model})


def test_a_part_of_one_learning_role_is_frozen_and_adapters_refuse_it():
    job = picture_job(GRPO)
    settings = with_flags(job.settings, freeze="unembed,layers/1")
    check_freeze(settings, {"policy": job.model, "critic": with_value_head(job.model)})
    assert is_frozen("layers/1/mlp", ("layers/1",)) and not is_frozen("layers/10/mlp", ("layers/1",))
    with pytest.raises(SettingsError, match="--freeze=unembed with --lora_rank=2: adapters learn alone; leave one of"):
        check_together(with_flags(job.settings, freeze="unembed", lora_rank=2))


@pytest.mark.slow
def test_adapters_learn_beside_the_decoder_alone():
    steps = steps_on("dp1", with_gradients=True, lora_rank=2, freeze=None)
    assert_same_numbers(steps_on("dp2", lora_rank=2, freeze=None, fsdp=True), steps)
    learned = {name.split("/")[0] for name, x in trees.named(steps["grads"][1]["policy"].tree) if x.any()}
    assert learned == {"layers"}


@pytest.mark.slow
def test_adapters_of_the_tower_learn_where_they_are_named():
    targets = ("q", "down", "qkv", "value", "proj", "up_proj", "down_proj", "first", "second")
    given = {"lora_rank": 2, "freeze": None, "adapted": targets, "lr": 0.05, "tower": DEEP_TOWER}
    steps = steps_on("dp1", with_gradients=True, **given)
    assert_same_numbers(steps_on("tp2", **given), steps)
    grads = trees.named(steps["grads"][1]["policy"].tree)
    tower = {name for name, x in grads if name.startswith("vision/") and x.abs().max() > 1e-9}
    assert {name.split("/")[1] for name in tower} >= {"layers", "merger"}
    assert all("_lora_" in name for name in tower)
    assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for metrics in steps["metrics"])


@pytest.mark.parametrize("name", ["spin", "chord"])
def test_demonstrations_beside_samples_have_the_pictures_of_their_prompts(name):
    job = picture_job(recipe(name), batch_prompts=6)
    prompts = [example._replace(fields={**example.fields, "demonstration": "1"}) for example in job.task.prompts]
    run, state = begin(dataclasses.replace(job, task=job.task._replace(prompts=prompts)), single())
    rows, state, _ = draw_batch(run, state)
    batch = rows.batch
    placeholders = (batch.tokens == TOWER.placeholder).sum(1)
    assert batch.demonstration.any(1).sum() == 6 and placeholders[batch.demonstration.any(1)].any()
    assert torch.equal(batch.patches.offsets.diff(), placeholders * TOWER.merge**2)
