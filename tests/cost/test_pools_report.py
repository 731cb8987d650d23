"""The dry run of ranks that train or generate."""

import json

import pytest

from funrl.algos.recipes.grpo import grpo
from funrl.cost.reports.dry_report import dry_run
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
