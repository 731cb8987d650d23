"""Splits of devices between training and generation in a dry run, and its report of them."""

import functools
import json

import numpy as np
import pytest
from dry_jobs import plain
from dry_jobs import settings as dry_settings

import funrl
from funrl.algos.recipes import recipe
from funrl.cost import dry_run
from funrl.cost import report as dry_report
from funrl.cost import schedules as schedule_report
from funrl.cost.schedules import (
    LengthError,
    LengthLaw,
    LoggedLengths,
    Workload,
    async_run,
    law_of_mean,
    law_of_run,
    lengths_of_run,
    simulate_splits,
    traced_ranks,
)
from funrl.cost.tracing.hardware import HARDWARE
from funrl.cost.verdict import step_seconds
from funrl.rollout.ledger import LedgerRule
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
    assert base.rule == LedgerRule(8, 1, 1)
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
    logged = schedules._replace(lengths=LoggedLengths((3.0, 8.0), cut=1))
    assert "1 of 2 lengths are cut at 8 tokens" in schedule_report.schedules_text(logged).splitlines()[1]
    record = json.loads(json.dumps(schedule_report.schedules_object(schedules)))
    assert record["most_age"] == 1 and record["length_mean"] == pytest.approx(8)
    assert [x["train"] for x in record["splits"]] == [x.train for x in schedules.splits]
    best = schedules.splits[0]
    assert record["splits"][0]["result"]["step"] == best.result.step
    assert f"{best.train} shared" in text if best.shared else f"train {best.train}, generate {best.generate}" in text


@pytest.mark.slow
def test_the_dry_run_prints_it():
    settings = settings_of(**SMALL, task="arithmetic", dry_run=True, staleness=1, lengths=LENGTHS, json=True)
    record = json.loads(dry_report.dry_run(settings, recipe("rollout_is")))
    assert record["fits"] and record["schedules"]["staleness"] == 1


@pytest.mark.parametrize(
    "name,flags,message",
    [
        ("rollout_is", {"staleness": 2}, "--staleness=2 does nothing without ranks that only generate (--place)"),
        ("grpo", {"staleness": 2, "dry_run": True}, "--staleness=2: "),
        ("grpo", {"staleness": 2, "dry_run": True}, "does not depend on rollout_logp"),
    ],
)
def test_staleness_is_refused_where_it_cannot_be(name, flags, message):
    with pytest.raises(SettingsError) as error:
        plain(name, **flags)
    assert message in str(error.value)


def test_a_run_on_its_own_devices_has_the_times_of_traces():
    flags = {"mesh": "dp2", "minibatches": 2, "dry_run": True, "hardware": "cpu"}
    work = Workload(law_of_mean(12, 24), 10, HARDWARE["cpu"])
    algorithm = recipe("rollout_is")()
    trainer = traced_ranks(dry_settings(**flags), algorithm, work.lengths, work.rank())
    run = async_run(plain("rollout_is", **flags), trainer.times, 6, work, LedgerRule(8, 1))
    assert (run.replicas, run.samples, run.update.ranks, run.update.minibatches) == (6, 2, 2, 2)
    rows = np.full(16, 10 + work.lengths.mean)
    traced = dry_run.estimate(plain("rollout_is", **flags | {"max_new_tokens": 12}), 10, work.hardware, "train")
    assert run.update.seconds(rows) == pytest.approx(step_seconds(traced, work.hardware))


def test_splits_share_the_traced_trainer_and_fit_by_its_memory():
    job = plain("rollout_is", mesh="dp4", fsdp=True)
    work = Workload(law_of_mean(12, 24), 10, HARDWARE["cpu"])
    settings = dry_settings(mesh="dp4", fsdp=True, dry_run=True)
    trainer = traced_ranks(settings, recipe("rollout_is")(), work.lengths, work.rank())
    assert trainer.nbytes(1) > trainer.nbytes(2) > trainer.nbytes(4)  # shards
    splits, runs = simulate_splits(job, trainer, work, LedgerRule(8, 1))
    assert sorted(x.train for x in splits if not x.shared) == [1, 2, 3]
    assert set(runs) == set(splits) and all(x.fits for x in splits)
    assert [x.result.step for x in splits] == sorted(x.result.step for x in splits)
    small = work._replace(hardware=HARDWARE["cpu"]._replace(memory=1e5))
    splits, _ = simulate_splits(job, trainer, small, LedgerRule(8, 1))
    assert not any(x.fits for x in splits)
    schedules = schedule_report.Schedules(LedgerRule(8, 1), work.lengths, splits, [])
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
    result = law_of_run(metrics(tmp_path, rows))
    assert result.mean == pytest.approx(law.mean, rel=0.05)
    assert result.spread == pytest.approx(law.spread, rel=0.2)


@pytest.mark.slow
def test_the_lengths_of_saved_rows_are_drawn(tmp_path):
    flags = {"batch_prompts": 4, "samples_per_prompt": 2, "eval_prompts": 2, "warmstart_steps": 0, "device": "cpu"}
    run = funrl.train("grpo", **flags, steps=2, save_rollouts=1, run_dir=str(tmp_path / "run"))
    lengths = lengths_of_run(tmp_path / "run", most=10_000)
    means = [row["response_length/mean"] for row in run.metrics]
    assert lengths.mean == pytest.approx(sum(means) / 2) and len(lengths.tokens) == 16
    assert lengths.most == max(row["response_length/max"] for row in run.metrics)


def test_a_run_without_lengths_has_no_law(tmp_path):
    with pytest.raises(LengthError, match="has no step with response_length/mean"):
        law_of_run(metrics(tmp_path, [{"step": 1}]))
    even = {"response_length/mean": 8.0, "response_length/max": 8.0}
    with pytest.raises(LengthError, match="have no law"):
        law_of_run(metrics(tmp_path, [even]))
