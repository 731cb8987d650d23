"""Trackers of other packages: offline runs are read back, and what fails does not end a run.

The packages are looked for in .venv-trackers, which `./test --all` makes, or in this environment.
"""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from funrl.cli.command import Experiment, read_command
from funrl.track.observe import RunObserver
from funrl.track.records.run_directory import open_run
from funrl.track.records.services import SERVICES, TrackerError, open_service
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.records import TRACKERS
from funrl.trainer.settings.settings import settings_of

ROOT = Path(__file__).parents[2]
OWN = ROOT / ".venv-trackers/bin/python"
WRITE = """
import json, pathlib, sys, time
from funrl.track.records.run_directory import RunDirectory
from funrl.track.records.services import open_service
run = RunDirectory(pathlib.Path("run"))
for steps in ((1, 2), (3,)):  # the second is a resumed run
    if steps == (3,) and sys.argv[1] == "wandb":
        time.sleep(1.1)  # they name the folder of a run by the second
    tracker = open_service(sys.argv[1], run, print)
    for step in steps:
        tracker.write(step, {"reward/mean": step / 4, "not/finite": float("nan")})
    tracker.close()
"""
READ = {
    "wandb": """
import glob
data = b"".join(open(f, "rb").read() for f in glob.glob("run/wandb/offline-run-*/*.wandb"))
assert len(glob.glob(f"run/wandb/offline-run-*-{identity}")) == 2
assert b"reward/mean" in data and b"not/finite" not in data
assert [number in data for number in (b"0.25", b"0.5", b"0.75", b"0.125")] == [True] * 4
""",
    "mlflow": """
from mlflow import MlflowClient
history = [(m.step, m.value) for m in MlflowClient().get_metric_history(identity, "reward/mean")]
assert history == [(1, 0.25), (2, 0.5), (3, 0.75)], history
assert MlflowClient().get_run(identity).data.params == {"steps": "3", "lr": "0.125"}
""",
}


def python_with(name):
    """An interpreter that imports a package; None where there is none."""
    if (
        OWN.exists()
        and not subprocess.run(
            [OWN, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is None)"]
        ).returncode
    ):
        return str(OWN)
    return sys.executable if importlib.util.find_spec(name) else None


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_an_offline_run_is_read_back(name, tmp_path):
    python = python_with(name)
    if python is None:
        pytest.skip(f"{name} is not installed: ./test --all makes .venv-trackers for it")
    places = {
        "HOME": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
    }
    modes = {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}
    environment = os.environ | places | modes | {"PYTHONPATH": str(ROOT)}
    open_run(str(tmp_path / "run"), "ppo", {"steps": 3, "lr": 0.125})  # here: the trackers' environment has no torch
    program = f"{WRITE}\nidentity = json.load(open('run/trackers.json'))['{name}']\n{READ[name]}"
    done = subprocess.run([python, "-c", program, name], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def fake_wandb(calls, fails_at):
    """A module with what is used of wandb."""

    def log(metrics, step):
        if step >= fails_at:
            raise ConnectionError("no route to host")
        calls.append((step, metrics))

    made = types.SimpleNamespace(id="x7", log=log, finish=lambda: calls.append("closed"))
    return types.SimpleNamespace(init=lambda **given: calls.append(given) or made)


def test_a_service_that_fails_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch):
    calls, results = [], []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(calls, 2))
    run = open_run(tmp_path / "mine", "ppo", {"steps": 3})
    tracker = open_service("wandb", run, results.append)
    for step in (1, 2, 3):
        tracker.write(step, {"reward/mean": 0.5, "x": float("inf")})
    tracker.close()
    assert calls[0]["name"] == "mine" and calls[0]["id"] is None and calls[0]["config"] == {"steps": 3}
    assert calls[1:] == [(1, {"reward/mean": 0.5}), "closed"]
    assert results == ["wandb: ConnectionError: no route to host; nothing goes there from step 2 on"]
    assert json.loads(run.trackers.read_text()) == {"wandb": "x7"}
    open_service("wandb", run, results.append)
    assert calls[-1]["id"] == "x7"


def test_a_tracker_that_is_not_there_is_answered_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(TrackerError, match=r"--report_to=mlflow: mlflow is not installed \(pip install mlflow\)"):
        open_service("mlflow", open_run(tmp_path / "run", "ppo", {}), print)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="--report_to=mlflow,wandb: mlflow is not installed; pip install mlflow"):
        read_command(Experiment("grpo", "grpo", {}), ["grpo", "--report_to=mlflow,wandb"], writes=True)
    with pytest.raises(SettingsError, match="some of wandb,mlflow,otel"):
        read_command(Experiment("grpo", "grpo", {}), ["grpo", "--report_to=visdom"], writes=True)
    assert set(SERVICES) == set(TRACKERS)


def test_a_run_gives_its_metrics_to_the_trackers_of_its_flag(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(calls, 9))
    open_run(tmp_path / "run", "ppo", {})
    job = types.SimpleNamespace(settings=settings_of(report_to="wandb"), task=types.SimpleNamespace(name="sums"))
    with RunObserver(job, str(tmp_path / "run"), 0) as observer:
        observer.step(1, {"reward/mean": 0.5}, {"generate": 2.0})
    assert calls[1][0] == 1 and calls[1][1]["reward/mean"] == 0.5 and calls[1][1]["time_s/step"] == 2.0
    with RunObserver(job, str(tmp_path / "run"), 1) as observer:  # another rank
        observer.step(1, {"reward/mean": 0.5}, {"generate": 2.0})
    assert calls[2:] == ["closed"]
