"""`funrl join`, as one types it."""

import json
import os
import signal
import time

import pytest
from forked_python import start_python

from funrl.cli import join
from funrl.cli import main as cli

SMALL = ["--batch_prompts=4", "--samples_per_prompt=2", "--max_new_tokens=4", "--warmstart_steps=0"]
SMALL += ["--eval_prompts=4", "--device=cpu", "--compile=off", "--steps=2"]


def started(*words):
    """A process of the program, in a session of its own."""
    return start_python(["-m", "funrl", *map(str, words)], os.environ | {"OMP_NUM_THREADS": "1"})


def metrics(run):
    """Metrics of each step, without those of time and memory."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = ("time_s/", "memory/", "perf/", "sync/bytes")
    return [{name: x for name, x in row.items() if not name.startswith(own)} for row in rows]


@pytest.mark.gloo
@pytest.mark.slow
def test_generators_join_a_run_and_one_of_them_leaves(tmp_path):
    place, together = "train:dp2 generate:join", ["--mesh=dp2", "--generate_mesh=tp2"]
    runs = {name: tmp_path / name for name in ("joined", "plain")}
    first, leaving = (started("join", runs["joined"], "--mesh=tp2") for _ in range(2))  # before there is a run
    processes = [first, leaving, started("grpo", *SMALL, f"--place={place}", f"--run_dir={runs['joined']}")]
    try:
        wait_for(runs["joined"] / "join.json")
        leaving.send_signal(signal.SIGTERM)
        texts = [process.communicate(timeout=150) for process in processes]
        processes.append(started("grpo", *SMALL, *together, f"--run_dir={runs['plain']}"))
        texts.append(processes[-1].communicate(timeout=150))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in (first, *processes[2:])] == [0, 0, 0], texts
    assert "the run has ended: it has written" in texts[0][0]
    assert metrics(runs["joined"]) == metrics(runs["plain"])


def test_a_run_that_is_not_there_yet_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(join, "RUN_LOOK_S", 0.01)
    for wait_s, item in ((0.02, True), (0.0, False)):
        with pytest.raises(ValueError, match=r"config\.json of a run: No such file"):
            join.joining_job(str(tmp_path / "gone"), "dp1", wait_s)
        assert (f"for {tmp_path / 'gone' / 'config.json'}, which a run writes" in capsys.readouterr().err) is item


def wait_for(file):
    """Wait until a file is there."""
    deadline = time.monotonic() + 300
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "words,problem",
    [
        ([], "usage: funrl join RUN_DIR"),
        (["RUN", "--mesh=dp2"], "--mesh=dp2: a generator is one replica"),
        (["RUN", "--mesh=tp2,dp2"], "a generator is one replica"),
        (["RUN", "--wait=0"], "RUN/config.json: not the config.json of a run: No such file"),
        (["RUN", "--wait=-1"], "--wait=-1"),
    ],
)
def test_what_cannot_be_joined_is_said(words, problem, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["funrl", "join", *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_run_that_generates_itself_cannot_be_joined(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"experiment": "grpo", "flags": {"place": "generate:1"}}))
    assert cli.main(["funrl", "join", str(tmp_path), "--wait=0"]) == 2
    assert "its ranks generate themselves; start it with" in capsys.readouterr().err
