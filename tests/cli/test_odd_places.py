"""A run without a home directory, without a name for its user, and with TMPDIR absent or full."""

import json
import os
import pwd
import tempfile
from pathlib import Path

import pytest
from disks import mounted

from funrl.cli.run import main
from funrl.compiled_kernels import kernel_library

TINY = (
    "--device=cpu",
    "--compile=off",
    "--batch_prompts=4",
    "--eval_prompts=4",
    "--samples_per_prompt=2",
    "--lr=1e-3",
    "--max_new_tokens=4",
    "--dtype=float64",
    "--steps=2",
    "--save_every=1",
)


def nobody(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")


@pytest.fixture
def homeless(monkeypatch):
    """No HOME, and a user that the system has no entry of."""
    for name in ("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(RuntimeError):
        Path.home()


@pytest.fixture
def full_disk(tmp_path):
    """A disk without a free byte."""
    with mounted(tmp_path / "full", "4k") as folder:
        (folder / "filler").write_bytes(bytes(4096))
        yield folder


def run(tmp_path, monkeypatch, temporary, *flags):
    (tmp_path / "second").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("TEMP", str(tmp_path / "second"))  # is looked at next
    monkeypatch.setattr(tempfile, "tempdir", None)  # looked for anew
    run_dir = tmp_path / "run"
    assert main("grpo", ["grpo", *TINY, f"--run_dir={run_dir}", *flags]) == 0
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert (run_dir / "checkpoints" / "step-2" / "complete.json").is_file()
    assert tempfile.gettempdir() == str(tmp_path / "second")


@pytest.mark.slow
def test_no_home_no_user_and_no_temporary_folder(homeless, tmp_path, monkeypatch):
    """The warm start is kept in a folder of the user's own among the temporary ones."""
    run(tmp_path, monkeypatch, tmp_path / "absent", "--warmstart_steps=1")
    kept = kernel_library.cache_folder()
    assert kept == Path(tempfile.gettempdir()) / f"funrl-cache-{os.getuid()}" and any(kept.iterdir())


@pytest.mark.slow
@pytest.mark.gloo
def test_a_full_temporary_folder(homeless, full_disk, tmp_path, monkeypatch):
    run(tmp_path, monkeypatch, full_disk, "--warmstart_steps=0", "--mesh=dp2")
    assert list(full_disk.iterdir()) == [full_disk / "filler"]
