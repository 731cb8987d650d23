"""The processes of a run on this machine: started together, ended together, and the first failure explained.

They are forked from this process where a forked child can compute, which takes a second for eight of them; otherwise
they are fresh interpreters, to which cloudpickle takes the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import cloudpickle
import torch

from funrl.loading import load_files, loaded_files
from funrl.processes import heartbeat, stall_monitor, store
from funrl.processes.forks import end_with_parent
from funrl.processes.output import flush_output, lasting_output
from funrl.processes.watch import WaitLimits, Watch

GRACE_S = 4.0  # how long processes may take to end by themselves once one of them has failed
REPORT_S = 4.0  # how long one that has failed may take to end, before it is ended without its report

STOPPING = "interrupted: the run finishes this step, saves and ends; another Ctrl-C ends it at once"
END_AT_ONCE = signal.SIGUSR1  # from the process that started the ranks; a terminal's SIGINT reaches them too

_ranks: set[int] = set()  # ids of the running ranks that this process has started
_asked: int | None = None  # the first signal by which this process was asked to stop
_Place = tuple[int, str, int]  # a rank's number, the folder that all processes share, and the port of the store
_supervised = False  # whether this process is a rank that another process of this program has started


class WorkerError(RuntimeError):
    """A rank failed; the message is its rank and its traceback."""


class RankProgram(NamedTuple):
    """The program of every process.

    Attributes:
      run: (rank, client of the store, folder that all processes share) -> a result; rank 0's counts.
      plain: exceptions whose message is all that a user needs; no traceback is shown of them.
    """

    run: Callable[[int, Any, str], Any]
    plain: tuple[type[Exception], ...]


def run_processes(task: RankProgram, count: int, fork: bool, waiting: WaitLimits) -> Any:
    """Run a task in `count` processes and end all of them when one fails or the user interrupts.

    Args:
      fork: whether the processes are forks of this one; see `can_fork`.

    Raises:
      WorkerError: a process failed, or does not answer.
      ValueError: cloudpickle cannot take the task to fresh interpreters.
    """
    with (
        tempfile.TemporaryDirectory(prefix="funrl-") as folder,
        store.listen() as listener,
        contextlib.ExitStack() as end,
    ):
        pids: dict[int, int] = {}
        if not fork:
            _leave(task, folder)
        flush_output()
        try:
            for rank in range(count):
                place = (rank, folder, listener.getsockname()[1])
                pids[_fork(task, place, listener) if fork else _start(place)] = rank
            watch = end.enter_context(contextlib.closing(Watch(store.keep_store(listener), count, waiting)))
            with _stop_signals(watch.in_steps):
                _ranks.update(pids)
                failed = _wait(pids, watch)
            first_is_done = 0 not in pids.values() and 0 not in failed
        except KeyboardInterrupt:
            _end(pids, END_AT_ONCE)  # rank 0 gets the time to leave its files readable
            raise
        finally:
            _ranks.clear()
            _end(pids, signal.SIGKILL)  # one that waits for another in vain hears no other signal
        result = os.path.join(folder, "result")
        if first_is_done and not os.path.exists(result):
            raise WorkerError("rank 0 ended before the program did, as os._exit does")
        if failed or watch.order is not None:  # one may have reported a failure, and not end
            raise WorkerError((watch.explanation or _explain(watch.reports(), failed)) + watch.notices())
        with open(result, "rb") as file:
            return pickle.load(file)


def ask_to_stop(sign: int = signal.SIGTERM) -> bool:
    """Ask this process and its ranks to stop where their state is recoverable; True if it has started ranks.

    Args:
      sign: the signal that this process has received.
    """
    global _asked
    _asked = sign if _asked is None else _asked
    ranks = tuple(_ranks)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    return bool(ranks)


def stop_asked() -> bool:
    """True if this process was asked to stop."""
    return _asked is not None


def interrupt_asked() -> bool:
    """True if it was an interrupt, as a terminal and a notebook send it, that first asked this process to stop."""
    return _asked == signal.SIGINT


@contextlib.contextmanager
def stops_when_asked() -> Iterator[None]:
    """Have signals ask to stop, for a program that polls `stop_asked` after each step and then ends by itself.

    SIGTERM always asks. SIGINT asks once a step has begun; a second one, or one before the first step, raises
    KeyboardInterrupt. Ranks that this program has started receive neither: the process that started them passes it on.
    """
    with _stop_signals(heartbeat.in_steps, always=True):
        yield


@contextlib.contextmanager
def _stop_signals(in_steps: Callable[[], bool], always: bool = False) -> Iterator[None]:
    """Handle SIGINT and SIGTERM as `stops_when_asked` says, in the main thread.

    Args:
      in_steps: whether the program has begun a step, after which it stops when it is asked to.
      always: handle SIGTERM even where it has a handler already.
    """
    global _asked
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    interrupts = itertools.count()

    def interrupt(*_: object) -> None:
        if next(interrupts) or not in_steps():
            raise KeyboardInterrupt
        ask_to_stop(signal.SIGINT)
        if os.environ.get("RANK", "0") == "0":
            # In a thread: the signal may have come in the middle of a line that is being printed.
            threading.Thread(target=stall_monitor.say, args=(STOPPING,)).start()

    handlers: dict[int, Callable[..., object]] = {}
    if always or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        handlers[signal.SIGTERM] = lambda *_: ask_to_stop()
    if not _supervised and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
        handlers[signal.SIGINT] = interrupt
    _asked = None
    before = {sign: signal.signal(sign, handler) for sign, handler in handlers.items()}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def can_fork() -> bool:
    """True if a forked child of this process can compute. Ends this thread's idle OpenMP threads to make it so.

    The threads of a pool do not survive a fork. A child whose OpenMP believes that it has some waits for them forever
    at its first parallel operation; so the pool is ended here, and the next such operation makes another. The threads
    of an accelerator, of the autograd engine and of torch's other pools cannot be ended: where there are any, the
    answer is no. It is no too where there is a process group, such as vLLM makes: a child would have it, and could make
    no other. Other libraries' threads are their own concern: numpy's, say, come back after a fork.
    """
    if sys.platform != "linux" or torch.cuda.is_initialized() or torch.distributed.is_initialized():
        return False
    with contextlib.suppress(OSError):  # a thread that has ended in between
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/comm") as file:
                if file.read().startswith("pt_"):  # what torch calls its own threads
                    return False
    with open("/proc/self/maps") as file:
        loaded = {line.split()[-1] for line in file if "libgomp" in line}  # others' OpenMP knows of forks
    hard = 2
    try:
        return all(ctypes.CDLL(path).omp_pause_resource_all(hard) == 0 for path in loaded)
    except (AttributeError, OSError):  # older than OpenMP 5, or a file that has been replaced
        return False


def _fork(task: RankProgram, place: _Place, listener: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        listener.close()
        _live(lambda: task, place, pickle.dump)
    finally:  # a signal may come before there is anything to catch it: nothing of the parent's is left to this process
        os._exit(1)


def _leave(task: RankProgram, folder: str) -> None:
    """Write the task where fresh interpreters find it."""
    try:
        content = cloudpickle.dumps(task)
    except Exception as error:
        raise ValueError(
            f"the program cannot be sent to other processes: {error}. Make what it needs inside of it, from names and "
            "numbers"
        ) from error
    with open(os.path.join(folder, "task"), "wb") as file:
        pickle.dump(loaded_files(), file)
        file.write(content)


def _start(place: _Place) -> int:
    """Start a fresh interpreter, which finds modules where this one does."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    arguments = [sys.executable, "-P", "-m", "funrl.processes.workers", *map(str, place)]
    return os.posix_spawn(sys.executable, arguments, os.environ | {"PYTHONPATH": paths})


