"""Calls of the first rank for rows of all ranks: few of each row and group, and none of each rank."""

import os
import re
from pathlib import Path

import pytest
from forked_python import run_python

ROOT = Path(__file__).parents[2]
MOST = {"groups": 200, "plan": 12, "score": 8}  # calls of a group or a row; the others' do not grow with rows
SAMPLES = 4


def calls(folder, count):
    """Calls by line of the benchmark, with as many ranks as groups."""
    flags = (f"--ranks={count}", f"--prompts={count}", f"--samples={SAMPLES}", "--calls")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = run_python([str(ROOT / "benchmarks/first_rank.py"), *flags], folder, environment, timeout_s=120)
    assert done.returncode == 0, done.stderr
    return {
        name: int(n.replace(",", "")) for name, n in re.findall(r"^(\w+) +[\d.]+ s +([\d,]+) calls", done.stdout, re.M)
    }


@pytest.mark.slow
def test_calls_grow_by_a_few_for_each_group_and_row(tmp_path):
    few, many = 64, 320
    before, after = calls(tmp_path, few), calls(tmp_path, many)
    assert before.keys() == after.keys() == {*MOST, "move", "exchange", "advantages", "checkpoint"}
    for name, most in MOST.items():
        units = (many - few) * (1 if name == "groups" else SAMPLES)
        assert after[name] - before[name] < most * units, name
    assert all(after[name] < 1.1 * before[name] for name in ("move", "exchange", "advantages"))
