"""The commands of docs/scale_out.md, on this machine: a Slurm that has one host, and two nodes with a rank each.

The lines are those of the page. What is written for eight nodes of eight devices is made two of one; `funrl` is a
script that adds flags which make a run short; `srun` is one that starts tasks with the variables that Slurm sets. Their
Python is a fork of this process.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from forked_python import forking_python
from free_ports import free_port
from ray_cluster import children_of

from funrl.data.tokenizer import character_tokenizer
from funrl.models import decoder_config, decoder_model
from funrl.models.huggingface import directories as hf
from funrl.processes.environment import FIRST_PORT, PORTS
from funrl.trainer.settings.settings import settings_flags, settings_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scale_out.md").read_text()
TASKS = 2
SHORT = (
    f"--mesh=dp{TASKS} --generate_mesh=dp1,tp2 --device=cpu --dtype=float32 --batch_prompts=2 "
    "--samples_per_prompt=2 --max_new_tokens=4 --eval_prompts=2 --save_every=1 --kv_cache_gb=1"
)
FUNRL = """#!{python}
import os, sys
from funrl.cli.main import main
short = "{flags} --steps=1".split() + os.environ.get("FURTHER_FLAGS", "").split()
short = {{word.partition("=")[0]: word for word in short}}
words = [word for word in sys.argv[1:] if word.partition("=")[0] not in short]
sys.exit(main(["funrl", *words, *short.values()]))
"""
SRUN = """#!{python} -SE
import os, pathlib, subprocess, sys, time
words = sys.argv[1:]
flags = []
while words[0].startswith("-"):  # of srun itself
    flags.append(words.pop(0))
variables = {{"SLURM_STEP_NUM_TASKS": "{tasks}", "SLURM_STEP_TASKS_PER_NODE": "1(x{tasks})"}}
variables |= {{"SLURM_STEP_NODELIST": "localhost,other", "SLURM_LOCALID": "0"}}
tasks = [subprocess.Popen(words, env=os.environ | variables | {{"SLURM_PROCID": str(i)}}) for i in range({tasks})]
pathlib.Path("{shared}/tasks").write_text(" ".join(str(task.pid) for task in tasks))
asked = False
while any(task.poll() is None for task in tasks):
    if "--kill-on-bad-exit=1" in flags and not asked and any(task.poll() for task in tasks):
        asked = True
        for task in tasks:
            task.terminate()
    time.sleep(0.05)
sys.exit(max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks))
"""
REWARD = """import pathlib, time
held = pathlib.Path("{shared}/held")
def score(prompt, completion, **_):
    while held.exists() and pathlib.Path(held.read_text()).stat().st_size:  # the metrics of a step
        time.sleep(0.05)
    return float("a" in completion)
