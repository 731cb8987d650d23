"""`funrl plan`: tables of costs, the choice by a bound, and files that start runs."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from funrl.cli import plan
from funrl.cli.command import read_command, with_models
from funrl.cli.doctor import experiment_of
from funrl.cli.main import main
from funrl.cli.plan import LAUNCHERS, PLAN_FLAGS, RunPlan, launch_text, own_flags, plan_command, plan_on
from funrl.cost.tracing.hardware import HARDWARE
from funrl.cost.verdict import errors_text, quoted_flags
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of

COMMAND = "funrl grpo --model=/shared/model --mesh=dp16 --run_dir=/shared/runs/First_one"
ON_16 = RunPlan(16, {"mesh": "dp16"}, nbytes=6e10, fits=True, step_s=300.0, tokens_per_s=4e4, hours=2.5)


def written(launcher, best=ON_16, hardware="h200", per_node=8):
    settings = settings_of(run_dir="/shared/runs/First_one", hardware=hardware)
    given = {"launch": launcher, "image": "here/funrl:1", "storage": "mine", "gpus_per_node": per_node}
    return launch_text(given, best, COMMAND, settings)


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


def planned(*flags, count=1, hardware=HARDWARE["cpu"]):
    """The plan of a command for some devices."""
    command = read_command(experiment_of("grpo"), ["funrl grpo", *flags, "--dry_run"], writes=False)
    return plan_on(count, with_models(command).settings, command.compose, hardware)


@pytest.mark.slow
def test_lengths_of_a_law_and_of_a_log_change_the_time_of_a_step(tmp_path):
    tokens = [4] * 60 + [16] * 4
    numbers, objects = tmp_path / "numbers.txt", tmp_path / "eval_samples.jsonl"
    numbers.write_text("".join(f"{n}\n" for n in tokens))
    objects.write_text("".join(f'{{"tokens": {n}, "reward": 1}}\n' for n in tokens))
    full = planned("--max_new_tokens=16")
    logged = [planned("--max_new_tokens=16", f"--lengths={path}") for path in (numbers, objects)]
    nearly = planned("--max_new_tokens=16", "--lengths=mean:15,max:16,spread:0.1")
    assert logged[0] == logged[1] and logged[0].step_s < 0.7 * full.step_s
    assert nearly.step_s == pytest.approx(full.step_s, rel=0.35)
    assert logged[0].nbytes == full.nbytes  # for rows of full length


@pytest.mark.slow
def test_waits_of_a_trace_change_the_time_of_a_step(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"waits": [1]}\n' * 15 + '{"waits": [61]}\n')
    none, mean, tail = (
        planned("--task=calculator", *flags).step_s
        for flags in ([], ["--assume_tool_seconds=4.75"], [f"--tool_trace={trace}"])
    )
    assert none < mean < none + 5 < tail < none + 70


@pytest.mark.slow
def test_smaller_nodes_have_slower_sums():
    flags = ["--model=recipes/models/qwen2.5_7b.json", "--batch_prompts=64", "--prompt_tokens=64"]
    flags += ["--max_new_tokens=64", "--dtype=bfloat16"]
    hardware = HARDWARE["h100"]
    near, far = (planned(*flags, count=4, hardware=hardware._replace(node=node)) for node in (8, 1))
    assert far.step_s > 1.1 * near.step_s


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--budget=10", "--budget=10: give the price of a device for an hour, --gpu_price"),
        ("--gpus=8,x", "--gpus=8,x: give numbers of devices"),
        ("--gpus=12", "--gpus=12: 12 devices are not whole nodes of --gpus_per_node=8"),
        ("--gpus=8,12,18 --gpus_per_node=4", "18 devices are not whole nodes of --gpus_per_node=4"),
        ("--mesh=dp2", "--mesh=dp2: funrl plan chooses it; leave it out"),
        ("--to=FILE", "--to=FILE does nothing without --launch"),
        ("--launch=slurm", "--launch=slurm: give --run_dir, a path that all nodes see"),
        ("--launch=slurm --run_dir=runs/first", "--launch=slurm: give --run_dir, a path that all nodes see"),
        ("--launch=slurm --run_dir=/s/r --image=x", "--image=x does nothing with --launch=slurm"),
        ("--launch=slurm --run_dir=/s/r --hardware=cpu", "it starts runs on a100, h100, h200, gb200, mi300x, not on"),
        ("--launch=slurm --run_dir=/s/r --to=/no/such/file", "--to=/no/such/file: it exists, or its folder does not"),
        ("--launch=k8s", "--launch=k8s: it must be one of slurm"),
        (
            "--launch=sky --run_dir=/s/r",
            "give --storage, a bucket, such as s3://mine; nodes mount it at /s",
        ),
        ("--launch=sky --run_dir=/opt/r --storage=s3://x", "--run_dir=/opt/r: images have a folder /opt"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_the_search(flags, problem):
    with pytest.raises(SettingsError, match=re.escape(problem)):
        plan_command(["plan", "grpo", *flags.split()])


def test_lengths_are_read_before_the_search_and_cut_at_what_a_completion_may_have(tmp_path, monkeypatch, capsys):
    searched = []
    monkeypatch.setattr(plan, "_plans", lambda *args: (searched.append(args), ([ON_16], []))[1])
    file = tmp_path / "lengths"
    flags = ["plan", "grpo", "--gpus=1", "--max_new_tokens=8", f"--lengths={file}"]
    file.write_bytes(b"3\n\xff\n")
    with pytest.raises(SettingsError, match=f"^--lengths={file}: {file}:2: give a number of tokens a line"):
        plan_command(flags)
    assert not searched
    file.write_text("3\n8\n9\n40\n")
    assert plan_command(flags) == 0 and searched
    assert "\n2 of 4 lengths are cut at 8 tokens (--max_new_tokens)\n" in capsys.readouterr().out


def test_a_start_file_is_not_written_for_weights_that_are_not_there(tmp_path):
    flags = ["--freeze=nosuch", "--gpus=1", "--launch=slurm", "--run_dir=/s/r", f"--to={tmp_path / 'run.sbatch'}"]
    with pytest.raises(SettingsError, match="--freeze=nosuch: no weight's name begins with 'nosuch'"):
        plan_command(["plan", "grpo", *flags])
    assert not list(tmp_path.iterdir())


def test_the_page_has_the_errors_that_a_plan_prints():
    page = (Path(__file__).parents[2] / "docs" / "dry_run.md").read_text()
    assert errors_text() in "\n".join(line.strip() for line in page.splitlines())


def test_the_help_has_the_flags_of_a_plan_with_their_defaults(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["funrl", "plan", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "The algorithm" not in printed and max(map(len, printed.splitlines())) <= 100
    words = " ".join(printed.split())
    for flag in PLAN_FLAGS:
        default = "" if flag.default is None else f"={flag.default}"
        assert f" --{flag.name}{default} {flag.help()}" in words


def test_containers_get_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(prompt, completion, **_):\n    return 1.0\n")
    line = ["plan", "grpo", "--launch=jobset", "--run_dir=/s/r", "--storage=x", "--reward=mine.py:score"]
    with pytest.raises(SettingsError, match=r"--reward=mine.py:score: give an absolute path that the containers see"):
        plan_command(line)


def test_the_command_has_the_flags_of_the_line_and_its_file_alone(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("hardware: h200\nresume: true\nsteps: 7\nverify_sync: false\n")
    experiment = experiment_of("grpo")
    words = ["funrl grpo", f"--config={file}", "--kl_coef", "0.5", "--run_dir", "/a b/r", "--dry_run"]
    own = own_flags(read_command(experiment, words, writes=False), experiment)
    assert own == {"steps": 7, "verify_sync": "false", "run_dir": "/a b/r", "kl_coef": 0.5}
    again = read_command(experiment, ["funrl grpo", *shlex.split(quoted_flags(own))], writes=False)
    assert (again.settings.run.steps, dict(again.arguments)["kl_coef"]) == (7, 0.5)


def test_every_file_has_the_command_the_nodes_and_the_time_of_a_step_to_end_in():
    for launcher in LAUNCHERS:
        text = written(launcher)
        assert f"{COMMAND.removeprefix('funrl ')} --resume" in text and "900" in text, launcher
    slurm = written("slurm")
    assert "--nodes=2 --ntasks-per-node=8 --gpus-per-node=8" in slurm and "--signal=B:TERM@900" in slurm
    sky = yaml.safe_load(written("sky"))
    assert sky["num_nodes"] == 2 and sky["resources"]["accelerators"] == "H200:8" and sky["resources"]["use_spot"]
    assert sky["file_mounts"] == {"/shared": {"source": "mine", "mode": "MOUNT"}} and sky["name"] == "funrl-first-one"
    assert {"--no-python", "--shutdown-timeout=900"} <= set(torchrun_words(sky["run"]))
    assert yaml.safe_load(written("sky", hardware="a100"))["resources"]["accelerators"] == "A100-80GB:8"
    ray = yaml.safe_load(written("kuberay"))["spec"]
    (group,) = ray["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == 2 and "--nodes=2 --shutdown_timeout=900 -- grpo" in ray["entrypoint"]
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    (job,) = yaml.safe_load(written("jobset"))["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["completions"] == spec["parallelism"] == 2 and spec["completionMode"] == "Indexed"
    assert container["image"] == "here/funrl:1" and container["volumeMounts"][0]["mountPath"] == "/shared"
    words = set(torchrun_words(container["command"][2]))
    assert {"--nnodes=2", "--nproc-per-node=8", "--shutdown-timeout=900"} <= words
    assert '"amd.com/gpu": 8' in written("jobset", hardware="mi300x")
    assert "--nodes=1 --ntasks-per-node=4 --gpus-per-node=4" in written("slurm", ON_16._replace(gpus=4))
    assert "--nodes=4 --ntasks-per-node=4 --gpus-per-node=4" in written("slurm", per_node=4)


def test_skypilot_reads_its_file(tmp_path):
    sky = pytest.importorskip("sky", reason="skypilot is not installed: pip install skypilot")
    file = tmp_path / "task.yaml"
    file.write_text(written("sky"))
    task = sky.Task.from_yaml(str(file))
    (resources,) = task.resources
    assert task.num_nodes == 2 and resources.accelerators == {"H200": 8} and resources.use_spot
