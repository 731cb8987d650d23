"""Locks of `requirements/`: each has a release that pyproject.toml allows of everything that it asks for."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = {
    "cpu.txt": ["test"],
    "cuda13.txt": ["data", "serve", "nf4", "flash-attn-4"],
    "vllm_cuda13.txt": ["data", "serve", "nf4"],
}


def _releases(file: Path) -> dict[str, str]:
    lines = (line for line in file.read_text().splitlines() if line and not line.startswith("#"))
    pinned = [Requirement(line) for line in lines]
    return {canonicalize_name(line.name): next(iter(line.specifier)).version for line in pinned}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_meets_the_project(name):
    releases = _releases(ROOT / "requirements" / name)
    asked = [*PROJECT["dependencies"], *(x for extra in LOCKS[name] for x in PROJECT["optional-dependencies"][extra])]
    for requirement in map(Requirement, asked):
        assert releases[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_lock_for_cpus_has_nothing_of_cuda_and_the_torch_of_setup():
    releases = _releases(ROOT / "requirements/cpu.txt")
    assert not [name for name in releases if name.startswith(("nvidia", "cuda"))]
    for name, release in _releases(ROOT / "requirements/torch_cpu.txt").items():
        assert releases[name] == release
