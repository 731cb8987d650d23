"""Splits of devices between training and generation in a dry run, and its report of them."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from dry_jobs import H100, plain, write_config

from funrl.algos.recipes import recipe
from funrl.asynchrony.admission import AdmissionRule
from funrl.cost import report as dry_report
from funrl.cost import schedules as schedule_report
from funrl.cost.decoding import judging
from funrl.cost.schedules import Workload, async_run, simulate_splits, verdict_times
from funrl.cost.simulation import LengthError, LengthLaw, law_of_mean, law_of_run
from funrl.cost.tracing.estimate import pretended
from funrl.cost.tracing.hardware import HARDWARE
from funrl.trainer.jobs.build import build
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of

SMALL = {"mesh": "dp4", "batch_prompts": 8, "samples_per_prompt": 2, "max_new_tokens": 24, "hardware": "cpu"}
LENGTHS = "mean:8,max:24"


@functools.cache
def report(**flags):
    settings = settings_of(**SMALL, dry_run=True, **flags)
    return schedule_report.schedules_of(settings, recipe("rollout_is")(), HARDWARE["cpu"], 10)


@pytest.mark.slow
def test_flags_decide_what_is_simulated():
    base = report(staleness=1, lengths=LENGTHS)
    assert base.rule == AdmissionRule(8, 1, 1)
    assert [(x.train, x.generate) for x in base.splits if not x.shared] != []
    assert {x.train + x.generate for x in base.splits if not x.shared} == {4}
    assert {x.result.age_max for x in base.splits} == {0, 1}  # shared devices take turns
    assert {rule.staleness: result.age_max for rule, result in base.rules if rule.window == 1} == {
        0: 0,
        1: 1,
        2: 2,
        4: 4,
    }
    other = report(staleness=3, window=4, lengths="mean:20,max:24")
    assert max(x.result.age_max for x in other.splits) in (3, 4)  # a window lets later groups go first
    assert {rule.staleness for rule, _ in other.rules} == {0, 1, 2, 3, 4}
    assert other.rule.window == 4 and {rule.window for rule, _ in other.rules} == {1, 4, 8}
    assert other.splits[0].result.step > base.splits[0].result.step
    assert schedule_report.wants_schedules(settings_of(lengths=LENGTHS))
    assert not schedule_report.wants_schedules(settings_of())


def test_the_text_and_the_object_say_the_same():
    schedules = report(staleness=1, lengths=LENGTHS)
    text = schedule_report.schedules_text(schedules)
    head = text.splitlines()[0]
    assert head.startswith("asynchronous, S=1, W=1: no group is more than 1 version behind; completions of 8 tokens")
    assert "4 shared" in text and "by staleness and window:" in text
    found = json.loads(json.dumps(schedule_report.schedules_object(schedules)))
    assert found["most_age"] == 1 and found["length_mean"] == pytest.approx(8)
    assert [x["train"] for x in found["splits"]] == [x.train for x in schedules.splits]
    best = schedules.splits[0]
    assert found["splits"][0]["result"]["step"] == best.result.step
    assert f"{best.train} shared" in text if best.shared else f"train {best.train}, generate {best.generate}" in text


@pytest.mark.slow
def test_the_dry_run_prints_it():
    settings = settings_of(**SMALL, task="arithmetic", dry_run=True, staleness=1, lengths=LENGTHS, json=True)
    found = json.loads(dry_report.dry_run(settings, recipe("rollout_is")))
    assert found["fits"] and found["schedules"]["staleness"] == 1


@pytest.mark.parametrize(
    "name,flags,message",
    [
        ("rollout_is", {"staleness": 2}, "the devices of a run take turns at generation and training"),
        ("grpo", {"staleness": 2, "dry_run": True}, "does not depend on rollout_logp"),
    ],
)
def test_staleness_is_refused_where_it_cannot_be(name, flags, message):
    with pytest.raises(SettingsError) as error:
        plain(name, **flags)
    assert "--staleness=2: " in str(error.value) and message in str(error.value)


def test_a_run_on_its_own_devices_has_the_times_of_the_formulas():
    job = plain("rollout_is", mesh="dp2", minibatches=2)
    law = law_of_mean(12, 24)
    work = Workload(law, 10, HARDWARE["cpu"])
    run = async_run(job, 6, work, AdmissionRule(8, 1))
    assert (run.replicas, run.samples, run.update.ranks, run.update.minibatches) == (6, 2, 2, 2)
    rows = np.full(16, 10 + law.mean)
    alone = async_run(plain("rollout_is", mesh="dp4"), 4, work, AdmissionRule(8, 1))
    assert run.update.seconds(rows) > alone.update.seconds(rows)  # half of the ranks, twice the rows of each


def test_the_trainer_waits_for_a_judge_about_as_long_as_its_trace(tmp_path):
    """Without launches, which a CUDA graph hides in part; the formula has no kernels but products and caches."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8}
    hardware = H100._replace(launch=0.0)
    flags = {"prompts": "p.jsonl", "judge": write_config(tmp_path, **sizes), "judge_max_new_tokens": 64}
    flags |= {"batch_prompts": 32, "max_new_tokens": 64, "decode_rows": 64, "dtype": "bfloat16"}
    job = plain("rollout_is", memory=hardware.memory, **flags)
    alone = dataclasses.replace(job, judge=None)
    with pretended(job.sizes) as mesh:
        traced = judging(job, job.judge, build(alone, mesh, lambda _: None), 64, 0.0, hardware).costs.seconds
    work = Workload(law_of_mean(60, 64), 64, hardware)
    rows = np.full(64, 128)
    seconds = verdict_times(job, job.judge, work).seconds(rows)
    assert traced / 2 < seconds < traced
    assert verdict_times(job, job.judge._replace(sizes={**job.sizes, "data": 2}), work).seconds(rows) < seconds
    updates = [async_run(x, 1, work, AdmissionRule(32, 1)).update.seconds(rows) for x in (job, alone)]
    assert updates[0] - updates[1] == pytest.approx(seconds)


