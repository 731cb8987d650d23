"""Marks that `./test` chooses by."""

import re
from pathlib import Path

import pytest
from selection import starts_jax

TESTS = Path(__file__).parent
NAMED = ("xla/test_*", "trainer/test_lowered_*", "cost/test_ahead_*", "cost/test_compiled_models")
OF_JAX = [file for name in NAMED for file in TESTS.glob(f"{name}.py")]


@pytest.mark.parametrize("file", OF_JAX, ids=lambda file: file.name)
def test_a_file_of_programs_in_jax_is_marked(file):
    assert starts_jax(file), "pytestmark = pytest.mark.xla"


def test_no_other_file_imports_jax():
    imports = r"^\s*(import jax|from jax|pytest\.importorskip\(\"jax\"\))"
    importing = [file for file in TESTS.rglob("test_*.py") if re.search(imports, file.read_text(), re.MULTILINE)]
    assert importing and set(importing) <= set(OF_JAX)
