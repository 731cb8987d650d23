"""Copies of the checkout in which a test makes an addition, as CONTRIBUTING.md describes it, and runs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copy_checkout(folder):
    """Copy the files that git tracks, and new ones that it does not ignore, into a folder."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    for name in files:
        if (ROOT / name).is_file():  # not one that was removed since the last commit
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def insert_after(file, line, text):
    """Insert a text after the first line of a file that is `line`."""
    before, result, after = file.read_text().partition(f"{line}\n")
    assert result, f"{file} has no line {line!r}"
    file.write_text(before + result + text + after)


def run_in(folder, *words):
    """Output of `python WORDS` in a copy, whose funrl it runs; an AssertionError with it where that fails."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def broken_rules(folder):
    """Rules of tools/house.py that a copy breaks, a line each."""
    return run_in(folder, "-c", "from tools import house; print(*house.problems(house.read_house()), sep='\\n')")
