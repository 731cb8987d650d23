"""Run programs that a policy has written in a process that cannot harm the machine.

    ended = run_program("print(input() * 2)", stdin="ab")     # Ended(problem="", stdout="abab\\n", ...)

A program is a single Python process. It may have threads, but cannot start processes; it has no network and cannot
signal other processes; it can write in a temporary directory of its own only, and read that directory, Python and the
system's libraries; and it is killed when it exceeds a limit. The kernel enforces this; see `confine`. It needs Linux on
x86_64 or aarch64, with Landlock (Linux 5.13).
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
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from funrl.rewards import confine

_SYSTEM = (  # readable, where they exist
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/sbin",
    "/nix/store",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
    "/etc/ssl",
    "/etc/mime.types",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/devices/system/cpu",
)
_POLL_EVERY_S = 0.05
_FOLDER = "funrl-program-{}-"  # with the number of the process that has made it
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


class SandboxError(RuntimeError):
    """A program cannot be confined here; the message says why. It has not been run."""


class Limits(NamedTuple):
    """Limits of one run of a program.

    Attributes:
      wall_s: seconds from start to end.
      cpu_s: CPU-seconds, rounded to an integer.
      memory_bytes: address space of the process, including Python's own 30 MB.
      file_bytes: size of a file, and of all files together, including deleted ones that are open.
      files: number of files in its directory.
      output_bytes: of stdout, and of stderr.
      threads: concurrent threads.
      open_files: concurrently open files.
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


class SandboxResult(NamedTuple):
    """Result of running a program.

    Attributes:
      problem: what ended it, such as "wall time" or "signal SIGSEGV"; "" if it exited with status 0.
      stdout, stderr: what it printed, up to the limit.
      passed: numbers of the tests that passed.
    """

    problem: str
    stdout: str
    stderr: str
    passed: frozenset[int] = frozenset()


def run_program(program: str, tests: Sequence[str] = (), stdin: str = "", limits: Limits = LIMITS) -> SandboxResult:
    """Run a Python program to its end or a limit.

    Args:
      program: source text. Without tests it runs as a script, with `__name__` "__main__".
      tests: source texts that run after it in turn, each with the program's names; a test passes if it does not raise.
      stdin: input of the program.
      limits: the program is killed when it exceeds them.

    Raises:
      SandboxError: the program cannot be confined on this machine.

    Warning: tests run in the program's own process, so a program can deceive them, for example with an object that
      equals everything. Printed output is compared outside.
    """
    check_platform()
    token = secrets.token_hex(8)
    task = {
        "program": program,
        "tests": list(tests),
        "token": token,
        "limits": limits._asdict(),
        "parent": os.getpid(),
        "readable": readable_paths(),
    }
    with _own_folder() as folder, _text_file(json.dumps(task)) as task_file, _text_file(stdin) as stdin_file:
        result, its_result = os.pipe()
        try:
            command = [sys.executable, "-I", confine.__file__, str(task_file.fileno()), str(its_result)]
            process = subprocess.Popen(
                command,
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                start_new_session=True,
                pass_fds=(task_file.fileno(), its_result),
                env=_ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
            )
        finally:
            os.close(its_result)
        with process, open(result, "rb", buffering=0) as results:
            try:
                given = frozenset(_identity(os.fstat(file.fileno())) for file in (task_file, stdin_file))
                problem, outputs = _watch(process, results, ProgramLimits(folder, limits, given))
            finally:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)  # although it cannot have started others
                process.wait()
    stdout, stderr, lines = (bytes(part).decode(errors="replace") for part in outputs)
    if not lines.startswith("confined\n"):
        raise SandboxError(f"a program cannot be confined here: {(stderr.strip().splitlines() or [problem])[-1]}")
    passed = frozenset(int(number) for number in re.findall(rf"^{token} (\d+)$", lines, re.MULTILINE))
    return SandboxResult(problem or _status(process.returncode), stdout, stderr, passed=passed)


@functools.cache
def check_platform() -> str:
    """The means of restricting a program's files on this machine.

    Raises:
      SandboxError: programs cannot be confined here.
    """
    if sys.platform != "linux" or platform.machine() not in confine.MACHINES:
        raise SandboxError(
            f"programs are confined on Linux on {' or '.join(confine.MACHINES)} only, and this is {sys.platform} on "
            f"{platform.machine()}"
        )
    if confine.landlock_version() < 1:
        raise SandboxError(
            "the kernel has no Landlock, which programs of a policy need: Linux 5.13 or later, with landlock among lsm="
        )
    return "landlock"


