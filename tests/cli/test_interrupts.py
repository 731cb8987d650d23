"""However a run ends, it ends soon, says why in a few lines, and leaves a directory that can be read."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from forked_python import start_python

import funrl
from funrl.cli.run import _signals as run_signals
from funrl.processes.workers import stop_asked

pytestmark = pytest.mark.gloo
SMALL = ["--warmstart_steps=0", "--batch_prompts=4", "--samples_per_prompt=2", "--eval_prompts=4"]


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
    words = ["-m", "funrl.experiments.grpo", "--device=cpu", f"--run_dir={run_dir}", *SMALL, "--steps=100000", *flags]
    scratch = run_dir.parent / "scratch"
    scratch.mkdir()
    run = start_python(words, os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)})
    STARTED.append(run)
    deadline = time.monotonic() + 300
    while not lines(run_dir) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lines(run_dir), run.communicate()
    return run


def lines(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def processes(session):
    """Ids of the living processes of a session: the ranks, which are one group, and reward workers, each its own."""
    results = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                results.append(int(entry))
    return results


def check_readable(run_dir):
    steps = [json.loads(line)["step"] for line in lines(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
    assert json.loads((run_dir / "config.json").read_text())["flags"]["batch_prompts"] == 4
    report = (run_dir / "report.html").read_text()
    assert "reward" in report and "The run is to take" in report


linux = pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")


STOPS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
STOPPING = "interrupted: the run finishes this step, saves and ends; another Ctrl-C ends it at once\n"


def slow_reward(tmp_path):
    """Flags of a reward that is usually under way when a signal comes."""
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef score(prompt, completion, **fields):\n    time.sleep(0.2)\n    return 1.0\n"
    )
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}+{n}="}}\n' for n in range(20)))
    return [f"--prompts={tmp_path}/prompts.jsonl", f"--reward={tmp_path}/slow.py:score", "--max_new_tokens=4"]


def check_stopped(run, run_dir, sign):
    """The run has finished a step, which is saved, and blames nobody."""
    out, err = run.communicate(timeout=120)
    status, how = STOPS[sign]
    last = len(lines(run_dir))
    after = f"{how} after step {last}, which is saved; --resume --run_dir={run_dir} continues\n"
    assert err == (STOPPING if sign == signal.SIGINT else "") + after
    assert run.returncode == status
    assert str(run_dir / "report.html") in out
    assert [path.parent.name for path in run_dir.glob("checkpoints/*/complete.json")] == [f"step-{last}"]
    assert processes(run.pid) == []
    check_readable(run_dir)


@linux
@pytest.mark.slow
def test_sigterm_to_every_process_finishes_the_step_and_blames_no_reward(tmp_path):
    """As systemd sends it, and Slurm to the processes of a step: whichever their groups, reward workers included."""
    run_dir = tmp_path / "run"
    run = start(run_dir, "--mesh=dp2", "--reward_workers=1", *slow_reward(tmp_path))
    pids = processes(run.pid)
    assert len(pids) >= 7
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    check_stopped(run, run_dir, signal.SIGTERM)


@pytest.mark.slow
@linux
def test_an_interrupt_of_the_group_finishes_the_step_and_saves(tmp_path):
    """A terminal's Ctrl-C goes to every process of the group."""
    run_dir = tmp_path / "run"
    run = start(run_dir, "--mesh=dp2", "--save_every=0")
    os.killpg(run.pid, signal.SIGINT)
    check_stopped(run, run_dir, signal.SIGINT)


@pytest.mark.slow
@linux
@pytest.mark.parametrize(("mesh", "workers"), [("dp2", 1), pytest.param("dp1", 2, marks=pytest.mark.slow)])
def test_a_second_interrupt_ends_a_run_before_its_rewards_and_leaves_a_report(tmp_path, mesh, workers):
    run_dir = tmp_path / "run"
    flags = [flag.replace("slow.py:score", "slow.py:late") for flag in slow_reward(tmp_path)]
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\n\ndef late(prompt, completion, **fields):\n"
        f"    time.sleep(300 * pathlib.Path({str(tmp_path / 'late')!r}).exists())\n    return 1.0\n"
    )
    run = start(run_dir, f"--mesh={mesh}", f"--reward_workers={workers}", *flags)
    (tmp_path / "late").touch()
    os.killpg(run.pid, signal.SIGINT)
    assert run.stderr is not None and run.stderr.readline() == STOPPING
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)  # a reward takes 300 s
    assert run.returncode == 130
    assert err == "interrupted\n"
    assert str(run_dir / "report.html") in out
    assert processes(run.pid) == []
    assert not list((tmp_path / "scratch").glob("funrl-*"))
    check_readable(run_dir)


