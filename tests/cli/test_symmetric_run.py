"""`ray symmetric-run` as docs/scale_out.md has it: one command on all nodes makes a cluster, runs there and ends.

Needs Ray: .ci/setup_ray makes .venv-ray for it.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ray_cluster import HEALTH, ROOT, on_ray, processes_with

RUN_S = 400
SHARED = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
START = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats"]
SMALL = ["--device=cpu", "--compile=off", "--batch_prompts=4", "--samples_per_prompt=2", "--max_new_tokens=4"]
SMALL += ["--warmstart_steps=0", "--eval_prompts=4", "--steps=2", "--place=train:dp2 generate:ray2-2"]


@on_ray
def test_one_command_on_all_nodes_starts_a_cluster_runs_and_ends_it(tmp_path):
    """The trainer takes all CPUs of one node, the generators those of the other."""
    if subprocess.run(["unshare", *SHARED, "ip", "netns", "list"], capture_output=True).returncode:
        pytest.skip("nodes with networks of their own cannot be made here")
    run_dir = tmp_path / "run"
    environment = os.environ | {f"RAY_health_check_{name.lower()}": text for name, text in HEALTH.items()}
    environment |= {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": "120"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    funrl = shlex.join([sys.executable, "-m", "funrl", "ray", "--", "grpo", *SMALL, f"--run_dir={run_dir}"])
    command = ["ray", "symmetric-run", "--address=10.0.0.2:6379", *START]
    done = subprocess.run(
        [
            "unshare",
            *SHARED,
            "bash",
            f"{ROOT}/tests/symmetric_run.sh",
            tmp_path,
            *command,
            "--",
            "sh",
            "-c",
            f"{funrl} && exit 3",
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    logs = [(tmp_path / f"node{node}.log").read_text() for node in (2, 3)]
    assert done.returncode == 3, "\n".join([done.stderr, *logs])  # of the command, which has succeeded
    assert f"results in {run_dir}" in logs[0] and "Command failed with return code 3" in logs[0]
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 2
    assert "On worker node" in logs[1] and "results in" not in logs[1]  # it runs on the first node alone
    assert "2 of 2 are there" in logs[0]
    assert not processes_with(str(tmp_path))
