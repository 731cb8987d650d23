"""Programs beside this file that interpret or compile Triton kernels, and tests of their cases."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton, on Linux"
)


def output_of(program, *args, **variables):
    """What a program prints, as JSON; a new process, since triton reads variables at imports."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / program), *args],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1800,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@functools.cache
def interpreted(program):
    """For each case of a program null, or the traceback of its failure, under Triton's interpreter."""
    return output_of(program, TRITON_INTERPRET="1")


def interpreted_test(program, cases):
    """A test of each case of a program, which runs once."""

    @needs_triton
    @pytest.mark.slow
    @pytest.mark.parametrize("case", cases)
    def test(case):
        results = interpreted(program)
        assert tuple(results) == cases
        assert results[case] is None, results[case]

    return test
