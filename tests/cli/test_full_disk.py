"""A full disk, or a run directory that goes: one line, a status that is not 0, and the state saved elsewhere."""

import json
import os
import shutil
import subprocess
import tempfile

import pytest
from disks import mounted

import funrl
from funrl.cli.run import main
from funrl.track.records.run_directory import RunDirectoryError
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints

TINY = (
    "--device=cpu",
    "--compile=off",
    "--batch_prompts=4",
    "--eval_prompts=4",
    "--samples_per_prompt=2",
    "--lr=1e-3",
    "--max_new_tokens=4",
    "--warmstart_steps=0",
    "--dtype=float64",
)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MB."""
    with mounted(tmp_path / "disk", "3m") as folder:
        yield folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The temporary folder of the run."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def fill(folder, free):
    """Leave so many bytes free."""
    size = shutil.disk_usage(folder).free - free
    with open(folder / "filler", "wb") as file:
        file.write(bytes(max(0, size)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "free", "flags", "steps"),
    [
        pytest.param(
            "metrics",
            40_000,
            ("--save_every=0", "--sample_every=1", "--steps=400"),
            range(1, 400),
            marks=pytest.mark.slow,
        ),
        ("model", 300_000, ("--save_every=0", "--steps=1"), (1,)),
        pytest.param(
            "checkpoint",
            1_500_000,
            ("--save_every=1", "--steps=2", "--mesh=dp2"),
            (1, 2),
            marks=pytest.mark.gloo,
        ),
    ],
)
def test_a_full_disk_ends_the_run_and_the_state_is_saved_elsewhere(
    phase, free, flags, steps, small_disk, elsewhere, capfd
):
    fill(small_disk, free)
    run_dir = small_disk / "run"
    assert main("grpo", ["grpo", *TINY, f"--run_dir={run_dir}", *flags]) == 1
    captured = capfd.readouterr()
    first, second = captured.err.strip().splitlines()
    assert first.startswith(f"error: {run_dir}") and "cannot be written: " in first and "no space left" in first.lower()
    (there,) = elsewhere.glob("funrl-*")
    (saved,) = complete_checkpoints(there)
    checkpoints = run_dir / "checkpoints"
    command = f"mkdir -p {checkpoints} && mv {there}/step-{saved} {checkpoints}"
    assert f"the state after step {saved} is saved in {there}; `{command}` moves it to the run, and --resume" in second
    assert saved in steps
    if phase == "metrics":
        subprocess.run(["mount", "-o", "remount,size=30m", str(small_disk)], check=True)
        subprocess.run(command, shell=True, check=True)
        more = (f"--steps={saved + 1}", f"--run_dir={run_dir}", "--save_every=0", "--resume")
        assert main("grpo", ["grpo", *TINY, *more]) == 0
        lines = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert lines == [*range(1, saved + 2)]


@pytest.mark.parametrize("flags", [(), ("--resume",)], ids=["new", "resumed"])
def test_a_read_only_directory_is_said_in_a_line_before_work_starts(flags, small_disk, capfd):
    (small_disk / "run" / "checkpoints").mkdir(parents=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run_dir = small_disk / ("run" if flags else "new")
    assert main("grpo", ["grpo", *TINY, "--steps=3", f"--run_dir={run_dir}", *flags]) == 2
    captured = capfd.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert line.startswith(f"error: --run_dir={run_dir}: cannot be ") and "read-only file system" in line
    assert captured.out == ""


@pytest.mark.slow
@pytest.mark.gloo
def test_a_checkpoint_of_another_model_is_refused_in_a_line_on_every_mesh(tmp_path, capfd):
    run_dir = tmp_path / "run"
    assert main("grpo", ["grpo", *TINY, "--steps=1", f"--run_dir={run_dir}", "--save_every=1"]) == 0
    for program, flags, missing in (("ppo", (), "recipe"), ("grpo", ("--optimizer=muon", "--mesh=dp2"), "muon")):
        capfd.readouterr()
        assert main(program, [program, *TINY, "--steps=2", f"--run_dir={run_dir}", "--resume", *flags]) == 2
        (line,) = capfd.readouterr().err.strip().splitlines()
        assert line.startswith(f"error: --resume: {run_dir}/checkpoints/step-1 is of a run with"), line
        assert missing in line and "; give the flags that the run was started with, or another --run_dir" in line


@pytest.mark.slow
def test_a_run_directory_that_is_deleted_under_a_run_ends_it(tmp_path, elsewhere):
    run_dir = tmp_path / "run"

    def delete(step, metrics):
        if step == 1:
            shutil.rmtree(run_dir)

    small = {"batch_prompts": 4, "samples_per_prompt": 2, "max_new_tokens": 4, "eval_prompts": 4, "warmstart_steps": 0}
    with pytest.raises(funrl.RunError) as caught:
        funrl.train("grpo", run_dir=str(run_dir), on_step=delete, steps=9, dtype="float64", device="cpu", **small)
    cause, message = caught.value.__cause__, f"{run_dir}/metrics.jsonl: cannot be written: no such file or directory"
    assert isinstance(cause, RunDirectoryError) and str(cause) == message
    assert str(caught.value) == f"the run failed: RunDirectoryError: {message}" and caught.value.run.metrics == []
    (there,) = elsewhere.glob("funrl-saved-*")
    assert complete_checkpoints(there).keys() == {2}
    assert f"the state after step 2 is saved in {there}" in cause.__notes__[0]
    assert not os.path.exists(run_dir / "model")
