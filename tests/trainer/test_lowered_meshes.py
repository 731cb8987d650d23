"""Programs on meshes of JAX's devices, in processes of their own, as JAX fixes their number when it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

pytestmark = pytest.mark.xla

HERE = Path(__file__).parent
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
MESHES = {  # the collectives that its program must have
    "dp2,tp2": {"all-reduce"},
    "dp2+fsdp": {"all-gather", "reduce-scatter"},
    "sp2": {"all-to-all"},
    "ep2": {"all-gather", "reduce-scatter"},
}
ENGINES = [("float64", "dp2,tp2+lora"), ("float64", "dp2+states"), ("bfloat16", "dp2,tp2")]
RUNS = [
    ("float64", "ppo:dp2,tp2", "grpo:ep2+fsdp"),
    ("float64", "ppo:dp2+fsdp", "ppo:sp2"),
    ("float32", "ppo:dp2,tp2", "sft:dp2+fsdp"),
    ("bfloat16", "sft:dp2,tp2"),
]
DECODED = ("float64", "grpo:dp2+fsdp+on=tp2")
METRICS = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 2e-2}
STEPS = {"bfloat16": "1"}
COMMAND = ["-m", "funrl.cli.main"]


@pytest.mark.slow
def test_the_gradient_of_a_mesh_is_that_of_torch_on_one_device():
    lines = output_of("lowered_meshes.py", *MESHES).splitlines()
    assert [line.split()[0] for line in lines] == list(MESHES)
    for line in lines:
        mesh, gap, *collectives = line.split()
        assert float(gap) < 1e-12 and set(collectives) >= MESHES[mesh], line


@pytest.mark.slow
@pytest.mark.parametrize("runs", RUNS, ids=" ".join)
def test_a_run_on_a_mesh_has_the_metrics_of_torch_s_ranks(runs):
    dtype, *texts = runs
    lines = output_of("lowered_runs.py", dtype, STEPS.get(dtype, "5"), *texts).splitlines()
    assert [line.split()[0] for line in lines] == texts
    for line in lines:
        assert float(line.split()[1]) < METRICS[dtype], line


@pytest.mark.slow
@pytest.mark.parametrize("dtype,mesh", ENGINES, ids=" ".join)
def test_completions_of_an_engine_on_a_mesh_are_those_of_torch(dtype, mesh):
    resharded, line = output_of("lowered_engines.py", dtype, mesh).splitlines()
    assert resharded == "resharded by the devices"
    _, gap, rounding, *most, other = line.split(" ")
    assert float(gap) < (1e-12 if dtype == "float64" else 2 * float(rounding))
    assert not other
    assert min(map(int, most)) > 0  # both lanes have had pages


@pytest.mark.slow
def test_a_run_that_decodes_on_a_mesh_has_the_metrics_of_torch_s_ranks():
    dtype, text = DECODED
    _, gap, name = output_of("lowered_runs.py", dtype, "2", text).split()
    assert float(gap) < METRICS[dtype], name


@pytest.mark.slow
def test_a_checkpoint_of_a_mesh_is_continued_by_the_other_backend(tmp_path):
    lines = output_of("lowered_resumed.py", "dp2,tp2", str(tmp_path)).splitlines()
    assert [line.split()[:2] for line in lines] == [["torch", "xla"], ["xla", "torch"]]
    for line in lines:
        assert float(line.split()[2]) < 1e-9, line


@pytest.mark.slow
def test_adapters_of_a_hugging_face_folder_learn_on_a_mesh_with_remat_as_in_torch(tmp_path):
    from mesh_runs import saved_model

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    saved_model(tmp_path / "start", "qwen3", **sizes, num_key_value_heads=2, head_dim=4)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"prompt": f"{i}+3=", "completion": str(i + 3)}) for i in range(8)))
    words = ["sft", f"--model={tmp_path / 'start'}", f"--data={texts}", f"--eval_data={texts}", "--batch_prompts=4"]
    words += ["--steps=2", "--lora_rank=2", "--lr=0.01", "--remat=full", "--device=cpu", "--dtype=float64"]
    losses = {}
    for backend, mesh in (("xla", "dp2"), ("torch", "dp1")):
        run = tmp_path / backend
        output_of(COMMAND, *words, f"--backend={backend}", f"--mesh={mesh}", f"--run_dir={run}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses[backend] = [line["eval/loss"] for line in lines if "eval/loss" in line]
        assert (run / "adapter").is_dir()
    assert losses["xla"] == pytest.approx(losses["torch"], rel=1e-9) and losses["xla"][-1] < losses["xla"][0] - 0.01


def output_of(program, *args):
    """Output of a program beside this file, or of funrl."""
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))
    environment = os.environ | DEVICES | {"PYTHONPATH": path}
    start = program if program == COMMAND else [str(HERE / program)]
    command = [sys.executable, *start, *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
