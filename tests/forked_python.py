"""`python WORDS` in a fork of the tests' process, which saves the seconds of importing torch again."""

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from funrl.processes.module_process import end_as_program
from funrl.processes.output import flush_output
from funrl.processes.parent import end_with_parent
from funrl.processes.workers import can_fork, import_before_fork

CLIENT = """#!{python} -SE
import json, os, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({address!r})
socket.send_fds(link, [json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
sys.exit(int(link.recv(16) or 1))
"""


def run_python(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: int = 600
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`.

    Args:
      words: "-m" and a module, or a file, or "-" for a program from the standard input; and its arguments.
      folder: working directory.
      environment: all variables; a fork does not read those that libraries read when they are imported.

    Raises:
      AssertionError: it takes longer than `timeout_s`.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, open(os.devnull) as nothing:
        with _limited(timeout_s):
            status = _status(words, folder, environment, (nothing.fileno(), out.fileno(), err.fileno()))
        texts = [file.read() for file in (out, err) if file.seek(0) == 0]
    return subprocess.CompletedProcess([*words], status, *texts)


def run_with_python(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: int = 600
) -> subprocess.CompletedProcess[str]:
    """Run a program that is not Python's and starts `$PYTHON WORDS`, one after the other, which this process forks.

    Raises:
      AssertionError: it takes longer than `timeout_s`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="funrl-python-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        python, address = Path(folder, "python"), os.path.join(folder, "socket")
        python.write_text(CLIENT.format(python=sys.executable, address=address))
        python.chmod(0o700)
        listener.bind(address)
        listener.listen()
        listener.settimeout(0.1)
        process = subprocess.Popen(command, env=environment | {"PYTHON": str(python)}, stdout=out, stderr=err)
        try:
            with _limited(timeout_s):
                while process.poll() is None:
                    with contextlib.suppress(TimeoutError):
                        _answer(listener.accept()[0])
        finally:
            process.kill()
            process.wait()
        texts = [file.read() for file in (out, err) if file.seek(0) == 0]
    return subprocess.CompletedProcess([*command], process.returncode, *texts)


def _answer(link: socket.socket) -> None:
    """Run what a client asks for, and tell it the status."""
    with link:
        message, descriptors, *_ = socket.recv_fds(link, 1 << 20, 3)
        try:
            status = _status(*json.loads(message), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        link.send(str(status).encode())


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def expire(*_):
        raise AssertionError(f"it takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _status(
    words: Sequence[str], folder: str | Path, environment: Mapping[str, str], descriptors: Sequence[int]
) -> int:
    """Exit status of `python WORDS`, whose input, output and errors are `descriptors`."""
    if not can_fork():
        inputs = dict(zip(("stdin", "stdout", "stderr"), descriptors, strict=True))
        return subprocess.run([sys.executable, *words], cwd=folder, env=environment, **inputs, check=False).returncode
    import_before_fork()
    flush_output()
    pid = os.fork()
    if not pid:
        try:
            end_with_parent()
            signal.alarm(0)
            _become(words, folder, environment, descriptors)
        finally:  # nothing of the parent's, such as its cleanup, is left to this process
            os._exit(1)
    try:
        status = os.waitpid(pid, 0)[1]
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(status)


def _become(
    words: Sequence[str], folder: str | Path, environment: Mapping[str, str], descriptors: Sequence[int]
) -> NoReturn:
    """Be the program, and end this process with its status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    end_as_program(lambda: _run(words))


def _run(words: Sequence[str]) -> None:
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = [*words[1:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = [*words]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(words[0])
        if words[0] == "-":
            file = Path(folder, "stdin.py")
            file.write_text(sys.stdin.read())
        sys.path.insert(0, os.getcwd() if words[0] == "-" else str(file.parent))
        runpy.run_path(str(file), run_name="__main__")
