"""Starts of a run: which of them made a step, and which values its flags had."""

import json

import pytest

from funrl.track.records.run_directory import begin_segment, open_run
from funrl.track.records.segments import (
    SegmentError,
    config_of,
    in_words,
    segment_of_step,
    segments_of,
    standing_segments,
    values_over_time,
)
from funrl.track.report.page import headline
from funrl.track.report.run_files import ReportError, RunFiles, read_run
from funrl.trainer.settings.declaration import HELD_OUT_SET


def config(*starts):
    """A config.json of starts: the step after which each began, and its learning rate."""
    return config_of([{"step": step, "flags": {"lr": lr, "seed": 0}} for step, lr in starts])


@pytest.mark.parametrize(
    ("starts", "rates"),
    [
        ([(0, 1)], {1: 1, 9: 1}),
        ([(0, 1), (4, 2)], {4: 1, 5: 2, 9: 2}),
        ([(0, 1), (4, 2), (2, 3)], {2: 1, 3: 3, 5: 3}),  # the checkpoint of step 4 could not be read
        ([(0, 1), (0, 2), (4, 3)], {1: 2, 4: 2, 5: 3}),  # the first made no checkpoint
        ([(4, 2)], {1: 2, 5: 2}),  # what was before is not known
    ],
)
def test_a_step_was_made_by_the_newest_start_before_it(starts, rates):
    results = {step: segment_of_step(config(*starts), step)["flags"]["lr"] for step in rates}
    assert results == rates
    assert config(*starts)["flags"]["lr"] == starts[-1][1]  # at the top is the newest


def test_values_are_told_with_the_steps_after_which_they_changed():
    configs = config((0, 1), (2, 1), (4, 2), (3, 5))
    assert values_over_time(configs) == {"lr": [(0, 1), (3, 5)], "seed": [(0, 0)]}
    assert [standing_segment["step"] for standing_segment in standing_segments(configs)] == [0, 2, 3]
    assert in_words([(0, 1), (3, 5)]) == "1, 5 after step 3" and in_words(None) == "None"
    assert values_over_time({"flags": {"lr": 1}, "inputs": {"prompts": "a"}}, "inputs") == {"prompts": [(0, "a")]}


@pytest.mark.parametrize("broken", [[], 3, [3], [{"step": "1"}], [{"flags": {}}]])
def test_segments_that_cannot_be_read_are_named(broken, tmp_path):
    with pytest.raises(SegmentError):
        segments_of({"segments": broken})
    run = open_run(tmp_path, "ppo", {})
    run.config.write_text(json.dumps({"experiment": "ppo", "segments": broken}))
    run.metrics.write_text('{"step": 1}\n')
    with pytest.raises(ReportError, match=r"config\.json: its segments are not as a run writes them"):
        read_run(run)


def test_a_start_is_a_segment_when_it_has_been_accepted(tmp_path):
    run = open_run(tmp_path, "ppo", {"lr": 1})
    begin_segment(run, 0, {"prompts": "a"})
    before = run.config.read_bytes()
    for lr in (2, 3):  # the first of them was refused
        open_run(tmp_path, "ppo", {"lr": lr}, resume=True)
        assert run.config.read_bytes() == before
    begin_segment(run, 7, {"prompts": "b"})
    configs = json.loads(run.config.read_text())
    assert values_over_time(configs) == {"lr": [(0, 1), (7, 3)]}
    assert values_over_time(configs, "inputs") == {"prompts": [(0, "a"), (7, "b")]}
    assert (configs["flags"], configs["inputs"], len(configs["segments"])) == ({"lr": 3}, {"prompts": "b"}, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_resume_of_nothing_is_a_first_start(tmp_path):
    run = open_run(tmp_path, "ppo", {"lr": 1}, resume=True)
    assert not run.config.exists()
    begin_segment(run, 0, {})
    assert [row["step"] for row in json.loads(run.config.read_text())["segments"]] == [0]


def test_the_headline_compares_one_held_out_set():
    rows = [{"step": step, "eval/accuracy": value} for step, value in ((1, 0.25), (4, 0.5), (6, 0.75), (8, 0.875))]
    configs = config_of([{"step": step, "inputs": {HELD_OUT_SET: digest}} for step, digest in ((0, "a"), (4, "b"))])
    assert headline(RunFiles(configs, rows, [], [])) == "Held-out accuracy rose from 0.75 to 0.875 in 8 steps."
    same = config_of([{"step": step, "inputs": {HELD_OUT_SET: "a"}} for step in (0, 4)])
    assert "from 0.25 to 0.875" in headline(RunFiles(same, rows, [], []))
