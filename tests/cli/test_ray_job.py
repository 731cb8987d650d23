"""`funrl ray`: what is refused before a cluster is asked, and jobs on a cluster of two loopback nodes.

Jobs need Ray: `./test --all` makes .venv-ray and runs this file there.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml
from ray_cluster import NODES, command_of, on_ray, parent_of, processes_with, wait_until

from funrl.cli import main as cli
from funrl.cli.plan import RunPlan, launch_text
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints
from funrl.trainer.settings.settings import settings_of

SMALL = ["--device=cpu", "--compile=off", "--batch_prompts=4", "--samples_per_prompt=2", "--max_new_tokens=4"]
SMALL += ["--warmstart_steps=0", "--eval_prompts=4"]
JOB_S = 240


@pytest.mark.parametrize(
    "words,problem",
    [
        ([], "usage: funrl ray"),
        (["--", "nosuch"], "nosuch"),
        (["--", "grpo", "--mseh=dp2"], "--mseh is not a flag; did you mean --mesh?"),
        (["--", "grpo", "--mesh=dp2", "--steps=-1"], "--steps=-1"),
        (["--nodes=0", "--", "grpo"], "--nodes=0"),
        (["--nods=2", "--", "grpo"], "--nods"),
        (["--nodes=3", "--", "grpo", "--mesh=dp4"], "--nodes=3: the run has 4 ranks"),
        (["--", "grpo", "--device=xla"], "--device=xla"),
    ],
)
def test_bad_flags_are_refused_before_a_cluster_is_asked(words, problem, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["funrl", "ray", *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_dry_run_needs_no_cluster(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["funrl", "ray", "--nodes=2", "--", "dapo", "--mesh=dp2", "--dry_run", "--hardware=cpu"]) == 0
    assert "GB" in capsys.readouterr().out


def test_without_ray_the_error_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["funrl", "ray", "--", "grpo", "--mesh=dp2"]) == 2
    assert "pip install 'funrl[ray]'" in capsys.readouterr().err


def start(cluster, options, *flags):
    words = [sys.executable, "-m", "funrl", "ray", *options, "--", "grpo", *SMALL, *map(str, flags)]
    return subprocess.Popen(words, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, run_dir):
    """Wait for a job, which leaves no process; its output and errors."""
    try:
        texts = process.communicate(timeout=JOB_S)
    finally:
        process.kill()
    assert wait_until(lambda: not processes_with(str(run_dir)), 60), texts
    return texts


def metrics(run_dir):
    """Metrics of each step, without those of time and memory."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    own = ("time_s/", "memory/", "perf/", "sync/bytes", "places/")
    return [{name: value for name, value in row.items() if not name.startswith(own)} for row in rows]


@on_ray
def test_a_job_on_two_nodes_equals_the_run_of_one_machine(cluster, tmp_path):
    """The cluster's address is in RAY_ADDRESS, as for the entrypoint of a Ray job."""
    process = start(cluster, ["--nodes=2"], "--mesh=dp2", "--steps=2", f"--run_dir={tmp_path}/ray")
    out, err = finish(process, tmp_path / "ray")
    assert process.returncode == 0, out + err
    assert f"results in {tmp_path}/ray" in out
    assert any(line.startswith(tuple(f"[{node}] " for node in NODES)) for line in out.splitlines())
    words = [sys.executable, "-m", "funrl", "grpo", *SMALL, "--mesh=dp2", "--steps=2", f"--run_dir={tmp_path}/plain"]
    subprocess.run(words, env=cluster, check=True, capture_output=True, timeout=JOB_S)
    assert len(metrics(tmp_path / "ray")) == 2
    assert metrics(tmp_path / "ray") == metrics(tmp_path / "plain")


@on_ray
def test_a_job_whose_generators_are_on_ray_too_equals_the_run_of_one_machine(cluster, tmp_path):
    place = "--place=train:dp2 generate:ray1-2"
    process = start(cluster, ["--nodes=1"], place, "--steps=2", f"--run_dir={tmp_path}/ray")
    out, err = finish(process, tmp_path / "ray")
    assert process.returncode == 0, out + err
    words = [sys.executable, "-m", "funrl", "grpo", *SMALL, "--mesh=dp2", "--steps=2", f"--run_dir={tmp_path}/plain"]
    subprocess.run(words, env=cluster, check=True, capture_output=True, timeout=JOB_S)
    assert metrics(tmp_path / "ray") == metrics(tmp_path / "plain")


@on_ray
def test_the_status_of_a_run_that_fails_is_that_of_the_command(cluster, tmp_path):
    (tmp_path / "r.py").write_text("def score(prompt, completion, **_):\n    raise ValueError('no luck')\n")
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(9)))
    flags = [f"--prompts={tmp_path}/p.jsonl", f"--reward={tmp_path}/r.py:score", f"--run_dir={tmp_path}/run"]
    process = start(cluster, [], "--mesh=dp2", *flags)
    out, err = finish(process, tmp_path)
    assert process.returncode == 1, out + err
    assert "no luck" in err


