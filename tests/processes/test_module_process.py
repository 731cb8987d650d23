"""A module as a program in a process of its own, a fork or a new interpreter."""

import os
import subprocess
from pathlib import Path

import pytest

from funrl.processes import module_process as processes
from funrl.processes.module_process import module_process

PROGRAM = """
import os, sys
print(os.getpid(), os.path.basename(os.getcwd()), os.environ["COLOUR"], flush=True)
print(sys.argv[1], file=sys.stderr, flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(params=[True, False], ids=["forked", "new interpreter"])
def program(request, tmp_path, monkeypatch):
    """Arguments of `module_process` for a program that ends with the status of its first word."""
    if not request.param:
        monkeypatch.setattr(processes, "can_fork", lambda: False)
    (tmp_path / "ends_with.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda word: ("ends_with", [word], tmp_path, {**os.environ, "COLOUR": "blue"})


def test_what_it_prints_is_read_in_its_folder_and_environment(program, tmp_path):
    with module_process(*program("0")) as output:
        pid, *words = output.read().split()
    assert int(pid) != os.getpid() and words == [tmp_path.name, "blue", "0"]
    assert "COLOUR" not in os.environ and Path.cwd() != tmp_path


def test_a_parent_without_an_output_starts_one_too(program, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with module_process(*program("0")) as output:
        assert output.read().split()[-1] == "0"


def test_one_that_fails_raises_after_its_lines(program):
    with pytest.raises(subprocess.CalledProcessError) as raised, module_process(*program("3")) as output:
        last = output.read().split()[-1]
    assert raised.value.returncode == 3 and last == "3"


def test_an_exception_is_shown_and_fails(program):
    with pytest.raises(subprocess.CalledProcessError), module_process(*program("three")) as output:
        last = output.read().splitlines()[-1]
    assert last.startswith("ValueError: ")


def test_it_is_killed_where_the_block_raises(program):
    with pytest.raises(KeyboardInterrupt), module_process(*program("0")) as output:
        pid = output.readline().split()[0]
        raise KeyboardInterrupt
    assert not os.path.exists(f"/proc/{pid}")
