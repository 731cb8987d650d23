"""`funrl watch`: a run that another process makes, from its files alone."""

import io
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from funrl.cli.main import main
from funrl.track import watch
from funrl.track.records.run_directory import keep_steps
from funrl.track.records.run_lock import owned_run
from funrl.track.records.samples import Sample, open_samples
from funrl.track.records.trackers import jsonl
from funrl.track.report import run_files
from funrl.track.report.run_files import ReportError
from funrl.track.watch import watch_run


def write_steps(run, *steps):
    tracker = jsonl(run.metrics)
    for step in steps:
        tracker(step, {"reward/mean": step / 10, "actor/pg_clipfrac": 0.9, "time_s/step": 1.0, "time_s/generate": 0.5})
    tracker.close()


def watching(run_dir):
    """Watch a run in a thread; returns the thread and the file that it prints to."""
    file = io.StringIO()
    console = Console(file=file, width=100)
    thread = threading.Thread(target=watch_run, args=(run_dir, console), daemon=True)
    thread.start()
    return thread, file


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_run_is_followed_from_its_start_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "READ_S", 0.01)
    monkeypatch.setattr(socket.socket, "bind", lambda *_: pytest.fail("a port is opened"))
    folder = tmp_path / "run"
    thread, file = watching(folder)
    wait_for(lambda: "no such directory; waiting" in file.getvalue())
    with owned_run(folder, "ppo", {"steps": 9}) as run:
        write_steps(run, 1, 2)
        wait_for(lambda: "2/9" in file.getvalue())
        wait_for(run.report.exists)
        page = run.report.read_text()
        assert "Running, step 2 of 9." in page and '<meta http-equiv="refresh"' in page
        samples = open_samples(run.samples)
        samples.write(Sample(2, "1+1=", "2", 1.0))
        samples.close()
        write_steps(run, 3, 4, 5, 6)
        wait_for(lambda: "6/9" in file.getvalue())
        assert "sample step 2  reward 1  1+1= | 2" in file.getvalue()
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive() and file.getvalue().endswith(f"the run has ended; open {run.report}\n")
    assert file.getvalue().count("step 5: the ratios of 90% of the tokens are clipped") == 1  # as the run says it
    page = run.report.read_text()
    assert "Ended at step 6 of 9." in page and 'http-equiv="refresh"' not in page


def test_an_episode_is_shown_as_a_conversation(tmp_path):
    folder = tmp_path / "run"
    says = [{"role": "user", "text": "2*3"}, {"role": "assistant", "text": "six", "sampled": True}]
    conversation = {"branches": [{"agent": "policy", "reward": None, "says": says}], "status": "turns"}
    with owned_run(folder, "ppo", {"steps": 2}) as run:
        write_steps(run, 1, 2)
        samples = open_samples(run.samples)
        samples.write(Sample(2, "2*3", "six", None, conversation=conversation))
        samples.close()
    file = io.StringIO()
    watch_run(folder, Console(file=file, width=100))
    assert "sample step 2  unscored  2*3 | six" in file.getvalue()
    assert "ended by its limit of turns" in " ".join(run.report.read_text().split())


def test_the_page_is_written_at_most_every_ten_seconds(tmp_path, monkeypatch):
    now = [1000.0]
    pages = []
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "write_page", lambda run, path: pages.append((now[0], run.running)))
    with owned_run(tmp_path / "run", "ppo", {"steps": 9}) as run:
        steps = iter(range(2, 40))
        write_steps(run, 1)

        def sleep(seconds):
            assert seconds == watch.READ_S
            now[0] += 4.0
            step = next(steps)
            write_steps(run, step)
            if step == 9:
                monkeypatch.setattr(run_files, "is_owned", lambda _: False)

        monkeypatch.setattr(watch.time, "sleep", sleep)
        watch_run(run.path, Console(file=io.StringIO()))
    assert pages == [(1000.0, True), (1012.0, True), (1024.0, True), (1032.0, False)]


def test_reading_and_writing_take_a_bounded_share_of_the_time(monkeypatch):
    monkeypatch.setattr(watch.time, "monotonic", lambda: 103.0)
    assert watch._next_time(100.0, 10.0) == pytest.approx(100.0 + 3.0 / watch.MOST_BUSY)
    assert watch._next_time(102.9, 10.0) == pytest.approx(112.9)


def test_a_resumed_run_is_followed_from_its_checkpoint(tmp_path, monkeypatch):
    with owned_run(tmp_path / "run", "ppo", {"steps": 9}) as run:
        write_steps(run, *range(1, 8))

        def sleep(seconds):
            if len(run.metrics.read_text().splitlines()) == 7:
                keep_steps(run.metrics, 3)
            else:
                write_steps(run, 4, 5)
                monkeypatch.setattr(run_files, "is_owned", lambda _: False)

        monkeypatch.setattr(watch.time, "sleep", sleep)
        file = io.StringIO()
        watch_run(run.path, Console(file=file))
    assert [line.split()[0] for line in file.getvalue().splitlines() if "/9" in line] == ["7/9", "5/9"]


def test_the_times_of_steps_before_the_first_reading_are_known(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    os.utime(path, (time.time() - 100.0,) * 2)
    ends = watch._end_times([{"time_s/step": 2.0}, {"time_s/step": 5.0}, {}, {"time_s/step": 3.0}], path)
    assert [b - a for a, b in itertools.pairwise(ends)] == pytest.approx([5.0, 0.0, 3.0])
    assert time.monotonic() - ends[-1] == pytest.approx(100.0, abs=30.0)


def test_what_is_no_run_or_goes_away_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "READ_S", 0.01)
    with pytest.raises(ReportError, match=r"is not the directory of a run: it has no config\.json"):
        watch_run(tmp_path)
    with owned_run(tmp_path / "run", "ppo", {"steps": 9}) as run:
        write_steps(run, 1)
        monkeypatch.setattr(watch.time, "sleep", lambda _: shutil.rmtree(run.path, ignore_errors=True))
        with pytest.raises(ReportError, match="run: no such directory"):
            watch_run(run.path, Console(file=io.StringIO()))


@pytest.mark.slow
def test_the_command_ends_with_the_run_and_on_interrupt(tmp_path, capsys):
    command = [sys.executable, "-m", "funrl", "watch", str(tmp_path / "run")]
    with owned_run(tmp_path / "run", "ppo", {"steps": 3}) as run:
        write_steps(run, 1)
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            assert process.stdout.readline().split()[:2] == ["step", "reward"]
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
            process.stdout.close()
    assert main(["funrl", *command[3:]]) == 0
    assert "".join(capsys.readouterr().out.splitlines()).endswith(f"the run has ended; open {run.report}")
    assert main(["funrl", *command[3:], "--port=6007"]) == 2
    assert "--port is not a flag; usage: funrl watch RUN" in capsys.readouterr().err
    assert json.loads(run.config.read_text())["experiment"] == "ppo"
