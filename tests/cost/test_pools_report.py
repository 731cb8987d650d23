"""The dry run of trainer or generator ranks."""

import functools
import json

import pytest
from dry_jobs import write_config

from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.cost.report import dry_run, placed_seconds
from funrl.cost.schedules import Workload, lengths_of, placed_schedules, schedules_text
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.pools.placement import read_placement
from funrl.mesh.text import parse
from funrl.trainer.settings.settings import settings_of


def tables(**flags):
    settings = settings_of(place="train:dp2@0-1 generate:tp2", device="cpu", dry_run=True, json=True, **flags)
    return json.loads(dry_run(settings, grpo))


@pytest.mark.slow
def test_each_pool_has_the_phases_and_the_memory_of_what_it_does():
    record = tables(fsdp=True)
    assert record["place"] == "train:dp2@0-1 generate:tp2@2-3"
    assert "generate" not in record["train"]["phases"] and "update_policy" in record["train"]["phases"]
    assert list(record["generate"]["phases"]) == ["generate"]
    held = record["generate"]["phases"]["generate"]["peak_bytes"]
    assert held["weights"] > 0 and held.get("optimizer", 0) == 0 == held.get("gradients", 0)
    assert record["train"]["mesh"] == "dp2" and record["generate"]["generate_mesh"] == "tp2"


@functools.cache
def one_of_each():
    """The text of a trainer and a generator."""
    return dry_run(settings_of(place="generate:1", device="cpu", dry_run=True), grpo)


@pytest.mark.slow
def test_the_text_names_the_pools():
    text = one_of_each()
    assert text.startswith("place train:dp1@0 generate:dp1@1\n\ntrain: ")
    assert "\n\ngenerate: " in text and text.count("fits: ") == 2


@pytest.mark.slow
def test_a_role_s_ranks_hold_its_weights_and_the_trainer_does_not():
    compose = functools.partial(grpo, kl_coef=0.1)
    flags = {"device": "cpu", "dry_run": True, "json": True}
    record, without = (
        json.loads(dry_run(settings_of(place=place, **flags), compose))
        for place in ("generate:1 reference:1", "generate:1")
    )
    assert list(record["reference"]["phases"]) == ["score_reference"]
    held = record["reference"]["phases"]["score_reference"]["peak_bytes"]
    assert "score_reference" not in record["train"]["phases"] and "score_reference" in without["train"]["phases"]
    assert held.get("optimizer", 0) == 0 < held["weights"]
    for phase, costs in record["train"]["phases"].items():
        before = without["train"]["phases"][phase]["peak_bytes"]["weights"]
        assert before - costs["peak_bytes"]["weights"] == held["weights"]
    assert record["step"]["reference"] > 0
    assert record["step"]["seconds"] == pytest.approx(without["step"]["seconds"], rel=1e-6)


def test_a_step_is_as_long_as_the_longer_side_where_both_work_at_once():
    pools = {"train": 3.0, "generate": 4.0, "reference": 2.0}
    assert placed_seconds(pools, {"rows": 0.5}, overlaps=True) == 5.5
    assert placed_seconds(pools, {"rows": 0.5}, overlaps=False) == 9.5


@pytest.mark.slow
def test_schedules_count_a_role_s_ranks_in_the_trainer_s_step():
    def run(place):
        flags = {"staleness": 1, "lengths": "mean:2,max:4", "batch_prompts": 16, "samples_per_prompt": 2}
        settings = settings_of(place=place, dry_run=True, device="cpu", **flags)
        placement = read_placement(place, parse("dp1"))
        work = Workload(lengths_of(settings, 16), 10, HARDWARE["cpu"])
        return placed_schedules(settings, placement, rollout_is(kl_coef=0.1), work, transfer=0.0)

    runs = [run(place) for place in ("generate:1 reference:1", "generate:1", "generate:1 reference:dp2")]
    split, alone, less = (next(x for x in schedules.splits if not x.shared) for schedules in runs)
    assert split.scoring == (("reference", 1),) and alone.scoring == ()
    assert split.result.step == pytest.approx(alone.result.step, rel=1e-6)
    assert less.result.step < split.result.step
    text = schedules_text(runs[0])
    assert "\ntrain 1, generate 1, reference 1 " in text and "3 shared" in text
    assert "trainer busy: with its waits for the scores of reference\n" in text


@pytest.mark.slow
def test_a_judge_is_estimated_where_it_writes(tmp_path):
    config = write_config(tmp_path, num_attention_heads=2, num_key_value_heads=2)
    flags = {"judge": config, "prompts": "p.jsonl", "judge_max_new_tokens": 8, "max_new_tokens": 24}
    flags |= {"device": "cpu", "hardware": "cpu", "dry_run": True, "batch_prompts": 4, "staleness": 1, "json": True}
    apart, beside = (
        json.loads(dry_run(settings_of(place=place, **flags), rollout_is))
        for place in ("generate:1 judge:tp2", "generate:1")
    )
    assert list(apart["judge"]["phases"]) == ["score_judge"] and apart["judge"]["mesh"] == "tp2"
    assert "score_judge" in beside["train"]["phases"] and "score_judge" not in apart["train"]["phases"]
    weights = {name: x["peak_bytes"]["weights"] for name, x in apart["train"]["phases"].items()}
    whole = 2 * apart["judge"]["phases"]["score_judge"]["peak_bytes"]["weights"]  # but for the norms, which tp2 copies
    for name, held in weights.items():
        assert beside["train"]["phases"][name]["peak_bytes"]["weights"] - held == pytest.approx(whole, rel=0.01)
    split, alone = (next(x for x in row["schedules"]["splits"] if not x["shared"]) for row in (apart, beside))
    assert split["scoring"] == [["judge", 2]] and alone["scoring"] == []


@pytest.mark.slow
def test_a_generator_on_ray_is_a_pool_of_one_rank(tmp_path):
    flags = {"device": "cpu", "dry_run": True}
    report = dry_run(settings_of(place="generate:ray1-4", **flags), grpo)
    assert report.startswith("--place=generate:ray1-4: with one generator")
    assert report.endswith(one_of_each())
    config = write_config(tmp_path, num_attention_heads=2, num_key_value_heads=2)
    flags |= {"judge": config, "prompts": "p.jsonl", "judge_max_new_tokens": 8, "max_new_tokens": 24}
    places = "generate:ray1-4", "train:dp1 generate:1"
    judged, split = (dry_run(settings_of(place=place, **flags), grpo) for place in places)
    assert judged.endswith(split) and "score_judge" in split