@on_ray
@pytest.mark.parametrize("sign,status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_driver_has_the_run_save_and_stop(cluster, tmp_path, sign, status):
    run_dir = tmp_path / "run"
    process = start(cluster, ["--nodes=2"], "--mesh=dp2", "--steps=100000", "--save_every=0", f"--run_dir={run_dir}")
    assert wait_until((run_dir / "metrics.jsonl").exists, JOB_S)
    assert wait_until(lambda: metrics(run_dir), 60)
    process.send_signal(sign)
    out, err = finish(process, run_dir)
    assert process.returncode == status, out + err
    assert len(list(run_dir.glob("checkpoints/*/complete.json"))) == 1, out + err
    assert "which is saved; --resume" in err


@on_ray
def test_ranks_that_do_not_end_are_killed_after_the_shutdown_timeout(cluster, tmp_path):
    """The run finishes its step first, and a reward that never returns keeps it from that."""
    begun = tmp_path / "begun"
    lines = ("import pathlib, time", "def score(prompt, completion, **_):", f"    pathlib.Path({str(begun)!r}).touch()")
    (tmp_path / "r.py").write_text("\n".join([*lines, "    time.sleep(3600)", ""]))
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(9)))
    flags = [f"--prompts={tmp_path}/p.jsonl", f"--reward={tmp_path}/r.py:score", f"--run_dir={tmp_path}/run"]
    process = start(cluster, ["--nodes=2", "--shutdown_timeout=5"], "--mesh=dp2", *flags)
    assert wait_until(lambda: begun.exists() or process.poll() is not None, JOB_S)
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    out, err = finish(process, tmp_path)
    assert process.returncode == 143, out + err
    assert 4.5 < time.monotonic() - begin < 60, out + err
    assert "torchrun kills ranks 5 s after SIGTERM" in out + err


@on_ray
def test_devices_that_are_missing_are_named(cluster, tmp_path):
    run_dir = tmp_path / "run"
    for mesh, message in (
        (["--mesh=dp8"], "waited 0 minutes (--timeout) for 2 nodes with 4 CPU each: the cluster has CPUs: 2 on 127.0."),
        (["--mesh=dp2", "--device=cuda"], "for 2 nodes with 1 GPU each: the cluster has GPUs: 0 on 127.0."),
    ):
        words = [word for word in SMALL if not (len(mesh) > 1 and word.startswith("--device"))]
        command = [sys.executable, "-m", "funrl", "ray", "--nodes=2", "--timeout=0", "--", "grpo", *words, *mesh]
        done = subprocess.run(
            [*command, f"--run_dir={run_dir}"], env=cluster, capture_output=True, text=True, timeout=JOB_S
        )
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert "of them are free" in done.stderr
    assert not run_dir.exists()


@on_ray
def test_a_lost_node_ends_the_job_and_is_named_and_the_job_resumes(cluster, tmp_path):
    """The other node saves the state, of which it has a whole copy."""
    run_dir = tmp_path / "run"
    flags = ["--mesh=dp2", "--save_every=0", "--resume", f"--run_dir={run_dir}"]
    process = start(cluster, ["--nodes=2"], "--steps=100000", *flags)
    assert wait_until((run_dir / "metrics.jsonl").exists, JOB_S) and wait_until(lambda: metrics(run_dir), 60)
    guards = [pid for pid in processes_with(str(run_dir)) if "funrl.processes.guard" in command_of(pid)]
    (guard,) = [pid for pid in guards if "--node-rank=1" in command_of(pid)]
    os.kill(parent_of(guard), signal.SIGKILL)  # Ray's worker
    out, err = finish(process, run_dir)
    assert process.returncode == 1, out + err
    assert "error: node 127.0.0." in err and "was lost" in err
    last = max(complete_checkpoints(run_dir / "checkpoints"))
    process = start(cluster, ["--nodes=2"], f"--steps={last + 1}", *flags)
    out, err = finish(process, run_dir)
    assert process.returncode == 0 and f"resumed after step {last}" in out + err, out + err
    assert len(metrics(run_dir)) == last + 1


def entrypoint(run_dir, *flags):
    """Words of the entrypoint of the RayJob that `funrl plan` writes for two nodes of one device."""
    plan = RunPlan(2, {"mesh": "dp2"}, nbytes=1e9, fits=True, step_s=1.0, tokens_per_s=1.0, hours=1.0)
    command = " ".join(["funrl grpo --mesh=dp2", *SMALL, f"--run_dir={run_dir}", *flags])
    given = {"launch": "kuberay", "image": None, "storage": "claim", "gpus_per_node": 1}
    text = launch_text(given, plan, command, settings_of(run_dir=str(run_dir), hardware="h100"))
    return [sys.executable, "-m", *shlex.split(yaml.safe_load(text)["spec"]["entrypoint"])]


@on_ray
def test_the_planned_ray_job_is_stopped_and_submitted_again_with_the_same_bits(cluster, tmp_path):
    run_dir = tmp_path / "run"
    flags = ["--steps=4", "--save_every=0"]
    words = entrypoint(run_dir, *flags)
    process = subprocess.Popen(words, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_until((run_dir / "metrics.jsonl").exists, JOB_S) and wait_until(lambda: metrics(run_dir), 60)
    process.send_signal(signal.SIGTERM)  # as `ray job stop` does
    out, err = finish(process, run_dir)
    last = len(metrics(run_dir))
    assert process.returncode == 143 and last < 4, out + err
    process = subprocess.Popen(words, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = finish(process, run_dir)
    assert process.returncode == 0 and f"resumed after step {last}" in out + err, out + err
    words = [sys.executable, "-m", "funrl", "grpo", *SMALL, "--mesh=dp2", *flags, f"--run_dir={tmp_path}/plain"]
    subprocess.run(words, env=cluster, check=True, capture_output=True, timeout=JOB_S)
    assert metrics(run_dir) == metrics(tmp_path / "plain")
