"""Every `>>>` example in a docstring prints what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [file for file in sorted((ROOT / "funrl").rglob("*.py")) if ">>>" in file.read_text()]


@pytest.mark.parametrize("file", FILES, ids=[file.relative_to(ROOT).as_posix() for file in FILES])
def test_examples_of_docstrings(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    result = doctest.testmod(module)  # an example may use what its module imports
    assert result.attempted and not result.failed
