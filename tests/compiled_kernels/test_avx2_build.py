"""The kernels that a processor with AVX2 alone has, on one that has more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from funrl.compiled_kernels import kernel_library
from funrl.compiled_kernels.kernel_library import library_problem

FILES = ["test_packed.py", "test_exact_operators.py", "test_grouped_linear.py"]
NO_KERNEL = library_problem()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL)),
    pytest.mark.skipif(
        NO_KERNEL is None and "avx512f" not in kernel_library._processor(), reason="the other tests see AVX2 here"
    ),
]


def test_kernels_pass_their_tests_with_avx2_alone():
    folder = Path(__file__).parent
    capped = os.environ | {"FUNRL_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command += [str(folder / name) for name in FILES]
    run = subprocess.run(command, cwd=folder.parents[1], env=capped, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:]
