"""Files that `funrl plan` writes, run on loopback: two nodes whose run is taken away, and ends with the same bits.

Each launcher has its own way to end a run: a cloud sends SIGTERM to spot nodes, Kubernetes loses one and stops the
other, Slurm sends SIGTERM to the batch script, which queues the job again. KubeRay's entrypoint needs Ray,
so tests/cli/test_ray_job.py runs it.
"""

import os
import signal
import time

import pytest
import yaml
from test_scale_out import (  # noqa: F401  (fixtures)
    descendants,
    end_all,
    finished,
    forks,
    free_port,
    hold_second_step,
    in_real_python,
    shared,
    start,
    steps_of,
    wait_for_step,
)

from funrl.cli.plan import RunPlan, launch_text
from funrl.processes.environment import FIRST_PORT, PORTS
from funrl.trainer.settings.settings import settings_of

TWO = RunPlan(2, {"mesh": "dp2"}, nbytes=1e9, fits=True, step_s=1.0, tokens_per_s=1.0, hours=1.0)
STEPS = 3
UNSAVED = f"--steps={STEPS} --save_every=0"  # so that a step is saved because a signal came


def written(launcher, run_dir):
    """The file that starts a run of two nodes of one device."""
    command = f"funrl grpo --mesh=dp2 --run_dir={run_dir}"
    settings = settings_of(run_dir=str(run_dir), hardware="h100")
    given = {"launch": launcher, "image": None, "storage": "s3://mine", "gpus_per_node": 1}
    return launch_text(given, TWO, command, settings)


def sky_nodes(shared, run_dir, port, **further):  # noqa: F811
    """Both nodes of a task of SkyPilot."""
    of_task = {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    }
    block = yaml.safe_load(written("sky", run_dir))["run"].replace("--master-port=29500", f"--master-port={port}")
    return [
        start(["bash", "-c", block], shared, **of_task, **further, SKYPILOT_NODE_RANK=str(rank)) for rank in range(2)
    ]


def jobset_nodes(shared, run_dir, port, **further):  # noqa: F811
    """Both pods of a JobSet."""
    (job,) = yaml.safe_load(written("jobset", run_dir))["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    program, flag, block = container["command"]
    head = "--master-addr=funrl-jobset-ranks-0-0.funrl-jobset"
    assert head in block
    block = block.replace(head, "--master-addr=127.0.0.1").replace("--master-port=29500", f"--master-port={port}")
    return [start([program, flag, block], shared, **further, JOB_COMPLETION_INDEX=str(rank)) for rank in range(2)]


def slurm_job(shared, run_dir, port, **further):  # noqa: F811
    """A job of Slurm, whose number gives the port."""
    script = shared / "job.sh"
    script.write_text(written("slurm", run_dir))
    return [start(["bash", script], shared, **further, SLURM_JOB_ID=str(PORTS + port - FIRST_PORT))]


def lose_pod(nodes):
    """Lose the second pod with all that runs in it; Kubernetes stops the first one before both start again."""
    first, second = (process for process, _ in nodes)
    for pid in [second.pid, *descendants(second.pid)]:
        os.kill(pid, signal.SIGKILL)
    first.send_signal(signal.SIGTERM)


def preempt(nodes):
    """As a cloud does with spot nodes, and Slurm with a batch script before the time limit."""
    for process, _ in nodes:
        process.send_signal(signal.SIGTERM)


LAUNCHED = {
    "sky": (sky_nodes, preempt, UNSAVED),
    "jobset": (jobset_nodes, lose_pod, f"--steps={STEPS} --save_every=1"),
    "slurm": (slurm_job, preempt, UNSAVED),
}


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("launcher", LAUNCHED)
def test_a_run_that_is_taken_away_ends_with_the_same_bits(launcher, shared, forks):  # noqa: F811
    launch, take_away, flags = LAUNCHED[launcher]
    in_real_python(shared, forks)
    plain = shared / "runs/plain"
    program = ["bash", "-c", f"funrl grpo --mesh=dp2 --run_dir={plain}"]
    finished(forks, start(program, shared, FURTHER_FLAGS=f"--steps={STEPS}"))

    run_dir = shared / "runs" / launcher
    hold_second_step(shared, run_dir)
    nodes = launch(shared, run_dir, free_port(FIRST_PORT, FIRST_PORT + PORTS), FURTHER_FLAGS=flags)
    wait_for_step(run_dir, saved="--save_every=1" in flags)
    take_away(nodes)
    time.sleep(2)
    (shared / "held").unlink()
    codes = [process.wait(120) for process, _ in nodes]
    texts = "".join(end_all(*nodes))
    last = steps_of(run_dir)[-1]
    assert 0 not in codes and last < STEPS, texts
    if launcher == "slurm":
        assert codes == [143] and (shared / "scontrol").read_text().startswith("requeue ")

    nodes = launch(shared, run_dir, free_port(FIRST_PORT, FIRST_PORT + PORTS), FURTHER_FLAGS=flags)
    texts = "".join(finished(forks, *nodes))
    assert f"resumed after step {last}" in texts, texts
    assert steps_of(run_dir) == [1, 2, 3]
    files = [sorted((run / "model").glob("*.safetensors")) for run in (plain, run_dir)]
    assert files[0] and [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


@pytest.mark.slow
@pytest.mark.gloo
def test_a_job_of_slurm_that_fails_is_not_queued_again(shared, forks):  # noqa: F811
    """Though `--kill-on-bad-exit` sends SIGTERM to its other tasks."""
    (shared / "REWARD.py").write_text("def score(prompt, completion, **_):\n    raise ValueError('no luck')\n")
    (job,) = slurm_job(shared, shared / "runs/first", free_port(FIRST_PORT, FIRST_PORT + PORTS))
    deadline = time.monotonic() + 300
    while job[0].poll() is None and time.monotonic() < deadline:
        forks[1]()
    (text,) = end_all(job)
    assert job[0].returncode > 0 and "no luck" in text and not (shared / "scontrol").exists(), text
