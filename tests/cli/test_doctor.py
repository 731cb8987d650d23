"""`funrl doctor` says what is there, and of a command line whether it would run."""

import re

import pytest
import torch

from funrl.cli import main as cli
from funrl.cli.doctor import experiment_of, machine


def call(capsys, *words):
    return cli.main(["funrl", "doctor", *words]), capsys.readouterr().out


def test_doctor_is_listed(capsys):
    assert cli.main(["funrl", "--help"]) == 0
    assert "funrl doctor [NAME --flag=value ...]" in capsys.readouterr().out


def test_a_machine_and_its_packages(capsys):
    status, out = call(capsys)
    assert status == 0 and "would" not in out
    for name in (
        "CPU",
        "processor",
        "matrix products",
        "GPU",
        "communication",
        "C\\+\\+ kernels",
        "torch",
        "vllm",
    ):
        assert re.search(rf"^  {name} +\S", out, re.MULTILINE), name


def test_a_gpu_is_described_and_why_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "is built for CPUs; the build for this machine's GPUs is on pytorch.org" in dict(machine())["GPU"]
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "built for CUDA 12.8, sees no GPU; the driver may be missing or older" in dict(machine())["GPU"]
    monkeypatch.setattr("funrl.mesh.launch.gpu_problem", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    rows = dict(machine())
    assert rows["GPU 0"] == "NVIDIA H100 80GB HBM3, 70.0 of 80.0 GB free"
    assert rows["attention, bfloat16"].startswith("torch ") and "GPU" not in rows
    assert rows["attention over pages"] in (
        "by a kernel",
        "gathers the pages, which is slow: no kernel takes them here",
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["funrl", "dr_grpo", "--steps=2"], None),
        (["ppo", "--setps=2"], "--setps is not a flag; did you mean --steps?"),
        (["grpo", "--mesh=dp0"], "must be at least 1"),
        (["sft", "--data=nowhere.jsonl"], "--data: nowhere.jsonl: no such file"),
        (["pppo"], "'pppo' is not an experiment or a recipe; did you mean ppo?"),
        (["run"], "'run' is not an experiment or a recipe"),
        (["a.py:f"], "'a.py:f' is not an experiment or a recipe"),
    ],
)
def test_a_command_line_would_run_or_not(words, says, capsys):
    status, out = call(capsys, *words)
    last = out.splitlines()[-1]
    assert (status, last) == (0, "  would run") if says is None else status == 1 and says in last


@pytest.mark.slow
def test_a_run_directory_in_use_is_seen_and_left_as_it_is(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    status, out = call(capsys, "ppo", f"--run_dir={tmp_path}")
    assert status == 1 and "would not run" in out
    assert call(capsys, "ppo", f"--run_dir={tmp_path / 'new'}")[0] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_an_experiment_has_the_defaults_of_its_file(monkeypatch):
    seen = []
    monkeypatch.setattr("funrl.cli.run.main", lambda *args, **defaults: seen.append((*args, defaults)) or 0)
    for name in cli.experiment_names():
        with pytest.raises(SystemExit):
            cli.main(["funrl", name])
        assert seen[-1] == (name, experiment_of(name).defaults)
    assert len(seen) == len(cli.experiment_names())
