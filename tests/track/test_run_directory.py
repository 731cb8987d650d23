"""The run directory: refused before any work if it cannot serve, and valid JSON whatever is written."""

import json
import math
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from funrl.track.records import run_directory
from funrl.track.records.run_directory import (
    RunDirectory,
    RunDirectoryError,
    check_can_go_on,
    keep_steps,
    open_lines,
    open_run,
    read_lines,
    valid,
)
from funrl.track.records.samples import Sample, first_and_last, open_samples, read_samples


def test_config_has_flags_versions_mesh_and_seed(tmp_path):
    run = open_run(tmp_path / "new" / "run", "ppo", {"mesh": "dp4,tp2", "seed": 7, "lr": 1e-3, "model": None})
    config = json.loads(run.config.read_text())
    assert config["flags"] == {"mesh": "dp4,tp2", "seed": 7, "lr": 1e-3, "model": None}
    assert (config["experiment"], config["mesh"], config["seed"]) == ("ppo", "dp4,tp2", 7)
    assert set(config["versions"]) == {"funrl", "python", "torch", "transformers"}
    assert config["versions"]["torch"] == torch.__version__
    assert [p.name for p in run.path.iterdir()] == ["config.json"]  # no draft and no probe is left


def test_default_name_gets_a_number_when_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "20250101-120000")
    names = [open_run(None, "grpo", {}).path.as_posix() for _ in range(3)]
    assert names == [f"runs/grpo-20250101-120000{suffix}" for suffix in ("", "-2", "-3")]


def test_a_former_run_is_refused_and_kept(tmp_path):
    run = open_run(tmp_path, "ppo", {"seed": 1})
    open_run(tmp_path, "ppo", {"seed": 2})  # nothing was written but this: the directory may be taken
    lines = open_lines(run.metrics)
    lines.write({"step": 1})
    lines.close()
    with pytest.raises(RunDirectoryError, match=f"{tmp_path}: holds metrics.jsonl, .*former run"):
        open_run(tmp_path, "ppo", {"seed": 3})
    assert json.loads(run.config.read_text())["seed"] == 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "tensorboard", "model", "report.html"])
def test_one_that_wrote_no_step_or_has_not_yet_is_refused_too(name, tmp_path):
    run = open_run(tmp_path, "ppo", {"seed": 1})
    if name in ("tensorboard", "model"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("")  # open, and nothing in it yet
    with pytest.raises(RunDirectoryError, match=f"--run_dir={tmp_path}: holds {name}, as a former run leaves"):
        open_run(tmp_path, "ppo", {"seed": 2})
    assert json.loads(run.config.read_text())["seed"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["config.json", name])


def test_all_that_is_in_the_way_is_named(tmp_path):
    (tmp_path / "samples.jsonl").write_text("")
    (tmp_path / "model").mkdir()
    with pytest.raises(RunDirectoryError, match=r"holds samples\.jsonl, model, as"):
        open_run(tmp_path, "ppo", {})


def test_a_models_config_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RunDirectoryError, match=r"no run has written"):
        open_run(tmp_path, "ppo", {})
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "llama"}


def test_a_directory_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunDirectoryError, match=f"--run_dir={path}: cannot be created"):
            open_run(path, "ppo", {})


def test_a_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def refuse(*_, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_directory, "open", refuse, raising=False)  # the tests may run as root, whom no mode stops
    with pytest.raises(RunDirectoryError, match=f"--run_dir={tmp_path}: cannot be written: permission denied"):
        open_run(tmp_path, "ppo", {})
    assert not (tmp_path / "config.json").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_directory_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        open_run(tmp_path, "ppo", {})


def test_every_value_becomes_valid_json():
    value = {
        "nan": math.nan,
        "inf": -math.inf,
        "tensor": torch.tensor(2.5),
        "bad": torch.tensor(math.nan),
        "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
        "numpy": np.float32(0.5),
        "numpy64": np.float64(math.inf),
        "int": np.int64(3),
        "array": torch.tensor([1.0, math.inf]),
        "path": Path("a"),
        "flag": True,
        1: (None,),
    }
    text = json.dumps(valid(value), allow_nan=False)
    assert json.loads(text) == {
        "nan": None,
        "inf": None,
        "tensor": 2.5,
        "bad": None,
        "bf16": 1.5,
        "numpy": 0.5,
        "numpy64": None,
        "int": 3,
        "array": [1.0, None],
        "path": "a",
        "flag": True,
        "1": [None],
    }


