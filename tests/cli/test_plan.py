"""`funrl plan`: tables of costs, the choice by a bound, and files that start runs."""

import re
import shlex

import pytest
import yaml

from funrl.cli.plan import LAUNCHERS, RunPlan, launch_text, plan_command
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of

COMMAND = "funrl grpo --model=/shared/model --mesh=dp16 --run_dir=/shared/runs/first"
ON_16 = RunPlan(16, {"mesh": "dp16"}, nbytes=6e10, fits=True, step_s=300.0, tokens_per_s=4e4, hours=2.5)


def written(launcher, plan=ON_16, per_node=8):
    settings = settings_of(run_dir="/shared/runs/first", hardware="h200")
    return launch_text(launcher, plan, COMMAND, settings, per_node=per_node, image="here/funrl:1")


def torchrun_words(text):
    words = shlex.split(text.replace("\\\n", " "))
    return words[words.index("torchrun") :]


@pytest.mark.slow
def test_a_bound_on_the_price_chooses_the_fastest_plan_below_it(capsys):
    flags = ["plan", "grpo", "--gpus=1,2", "--hardware=cpu", "--gpu_price=1", "--steps=3600"]
    assert plan_command(flags) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if re.match(r"[12] ", line)}
    assert "--mesh=dp1" in rows["1"] or "--mesh" not in rows["1"][-1]
    hours = {
        gpus: float(re.findall(r"yes .*? ([\d.]+) +\d+ +--", " ".join(row) + " --")[0]) for gpus, row in rows.items()
    }
    assert hours["2"] > hours["1"] > 0  # a part of the work is done by both
    assert "on 2 cpu" in printed
    assert plan_command([*flags, f"--budget={(hours['1'] + hours['2']) / 2}"]) == 0
    assert "on 1 cpu" in capsys.readouterr().out
    assert plan_command([*flags, f"--gpu_hours={hours['1'] / 2}"]) == 1
    assert "no plan fits; the nearest, on 1 GPUs, takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--budget=10"], "--budget=10: give the price of a device for an hour, --gpu_price"),
        (["--gpus=8,x"], "--gpus=8,x: give numbers of devices"),
        (["--launch=slurm"], "--launch=slurm: give --run_dir, an absolute path that all nodes see"),
        (["--launch=k8s"], "--launch=k8s: it must be one of slurm"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags, problem):
    with pytest.raises(SettingsError, match=re.escape(problem)):
        plan_command(["plan", "grpo", *flags])


def test_devices_fill_nodes():
    with pytest.raises(SettingsError, match=r"--gpus=12: they are not whole nodes of --gpus_per_node=8"):
        written("slurm", ON_16._replace(gpus=12))
    assert "--nodes=1 --ntasks-per-node=4 --gpus-per-node=4" in written("slurm", ON_16._replace(gpus=4))


def test_every_file_has_the_command_the_nodes_and_the_time_of_a_step_to_end_in():
    for launcher in LAUNCHERS:
        text = written(launcher)
        assert f"{COMMAND.removeprefix('funrl ')} --resume" in text, launcher
    slurm = written("slurm")
    assert "--nodes=2 --ntasks-per-node=8 --gpus-per-node=8" in slurm and "--signal=TERM@900" in slurm
    sky = yaml.safe_load(written("sky"))
    assert sky["num_nodes"] == 2 and sky["resources"]["accelerators"] == "H200:8" and sky["resources"]["use_spot"]
    assert "--no-python" in torchrun_words(sky["run"])
    ray = yaml.safe_load(written("kuberay"))["spec"]
    (group,) = ray["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == 2 and "--nodes=2 -- grpo" in ray["entrypoint"]
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    (job,) = yaml.safe_load(written("jobset"))["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["completions"] == spec["parallelism"] == 2 and spec["completionMode"] == "Indexed"
    assert container["image"] == "here/funrl:1" and container["volumeMounts"][0]["mountPath"] == "/shared"
    assert {"--nnodes=2", "--nproc-per-node=8"} <= set(torchrun_words(container["command"][2]))


def test_skypilot_reads_its_file(tmp_path):
    sky = pytest.importorskip("sky", reason="skypilot is not installed: pip install skypilot")
    file = tmp_path / "task.yaml"
    file.write_text(written("sky"))
    task = sky.Task.from_yaml(str(file))
    (resources,) = task.resources
    assert task.num_nodes == 2 and resources.accelerators == {"H200": 8} and resources.use_spot
