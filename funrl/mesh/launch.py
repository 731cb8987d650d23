"""Runs one program on every device of a mesh.

Under torchrun (RANK and WORLD_SIZE in the environment) this process is one of the ranks. Otherwise the ranks are
started here: forked on CPU, because a fork after `import torch` is ready in a second where eight fresh interpreters
take half a minute; spawned on CUDA and ROCm, one process per GPU. A mesh of one device starts nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import Mesh, MeshError
from funrl.mesh.plan import RANKS_PER_NODE

GRACE_S = 4.0  # how long ranks may take to end by themselves once one of them has failed


class WorkerError(RuntimeError):
    """A rank failed; the message is its rank and its traceback."""


def device_type() -> str:
    """ "cuda" where torch sees a GPU (ROCm included), else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_devices(sizes: Mapping[str, int], device: str) -> None:
    """Raises MeshError where the mesh does not fit the machine or the ranks that torchrun has started."""
    world, shape = Mesh(dict(sizes)).world, meshes.text(dict(sizes))
    if "WORLD_SIZE" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != world:
            raise MeshError(f"the mesh {shape} has {world} devices, torchrun started {os.environ['WORLD_SIZE']} ranks")
    elif device == "cuda" and world > torch.cuda.device_count():
        raise MeshError(f"the mesh {shape} needs {world} GPUs, this machine has {torch.cuda.device_count()}")


def ranks_per_node() -> int:
    """How many ranks torchrun has started on this machine; without torchrun a usual number, for all are on it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", RANKS_PER_NODE))


def launch(
    program: Callable[[Mesh], Any],
    sizes: Mapping[str, int],
    device: str | None = None,
    plain: tuple[type[Exception], ...] = (),
    patience: timedelta = timedelta(minutes=10),
) -> Any:
    """Runs `program(mesh)` on every rank and returns what rank 0 returned.

    Args:
      program: the same on every rank; picklable where ranks are spawned (GPUs).
      sizes: size of each mesh axis.
      device: "cpu" or "cuda"; the default is `device_type()`.
      plain: exceptions whose message says all that a user needs; no traceback is shown of them.
      patience: how long a rank waits for another in a collective before that is an error.

    Raises:
      MeshError: the mesh does not fit the devices.
      WorkerError: a rank raised or died. All other ranks are ended first; the message shows that rank's traceback.
      KeyboardInterrupt: the user interrupted; all ranks have ended.
    """
    device = device or device_type()
    sizes = dict(sizes)
    check_devices(sizes, device)
    world = Mesh(sizes).world
    if "WORLD_SIZE" in os.environ:
        rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", 0))
        with _process_group(sizes, rank, local, device, "env://", patience) as mesh:
            return program(mesh)
    if world == 1:
        if device == "cuda":
            torch.cuda.set_device(0)
        return program(meshes.single(f"{device}:0" if device == "cuda" else "cpu"))
    return _supervise(program, sizes, device, plain, patience)


@contextlib.contextmanager
def _process_group(
    sizes: dict[str, int], rank: int, local: int, device: str, rendezvous: str, patience: timedelta
) -> Iterator[Mesh]:
    """The mesh as this rank sees it, with a process group for every combination of its axes."""
    world = Mesh(sizes).world
    where = torch.device(f"{device}:{local}" if device == "cuda" else "cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    options: dict[str, Any] = {"device_id": where} if device == "cuda" else {}
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=world,
        timeout=patience,
        **options,
    )
    yield Mesh(sizes, rank, where, _groups(sizes, rank))
    # Not after an error: to leave a group of NCCL takes all ranks, and the others wait elsewhere for this one.
    dist.barrier()
    dist.destroy_process_group()


def view(mesh: Mesh, sizes: Mapping[str, int]) -> Mesh:
    """The same processes as a mesh of other sizes, such as the one to generate on. Called by every rank."""
    sizes = dict(sizes)
    if Mesh(sizes).world != mesh.world:
        raise MeshError(
            f"{meshes.text(sizes)} has {Mesh(sizes).world} devices, {mesh} has {mesh.world}; they must be the same"
        )
    return mesh if sizes == mesh.sizes else Mesh(sizes, mesh.rank, mesh.device, _groups(sizes, mesh.rank))


def _groups(sizes: dict[str, int], rank: int) -> dict[tuple[str, ...], str]:
    """Names of this rank's process groups, one for every combination of axes. Made by all ranks in the same order."""
    world, groups = Mesh(sizes).world, {}
    for axes in meshes.combinations(sizes):
        for ranks in meshes.members(sizes, axes):
            group: Any = dist.group.WORLD if len(ranks) == world else dist.new_group(ranks)
            if rank in ranks:
                groups[axes] = group.group_name
    return groups


