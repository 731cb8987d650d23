"""The dry run of ranks that train or generate."""

import functools
import json

import pytest

from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.cost.reports.dry_report import dry_run, placed_run
from funrl.cost.reports.pools_report import placed_seconds
from funrl.cost.reports.schedule_report import schedules_text
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.pools.placement import read_placement
from funrl.mesh.text import parse
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of


def tables(**flags):
    settings = settings_of(place="train:dp2@0-1 generate:tp2", device="cpu", dry_run=True, json=True, **flags)
    return json.loads(dry_run(settings, grpo))


@pytest.mark.slow
def test_each_pool_has_the_phases_and_the_memory_of_what_it_does():
    found = tables(fsdp=True)
    assert found["place"] == "train:dp2@0-1 generate:tp2@2-3"
    assert "generate" not in found["train"]["phases"] and "update_policy" in found["train"]["phases"]
    assert list(found["generate"]["phases"]) == ["generate"]
    held = found["generate"]["phases"]["generate"]["peak_bytes"]
    assert held["weights"] > 0 and held.get("optimizer", 0) == 0 == held.get("gradients", 0)
    assert found["train"]["mesh"] == "dp2" and found["generate"]["generate_mesh"] == "tp2"


def test_the_text_names_the_pools():
    text = dry_run(settings_of(place="generate:1", device="cpu", dry_run=True), grpo)
    assert text.startswith("place train:dp1@0 generate:dp1@1\n\ntrain: ")
    assert "\n\ngenerate: " in text and text.count("fits: ") == 2


def test_a_role_s_ranks_hold_its_weights_and_the_trainer_does_not():
    compose = functools.partial(grpo, kl_coef=0.1)
    flags = {"device": "cpu", "dry_run": True, "json": True}
    found, without = (
        json.loads(dry_run(settings_of(place=place, **flags), compose))
        for place in ("generate:1 reference:1", "generate:1")
    )
    assert list(found["reference"]["phases"]) == ["score_reference"]
    held = found["reference"]["phases"]["score_reference"]["peak_bytes"]
    assert "score_reference" not in found["train"]["phases"] and "score_reference" in without["train"]["phases"]
    assert held.get("optimizer", 0) == 0 < held["weights"]
    for phase, costs in found["train"]["phases"].items():
        before = without["train"]["phases"][phase]["peak_bytes"]["weights"]
        assert before - costs["peak_bytes"]["weights"] == held["weights"]
    assert found["step"]["reference"] > 0
    assert found["step"]["seconds"] == pytest.approx(without["step"]["seconds"], rel=1e-6)


def test_a_step_is_as_long_as_the_longer_side_where_both_work_at_once():
    pools = {"train": 3.0, "generate": 4.0, "reference": 2.0}
    assert placed_seconds(pools, {"rows": 0.5}, overlaps=True) == 5.5
    assert placed_seconds(pools, {"rows": 0.5}, overlaps=False) == 9.5


def test_schedules_count_a_role_s_ranks_in_the_trainer_s_step():
    def run(place):
        flags = {"staleness": 1, "lengths": "mean:2,max:4", "batch_prompts": 4, "samples_per_prompt": 2}
        settings = settings_of(place=place, dry_run=True, device="cpu", **flags)
        placement = read_placement(place, parse("dp1"))
        schedules = placed_run(settings, placement, rollout_is(kl_coef=0.1), HARDWARE["cpu"], 10).schedules
        assert schedules is not None
        return schedules

    runs = [run(place) for place in ("generate:1 reference:1", "generate:1", "generate:1 reference:dp2")]
    split, alone, less = (next(x for x in schedules.splits if not x.shared) for schedules in runs)
    assert split.scoring == (("reference", 1),) and alone.scoring == ()
    assert split.result.step == pytest.approx(alone.result.step, rel=1e-6)
    assert less.result.step < split.result.step
    text = schedules_text(runs[0])
    assert "\ntrain 1, generate 1, reference 1 " in text and "3 shared" in text
    assert "trainer busy: with its waits for the scores of reference\n" in text


@pytest.mark.parametrize("place", ["generate:1", "generate:1 judge:1"])
def test_a_judge_is_not_estimated(place):
    settings = settings_of(place=place, judge="m", device="cpu", dry_run=True)
    with pytest.raises(SettingsError, match="a judge is not estimated; leave --judge out"):
        placed_run(settings, read_placement(place, parse("dp1")), grpo(), HARDWARE["cpu"], 10)


def test_a_generator_that_joins_is_a_pool_of_one_rank():
    flags = {"device": "cpu", "dry_run": True}
    joined = dry_run(settings_of(place="generate:join", **flags), grpo)
    assert joined.startswith("--place=generate:join: with one generator on dp1")
    assert joined.endswith(dry_run(settings_of(place="generate:1", **flags), grpo))
    with pytest.raises(SettingsError, match="leave --reward_model out"):
        dry_run(settings_of(place="generate:join", reward_model="m", **flags), grpo)
