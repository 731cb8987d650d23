"""Programs in the sandbox: what they may do, and hostile ones, which change nothing for the next."""

import ctypes
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from funrl.rewards import confine, sandbox
from funrl.rewards.sandbox import Limits, SandboxError, run_program

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in confine.MACHINES, reason="programs are confined on Linux"
)
TIGHT = Limits(wall_s=30, cpu_s=1, memory_bytes=1 << 28, file_bytes=1 << 20, files=50, output_bytes=1 << 16, threads=20)
IGNORES = """
import signal
for sign in range(1, 65):
    try:
        signal.signal(sign, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
"""
FORKS = """
import os
for _ in {}:
    try:
        if os.fork() == 0:
            os._exit(0)
        print("there are two of us")
    except OSError:
        pass
"""
UNLINKED = """
import mmap, os
files = []
while True:
  if len(files) < 40:
    file = open('f', 'w+b'); file.write(bytes(900_000)); file.flush(); os.remove('f')
    {}
"""
WAITS = """
from funrl.rewards.sandbox import run_program
ended = run_program('''
import os, time
open("ready", "w").close()
while os.path.exists("ready"):
    time.sleep(0.01)
print("done")
''')
print(repr(ended.problem), ended.stdout)
"""
HOSTILE = {  # program: how it ends
    "fork a hundred times": (FORKS.format("range(100)"), ""),
    "fork bomb": (FORKS.format("iter(int, 1)"), "cpu time|wall time"),
    "endless output": ("while True: print('x' * 1000)", "output"),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "exit status 1"),
    "one large file": ("with open('f', 'wb') as file:\n  while True: file.write(bytes(100_000))", "exit status 1"),
    "many files": (
        "files = []\nwhile True: files.append(open(f'f{len(files)}', 'w')); files[-1].write('x' * 10_000)",
        "exit status 1|files",  # what comes first: no more open files for it, or a look at its directory
    ),
    "no end of files": ("i = 0\nwhile True:\n  open(f'f{i}', 'w').write('x'); i += 1", "files"),
    "signals": (IGNORES + "while True: pass", "signal SIGKILL|wall time"),
    "recursion": ("import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)", ".+"),
    "endless recursion": ("def f(): return f()\nf()", "exit status 1"),
    "threads": (
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(9,)).start()",
        "threads",
    ),
    "killer": ("import os\nos.kill(-1, 9)", "exit status 1"),
    "closed output": ("import os\nos.closerange(1, 64)\nwhile True: pass", "cpu time|wall time"),
    "shell": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'echo a; ls; echo b'])", "exit status 1"),
    "files without names": (UNLINKED.format("files.append(file)"), "files"),
    "mapped files without names": (
        UNLINKED.format("file.truncate(1 << 20); files.append(mmap.mmap(file.fileno(), 1 << 20)); file.close()"),
        "files",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_ended_and_the_run_goes_on(name):
    program, ending = HOSTILE[name]
    ended = run_program(program, limits=TIGHT)
    assert re.fullmatch(ending, ended.problem), ended
    assert "two of us" not in ended.stdout and len(ended.stdout) <= TIGHT.output_bytes + 1
    assert not list(Path(tempfile.gettempdir()).glob(f"funrl-program-{os.getpid()}-*"))


@pytest.mark.parametrize(
    "program,error",
    [
        ("import socket; socket.create_connection(('127.0.0.1', PORT), 2)", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "BlockingIOError"),
        ("import os; os.kill(PARENT, 0)", "PermissionError"),
        ("import resource; resource.prlimit(PARENT, resource.RLIMIT_NOFILE, (9, 9))", "PermissionError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))", "ValueError|PermissionError"),
        ("open(KEPT, 'w')", "PermissionError|FileNotFoundError"),
        ("open(KEPT)", "PermissionError|FileNotFoundError"),
        ("import os; os.listdir(os.path.dirname(KEPT))", "PermissionError|FileNotFoundError"),
        ("import os; os.listdir(os.path.expanduser('~root'))", "PermissionError|FileNotFoundError"),
        ("open('/proc/PARENT/cmdline')", "PermissionError|FileNotFoundError"),
        ("import os; os.remove(KEPT)", "PermissionError|FileNotFoundError"),
        ("import os; os.chmod(KEPT, 0)", "PermissionError"),
        ("import os; os.rename(KEPT, 'mine')", "PermissionError|OSError|FileNotFoundError"),
        ("open('/proc/self/oom_score_adj', 'w').write('9')", "PermissionError|OSError"),
        ("import os; os.mkdir('folder')", "PermissionError"),
        ("import os; os.memfd_create('x')", "PermissionError"),
        ("import os; os.execv('/usr/bin/id', ['id'])", "PermissionError"),
        ("import os; os.symlink('a', 'b')", "PermissionError"),
        ("import ctypes; assert ctypes.CDLL(None).mount(b'a', b'.', b'tmpfs', 0, None) == 0", "AssertionError"),
        ("import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0", "AssertionError"),
        ("import time; time.clock_settime(time.CLOCK_REALTIME, 0)", "PermissionError"),
        ("import ctypes; assert ctypes.CDLL(None).prctl(1, 9) == 0", "AssertionError"),
        ("import ctypes; assert ctypes.CDLL(None).prctl(4, 0) == 0", "AssertionError"),
    ],
)
def test_what_the_kernel_refuses_a_program(program, error, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, value in {"PORT": server.getsockname()[1], "PARENT": os.getpid(), "KEPT": repr(str(kept))}.items():
            program = program.replace(name, str(value))
        ended = run_program(program, limits=TIGHT)
    assert ended.problem == "exit status 1" and re.search(rf"^({error})\b", ended.stderr, re.MULTILINE), ended
    assert kept.read_text() == "kept" and kept.stat().st_mode & 0o400


def test_what_a_program_may_do():
    program = """
import decimal, json, math, os, random, ssl, sys, tempfile, threading, zoneinfo, __main__
with tempfile.TemporaryFile() as file:
    file.write(b"x")
threading.Thread(target=print, args=(input() * 2,)).start()
open("own", "w").write("text")
open(os.devnull, "w").write("text")
print(open("own").read(), os.listdir("."), os.getcwd() == os.environ["HOME"], len(os.environ) < 12, __name__)
os.remove("own")
sys.exit(0)
"""
    ended = run_program(program, stdin="ab\n", limits=TIGHT)
    assert ended.problem == "" and ended.stderr == ""
    assert sorted(ended.stdout.splitlines()) == ["abab", "text ['own'] True True __main__"]


def test_libraries_that_are_installed_can_be_used():
    program = "import numpy; print(int(numpy.arange(4).sum()))"
    assert run_program(program).stdout == "6\n"


def test_signals_to_every_process_of_a_run_do_not_end_a_program(tmp_path):
    """A scheduler's SIGTERM reaches each process; a program that is being scored runs to its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    program = None
    while program is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        program = next((int(pid) for pid in children if list(tmp_path.glob("funrl-program-*/ready"))), None)
        assert process.poll() is None
    os.kill(program, signal.SIGTERM)
    next(tmp_path.glob("funrl-program-*/ready")).unlink()
    assert process.communicate(timeout=120)[0] == "'' done\n\n"


def test_a_machine_without_landlock_says_what_is_needed(monkeypatch):
    sandbox.check_platform.cache_clear()
    monkeypatch.setattr(confine, "landlock_version", lambda: 0)
    try:
        with pytest.raises(SandboxError, match=r"has no Landlock"):
            run_program("print(1)")
    finally:
        monkeypatch.undo()
        sandbox.check_platform.cache_clear()


@pytest.mark.parametrize(
    "program,passed",
    [
        ("def f(x): return x + 1", {0, 2}),
        ("def f(x): return 1 / 0", set()),
        ("f = len; import os; os._exit(0)", set()),
        ("f = len; raise SystemExit(0)", set()),
        ("def f(x:", set()),
    ],
)
def test_tests_see_the_program_and_fail_one_by_one(program, passed):
    ended = run_program(program, ["assert f(1) == 2", "assert f(1) == 3", "import sys; assert f(0) == 1"], limits=TIGHT)
    assert ended.passed == passed


def test_a_machine_that_cannot_confine_says_so(monkeypatch):
    with pytest.raises(SandboxError, match="a program cannot be confined here: ValueError: not allowed to raise"):
        run_program("print(1)", limits=TIGHT._replace(open_files=-5))
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    sandbox.check_platform.cache_clear()
    try:
        with pytest.raises(SandboxError, match="on Linux on x86_64 or aarch64 only, and this is linux on riscv64"):
            run_program("print(1)")
    finally:
        monkeypatch.undo()
        sandbox.check_platform.cache_clear()


def test_directories_of_processes_that_were_killed_are_removed(tmp_path):
    orphan, other = tmp_path / "funrl-program-999999999-x", tmp_path / f"funrl-program-{os.getpid()}-x"
    orphan.mkdir(), other.mkdir()
    (orphan / "file").write_text("x")
    sandbox._remove_orphans(str(tmp_path))
    assert not orphan.exists() and other.exists()


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", confine.MACHINES)
def test_numbers_of_system_calls_are_those_of_the_kernels_headers(machine):
    if not os.path.exists(HEADERS[machine]):
        pytest.skip(f"{HEADERS[machine]} is not there")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(HEADERS[machine]).read_text()))
    column, _ = confine.MACHINES[machine]
    calls = {**confine.REFUSED, **confine.BEGINS_A_PROCESS, **confine.NEEDS_OTHER_CALLS, **confine.LINKS}
    single = ("CLONE", "KILL", "TGKILL", "PRCTL", "FCNTL")
    calls |= {name.lower(): getattr(confine, name) for name in single} | {"prlimit64": confine.PRLIMIT}
    for name, pair in calls.items():
        if name in defined:
            assert pair[column] == int(defined[name]), name
        else:
            assert pair[column] is None or pair[column] > 450, name  # newer than the headers


def test_the_filter_fits_the_machine_that_runs_it():
    for machine in confine.MACHINES:
        lines = confine.filter_lines(machine, 7)
        assert len(lines) < 4096 and lines[-1] == (6, 0, 0, 0x7FFF0000)
        assert all(place + 1 + max(line[1:3]) < len(lines) for place, line in enumerate(lines) if line[0] & 7 == 5)
    assert ctypes.sizeof(ctypes.c_void_p) == 8
