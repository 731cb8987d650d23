"""The program of all GPU measurements, on a CPU: its rows, what fails, and what has no time left."""

import json
import os
from pathlib import Path

import pytest
from forked_python import run_python

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run(folder, *flags, program=BENCHMARKS / "gpu.py"):
    """Run the program; its exit status, its output, and its table."""
    words = [str(program), "--device=cpu", "--small", f"--out={folder}/table", *flags]
    done = run_python(words, folder, os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout_s=300)
    table = folder / "table.json"
    return done, json.loads(table.read_text())["rows"] if table.exists() else []


@pytest.mark.slow
def test_every_part_gives_numbers_beside_their_roofline(tmp_path):
    done, rows = run(tmp_path, "--parts=kernels,train,decode,mixed,peer,decode-float8")
    assert done.returncode == 0, done.stderr
    counts = {"kernels": 17, "train": 5, "decode": 3, "mixed": 2, "peer": 1, "decode-float8": 2}
    assert {part: sum(row["part"] == part for row in rows) for part in counts} == counts
    measured = [row for row in rows if row["part"] != "peer" and "predicted" not in row["name"]]
    assert all(row["value"] > 0 and row["bound"] > 0 and row["share"] > 0 for row in measured)
    attention = next(row for row in rows if row["name"] == "varlen attention, one row of 64, forward")
    heads, head, tokens = 2, 16, 64
    assert attention["flops"] == 4 * heads * head * (tokens * (tokens + 1) // 2)
    assert attention["share"] == pytest.approx(attention["bound"] / attention["value"])
    learned = next(row for row in rows if "forward and backward" in row["name"])
    scored = next(row for row in rows if "score" in row["name"])
    assert 3 < learned["flops"] / scored["flops"] < 4, "three times the forward pass, and the logits once more"
    text = (tmp_path / "table.md").read_text()
    assert text.count("\n| kernels | ") == counts["kernels"] and "torch" in text.splitlines()[0]
    assert all(line in done.stdout for line in text.splitlines()[2:])


@pytest.mark.slow
def test_forms_of_log_probabilities_and_grouped_products_are_timed(tmp_path):
    done, rows = run(tmp_path, "--parts=logprob,grouped")
    assert done.returncode == 0, done.stderr
    names = {part: [row["name"] for row in rows if row["part"] == part] for part in ("logprob", "grouped")}
    assert len(names["logprob"]) == 6 and len(names["grouped"]) == 10
    assert sum("all columns" in name for name in names["logprob"]) == 3
    assert all(row["value"] > 0 and row["bound"] > 0 for row in rows)


@pytest.mark.slow
def test_the_kernels_of_a_pass_are_counted(tmp_path):
    done, rows = run(tmp_path, "--parts=decode-passes")
    assert done.returncode == 0, done.stderr
    assert [row["name"].rpartition(": ")[2] for row in rows] == ["kernels", "busy", "idle"] * 2
    assert all(row["value"] > 0 and row["bound"] for row in rows if row["unit"] == "ms" and "busy" in row["name"])
    counts = [row["value"] for row in rows if row["unit"] == "kernels"]
    assert counts[0] > 50, "on a CPU they are operators"


@pytest.mark.slow
@pytest.mark.gloo
def test_the_parts_for_two_gpus_run_on_ranks_of_gloo(tmp_path):
    done, rows = run(tmp_path, "--gpus=2")
    assert done.returncode == 0, done.stderr
    parts = ["captured-tp2", "groups-without-ranks", "hooks-compiled", "objects-beside-captures", "weights-beside"]
    assert list(dict.fromkeys(row["part"] for row in rows)) == parts
    assert all(row["value"] > 0 and not row["failed"] for row in rows)


@pytest.mark.slow
def test_a_cpu_says_that_it_is_aligned(tmp_path):
    done, rows = run(tmp_path, "--parts=aligned")
    assert done.returncode == 0, done.stderr
    assert [row["note"].partition(";")[0] for row in rows] == ["left out: on a CPU all kernels are aligned"]


BROKEN = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu
from gpu_parts.rows import Row

def broken(bench):
    yield Row("before", 1.0, "ms", 0.5)
    raise ValueError("no such kernel")

def ended(bench):
    sys.stdout.flush()
    import os
    os._exit(3)
    yield

def slow(bench):
    yield Row("first turn", 1.0, "ms")
    time.sleep(100)

def last(bench):
    yield Row("after all", 2.0, "tokens/s", 4.0)

gpu.parts = lambda: [gpu.Part("broken", 9, broken), gpu.Part("ended", 9, ended), gpu.Part("slow", 1, slow),
                     gpu.Part("last", 9, last), gpu.Part("long", 99, slow), gpu.Part("never", 9, last)]
gpu.app.run(gpu.main)
"""


def test_what_fails_is_a_row_and_the_rest_goes_on(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    done, rows = run(tmp_path, "--seconds=8", program=tmp_path / "broken.py")
    assert done.returncode == 1 and "failed: broken, ended, slow" in done.stderr
    notes = [(row["part"], row["value"], row["failed"], row["note"]) for row in rows]
    assert notes == [
        ("broken", 1.0, False, ""),
        ("broken", None, True, "ValueError: no such kernel"),
        ("ended", None, True, "its process ended with 3"),
        ("slow", 1.0, False, ""),
        ("slow", None, True, "cut off: its 1 s were over"),
        ("last", 2.0, False, ""),
        ("long", 1.0, False, ""),
        ("long", None, False, "cut off: --seconds=8 were over"),
        ("never", None, False, "left out: no time left of --seconds=8"),
    ]
    assert [row["share"] for row in rows if row["bound"]] == [0.5, 0.5]


@pytest.mark.slow
def test_without_a_gpu_it_says_how_to_try_it(tmp_path):
    done, rows = run(tmp_path, "--device=cuda", "--parts=kernels")
    if done.returncode == 0:
        pytest.skip("there is a GPU")
    assert "RuntimeError: torch 2." in done.stderr and "; --device=cpu --small tries the program" in done.stderr
    assert not rows
    done, _ = run(tmp_path, "--parts=kernel")
    assert done.returncode != 0 and "--parts=kernel: the parts are kernels, train, decode" in done.stdout + done.stderr