"""


@pytest.fixture
def forks():
    """A program that is a fork of this process, and what starts and ends such forks."""
    with forking_python() as both:
        yield both


@pytest.fixture
def shared(tmp_path, forks):
    """What all nodes see, with the scripts on their path in bin/."""
    config = decoder_config(
        vocab=104, embed=16, layers=1, heads=4, kv_heads=2, head=4, mlp=16, max_positions=128, eos=(1,), pad=0
    )
    tokenizer, model = character_tokenizer(string.printable), decoder_model(config)
    hf.save(tmp_path / "model", model, model.init(torch.Generator().manual_seed(0)), tokenizer)
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pytest.importorskip("pyarrow").table({"prompt": ["Tell me of a cat. "] * 20}), tmp_path / "train.parquet"
    )
    (tmp_path / "REWARD.py").write_text(REWARD.format(shared=tmp_path))
    python, bin_dir = forks[0], tmp_path / "bin"
    bin_dir.mkdir()
    given = f"--model={tmp_path}/model --prompts={tmp_path}/train.parquet --reward={tmp_path}/REWARD.py:score"
    scripts = {
        "funrl": FUNRL.format(python=python, flags=f"{SHORT} {given}"),
        "torchrun": f'#!/bin/sh\nexec {shlex.quote(str(python))} -m torch.distributed.run "$@"\n',
        "srun": SRUN.format(python=sys.executable, tasks=TASKS, shared=tmp_path),
        "scontrol": f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol\n',
        "scancel": f"#!/bin/sh\nkill -s TERM $(cat {tmp_path}/tasks)\n",
    }
    for name, text in scripts.items():
        (bin_dir / name).write_text(text)
        (bin_dir / name).chmod(0o755)
    return tmp_path


def in_real_python(shared, forks):
    """Have the scripts start interpreters of their own: signals other than SIGTERM do not reach forks."""
    for name in ("funrl", "torchrun"):
        script = shared / "bin" / name
        script.write_text(script.read_text().replace(str(forks[0]), sys.executable))


def hold_second_step(shared, run_dir):
    """Have rewards of the run wait after its first step, until `held` is removed."""
    (shared / "held").write_text(str(run_dir / "metrics.jsonl"))


def wait_for_step(run_dir, saved=False):
    """Wait until the run has made a step, and perhaps saved it."""
    deadline = time.monotonic() + 300
    metrics = run_dir / "metrics.jsonl"
    complete = run_dir / "checkpoints/step-1/complete.json"
    while not (metrics.exists() and metrics.stat().st_size) or saved > complete.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end_all(*started):
    """Kill processes with all that they have started; what they printed."""
    for process, _ in started:
        for pid in [*descendants(process.pid), process.pid]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    return [printed.read() for _, printed in started if printed.seek(0) == 0]


def descendants(pid):
    """Processes that a process has started, and those that these have started."""
    below = children_of(pid)
    return [*below, *(further for child in below for further in descendants(child))]


def environment(shared, **more):
    keep = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD_SIZE"))}
    path = os.pathsep.join([str(shared / "bin"), os.environ["PATH"]])
    return keep | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SHARED": str(shared)} | more


def start(command, shared, **more):
    """A process that prints to a file `printed`."""
    printed = tempfile.TemporaryFile("w+")  # noqa: SIM115
    variables = environment(shared, **more)
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=printed, stderr=subprocess.STDOUT)
    return process, printed


def finished(forks, *started):
    """The texts of processes that have to end well."""
    _, serve = forks
    deadline = time.monotonic() + 900
    try:
        while any(process.poll() is None for process, _ in started) and time.monotonic() < deadline:
            serve()
    finally:
        for process, _ in started:
            process.kill()
            process.wait()
    texts = [printed.read() for _, printed in started if printed.seek(0) == 0]
    assert [process.returncode for process, _ in started] == [0] * len(started), "\n".join(texts)
    return texts


def steps_of(run_dir):
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def torchrun_lines():
    """The indented commands of the page that torchrun starts, without their line ends."""
    text = PAGE.replace(" \\\n", " ")
    return [line.strip() for line in re.findall(r"^    torchrun .*$", text, re.MULTILINE)]


def sbatch_script():
    (text,) = re.findall(r"^```sbatch\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return text


def test_torchrun_has_flags_that_are_there():
    """tests/processes/test_attempts.py and tests/docs/test_manifests.py have it start two nodes."""
    alone, nodes = (line.partition(" funrl ") for line in torchrun_lines())
    assert alone[0].split()[1:] == ["--standalone", "--nproc-per-node=8", "--no-python"]
    flags = alone[2].removeprefix("grpo ").split()
    assert settings_of(**dict(word.removeprefix("--").split("=") for word in flags)).devices.mesh == "dp8"
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    assert nodes[0].split()[1:] == ["--nnodes=8", "--nproc-per-node=8", *meeting, "--no-python"]
    names = {word.removeprefix("--").partition("=")[0] for word in nodes[2].split()}
    assert {"config", "resume"} <= names <= {"config", *settings_flags()}
    assert (ROOT / re.findall(r"--config=(\S+)", nodes[2])[0]).exists()


@pytest.mark.gloo
@pytest.mark.slow
def test_the_batch_script_and_its_requeue(shared, forks):
    script = shared / "job.sh"
    script.write_text(sbatch_script())
    assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b""
    job = str(PORTS + free_port(FIRST_PORT, FIRST_PORT + PORTS) - FIRST_PORT)
    run_dir = shared / "runs" / job
    finished(forks, start(["bash", script], shared, SLURM_JOB_ID=job))
    assert steps_of(run_dir) == [1]
    (text,) = finished(
        forks, start(["bash", script], shared, SLURM_JOB_ID=job, FURTHER_FLAGS="--steps=2")
    )  # requeued: the same number
    assert "resumed after step 1" in text and steps_of(run_dir) == [1, 2]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_killed_task_of_slurm_ends_the_job_which_resumes(shared, forks):
    """The first rank, beside which a process keeps the store: `--kill-on-bad-exit` ends the other."""
    in_real_python(shared, forks)
    script = shared / "job.sh"
    script.write_text(sbatch_script())
    job = str(PORTS + free_port(FIRST_PORT, FIRST_PORT + PORTS) - FIRST_PORT)
    run_dir = shared / "runs" / job
    hold_second_step(shared, run_dir)
    variables = {"SLURM_JOB_ID": job, "FURTHER_FLAGS": "--steps=3"}
    started = start(["bash", script], shared, **variables)
    wait_for_step(run_dir, saved=True)
    os.kill(int((shared / "tasks").read_text().split()[0]), signal.SIGKILL)
    code = started[0].wait(120)
    (text,) = end_all(started)
    (shared / "held").unlink()
    assert code != 0, text
    (text,) = finished(forks, start(["bash", script], shared, **variables))
    assert "resumed after step 1" in text and steps_of(run_dir) == [1, 2, 3]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "to_group"), [(signal.SIGTERM, False), (signal.SIGINT, True)], ids=["SIGTERM", "Ctrl-C"]
)
def test_torchrun_passes_a_signal_on_and_the_run_saves(sign, to_group, shared, forks):
    """The line of the page for one machine; a terminal sends Ctrl-C to the whole group."""
    in_real_python(shared, forks)
    line = torchrun_lines()[0].replace("--nproc-per-node=8", f"--nproc-per-node={TASKS}")
    run_dir = shared / "runs/first"
    command = ["setsid", "bash", "-c", f"exec {line} --run_dir={run_dir} --resume"]
    hold_second_step(shared, run_dir)
    started = start(command, shared, FURTHER_FLAGS="--steps=9 --save_every=0")
    wait_for_step(run_dir)
    (os.killpg if to_group else os.kill)(started[0].pid, sign)
    time.sleep(2)
    (shared / "held").unlink()
    code = started[0].wait(120)
    (text,) = end_all(started)
    assert code != 0 and "torchrun kills ranks 30 s after SIGTERM" in text, text
    assert "after step 2, which is saved" in text and steps_of(run_dir) == [1, 2], text
    (text,) = finished(forks, start(command, shared, FURTHER_FLAGS="--steps=3"))
    assert "resumed after step 2" in text and steps_of(run_dir) == [1, 2, 3]
