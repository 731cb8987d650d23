"""`funrl ray`: what is refused before a cluster is asked, and jobs on a cluster of two loopback nodes.

Jobs need Ray: `./test --all` makes .venv-ray and runs this file there.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from free_ports import free_port

from funrl.cli import main as cli

ROOT = Path(__file__).parents[2]
HAS_RAY = importlib.util.find_spec("ray") is not None
NODES = ("127.0.0.2", "127.0.0.3")  # Ray replaces 127.0.0.1 by the host's address
SMALL = ["--device=cpu", "--compile=off", "--batch_prompts=4", "--samples_per_prompt=2", "--max_new_tokens=4"]
SMALL += ["--warmstart_steps=0", "--eval_prompts=4"]
START_S = 120
JOB_S = 240

with_ray = [
    pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: ./test --all makes .venv-ray for it"),
    pytest.mark.slow,
    pytest.mark.gloo,
]


def job_on_ray(function):
    for mark in with_ray:
        function = mark(function)
    return function


@pytest.mark.parametrize(
    "words,problem",
    [
        ([], "no command after `--`; usage: funrl ray"),
        (["--", "nosuch"], "nosuch"),
        (["--", "grpo", "--mseh=dp2"], "--mseh is not a flag; did you mean --mesh?"),
        (["--", "grpo", "--mesh=dp2", "--steps=-1"], "--steps=-1"),
        (["--nodes=0", "--", "grpo"], "--nodes=0"),
        (["--nods=2", "--", "grpo"], "--nods"),
        (["--nodes=3", "--", "grpo", "--mesh=dp4"], "--nodes=3: the run has 4 ranks"),
        (["--", "grpo", "--mesh=dp2", "--dry_run"], "--dry_run needs no cluster"),
        (["--", "grpo", "--device=xla"], "--device=xla"),
    ],
)
def test_bad_flags_are_refused_before_a_cluster_is_asked(words, problem, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["funrl", "ray", *words]) == 2
    assert problem in capsys.readouterr().err


def test_without_ray_the_error_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["funrl", "ray", "--", "grpo", "--mesh=dp2"]) == 2
    assert "pip install 'funrl[ray]'" in capsys.readouterr().err


def processes_with(text):
    """Ids of the processes whose command line or folder of work has a text."""
    ids = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and text in (folder / "cmdline").read_bytes().decode(errors="replace"):
                ids.append(int(folder.name))
    return [pid for pid in ids if pid != os.getpid()]


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


@pytest.fixture(scope="module")
def cluster():
    """Environment of a driver, with the address of a cluster of two nodes with two CPUs each."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: paths of sockets have at most 107 characters
    address = f"{NODES[0]}:{free_port(20_000, 30_000)}"
    variables = {name: text for name, text in os.environ.items() if name not in ("RAY_ADDRESS", "RANK", "WORLD_SIZE")}
    variables |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    common = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
    head = ["--head", f"--port={address.partition(':')[2]}", "--include-dashboard=false", f"--temp-dir={folder}"]
    nodes = []
    try:
        for ip, words in zip(NODES, (head, [f"--address={address}"]), strict=True):
            log = open(f"{folder}/{ip}.log", "w+")  # noqa: SIM115
            command = ["ray", "start", f"--node-ip-address={ip}", *words, *common]
            nodes.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=folder))
            text = Path(log.name)
            assert wait_until(lambda text=text: "Ray runtime started" in text.read_text(), START_S), text.read_text()
        yield variables | {"RAY_ADDRESS": address}
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(30)
        gone = wait_until(lambda: not processes_with(folder), 30)
        for pid in processes_with(folder):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    assert gone


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
    own = ("time_s/", "memory/", "perf/", "sync/bytes")
    return [{name: value for name, value in row.items() if not name.startswith(own)} for row in rows]


@job_on_ray
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


@job_on_ray
def test_the_status_of_a_run_that_fails_is_that_of_the_command(cluster, tmp_path):
    (tmp_path / "r.py").write_text("def score(prompt, completion, **_):\n    raise ValueError('no luck')\n")
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(9)))
    flags = [f"--prompts={tmp_path}/p.jsonl", f"--reward={tmp_path}/r.py:score", f"--run_dir={tmp_path}/run"]
    process = start(cluster, [], "--mesh=dp2", *flags)
    out, err = finish(process, tmp_path)
    assert process.returncode == 1, out + err
    assert "no luck" in err


@job_on_ray
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


@job_on_ray
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


@job_on_ray
def test_a_lost_node_ends_the_job_and_is_named(cluster, tmp_path):
    run_dir = tmp_path / "run"
    process = start(cluster, ["--nodes=2"], "--mesh=dp2", "--steps=100000", f"--run_dir={run_dir}")
    assert wait_until((run_dir / "metrics.jsonl").exists, JOB_S)
    guards = [pid for pid in processes_with(str(run_dir)) if "funrl.processes.guard" in command_of(pid)]
    (guard,) = [pid for pid in guards if "--node-rank=1" in command_of(pid)]
    os.kill(parent_of(guard), signal.SIGKILL)  # Ray's worker
    out, err = finish(process, run_dir)
    assert process.returncode == 1, out + err
    assert "error: node 127.0.0." in err and "was lost" in err


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