def test_lines_are_readable_while_open_and_after_a_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = open_lines(path)
    texts = ["plain", "two\nlines", "\u2028 separator", "lone \ud800 surrogate", "\x00\x1b"]
    for step, text in enumerate(texts):
        lines.write({"step": step, "text": text})
        assert [line["step"] for line in read_lines(path)] == list(range(step + 1))
    assert all(json.loads(line) for line in path.read_bytes().splitlines())
    whole = path.read_bytes()
    for cut in range(len(whole) - 20, len(whole)):  # ended inside the last write: its line alone is lost
        path.write_bytes(whole[:cut])
        steps = [line["step"] for line in read_lines(path)]
        assert steps in ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    assert [line["text"] for line in read_lines(path)][:3] == texts[:3]


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl, line 2: not JSON"):
        list(read_lines(path))
    path.write_text('{"step": 1}\n{"step": \n')  # the last one, but whole
    with pytest.raises(RunDirectoryError, match=r"line 2: not JSON"):
        list(read_lines(path))
    path.write_text('{"step": 1}\n3\n')
    with pytest.raises(RunDirectoryError, match=r"line 2: a JSON object is needed, not int"):
        list(read_lines(path))


def test_samples_come_back_and_bad_rewards_are_none(tmp_path):
    writer = open_samples(tmp_path / "samples.jsonl")
    writer.write(Sample(1, "1+1=", "2", 1.0, (("right", 1.0), ("short", 0.0))))
    writer.write(Sample(2, "1+1=", "3", math.nan))
    writer.close()
    assert read_samples(tmp_path / "samples.jsonl") == [
        Sample(1, "1+1=", "2", 1.0, (("right", 1.0), ("short", 0.0))),
        Sample(2, "1+1=", "3", None),
    ]
    assert read_samples(tmp_path / "none.jsonl") == []


def test_first_and_last_pairs_prompts_and_shares_nothing():
    def at(step, prompts):
        return [Sample(step, p, f"{p}{step}", 0.0) for p in prompts]

    early, late = first_and_last(at(9, "dcab") + at(1, "abxd") + at(5, "ab"), 3)
    assert [s.prompt for s in early] == ["a", "b", "x"] and [s.prompt for s in late] == ["a", "b"]
    assert {s.step for s in early} == {1} and {s.step for s in late} == {9}
    early, late = first_and_last(at(1, "abc"), 5)  # one step: two halves, no sample twice
    assert (len(early), len(late)) == (1, 2) and early[0] not in late
    assert first_and_last([], 5) == ([], []) and first_and_last(at(1, "a"), 5) == (at(1, "a"), [])


def test_a_full_disk_leaves_no_half_line(tmp_path):
    """A write that takes a part is as on a disk that fills up inside of it."""
    lines = open_lines(tmp_path / "metrics.jsonl")
    lines.write({"step": 1})
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            lines.write({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    lines.write({"step": 2})
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("how", ["deleted", "replaced", "moved"])
def test_lines_are_not_written_to_a_file_that_nobody_finds(how, tmp_path):
    (tmp_path / "run").mkdir()
    lines = open_lines(tmp_path / "run" / "metrics.jsonl")
    if how == "moved":
        (tmp_path / "run").rename(tmp_path / "other")
    else:
        (tmp_path / "run" / "metrics.jsonl").unlink()
    if how == "replaced":
        (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(FileNotFoundError):
        lines.write({"step": 1})


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    run = open_run(tmp_path, "ppo", {})
    run.model.mkdir()
    drafts = [tmp_path / ".config.json.17", tmp_path / ".report.html.17", run.model / "model-00001.safetensors.partial"]
    for draft in drafts:
        draft.touch()
    open_run(tmp_path, "ppo", {}, resume=True)
    assert not any(draft.exists() for draft in drafts) and run.config.exists()


def test_a_run_that_has_ended_without_a_checkpoint_is_not_begun_again(tmp_path):
    run = RunDirectory(tmp_path)
    run.config.write_text(json.dumps({"flags": {"steps": 2}}))
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    check_can_go_on(tmp_path)  # it was killed before it wrote its model
    run.model.mkdir()
    with pytest.raises(RunDirectoryError, match=r"has made its 2 steps and has no checkpoint .* --model=\S+/model"):
        check_can_go_on(tmp_path)
    run.metrics.write_text('{"step": 1}\n')
    check_can_go_on(tmp_path)  # it stopped early
    run.metrics.write_text('{"step": 2}\n')
    (run.checkpoints / "step-2").mkdir(parents=True)
    (run.checkpoints / "step-2/complete.json").write_text("{}")
    check_can_go_on(tmp_path)


def test_lines_of_later_steps_are_removed_in_place(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "text": "é"}}\n' for step in range(5)))
    keep_steps(path, 2)
    assert path.read_text() == "".join(f'{{"step": {step}, "text": "é"}}\n' for step in range(3))
    keep_steps(tmp_path / "absent.jsonl", 2)
    assert not (tmp_path / "absent.jsonl").exists()