def main(rank: str, folder: str, port: str) -> None:
    """The life of a fresh interpreter."""

    def task() -> RankProgram:
        with open(os.path.join(folder, "task"), "rb") as file:
            load_files(pickle.load(file))
            return pickle.load(file)

    _live(task, (int(rank), folder, int(port)), cloudpickle.dump)


def _live(task: Callable[[], RankProgram], place: _Place, dump: Callable[[Any, Any], None]) -> None:
    """The life of one rank: run, leave the result or report the failure, end without Python's own shutdown."""
    global _supervised
    rank, folder, port = place
    end_with_parent()
    _ranks.clear()
    _supervised = True
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    signal.signal(signal.SIGINT, lambda *_: None)  # the process that started this rank decides what it means
    signal.signal(END_AT_ONCE, _interrupted if rank == 0 else lambda *_: os._exit(130))
    status = 1
    client = None
    plain = ()

    try:
        client = store.connect(port)
        run, plain = task()
        with lasting_output():
            result = run(rank, client, folder)
        if rank == 0:
            with open(os.path.join(folder, "result"), "wb") as file:
                dump(result, file)
        status = 0
    except KeyboardInterrupt:
        status = 130
    except BaseException as error:  # asyncio's CancelledError and SystemExit are failures too
        store.report_failure(client, rank, error, plain)
    finally:
        with contextlib.suppress(Exception):  # a reader of the output that has gone, or an output that was closed
            flush_output()
        os._exit(status)  # and never on into the parent's own cleanup, which a forked rank has a copy of


