"""Programs on meshes of JAX's devices; conftest.py gives a process four."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
import torch
from lowered_engines import differences
from lowered_meshes import difference
from lowered_runs import gap_of, job_of
from mesh_runs import saved_model
from small_runs import Quiet
from test_lowered_runs import learned, run_until

from funrl.cli import main as cli
from funrl.mesh.mesh import single
from funrl.trainer.loop import train_loop

pytestmark = pytest.mark.xla

HERE = Path(__file__).parent
MESHES = {  # the collectives that its program must have
    "dp2,tp2+fsdp": {"all-reduce", "all-gather", "reduce-scatter"},
    "ep2,sp2": {"all-gather", "reduce-scatter", "all-to-all"},
}
ENGINES = [(torch.float64, "dp2,tp2+lora+states"), (torch.bfloat16, "dp2,tp2")]
RUNS = [
    "2:ppo:dp2,tp2",
    "2:grpo:ep2+fsdp",
    "2:grpo:dp2+fsdp+on=tp2",  # JAX decodes too
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradient_of_a_mesh_is_that_of_torch_on_one_device(mesh):
    gap, collectives = difference(mesh)
    assert gap < 1e-12 and collectives >= MESHES[mesh]


@pytest.mark.slow
def test_runs_on_meshes_have_the_metrics_of_torch_s_ranks():
    """In a process of its own, whose ranks are forked before JAX starts."""
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))
    command = [sys.executable, str(HERE / "lowered_runs.py"), *RUNS]
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == RUNS
    for line in lines:
        assert float(line.split()[1]) < 1e-9, line


@pytest.mark.slow
@pytest.mark.parametrize("dtype,mesh", ENGINES, ids=str)
def test_completions_of_an_engine_on_a_mesh_are_those_of_torch(dtype, mesh):
    gap, rounding, pages, same = differences(dtype, mesh)
    assert gap < (1e-12 if dtype == torch.float64 else 2 * rounding)
    assert same and min(pages) > 0  # both lanes have had pages


@pytest.mark.slow
def test_a_checkpoint_of_a_mesh_is_continued_by_the_other_backend(tmp_path):
    """From torch to JAX and back; the second step after a checkpoint depends on the state of the optimizer."""

    def job(text, **settings):
        return job_of(text, steps=4, **settings)

    whole = Quiet(str(tmp_path / "whole"))
    train_loop(job("sft:"), single(), whole)
    run = tmp_path / "run"
    run_until(2, run, job("sft:", save_every="1"))
    there = run_until(3, run, job("sft:dp2,tp2", save_every="1", backend="xla", resume=True, run_dir="x"))
    back = Quiet(str(run))
    train_loop(job("sft:", resume=True, run_dir="x"), single(), back)
    for steps, numbers in (there.steps, [2, 3]), (back.steps, [3, 4]):
        assert [step for step, _ in steps] == numbers
        gap, name = gap_of(learned(steps), learned(whole.steps[numbers[0] - 1 : numbers[1]]))
        assert gap < 1e-9, (numbers, name)


@pytest.mark.slow
def test_adapters_of_a_hugging_face_folder_learn_on_a_mesh_with_remat_as_in_torch(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    saved_model(tmp_path / "start", "qwen3", **sizes, num_key_value_heads=2, head_dim=4)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"prompt": f"{i}+3=", "completion": str(i + 3)}) for i in range(8)))
    words = ["sft", f"--model={tmp_path / 'start'}", f"--data={texts}", f"--eval_data={texts}", "--batch_prompts=4"]
    words += ["--steps=2", "--lora_rank=2", "--lr=0.01", "--remat=full", "--device=cpu", "--dtype=float64"]
    losses = {}
    for backend, mesh in (("xla", "dp2"), ("torch", "dp1")):
        run = tmp_path / backend
        with pytest.raises(SystemExit) as ended:
            cli.main(["funrl", *words, f"--backend={backend}", f"--mesh={mesh}", f"--run_dir={run}"])
        assert not ended.value.code
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses[backend] = [line["eval/loss"] for line in lines if "eval/loss" in line]
        assert (run / "adapter").is_dir()
    assert losses["xla"] == pytest.approx(losses["torch"], rel=1e-9) and losses["xla"][-1] < losses["xla"][0] - 0.01