@functools.cache
def readable_paths() -> list[str]:
    """Files and folders that a program may read besides its own: Python and the system's libraries."""
    python = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, confine.__file__}
    paths = {os.path.realpath(path) for path in python} | python
    return sorted(path for path in {*paths, *_SYSTEM} if os.path.exists(path))


class ProgramLimits(NamedTuple):
    """Limits of a program, and the files that they ignore.

    Attributes:
      folder: where it writes.
      limits: its limits.
      given: nameless files that it received, by device and inode.
    """

    folder: str
    limits: Limits
    given: frozenset[tuple[int, int]]


def _watch(
    process: subprocess.Popen[bytes], results: IO[bytes], watched: ProgramLimits
) -> tuple[str, tuple[bytearray, bytearray, bytearray]]:
    """Collect a program's output until it ends or exceeds a limit.

    Returns: the exceeded limit or ""; stdout, stderr and results.
    """
    assert process.stdout is not None and process.stderr is not None
    limits = watched.limits
    outputs = (bytearray(), bytearray(), bytearray())
    problem = ""
    deadline = time.monotonic() + limits.wall_s
    with selectors.DefaultSelector() as open_pipes:
        for pipe, into in zip((process.stdout, process.stderr, results), outputs, strict=True):
            open_pipes.register(pipe, selectors.EVENT_READ, into)
        last_check = time.monotonic()
        while not problem and (open_pipes.get_map() or process.poll() is None):
            if not open_pipes.get_map():  # it has closed them and still runs
                time.sleep(_POLL_EVERY_S)
            for key, _ in open_pipes.select(min(_POLL_EVERY_S, max(deadline - time.monotonic(), 0))):
                if not (data := os.read(key.fd, 1 << 16)):
                    open_pipes.unregister(key.fileobj)
                key.data.extend(data[: limits.output_bytes + 1 - len(key.data)])
                if len(key.data) > limits.output_bytes:
                    problem = "output"
            if time.monotonic() > deadline:
                problem = "wall time"
            elif time.monotonic() - last_check > _POLL_EVERY_S:
                problem = problem or _exceeded(process.pid, watched)
                last_check = time.monotonic()
    return problem, outputs


def _exceeded(pid: int, watched: ProgramLimits) -> str:
    """Name of an exceeded limit that the kernel does not enforce; "" without one."""
    limits = watched.limits
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        threads = re.search(r"^Threads:\s*(\d+)", file.read(), re.MULTILINE)
        if threads is not None and int(threads[1]) > limits.threads:
            return "threads"
    sizes: dict[tuple[int, int], int] = {}
    with os.scandir(watched.folder) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                status = file.stat(follow_symlinks=False)
                sizes[_identity(status)] = status.st_blocks * 512
    sizes |= _nameless_files(pid, watched)
    return "files" if len(sizes) > limits.files or sum(sizes.values()) > limits.file_bytes else ""


def _nameless_files(pid: int, watched: ProgramLimits) -> dict[tuple[int, int], int]:
    """Bytes of the nameless files that a process has open or mapped, by device and inode."""
    sizes: dict[tuple[int, int], int] = {}
    for descriptor in Path(f"/proc/{pid}/task").glob("*/fd/*"):  # a thread may have descriptors of its own
        with contextlib.suppress(OSError):
            status = descriptor.stat()
            if stat.S_ISREG(status.st_mode) and not status.st_nlink and _identity(status) not in watched.given:
                sizes[_identity(status)] = status.st_blocks * 512
    own = re.escape(os.path.basename(watched.folder))
    mapped = re.compile(rf"^(\w+)-(\w+) \S+ (\w+) (\w+):(\w+) (\d+) .*/{own}/.* \(deleted\)$", re.MULTILINE)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        for *words, number in mapped.findall(maps.read()):
            begin, end, offset, major, minor = (int(word, 16) for word in words)
            file = os.makedev(major, minor), int(number)
            sizes[file] = max(sizes.get(file, 0), offset + end - begin)
    return sizes


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Device and inode of a file."""
    return status.st_dev, status.st_ino


def _status(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return "cpu time" if name == "SIGXCPU" else "file size" if name == "SIGXFSZ" else f"signal {name}"
        return f"signal {-code}"
    return f"exit status {code}" if code else ""


@contextlib.contextmanager
def _own_folder() -> Iterator[str]:
    """Create a temporary directory, removed at the end."""
    _remove_orphans(tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix=_FOLDER.format(os.getpid()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _remove_orphans(where: str) -> None:
    """Remove the directories that killed processes have left; runs once per process."""
    for path in Path(where).glob(_FOLDER.format("*") + "*"):
        pid = path.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _text_file(text: str) -> Iterator[IO[bytes]]:
    """Create a nameless file with a text, positioned at its start."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="surrogatepass"))
        file.seek(0)
        yield file
