"""Choices of tests: cases that `./test` runs, where `./test --all` runs the others too; files that start JAX; and the
order of files."""

import collections
import functools
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest


def quick(cases: Iterable[Any], names: Collection[Any]) -> list[Any]:
    """Parameters, all slow but for some.

    Args:
      cases: all of them.
      names: of the ones that are not slow.
    """
    cases = list(cases)
    unknown = [name for name in names if name not in cases]
    assert not unknown, f"{unknown[0]!r} is not a case"
    return [case if case in names else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@functools.cache
def unlike_recipes() -> tuple[str, ...]:
    """The first of all recipes that read the same fields and have the same roles, losses and need of a filter.

    Others differ by formulas, which tests/algos compares with loops, by ranks and micro-batches too.
    """
    from funrl.algos.recipes import NAMES, recipe  # not before conftest.py has set the environment
    from funrl.trainer.steps.roles import fields_read, role_names

    first: dict[Any, str] = {}
    for name in NAMES:
        made = recipe(name)()
        needs = (*map(frozenset, (role_names(made), fields_read(made), made.losses)), made.filter is None)
        first.setdefault(needs, name)
    return tuple(first.values())


def starts_jax(file: Path) -> bool:
    """True of a file whose tests are marked as `xla`."""
    return re.search(r"^pytestmark = pytest\.mark\.xla$", file.read_text(), re.MULTILINE) is not None


XLA_FLAGS = (  # of programs that start JAX: LLVM optimizes little, and MLIR fuses no loop, so that it compiles soon
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_enable_concurrency_optimized_scheduler=false"  # as funrl.xla.meshes, where another test may begin JAX
)
AS_MANY_QUICK_ONES = 20  # take as long as a slow test
LONG = {  # files that take a minute or more of a core, or have few but long tests
    "test_chaos.py",
    "test_compile_phase.py",
    "test_every_flag_acts.py",
    "test_experiments.py",
    "test_first_day.py",
    "test_models_compile_mesh.py",
    "test_named_on_meshes.py",
    "test_programs.py",
    "test_scale_out.py",
    "test_snippets.py",
}


def in_order_of_length(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Tests of long files first, then of files with many tests: workers that take files in turn end together."""
    items = list(items)
    lengths = collections.Counter[Path]()
    for item in items:
        lengths[item.path] += AS_MANY_QUICK_ONES if item.get_closest_marker("slow") else 1
    return sorted(items, key=lambda item: (item.path.name not in LONG, -lengths[item.path]))
