"""The C++ functions under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized_calls

from funrl.compiled_kernels.kernel_library import _compiler, library_problem

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def compiler_says(argument):
    command = [*_compiler(), argument]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def sanitizer_problem():
    """The reason why there are no sanitizers here; None: there are."""
    if (problem := library_problem()) is not None:
        return problem
    if "Free Software Foundation" not in compiler_says("--version"):
        return f"{_compiler()[0]} is not g++, whose sanitizers this test loads"
    missing = [
        name for name in ("asan", "ubsan") if not Path(compiler_says(f"-print-file-name=lib{name}.so")).is_absolute()
    ]
    return f"{_compiler()[0]} has no lib{missing[0]}" if missing else None


PROBLEM = sanitizer_problem()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))]


@pytest.fixture(scope="module")
def environment():
    """Variables of a process whose kernels are sanitized; they are compiled already, outside of it."""
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "sanitized"
    path = os.pathsep.join([str(ROOT), str(FOLDER), str(FOLDER.parent)])
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, sanitized_calls.__file__, "compile"]
    subprocess.run(command, env=variables, cwd=ROOT, check=True, timeout=600)
    # The second one is loaded first, or AddressSanitizer would not find what throws exceptions.
    preloaded = " ".join(compiler_says(f"-print-file-name={name}.so") for name in ("libasan", "libstdc++"))
    return variables | {
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def run(environment, *arguments):
    command = [sys.executable, sanitized_calls.__file__, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_no_call_leaves_its_memory_or_the_language(environment):
    done = run(environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "results" in done.stdout


def test_a_planted_fault_is_reported(environment):
    done = run(environment, "plant")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr and "funrl_norm" in done.stderr
