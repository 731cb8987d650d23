"""A Python module that runs as a program, in a fork of the tests' process or else in a new interpreter.

A fork has every module that this process has imported, which saves the seconds of importing torch again.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

import torch

from funrl.processes.forks import end_with_parent
from funrl.processes.output import flush_output
from funrl.processes.workers import can_fork


@contextlib.contextmanager
def module_process(
    module: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[TextIO]:
    """Run `python -m module` with one thread of torch, and give what it prints, its errors too, while it runs.

    The process is killed if the `with` block raises.

    Args:
      module: name of the module.
      arguments: words of its command line.
      folder: working directory.
      environment: all variables of the process; a fork does not reread what libraries read at import.

    Raises:
      subprocess.CalledProcessError: it ends with another status than 0; raised at the end of the block.
    """
    environment = {**environment, "OMP_NUM_THREADS": "1"}
    reader, writer = os.pipe()
    with open(reader, errors="replace") as output:
        try:
            pid, ended = _start(module, arguments, folder, environment, writer=writer)
        finally:
            os.close(writer)
        try:
            yield output
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            ended()
            raise
    status = ended()
    if status:
        raise subprocess.CalledProcessError(status, [module, *arguments])


def _start(
    module: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], *, writer: int
) -> tuple[int, Callable[[], int]]:
    """Start the process, which writes to the descriptor `writer`; its id, and what waits for its status."""
    if not can_fork():
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=writer, stderr=writer)
        return process.pid, process.wait
    flush_output()
    pid = os.fork()
    if pid:
        return pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        end_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.chdir(folder)
        sys.path.insert(0, os.fspath(folder))
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)
        _run(module, arguments)
    finally:  # nothing of the parent's, such as its cleanup, is left to this process
        os._exit(1)


def _run(module: str, arguments: Sequence[str]) -> NoReturn:
    """Run the module as a program, and end this process with its status."""
    sys.argv = [module, *arguments]
    end_as_program(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def end_as_program(program: Callable[[], object]) -> NoReturn:
    """Run a program of Python, and end this process as an interpreter would after it, with its status."""
    status = 0
    try:
        program()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(Exception):
        flush_output()
    os._exit(status)
