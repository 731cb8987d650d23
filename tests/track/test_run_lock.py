"""One owner of a run directory, who leaves nothing where the run is refused."""

import os

import pytest
from forked_python import start_python

from funrl.track.records import run_lock
from funrl.track.records.run_directory import RunDirectoryError, expanded
from funrl.track.records.run_lock import LOCK, owned_run

HOLD = (
    "import sys, time; from funrl.track.records.run_lock import owned_run\n"
    "with owned_run(sys.argv[1], 'ppo', {}):\n    print('mine', flush=True); time.sleep(60)\n"
)


def test_a_second_run_is_refused_and_the_first_one_keeps_its_lock(tmp_path):
    with owned_run(tmp_path / "run", "ppo", {}) as run:
        (run.path / "config.json").unlink()  # as early as can be
        for _ in range(2):
            with (
                pytest.raises(RunDirectoryError, match=rf"another run writes there \(process {os.getpid()} on "),
                owned_run(run.path, "ppo", {}),
            ):
                pass
        assert (run.path / LOCK).exists()
    with owned_run(run.path, "ppo", {}):
        pass


def test_who_resumes_waits_for_the_end_of_a_run_that_is_killed(tmp_path, monkeypatch):
    (tmp_path / "hold.py").write_text(HOLD)
    run = tmp_path / "run"
    held = start_python([str(tmp_path / "hold.py"), str(run)], os.environ)
    assert held.stdout is not None and held.stdout.readline() == "mine\n"
    monkeypatch.setattr(run_lock, "WAIT_S", 0.2)
    with (
        pytest.raises(RunDirectoryError, match="another run writes there"),
        owned_run(run, "ppo", {}, resume=True),
    ):
        pass
    held.kill()
    monkeypatch.setattr(run_lock, "WAIT_S", 30.0)  # the other would have ended after 60 s
    with owned_run(run, "ppo", {}, resume=True):
        pass
    held.communicate()


def test_a_refused_run_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "open_run", lambda *_, **__: (_ for _ in ()).throw(RunDirectoryError("no")))
    with pytest.raises(RunDirectoryError, match="no"), owned_run(tmp_path / "new", "ppo", {}):
        pass
    assert not (tmp_path / "new").exists()


def test_a_path_below_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/run") == tmp_path / "run"
    with owned_run("~/run", "ppo", {}) as run:
        assert run.path == tmp_path / "run" and (tmp_path / "run/config.json").exists()
    with pytest.raises(RunDirectoryError, match="--run_dir=~nobody-of-that-name/x: "):
        expanded("~nobody-of-that-name/x")