def test_a_split_that_cannot_be_is_left_out():
    job = plain("rollout_is", mesh="dp4")

    def on_devices(count):
        if count == 3:
            raise SettingsError("rows cannot be divided")
        return plain("rollout_is", mesh=f"dp{count}")

    work = Workload(law_of_mean(12, 24), 10, HARDWARE["cpu"])
    splits, runs = simulate_splits(job, on_devices, work, AdmissionRule(8, 1))
    assert sorted(x.train for x in splits if not x.shared) == [1, 2]
    assert set(runs) == set(splits) and [x.fits for x in splits] == [True] * 3
    assert [x.result.step for x in splits] == sorted(x.result.step for x in splits)
    small = work._replace(hardware=HARDWARE["cpu"]._replace(memory=1e6))
    splits, _ = simulate_splits(job, on_devices, small, AdmissionRule(8, 1))
    assert not any(x.fits for x in splits)
    schedules = schedule_report.Schedules(AdmissionRule(8, 1), work.lengths, splits, [])
    assert "no split fits" in schedule_report.schedules_text(schedules)


def metrics(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("law", [LengthLaw(400, 0.6, 100_000), LengthLaw(1500, 0.9, 4000)])
def test_the_law_of_a_run_is_that_of_its_lengths(tmp_path, law):
    random = np.random.default_rng(0)
    rows = []
    for step in range(20):
        lengths = law.draw(random, 128, 8)
        rows.append(
            {
                "step": step,
                "response_length/mean": lengths.mean(),
                "response_length/max": lengths.max(),
                "response_length/clip_ratio": (lengths == law.most).mean(),
            }
        )
    found = law_of_run(metrics(tmp_path, rows))
    assert found.mean == pytest.approx(law.mean, rel=0.05)
    assert found.spread == pytest.approx(law.spread, rel=0.2)


def test_a_run_without_lengths_has_no_law(tmp_path):
    with pytest.raises(LengthError, match="has no step with response_length/mean"):
        law_of_run(metrics(tmp_path, [{"step": 1}]))
    even = {"response_length/mean": 8.0, "response_length/max": 8.0}
    with pytest.raises(LengthError, match="have no law"):
        law_of_run(metrics(tmp_path, [even]))
