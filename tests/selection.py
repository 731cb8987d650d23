"""Choices of tests: cases that `./test` runs, where `./test --all` runs the others too; and files that start JAX."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest


def quick(cases: Iterable[Any], names: Collection[Any]) -> list[Any]:
    """Parameters of which all but some are slow.

    Args:
      cases: all of them.
      names: those that are not slow.
    """
    cases = list(cases)
    unknown = [name for name in names if name not in cases]
    assert not unknown, f"{unknown[0]!r} is not a case"
    return [case if case in names else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def starts_jax(file: Path) -> bool:
    """True of a file whose tests are marked as `xla`."""
    return re.search(r"^pytestmark = pytest\.mark\.xla$", file.read_text(), re.MULTILINE) is not None