def _supervise(
    program: Callable, sizes: dict[str, int], device: str, plain: tuple[type[Exception], ...], patience: timedelta
) -> Any:
    """Starts the ranks, waits for them, and ends all of them when one fails or the user interrupts."""
    with tempfile.TemporaryDirectory(prefix="funrl-") as folder:
        pids: dict[int, int] = {}
        start = _fork if device == "cpu" else _spawn
        _flush()
        try:
            for rank in range(Mesh(sizes).world):
                pids[start(program, sizes, rank, device, folder, plain, patience)] = rank
            failed = _wait(pids)
            first_is_done = 0 not in pids.values() and 0 not in failed
        except KeyboardInterrupt:
            # The terminal has sent the interrupt to every rank too: give them time to leave their files readable.
            _end(pids, signal.SIGINT)
            raise
        finally:
            _end(pids, signal.SIGTERM)
        result = os.path.join(folder, "result")
        if first_is_done and not os.path.exists(result):
            raise WorkerError("rank 0 ended before the program did, as os._exit does")
        if failed:
            raise WorkerError(_explain(folder, failed))
        with open(result, "rb") as file:
            return pickle.load(file)


def _wait(pids: dict[int, int]) -> dict[int, int]:
    """Waits until all ranks end well, or one does not: then the wait statuses of those that failed, by rank.

    A rank that loses its peer fails within moments of it, so the others are looked at once more before the verdict.
    """
    failed: dict[int, int] = {}
    deadline = float("inf")
    while pids and time.monotonic() < deadline:
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = pids.pop(pid)
                if status:
                    failed[rank] = status
                    deadline = min(deadline, time.monotonic() + 0.3)
        time.sleep(0.02)
    return failed


def _end(pids: dict[int, int], sign: signal.Signals) -> None:
    """Asks the remaining ranks to end, and kills those that have not after a few seconds."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)
    deadline = time.monotonic() + GRACE_S
    while pids and time.monotonic() < deadline:
        for pid in list(pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del pids[pid]
        time.sleep(0.02)
    for pid in list(pids):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        del pids[pid]


def _explain(folder: str, failed: Mapping[int, int]) -> str:
    """What the rank that failed first has to say: one that was killed, else the one with the oldest traceback.

    A rank that waits for another in vain aborts itself in the end, which explains nothing if there is a traceback.
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
        if code > 0 and not os.path.exists(os.path.join(folder, f"error-{rank}")):
            return f"rank {rank} ended with status {code} and left no traceback"
    reports = []
    for name in os.listdir(folder):
        if name.startswith("error-"):
            path = os.path.join(folder, name)
            with open(path) as file:
                reports.append((os.stat(path).st_mtime_ns, int(name.removeprefix("error-")), file.read()))
    if reports:
        return min(reports)[2]
    return f"rank {next(iter(killed))} aborted and left no traceback"


def _fork(program: Callable, sizes: dict[str, int], rank: int, *rest: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // Mesh(sizes).world))
    _rank_main(program, sizes, rank, *rest)
    raise AssertionError("a rank does not return")


def _spawn(program: Callable, sizes: dict[str, int], rank: int, *rest: Any) -> int:
    import multiprocessing

    process = multiprocessing.get_context("spawn").Process(target=_rank_main, args=(program, sizes, rank, *rest))
    process.start()
    assert process.pid is not None
    return process.pid


def _rank_main(
    program: Callable,
    sizes: dict[str, int],
    rank: int,
    device: str,
    folder: str,
    plain: tuple[type[Exception], ...],
    patience: timedelta,
) -> None:
    """The life of one rank: run, leave the result or the traceback in `folder`, end without Python's own shutdown."""
    _die_with_parent()
    # SIGTERM comes from the supervisor: another rank has failed and this one waits for it in vain.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    signal.signal(signal.SIGINT, _interrupted if rank == 0 else lambda *_: os._exit(130))
    status = 1
    try:
        with _process_group(sizes, rank, rank, device, f"file://{folder}/rendezvous", patience) as mesh:
            result = program(mesh)
            if rank == 0:
                with open(os.path.join(folder, "result"), "wb") as file:
                    pickle.dump(result, file)
        status = 0
    except KeyboardInterrupt:
        status = 130
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) and leaving.code else 1
    except BaseException as error:
        _report(folder, rank, error, plain)
    finally:
        with contextlib.suppress(OSError):  # a reader of the output that has gone
            _flush()
        os._exit(status)


def _flush() -> None:
    """Writes out what has been printed, where there is somewhere to print to."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _report(folder: str, rank: int, error: BaseException, plain: tuple[type[Exception], ...]) -> None:
    """Leaves what a rank has to say of its failure for the supervisor; the first word stands."""
    trace = "".join(traceback.format_exception(error))
    said = str(error) if isinstance(error, plain) else f"rank {rank} failed:\n{trace}"
    try:
        with open(os.path.join(folder, f"error-{rank}"), "x") as file:
            file.write(said)
    except FileExistsError:
        return
    except OSError:  # the disk is full, which may be the very error
        print(said, file=sys.stderr)


def _interrupted(*_: Any) -> None:
    """Rank 0 writes files: it gets to close them, undisturbed by further interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _die_with_parent() -> None:
    """Linux: this process gets SIGKILL when its parent ends, so that a killed supervisor leaves no rank behind."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def free_port() -> int:
    """A TCP port on loopback that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
