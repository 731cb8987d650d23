"""The manifests of docs/scale_out.md: they parse, and their nodes, processes and ranks fit together."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from test_scale_out import finished, forks, free_port, shared, start, steps_of  # noqa: F401  (fixtures)

from funrl.mesh.pools.placement import generators_on_ray, training_sizes
from funrl.mesh.text import devices
from funrl.processes.environment import FIRST_PORT, PORTS
from funrl.trainer.settings.settings import settings_flags

PAGE = (Path(__file__).parents[2] / "docs/scale_out.md").read_text()
RECIPE = yaml.safe_load((Path(__file__).parents[2] / "recipes/llama3_70b_8nodes.yaml").read_text())
NODES = 8
DEVICES = 8


def block(language, *words):
    """The block of a language that has some words in it."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (text,) = [text for text in blocks if all(word in text for word in words)]
    return text


def words_of(text):
    """Words of a shell command over several lines."""
    return shlex.split(text.replace("\\\n", " "))


def options_of(words):
    return dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))


def check_command(words):
    """A command starts torchrun, and passes flags of funrl alone."""
    launcher = options_of(words[: words.index("funrl")])
    flags = options_of(words[words.index("funrl") + 1 :])
    assert "torchrun" in words[: words.index("funrl")] and "no-python" in launcher
    assert set(flags) - {"config"} <= set(settings_flags())
    assert flags.keys() >= {"run_dir", "resume"}
    return launcher, flags


def test_every_node_of_the_job_set_has_a_rank_of_its_own():
    jobs = yaml.safe_load(block("yaml", "kind: JobSet"))
    assert jobs["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and jobs["spec"]["network"]["enableDNSHostnames"]
    launch = block("sh", "JOB_COMPLETION_INDEX")
    launcher, _ = check_command(words_of(launch))
    ranks = []
    for job in jobs["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        assert spec["completions"] == spec["parallelism"] and job["replicas"] == 1
        (container,) = spec["template"]["spec"]["containers"]
        first = {entry["name"]: entry["value"] for entry in container["env"]}["FIRST_NODE"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(launcher["nproc-per-node"]) == DEVICES
        for index in range(spec["completions"]):
            variables = {"JOB_COMPLETION_INDEX": str(index), "FIRST_NODE": first}
            echo = re.sub(r"exec torchrun", "echo", launch)
            done = subprocess.run(["sh", "-c", echo], env=variables, capture_output=True, text=True, check=True)
            ranks.append(int(options_of(done.stdout.split())["node-rank"]))
    assert ranks == list(range(NODES)) and int(launcher["nnodes"]) == NODES
    names = [job["name"] for job in jobs["spec"]["replicatedJobs"]]
    assert launcher["master-addr"] == f"{jobs['metadata']['name']}-{names[0]}-0-0.{jobs['metadata']['name']}"


def test_the_train_job_has_the_nodes_of_the_recipe():
    job = yaml.safe_load(block("yaml", "kind: TrainJob"))
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1" and job["spec"]["runtimeRef"]["name"]
    trainer = job["spec"]["trainer"]
    launcher, _ = check_command(trainer["command"])
    assert set(launcher) == {"no-python"}  # all else is in PET_ variables
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (NODES, DEVICES)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == DEVICES
    assert RECIPE["mesh"] == f"dp{NODES * DEVICES}"


def test_the_ray_job_has_the_nodes_of_the_recipe():
    job = yaml.safe_load(block("yaml", "kind: RayJob"))
    words = shlex.split(job["spec"]["entrypoint"])
    end = words.index("--")
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert words[:2] == ["funrl", "ray"] and options_of(words[:end]) == {"nodes": str(NODES)}
    assert set(options_of(words[end + 1 :])) - {"config"} <= set(settings_flags())
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == NODES
    assert container["resources"]["limits"]["nvidia.com/gpu"] == DEVICES


def test_generators_on_ray_have_the_other_nodes():
    script = block("sh", "symmetric-run")
    assert subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True).stderr == ""
    (size,) = [int(size) for size in re.findall(r"^#SBATCH --nodes=(\d+)", script, re.M)]
    words = words_of(script[script.index("srun") :])
    ray, job = (place for place, word in enumerate(words) if word == "--")
    flags = options_of(words[job + 1 :])
    assert set(flags) <= set(settings_flags()) and words[ray + 1 : ray + 3] == ["funrl", "ray"]
    assert "min-nodes" not in options_of(words[:ray])  # with it the status of a run that succeeds is 1
    nodes = int(options_of(words[ray:job])["nodes"])
    assert devices(training_sizes(flags["place"], {})) == nodes * DEVICES and size == NODES
    bounds = generators_on_ray(flags["place"])
    assert bounds is not None and bounds.most == (size - nodes) * DEVICES


def heterogeneous():
    return block("slurm", "hetjob")


def test_the_heterogeneous_job_has_two_groups():
    script = heterogeneous()
    assert subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True).stderr == ""
    sizes = [int(size) for size in re.findall(r"^#SBATCH --nodes=(\d+)", script, re.M)]
    assert sum(sizes) == NODES and script.count("#SBATCH hetjob") == 1
    groups = [tuple(map(int, pair)) for pair in re.findall(r"^launch (\d) (\d) ", script, re.M)]
    assert groups == [(0, 0), (1, sizes[0])]
    assert f"--nnodes={NODES} " in script and f"--nproc-per-node={DEVICES} " in script


SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
SLURM_NODEID=0 exec "$@"
"""


@pytest.mark.gloo
@pytest.mark.slow
def test_the_heterogeneous_job_runs(shared, forks):  # noqa: F811
    """With one node of one device in each group."""
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho 127.0.0.1\n")):
        (shared / "bin" / name).write_text(text)
        (shared / "bin" / name).chmod(0o755)
    port = free_port(FIRST_PORT + 15_000, FIRST_PORT + PORTS)
    script = heterogeneous().replace("--nnodes=8", "--nnodes=2").replace("--nproc-per-node=8", "--nproc-per-node=1")
    script = script.replace("launch 1 6", "launch 1 1").replace("29500", str(port))
    (shared / "job.sh").write_text(script)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST_HET_GROUP_0": "localhost"}
    finished(forks, start(["bash", shared / "job.sh"], shared, **variables))
    assert steps_of(shared / "runs/7") == [1]


@pytest.mark.gloo
@pytest.mark.slow
def test_the_command_of_the_train_job_runs_on_two_nodes(shared, forks):  # noqa: F811
    """With the variables that Kubeflow Trainer gives torchrun."""
    words = yaml.safe_load(block("yaml", "kind: TrainJob"))["spec"]["trainer"]["command"]
    command = [word.replace("/shared/", f"{shared}/") for word in words if not word.startswith("--config")]
    port = free_port(FIRST_PORT + 15_000, FIRST_PORT + PORTS)
    of_nodes = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    command.insert(command.index("funrl") + 1, "grpo")
    finished(forks, *(start(command, shared, **of_nodes, PET_NODE_RANK=str(rank)) for rank in range(2)))
    assert steps_of(shared / "runs/first") == [1]
