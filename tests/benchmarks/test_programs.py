"""Every benchmark runs, at its smallest size, and prints its table. `tests/examples` runs the examples."""

import os
import re
from pathlib import Path

import forked_python
import pytest
from selection import XLA_FLAGS

from funrl.compiled_kernels.kernel_library import library_problem

ROOT = Path(__file__).parents[2]
NUMBER = r"\d[\d,.]*"
PROGRAMS = {  # program: its flags, and a line of its table
    "algos": ("--rows=16 --tokens=64 --rounds=1", rf"^rloo +{NUMBER} +{NUMBER}"),
    "async": (
        "--staleness=1 --seconds=0.01 --steps=4 --prompts=2 --samples=2 --turns=1",
        rf"^split, S=1 +{NUMBER} +{NUMBER} +{NUMBER} +{NUMBER}",
    ),
    "certificate": ("--rounds=2 --embed=64 --layers=1 --lines=3", rf"^\| FSDP dp4,tp2 -> dp4,tp2 .*\| {NUMBER} \|$"),
    "checkpoint": ("--gb=0.01 --rounds=2 --step_s=0.1", rf"^write +{NUMBER} s +{NUMBER} GB/s"),
    "data_plane": ("--rows=256 --longest=256 --budget=512 --lines=100 --ranks 4", rf"^ppo +4 +\d+ .* {NUMBER} s$"),
    "decode_kernel": (
        "--models=4x256 --dtypes=float32 --batches=1 --new_tokens=4 --repeats=1",
        rf"^ +4x256 +float32 +1 +{NUMBER}",
    ),
    "delta_net": (
        "--key_heads=1 --value_heads=2 --key=8 --value=8 --tokens=70 --rounds=1",
        rf"^ratio +{NUMBER} +{NUMBER}$",
    ),
    "dry_run_memory": ("--shapes=1M", rf"^\| 1.\d M \| dp1 \| {NUMBER} .* %"),
    "episodes": ("--turns=2 --repeats=1", rf"^ +2 +{NUMBER} +{NUMBER} us +{NUMBER} us +{NUMBER} us +\d+%$"),
    "first_rank": ("--ranks=8 --prompts=8 --samples=2", rf"^in all +{NUMBER} s, 16 rows on 8 ranks$"),
    "generate": (
        "--models=1x128:256 --dtypes=float32 --batches=1 --repeats=1",
        rf"^ +1x128:256 +float32 +1 \| native {NUMBER}",
    ),
    "gpu": (  # tests/benchmarks/test_gpu.py has its other parts
        "--device=cpu --small --tests --parts=compile,tests --out=table",
        rf"^\| compile \| compile a layer, 0.2M, warm \| {NUMBER} s",
    ),
    "host_step": ("--rows=2 --steps=3", rf"^static +2 rows: +{NUMBER} microseconds"),
    "layer": ("--tokens=16 --embed=64 --vocab=64 --turns=1 --remat=none", rf"^compiled +{NUMBER} +{NUMBER}"),
    "logit_blocks": (
        "--tokens=256 --embed=64 --vocab=4096 --l2_mb=1 --processors=2",
        rf"^\| 1024 x 512 \(taken\) \| forward \| 16 \| {NUMBER} \| {NUMBER} \| {NUMBER} \|$",
    ),
    "long": ("--tokens=256 --ranks=2", rf"^ +256 +2 ranks +{NUMBER} +{NUMBER}$"),
    "lora": ("--layers=1 --embed=64 --rank=2", rf"^\| adapters of rank 2 \| {NUMBER} M \|"),
    "moe": ("--experts=4 --per_token=2 --embed=16 --mlp=8 --tokens=8 --rounds=1", rf"^grouped +{NUMBER}ms"),
    "published": (
        "--rows=SFT.8192.recompute.FA3",
        rf"^\| prime-rl Qwen3-0.6B SFT 8192 .* \| {NUMBER} \| [+-]\d+% \|$",
    ),
    "reshard": ("--tree=1mb --rounds=2 --lines=1", rf"^\| FSDP dp4,tp2 -> dp4,tp2 .*\| {NUMBER} \|$"),
    "scheduler": ("--ranks=2 --rows=32 --stride=256", rf"^2, 64 \| ideal {NUMBER}  tickets {NUMBER} .* fixed {NUMBER}"),
    "serve": (
        "--clients=2 --requests=1 --tokens=4 --token_ms=1",
        rf"^tokens a second, 2 clients, 1 ms a token: direct {NUMBER} \(100%\)  whole {NUMBER} .* stream {NUMBER}",
    ),
    "speculate": (
        "--warmstart_steps=1 --rows=1 --drafts=0,2 --sizes=1x128 --repeats=1",
        rf"^ +loops, 1x128 .* drafts of 2: {NUMBER}",
    ),
    "step": (
        "--layers=1 --embed=64 --vocab=64 --prompts=2 --samples=2 --prompt_tokens=4 --new_tokens=4 --turns=1",
        rf"^total +{NUMBER} +{NUMBER} +{NUMBER} +{NUMBER}",
    ),
    "xla": (
        "--layers=1 --embed=32 --tokens=8 --vocab=32 --turns=1",
        rf"^ +1 +{NUMBER} +{NUMBER} +{NUMBER}$",
    ),
}
CAPPED = ("decode_kernel", "generate", "layer", "step")  # have --isa=avx2
# Modules of the others.
PARTS = {
    "handwritten_jax",
    "instruction_set",
    "random_trainer",
    "serve_client",
    "vllm_peer",
    "weightless",
}
COMPILED = {"decode_kernel", "speculate"}  # nothing else runs there


def test_every_program_is_in_the_table():
    assert {file.stem for file in (ROOT / "benchmarks").glob("*.py")} == {*PROGRAMS, *PARTS}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_prints_its_table(name, tmp_path):
    if name in COMPILED and (problem := library_problem()):
        pytest.skip(f"the compiled decoding step is not available: {problem}")
    check_table(name, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
@pytest.mark.parametrize("name", CAPPED)
def test_a_benchmark_runs_with_avx2_alone(name, tmp_path):
    printed = check_table(name, tmp_path, "--isa=avx2")
    assert re.search("^.*, AVX2 forced: torch AVX2, Inductor avx2, .*, funrl AVX2$", printed, re.MULTILINE), printed


def check_table(name, folder, *flags):
    arguments, line = PROGRAMS[name]
    printed = output_of(name, arguments, folder, *flags)
    assert re.search(line, printed, re.MULTILINE), printed
    return printed


def output_of(name, arguments, folder, *flags):
    """What a benchmark prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XLA_FLAGS": XLA_FLAGS}
    command = [str(ROOT / "benchmarks" / f"{name}.py"), *arguments.split(), *flags]
    done = forked_python.run_python(command, folder, environment, timeout_s=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_graphs_of_passes_with_prompts_save_what_is_predicted(tmp_path):
    """512 rows of mean length 512, of which one ends and one begins a pass: 19 ms a pass by the clock, 10.5 at most."""
    output = output_of("scheduler", "--passes", tmp_path)
    refilled = re.search(rf"^refilled rows \| \d+, 6\d% \| ({NUMBER})  ({NUMBER})$", output, re.MULTILINE)
    assert refilled is not None, output
    before, after = map(float, refilled.groups())
    assert 18 < before < 20 and after <= 10.5
