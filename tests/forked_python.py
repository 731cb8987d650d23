"""`python WORDS` in a fork of the tests' process, which saves the seconds of importing torch again."""

import contextlib
import functools
import gc
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from module_process import end_as_program

from funrl.cli.run import main
from funrl.models import decoder_model
from funrl.models.huggingface import directories as hf
from funrl.processes.forks import end_with_parent
from funrl.processes.output import flush_output
from funrl.processes.workers import can_fork
from funrl.tasks import arithmetic

CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({address!r})
socket.send_fds(link, [json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
fork = int(link.recv(16))
signal.signal(signal.SIGTERM, lambda *_: os.kill(fork, signal.SIGTERM))
sys.exit(int(link.recv(16) or 1))
"""


def run_python(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: int = 600
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`.

    Args:
      words: "-m" and a module, or a file, or "-" for a program from the standard input; and its arguments.
      folder: working directory.
      environment: all variables; a fork does not read the ones that libraries read when they are imported.

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
    """Run a program that is not Python's and starts `$PYTHON WORDS`; this process forks each of these.

    Raises:
      AssertionError: it takes longer than `timeout_s`.
    """
    with (
        forking_python() as (python, serve),
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        process = subprocess.Popen(command, env=environment | {"PYTHON": str(python)}, stdout=out, stderr=err)
        try:
            with _limited(timeout_s):
                while process.poll() is None:
                    serve()
        finally:
            process.kill()
            process.wait()
        texts = [file.read() for file in (out, err) if file.seek(0) == 0]
    return subprocess.CompletedProcess([*command], process.returncode, *texts)


@contextlib.contextmanager
def forking_python() -> Iterator[tuple[Path, Callable[[], None]]]:
    """A program `python` whose processes are forks of this one, and a function that starts and ends them.

    The function returns within a moment and has to be called until all are done. Of signals to the program, SIGTERM
    alone reaches the fork.
    """
    links: dict[int, socket.socket] = {}

    def serve() -> None:
        with contextlib.suppress(TimeoutError):
            link = listener.accept()[0]
            message, descriptors, *_ = socket.recv_fds(link, 1 << 20, 3)
            try:
                pid = _started(*json.loads(message), descriptors)
                links[pid] = link
                link.send(str(pid).encode())
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        for pid in [*links]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with links.pop(pid) as link, contextlib.suppress(OSError):  # the client may have been killed
                    link.send(str(os.waitstatus_to_exitcode(status) % 256).encode())

    with (
        tempfile.TemporaryDirectory(prefix="funrl-python-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        python, address = Path(folder, "python"), os.path.join(folder, "socket")
        python.write_text(CLIENT.format(python=sys.executable, address=address))
        python.chmod(0o700)
        listener.bind(address)
        listener.listen()
        listener.settimeout(0.05)
        try:
            yield python, serve
        finally:
            for pid, link in links.items():
                link.close()
                _kill(pid)


def start_python(
    words: Sequence[str],
    environment: Mapping[str, str],
    stdout: int = subprocess.PIPE,
    stderr: int | None = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start `python WORDS` in a session of its own; the process is a fork of this one."""
    command, forks = [sys.executable, *words], can_fork()
    if forks:
        run_once()
        flush_output()

    def become() -> None:  # runs after the fork; there is no exec
        try:
            os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # the parent waits for the end of a pipe
            gc.enable()
            _become(words, ".", environment)
        finally:
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env=environment,
        start_new_session=True,
        restore_signals=not forks,
        preexec_fn=become if forks else None,
    )


@functools.cache
def run_once() -> None:
    """Make a step in this process: no fork has to import anew what a run imports."""
    tiny = ["--device=cpu", "--batch_prompts=4", "--samples_per_prompt=2", "--max_new_tokens=4", "--steps=1"]
    with tempfile.TemporaryDirectory() as folder:
        model = decoder_model(arithmetic.model_config())
        hf.save(f"{folder}/model", model, model.init(torch.Generator().manual_seed(0)), arithmetic.tokenizer())
        Path(folder, "p.jsonl").write_text('{"prompt": "1+1="}\n' * 4)
        own = [f"--model={folder}/model", f"--prompts={folder}/p.jsonl", "--reward=repetition"]
        assert main("grpo", ["grpo", *tiny, *own, f"--run_dir={folder}/run"]) == 0


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
    pid = _started(words, folder, environment, descriptors)
    try:
        status = os.waitpid(pid, 0)[1]
    except BaseException:
        _kill(pid)
        raise
    return os.waitstatus_to_exitcode(status)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _started(
    words: Sequence[str], folder: str | Path, environment: Mapping[str, str], descriptors: Sequence[int]
) -> int:
    """Id of a process `python WORDS`, whose input, output and errors are `descriptors`."""
    if not can_fork():
        actions = [(os.POSIX_SPAWN_DUP2, descriptor, number) for number, descriptor in enumerate(descriptors)]
        program = "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.executable, sys.argv[2:])"
        command = [sys.executable, "-c", program, str(folder), sys.executable, *words]
        return os.posix_spawn(sys.executable, command, environment, file_actions=actions)
    run_once()
    flush_output()
    pid = os.fork()
    if not pid:
        try:
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            _become(words, folder, environment)
        finally:  # nothing of the parent's, such as its cleanup, is left to this process
            os._exit(1)
    return pid


def _become(words: Sequence[str], folder: str | Path, environment: Mapping[str, str]) -> NoReturn:
    """Be the program, and end this process with its status."""
    end_with_parent()
    signal.alarm(0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # that of the environment
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
