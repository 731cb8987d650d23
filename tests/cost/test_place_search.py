"""The search over divisions of the devices between training and generation."""

import functools
import json
from unittest import mock

import pytest
from dry_jobs import CPU, H100, QWEN3_30B, plain, settings, write_config

from funrl.algos.recipes import recipe
from funrl.cli.command import Experiment, read_command, with_mesh
from funrl.cost import report as dry_report
from funrl.cost import schedules
from funrl.cost import search as searching
from funrl.cost.report import dry_run
from funrl.cost.schedules import UpdateTimes, Workload, parse_lengths, rule_of
from funrl.cost.search import chosen_devices, place_search, reasons_text, train_counts
from funrl.trainer.settings.checks import check_settings
from funrl.trainer.settings.declaration import SettingsError

FLAGS = {"place": "auto:4", "staleness": 1, "hardware": "cpu", "samples_per_prompt": 4}


@functools.cache
def found(**flags):
    return place_search(settings(**FLAGS | flags), recipe("rollout_is")(), CPU)


@pytest.mark.parametrize(
    "world,counts", [(1, []), (2, [1]), (4, [1, 2, 3]), (12, [2, 4, 6, 8, 10]), (64, [8, 16, 24, 32, 40, 48, 56])]
)
def test_few_numbers_of_training_devices_are_tried(world, counts):
    assert train_counts(world) == counts


@pytest.mark.slow
def test_every_division_is_simulated_and_the_best_is_traced():
    result = found()
    divided = {(len(x.placement.train.ranks), len(x.placement.generate.ranks)) for x in result.candidates}
    assert divided == {(1, 3), (2, 2), (3, 1)} and not result.dropped
    best = result.candidates[0]
    assert best.peaks.keys() == {"train", "generate"} and all(x.fits(result.room) for x in result.candidates)
    assert [x.result.step for x in result.candidates] == sorted(x.result.step for x in result.candidates)
    assert {x.result.age_max for x in result.candidates} == {1}
    assert result.shared is not None and "on shared devices" in reasons_text(result)


@pytest.mark.slow
@pytest.mark.parametrize("flags,training", [({"decode_rows": 1}, 2), ({"epochs": 8}, 3)])
def test_the_slower_side_gets_more_devices(flags, training):
    given = settings(**FLAGS, **flags, lengths="mean:22,max:24", dry_run=True)
    hardware = CPU._replace(latency=0.0, launch=0.0)
    best = place_search(given, recipe("rollout_is")(), hardware).candidates[0]
    assert len(best.placement.train.ranks) == training


def test_a_run_takes_the_best_and_is_refused_where_none_fits(monkeypatch):
    given = settings(**FLAGS)
    monkeypatch.setattr(searching, "place_search", lambda *_: found())
    chosen, note = chosen_devices(given, recipe("rollout_is"), CPU)
    assert str(chosen.devices.placement) == str(found().candidates[0].placement)
    assert note.startswith("--place=auto:4 is '--place=train:") and not chosen.estimate.dry_run
    small = found()._replace(room=0.92e5)
    monkeypatch.setattr(searching, "place_search", lambda *_: small)
    with pytest.raises(
        SettingsError, match=r"--place=auto:4: no division of 4 devices fits: .* of 92 kB per device, to"
    ):
        chosen_devices(given, recipe("rollout_is"), CPU)


def engine_of_division(monkeypatch, tmp_path, capacity, **flags):
    """Mesh to generate on with two devices, whose replica holds `capacity(expert)` tokens; rows have 21,000."""
    right = schedules.engine_times

    def times_of(model, hardware, tensor, item, expert):
        return right(model, hardware, tensor, item, expert)._replace(capacity=capacity(expert))

    monkeypatch.setattr(schedules, "engine_times", times_of)
    job = plain("grpo", model=write_config(tmp_path, **QWEN3_30B), dtype="bfloat16", **flags)
    trainer = mock.Mock(full=mock.Mock(job=job), on=lambda count: (job.sizes, UpdateTimes(1, 1e-4)))
    work = Workload(parse_lengths("mean:1000,max:20000"), 1000, H100)
    return searching._division(trainer, (1, 2), work, rule_of(settings()))[1]["generate"]


def test_a_row_lies_in_the_cache_of_one_group_of_an_engine(monkeypatch, tmp_path):
    assert engine_of_division(monkeypatch, tmp_path, lambda expert: 25e3 * expert)
    with pytest.raises(SettingsError, match="2 devices have no room to generate with"):
        engine_of_division(monkeypatch, tmp_path, lambda expert: 15e3 * expert)


def test_generators_that_record_masks_share_experts(monkeypatch, tmp_path):
    masks = {"top_p": 0.8, "mask_replay": True}
    for flags in ({}, masks):
        assert engine_of_division(monkeypatch, tmp_path, lambda expert: 1e6 * (expert > 1), **flags)["expert"] == 2


@pytest.mark.slow
def test_flags_beside_it_are_kept_or_refused(tmp_path):
    result = place_search(
        settings(**FLAGS | {"place": "auto:2"}, model=write_config(tmp_path)), recipe("rollout_is")(), CPU
    )
    assert [str(x.placement) for x in result.candidates] == ["train:dp1@0 generate:dp1@1"]
    with pytest.raises(SettingsError, match="--mesh=dp2 does nothing: --place=auto:4"):
        check_settings(settings(**FLAGS, mesh="dp2", dry_run=True))
    with pytest.raises(SettingsError, match="no division of 1 devices is possible: one device cannot be divided"):
        found(place="auto:1")
    with pytest.raises(SettingsError, match="--place=auto: write auto and the number of devices"):
        check_settings(settings(place="auto"))


@pytest.mark.slow
def test_the_command_line_and_the_report_say_what_was_chosen():
    argv = ["funrl rollout_is", "--place=auto:2", "--device=cpu", "--batch_prompts=8"]
    chosen = with_mesh(read_command(Experiment("rollout_is", "rollout_is", {}), argv, writes=False))
    assert str(chosen.settings.devices.placement) == "train:dp1@0 generate:dp1@1"
    assert "--place=auto:2 is '--place=train:dp1@0 generate:dp1@1'" in chosen.notes[-1]
    given = settings(**FLAGS | {"place": "auto:2"}, dry_run=True)
    text = dry_run(given, recipe("rollout_is"), argv)
    assert text.startswith("the best of 1 ways to divide 2 devices:\n  funrl rollout_is ")
    assert "all devices shared" in text and "\n\nplace train:dp1@0 generate:dp1@1\n" in text


@pytest.mark.slow
def test_the_object_has_all_divisions(monkeypatch):
    monkeypatch.setattr(dry_report, "place_search", lambda *_: found())
    given = settings(**FLAGS, dry_run=True, json=True)
    whole = json.loads(dry_run(given, recipe("rollout_is")))
    assert whole["devices"] == 4 and len(whole["places"]) == 3 and whole["best"]["schedules"]["staleness"] == 1
    assert whole["best"]["place"] == whole["places"][0]["flags"]["place"]