@pytest.mark.slow
def test_an_interrupt_of_a_notebook_is_raised_after_the_step_is_saved(tmp_path, capfd):
    launcher, run_dir = os.getpid(), tmp_path / "run"

    def interrupt(step, metrics):
        if step == 1:
            os.kill(launcher, signal.SIGINT)
            end = time.monotonic() + 120  # of another process, which asks the ranks
            while not stop_asked() and time.monotonic() < end:
                time.sleep(0.01)

    settings = {"batch_prompts": 4, "samples_per_prompt": 2, "eval_prompts": 4, "warmstart_steps": 0, "compile": "off"}
    with pytest.raises(KeyboardInterrupt, match=f"after step 1, which is saved; resume=True, run_dir='{run_dir}'"):
        funrl.train("grpo", mesh="dp2", on_step=interrupt, run_dir=str(run_dir), steps=99, device="cpu", **settings)
    assert STOPPING in capfd.readouterr().err
    assert [path.parent.name for path in run_dir.glob("checkpoints/*/complete.json")] == ["step-1"]
    assert "The run is to take 99 steps." in (run_dir / "report.html").read_text()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def ranks_of(run):
    """Processes that the launcher has started, in the order of their ranks."""
    with open(f"/proc/{run.pid}/task/{run.pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


@pytest.mark.slow
@linux
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    run_dir = tmp_path / "run"
    run = start(run_dir, "--mesh=dp2", "--reward_workers=1")
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    out, err = run.communicate(timeout=60)  # --timeout is ten minutes
    assert run.returncode == 1
    assert "Traceback" not in out + err
    assert err.startswith("error: rank 1 was killed by SIGKILL")
    assert processes(run.pid) == []
    check_readable(run_dir)


def test_a_run_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with run_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@linux
@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_run_by_its_flag(tmp_path):
    """And reads the flag: the state is saved where the other rank holds it, unless an update was under way."""
    run_dir = tmp_path / "run"
    run = start(run_dir, "--mesh=dp2", "--stalled_after=20")
    os.kill(ranks_of(run)[1], signal.SIGSTOP)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 1
    assert re.match(r"error: no answer for 20 s \(--stalled_after\) from rank 1 on \S+ \(step \d+, ", err), err
    assert "Traceback" not in out + err
    assert processes(run.pid) == []
    check_readable(run_dir)


@linux
@pytest.mark.slow
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


@pytest.mark.slow
def test_a_reader_of_the_output_may_leave(tmp_path):
    run_dir = tmp_path / "run"
    words = ["-m", "funrl.experiments.grpo", "--device=cpu", f"--run_dir={run_dir}", *SMALL, "--steps=2", "--mesh=dp2"]
    run = start_python(words, os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.readline()
    run.stdout.close()
    err = run.stderr.read()
    assert run.wait(timeout=300) == 0
    assert err == ""
    assert len(lines(run_dir)) == 2
    assert (run_dir / "report.html").exists()


SLOW_REPORT = """
import sys
import time

from funrl.cli.main import main
from funrl.track.report import page

write_report = page.write_report


def write_slowly(run_dir):
    time.sleep(3)
    return write_report(run_dir)


page.write_report = write_slowly
sys.exit(main(["funrl", "grpo", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_under_torchrun_the_first_rank_says_what_failed_after_the_others_are_gone(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_REPORT)
    reward = "calls = []\n\n\ndef score(prompt, completion):\n    calls.append(1)\n    return 1 / (len(calls) < 15)\n"
    (tmp_path / "reward.py").write_text(reward)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(9)))
    flags = ["--device=cpu", "--compile=off", "--mesh=dp2", "--reward_workers=0", *SMALL, f"--run_dir={tmp_path}/run"]
    flags += [f"--prompts={tmp_path}/prompts.jsonl", f"--reward={tmp_path}/reward.py:score", "--max_new_tokens=4"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    run = subprocess.run(
        [*torchrun, str(tmp_path / "slow.py"), *flags], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 1 and "results in" in run.stdout
    assert "error: " in run.stderr and "division by zero" in run.stderr
