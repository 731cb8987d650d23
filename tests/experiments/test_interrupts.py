"""However a run ends, it ends soon, says why in a few lines, and leaves a directory that can be read."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.gloo
SMALL = ["--steps=100000", "--warmstart_steps=0", "--batch_prompts=4", "--samples_per_prompt=2", "--eval_prompts=4"]


STARTED = []


@pytest.fixture(autouse=True)
def no_process_is_left():
    """End what a test that failed has left."""
    yield
    for run in STARTED:
        for pid in processes(run.pid):
            os.kill(pid, signal.SIGKILL)
    STARTED.clear()


def start(run_dir, *flags):
    command = [sys.executable, "-m", "funrl.experiments.ppo", "--device=cpu", f"--run_dir={run_dir}", *SMALL, *flags]
    scratch = run_dir.parent / "scratch"
    scratch.mkdir()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    STARTED.append(run)
    deadline = time.monotonic() + 300
    while len(lines(run_dir)) < 2 and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(lines(run_dir)) >= 2, run.communicate()
    return run


def lines(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def processes(session):
    """Ids of the living processes of a session: the ranks, which are one group, and reward workers, each its own."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry))
    return found


def check_readable(run_dir):
    steps = [json.loads(line)["step"] for line in lines(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
    assert json.loads((run_dir / "config.json").read_text())["flags"]["batch_prompts"] == 4
    report = (run_dir / "report.html").read_text()
    assert "reward" in report and "Ended at step" in report and "Running" not in report


linux = pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")


@linux
@pytest.mark.parametrize(
    ("mesh", "workers", "sign"),
    [
        ("dp1", 0, signal.SIGINT), ("dp2", 1, signal.SIGINT),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("dp2", 0, signal.SIGINT), ("dp2", 0, signal.SIGTERM), ("dp1", 2, signal.SIGINT),
                ("dp1", 2, signal.SIGTERM), ("dp2", 1, signal.SIGTERM),
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.timed
def test_an_interrupt_ends_a_run_within_seconds_and_leaves_a_report(tmp_path, mesh, workers, sign):
    """Ctrl-C goes from the terminal to every process of its group; a job scheduler's end to the first."""
    run_dir = tmp_path / "run"
    run = start(run_dir, f"--mesh={mesh}", f"--reward_workers={workers}")
    serving = workers and workers + 1  # of a rank: a server, and its workers
    assert len(processes(run.pid)) == {"dp1": 1 + serving, "dp2": 3 + 2 * serving}[mesh]
    began = time.monotonic()
    (os.killpg if sign == signal.SIGINT else os.kill)(run.pid, sign)
    out, err = run.communicate(timeout=20)
    assert time.monotonic() - began < 8
    assert run.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[sign]
    assert "Traceback" not in out + err
    assert err.startswith({signal.SIGINT: "interrupted\n", signal.SIGTERM: "terminated after step "}[sign])
    assert str(run_dir / "report.html") in out
    assert processes(run.pid) == []
    assert not list((tmp_path / "scratch").glob("funrl-*"))
    check_readable(run_dir)


def ranks_of(run):
    """Processes that the launcher has started, in the order of their ranks."""
    with open(f"/proc/{run.pid}/task/{run.pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


@linux
@pytest.mark.timed
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    run_dir = tmp_path / "run"
    run = start(run_dir, "--mesh=dp2", "--reward_workers=1")
    began = time.monotonic()
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    out, err = run.communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert run.returncode == 1
    assert "Traceback" not in out + err
    assert err.startswith("error: rank 1 was killed by SIGKILL")
    assert processes(run.pid) == []
    check_readable(run_dir)


@linux
@pytest.mark.slow
@pytest.mark.timed
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path):
    run = start(tmp_path / "run", "--mesh=dp2", "--reward_workers=1")
    ranks = ranks_of(run)
    run.kill()
    run.communicate(timeout=120)
    deadline = time.monotonic() + 120
    while processes(run.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(ranks) == 2
    assert processes(run.pid) == []


@pytest.mark.parametrize("mesh", [pytest.param("dp1", marks=pytest.mark.slow), "dp2"])
def test_a_reader_of_the_output_may_leave(tmp_path, mesh):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "funrl.experiments.ppo", "--device=cpu", f"--run_dir={run_dir}", *SMALL]
    run = subprocess.Popen(
        [*command, "--steps=12", f"--mesh={mesh}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.readline()
    run.stdout.close()
    err = run.stderr.read()
    assert run.wait(timeout=300) == 0
    assert err == ""
    assert len(lines(run_dir)) == 12
    assert (run_dir / "report.html").exists()