def _wait(pids: dict[int, int], watch: Watch) -> dict[int, int]:
    """Wait until all ranks end well, or one does not; return the wait statuses of failed ranks, by rank.

    The remaining ranks may save the state, if they hold it.
    """
    failed: dict[int, int] = {}
    deadline = float("inf")
    while pids and time.monotonic() < deadline:
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = pids.pop(pid)
                watch.note_end(rank, failed=status != 0)
                if status:
                    failed[rank] = status
        watch.poll()
        if watch.order is not None and not watch.saving():
            # A rank that has reported a failure unwinds now.
            now = time.monotonic()
            deadline = min(deadline, now if failed or watch.stalled else now + REPORT_S)
        time.sleep(0.02)
    return failed


def _end(pids: dict[int, int], sign: signal.Signals) -> None:
    """Ask the remaining ranks to end, and kill after a few seconds any that have not.

    One that the kernel cannot end, as it waits for a disk, is abandoned.
    """
    for signal_now in (sign, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_now)
        deadline = time.monotonic() + GRACE_S
        while pids and time.monotonic() < deadline:
            for pid in list(pids):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del pids[pid]
            time.sleep(0.02)


def _explain(reports: Mapping[int, str], failed: Mapping[int, int]) -> str:
    """The report of the rank that failed first: one that was killed, else the first that has reported.

    A rank that waits for another in vain aborts itself in the end, which explains nothing if there is a traceback. One
    that aborts by itself leaves the others waiting, with tracebacks of their own: aborted ranks are named behind it.
    """
    killed = {rank: os.WTERMSIG(status) for rank, status in failed.items() if os.WIFSIGNALED(status)}
    for rank, number in killed.items():
        if number != signal.SIGABRT:
            name = signal.Signals(number).name
            return f"rank {rank} was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    for rank, status in failed.items():
        code = os.waitstatus_to_exitcode(status)
        if code - 128 in (signal.SIGTERM, signal.SIGINT):  # which have not come from here yet
            return f"rank {rank} was ended by {signal.Signals(code - 128).name}"
        if code > 0 and rank not in reports:
            return f"rank {rank} ended with status {code} and left no traceback"
    aborted = [f"rank {rank} aborted and left no traceback" for rank in sorted(killed.keys() - reports.keys())]
    if reports:
        return "\n".join([next(iter(reports.values())).rstrip("\n"), *aborted])
    return aborted[0] if aborted else "rank 0 aborted and left no traceback"


def _interrupted(*_: object) -> None:
    """Ignore further signals while rank 0 closes its files."""
    signal.signal(END_AT_ONCE, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main(*sys.argv[1:])
