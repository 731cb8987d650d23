"""Files that `funrl plan` writes, run on loopback: nodes with the variables of SkyPilot, and a stand-in of Slurm."""

import signal
import time

import pytest
import yaml
from test_scale_out import finished, forks, free_port, shared, start, steps_of  # noqa: F401  (fixtures)

from funrl.cli.plan import RunPlan, launch_text
from funrl.processes.environment import FIRST_PORT, PORTS
from funrl.trainer.settings.settings import settings_of

TWO = RunPlan(2, {"mesh": "dp2"}, nbytes=1e9, fits=True, step_s=1.0, tokens_per_s=1.0, hours=1.0)


def written(launcher, run_dir):
    """The file that starts a run of two nodes of one device."""
    command = f"funrl grpo --mesh=dp2 --run_dir={run_dir}"
    settings = settings_of(run_dir=str(run_dir), hardware="h100")
    given = {"launch": launcher, "image": None, "storage": "s3://mine"}
    return launch_text(given, TWO, command, settings, per_node=1)


def sky_nodes(shared, script, port, steps):  # noqa: F811
    """Both nodes of a task of SkyPilot."""
    of_task = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2", "STEPS": str(steps)}
    block = script.replace("--master-port=29500", f"--master-port={port}")
    return [
        start(["bash", "-c", block], shared, **of_task, SKYPILOT_NODE_RANK=str(rank), SKYPILOT_NUM_GPUS_PER_NODE="1")
        for rank in range(2)
    ]


@pytest.mark.slow
@pytest.mark.gloo
def test_nodes_that_are_taken_away_are_started_again_with_the_same_bits(shared, forks):  # noqa: F811
    runs = {}
    for name in ("undisturbed", "pre-empted"):
        runs[name] = shared / "runs" / name
        script = yaml.safe_load(written("sky", runs[name]))["run"]
        nodes = sky_nodes(shared, script, free_port(29600, 29700), steps=3)
        if name == "pre-empted":
            deadline = time.monotonic() + 300
            metrics = runs[name] / "metrics.jsonl"
            while not (metrics.exists() and steps_of(runs[name])) and time.monotonic() < deadline:
                forks[1]()
            for process, _ in nodes:  # as a cloud takes them
                process.send_signal(signal.SIGTERM)
            while any(process.poll() is None for process, _ in nodes) and time.monotonic() < deadline:
                forks[1]()
            assert steps_of(runs[name])[-1] < 3
            nodes = sky_nodes(shared, script, free_port(29700, 29800), steps=3)
        texts = finished(forks, *nodes)
        assert ("resumed after step" in "".join(texts)) == (name == "pre-empted")
    files = [sorted((run / "model").glob("*.safetensors")) for run in runs.values()]
    assert files[0] and [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


@pytest.mark.slow
@pytest.mark.gloo
def test_a_job_of_slurm_and_its_requeue(shared, forks):  # noqa: F811
    job = str(PORTS + free_port(FIRST_PORT, FIRST_PORT + PORTS) - FIRST_PORT)
    run_dir = shared / "runs/first"
    script = shared / "job.sh"
    script.write_text(written("slurm", run_dir))
    finished(forks, start(["bash", script], shared, SLURM_JOB_ID=job))
    (text,) = finished(forks, start(["bash", script], shared, SLURM_JOB_ID=job, STEPS="2"))  # requeued
    assert "resumed after step 1" in text and steps_of(run_dir) == [1, 2]
