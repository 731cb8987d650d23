"""Folders of weights: they end with their process, however it ends."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from funrl.rollout.vllm.folders import NEW_S, PREFIX, weights_folder

HOLDER = (
    "from funrl.rollout.vllm.folders import weights_folder; x = weights_folder(); print(x.name, flush=True); input()"
)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return lambda: sorted(path.name for path in tmp_path.iterdir())


def aged(path):
    """The folder, made to look as old as one may be that nobody is about to lock."""
    old = Path(path).stat().st_mtime - 2 * NEW_S
    os.utime(path, (old, old))
    return Path(path)


def test_a_folder_of_a_killed_process_is_removed_and_one_in_use_is_not(folders):
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held = aged(holder.stdout.readline().strip())
        (held / "000000").write_bytes(b"weights")
        aged(held)
        first = weights_folder()
        assert (held / "000000").exists()
        holder.kill()
        holder.wait()
        aged(held)
        second = weights_folder()
    assert folders() == sorted(Path(one.name).name for one in (first, second))
    del first, second
    assert folders() == []


def test_a_folder_that_may_be_about_to_be_locked_stays(folders):
    new = tempfile.mkdtemp(prefix=PREFIX)
    weights_folder()
    assert folders() == [Path(new).name]
