"""Programs that a policy has written, run in a process that cannot harm the machine.

    ended = run_program("print(input() * 2)", stdin="ab")     # Ended(problem="", stdout="abab\\n", ...)

A program is one process of Python: it may have threads, but start no other process; it has no network, can signal no
process but itself, writes files in a directory of its own, which is removed, and is ended when it exceeds a limit. The
kernel sees to that; `confine` says how. It needs Linux 3.17 on x86_64 or aarch64; with Landlock (Linux 5.13), programs
may write files.

A program can read the files that the user can read. It is confined, not hidden from.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from funrl.rewards import confine

_LOOK_EVERY_S = 0.05
_FOLDER = "funrl-program-{}-"  # with the number of the process that has made it
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}  # fmt: skip


class SandboxError(RuntimeError):
    """A program cannot be confined here; the message says why. It has not been run."""


class Limits(NamedTuple):
    """Limits of one run of a program.

    Attributes:
      wall_s: seconds from start to end.
      cpu_s: seconds of a core, in whole ones.
      memory_bytes: address space of the process, Python's own 30 MB included.
      file_bytes: of one file, and of all files together.
      files: in its directory.
      output_bytes: of what it prints, and of its errors.
      threads: at once.
      open_files: at once.
    """

    wall_s: float = 12.0
    cpu_s: float = 6.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 24
    files: int = 256
    output_bytes: int = 1 << 20
    threads: int = 64
    open_files: int = 64


LIMITS = Limits()


class Ended(NamedTuple):
    """End of a program.

    Attributes:
      problem: what ended it: "" for its own end with status 0, else such as "wall time" or "signal SIGSEGV".
      stdout, stderr: what it printed, up to the limit.
      passed: numbers of the tests that passed.
    """

    problem: str
    stdout: str
    stderr: str
    passed: frozenset[int] = frozenset()


def run_program(
    program: str, tests: Sequence[str] = (), stdin: str = "", limits: Limits = LIMITS, landlock: bool = True
) -> Ended:
    """Run a Python program to its end or a limit.

    Args:
      program: source text. Without tests it is run as a script, `__name__` being "__main__".
      tests: source texts that are run after it, in turn, each with the program's names; one passes that does not raise.
      stdin: what the program can read.
      limits: beyond which it is ended.
      landlock: whether it may write files, where the kernel can confine that to its directory.

    Raises:
      SandboxError: the program cannot be confined on this machine.

    Warning: tests run in the program's own process. One that is written to fool them, by an object that equals
      everything say, can; what a program prints is compared outside.
    """
    check_platform()
    token = secrets.token_hex(8)
    task = {
        "program": program, "tests": list(tests), "token": token, "limits": limits._asdict(), "parent": os.getpid(),
        "landlock": landlock,
    }  # fmt: skip
    with _own_folder() as folder, _text_file(json.dumps(task)) as task_file, _text_file(stdin) as stdin_file:
        result, its_result = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", confine.__file__, str(task_file.fileno()), str(its_result)],
                stdin=stdin_file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, start_new_session=True,
                pass_fds=(task_file.fileno(), its_result), env=_ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
            )  # fmt: skip
        finally:
            os.close(its_result)
        with process, open(result, "rb", buffering=0) as told:
            try:
                problem, outputs = _watch(process, told, folder, limits)
            finally:
                _kill(process)
    stdout, stderr, lines = (bytes(part).decode(errors="replace") for part in outputs)
    if not lines.startswith("confined\n"):
        raise SandboxError(f"a program cannot be confined here: {(stderr.strip().splitlines() or [problem])[-1]}")
    passed = frozenset(int(number) for number in re.findall(rf"^{token} (\d+)$", lines, re.MULTILINE))
    return Ended(problem or _status(process.returncode), stdout, stderr, passed)


@functools.cache
def check_platform() -> None:
    """Raise SandboxError where this machine is not one on which programs can be confined."""
    if sys.platform != "linux" or platform.machine() not in confine.MACHINES:
        raise SandboxError(
            f"programs are confined on Linux on {' or '.join(confine.MACHINES)} only, and this is {sys.platform} on "
            f"{platform.machine()}"
        )


def _watch(
    process: subprocess.Popen[bytes], told: IO[bytes], folder: str, limits: Limits
) -> tuple[str, tuple[bytearray, bytearray, bytearray]]:
    """Take what a program prints until it ends or exceeds a limit.

    Returns: the limit, "" for none; output, errors and results.
    """
    assert process.stdout is not None and process.stderr is not None
    outputs, problem = (bytearray(), bytearray(), bytearray()), ""
    deadline = time.monotonic() + limits.wall_s
    with selectors.DefaultSelector() as open_pipes:
        for pipe, into in zip((process.stdout, process.stderr, told), outputs, strict=True):
            open_pipes.register(pipe, selectors.EVENT_READ, into)
        looked = time.monotonic()
        while not problem and (open_pipes.get_map() or process.poll() is None):
            if not open_pipes.get_map():  # it has closed them and goes on
                time.sleep(_LOOK_EVERY_S)
            for key, _ in open_pipes.select(min(_LOOK_EVERY_S, max(deadline - time.monotonic(), 0))):
                if not (data := os.read(key.fd, 1 << 16)):
                    open_pipes.unregister(key.fileobj)
                key.data.extend(data[: limits.output_bytes + 1 - len(key.data)])
                if len(key.data) > limits.output_bytes:
                    problem = "output"
            if time.monotonic() > deadline:
                problem = "wall time"
            elif time.monotonic() - looked > _LOOK_EVERY_S:
                problem, looked = problem or _exceeded(process.pid, folder, limits), time.monotonic()
    return problem, outputs


def _exceeded(pid: int, folder: str, limits: Limits) -> str:
    """A limit that no system call keeps and the program has exceeded."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        threads = re.search(r"^Threads:\s*(\d+)", file.read(), re.MULTILINE)
        if threads is not None and int(threads[1]) > limits.threads:
            return "threads"
    count = nbytes = 0
    with os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                count, nbytes = count + 1, nbytes + file.stat(follow_symlinks=False).st_blocks * 512
            if count > limits.files or nbytes > limits.file_bytes:
                return "files"
    return ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a program that cannot have started others; its group is ended all the same."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _status(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return "cpu time" if name == "SIGXCPU" else "file size" if name == "SIGXFSZ" else f"signal {name}"
        return f"signal {-code}"
    return f"exit status {code}" if code else ""


@contextlib.contextmanager
def _own_folder() -> Iterator[str]:
    """A new directory, removed at the end."""
    _remove_orphans(tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix=_FOLDER.format(os.getpid()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _remove_orphans(where: str) -> None:
    """Remove the directories that processes have left that were killed, once in a process."""
    for path in Path(where).glob(_FOLDER.format("*") + "*"):
        pid = path.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _text_file(text: str) -> Iterator[IO[bytes]]:
    """A file without a name that can be read from its begin."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="surrogatepass"))
        file.seek(0)
        yield file
