"""Run one program on every device of a mesh, and make meshes over some of its processes.

Under torchrun or srun (see `environment`) this process is one of the ranks. Otherwise the ranks are started here:
forked on CPU, because a fork after `import torch` is ready in a second where eight fresh interpreters take half a
minute; fresh interpreters on CUDA and ROCm, one per GPU. A mesh of one device starts nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import AXES, Mesh, MeshError, Ranks
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.processes import heartbeat
from funrl.processes.board import Board
from funrl.processes.environment import read_environment
from funrl.processes.heartbeat import RECORD_BYTES, Link
from funrl.processes.store_signs import Alone, StoreLink
from funrl.processes.workers import RankProgram, WorkerError, can_fork, report_failure, run_processes

__all__ = [
    "WorkerError", "check_devices", "communication_backends", "cores", "device_type", "groups", "launch", "local_ranks",
    "ranks_per_node", "submesh", "view",
]  # fmt: skip

HEARTBEAT_S = 60.0
ENVIRONMENT = "env://"  # rendezvous of ranks that torchrun or srun has started
Before = Callable[[int], contextlib.AbstractContextManager[Any]]

# The groups of every mesh that has been made, as long as the group of all processes is the same.
_made: weakref.WeakKeyDictionary[Any, dict[tuple, dict[tuple[str, ...], str]]] = weakref.WeakKeyDictionary()


def device_type() -> str:
    """ "cuda" where torch sees a GPU (ROCm included), else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def communication_backends() -> tuple[str, ...]:
    """Backends of torch.distributed that this build has, of those that ranks use."""
    there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    return tuple(name for name, available in there.items() if dist.is_available() and available())


def check_devices(sizes: Mapping[str, int], device: str) -> None:
    """Raise MeshError where the mesh does not fit the machine or the ranks that torchrun has started."""
    world, shape = Mesh(dict(sizes)).world, meshes.text(dict(sizes))
    if read_environment() is not None:
        if int(os.environ["WORLD_SIZE"]) != world:
            raise MeshError(f"the mesh {shape} has {world} devices, {os.environ['WORLD_SIZE']} ranks were started")
    elif device == "cuda" and world > torch.cuda.device_count():
        raise MeshError(f"the mesh {shape} needs {world} GPUs, this machine has {torch.cuda.device_count()}")


def ranks_per_node() -> int:
    """Ranks that torchrun has started on this machine; without torchrun a usual number, for all are on it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", RANKS_PER_NODE))


def local_ranks(world: int) -> int:
    """Ranks on this machine, of `world` in the run: those that torchrun has started, or all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(
    program: Callable[..., Any],
    sizes: Mapping[str, int],
    device: str | None = None,
    plain: tuple[type[Exception], ...] = (),
    timeout: timedelta = timedelta(minutes=10),
    before: Before | None = None,
    heartbeat_s: float | None = HEARTBEAT_S,
    stalled_s: float | None = None,
) -> Any:
    """Run `program(mesh)` on every rank and return what rank 0 returned.

    Each rank computes with its share of the machine's cores. The program may be any callable, a lambda of a notebook
    too: forked ranks have it, and cloudpickle takes it to fresh interpreters.

    Args:
      program: (mesh) -> result, or (mesh, what `before` gives) -> result; the same on every rank.
      sizes: size of each mesh axis.
      device: "cpu" or "cuda"; the default is `device_type()`.
      plain: exceptions whose message is all that a user needs; no traceback is shown of them.
      timeout: how long a rank waits for another in a collective, of any group, before that is an error.
      before: (rank) -> a context that every rank enters while it has neither process groups nor a device, and leaves
        at the end; what it gives is the program's second argument. It is where a rank forks processes of its own.
      heartbeat_s: seconds without progress after which a line on the standard error says for which rank, in which
        phase, the run waits; None: it is not said.
      stalled_s: seconds without a sign of life from a rank's process after which the run ends; None: it does not.

    Raises:
      MeshError: the mesh does not fit the devices.
      WorkerError: a rank raised, died or does not answer. All other ranks are ended first; the message shows that
        rank's traceback.
      KeyboardInterrupt: the user interrupted; all ranks have ended.
    """
    device = device or device_type()
    sizes = dict(sizes)
    check_devices(sizes, device)
    world = Mesh(sizes).world
    if "WORLD_SIZE" in os.environ:
        rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", 0))
        group = functools.partial(_process_group, sizes, rank, local, local_ranks(world), device, ENVIRONMENT, timeout)
        link = StoreLink(rank, world, heartbeat_s, timeout.total_seconds(), stalled_s)
        return _on_rank(program, before, rank, group, link)
    if world == 1:
        return _on_rank(program, before, 0, functools.partial(_single, device), Alone(heartbeat_s))
    run = functools.partial(_run, program, before, sizes, device, timeout, plain)
    fork = device == "cpu" and can_fork()
    return run_processes(RankProgram(run, plain), world, fork, heartbeat_s, timeout.total_seconds(), stalled_s)


def _run(
    program: Callable[..., Any],
    before: Before | None,
    sizes: dict[str, int],
    device: str,
    timeout: timedelta,
    plain: tuple[type[Exception], ...],
    rank: int,
    folder: str,
) -> Any:
    """The program on one of the ranks that are started here."""
    where, world = f"file://{folder}/rendezvous", Mesh(sizes).world
    group = functools.partial(_process_group, sizes, rank, rank, world, device, where, timeout)
    board = Board(folder, world, report=functools.partial(report_failure, folder, rank, plain=plain))
    return _on_rank(program, before, rank, group, board, board.record(rank))


def _on_rank(
    program: Callable[..., Any],
    before: Before | None,
    rank: int,
    mesh_of: Callable[[], contextlib.AbstractContextManager[Mesh]],
    link: Link,
    record: Any = None,
) -> Any:
    """The program on this rank: what comes before, while it has no thread; then its signs of life and its mesh."""
    record = memoryview(bytearray(RECORD_BYTES)) if record is None else record
    with contextlib.nullcontext() if before is None else before(rank) as opened:
        try:
            with heartbeat.alive(heartbeat.Heart(record, link)), mesh_of() as mesh:
                return program(mesh) if before is None else program(mesh, opened)
        except Exception as error:
            if isinstance(link, StoreLink) and (text := link.timed_out()):
                raise WorkerError(text) from error
            raise


@contextlib.contextmanager
def _single(device: str) -> Iterator[Mesh]:
    """The mesh of this process alone."""
    if device == "cuda":
        torch.cuda.set_device(0)
    yield meshes.single(f"{device}:0" if device == "cuda" else "cpu")


@contextlib.contextmanager
def _process_group(
    sizes: dict[str, int], rank: int, local: int, here: int, device: str, rendezvous: str, timeout: timedelta
) -> Iterator[Mesh]:
    """The mesh of all ranks as one of them sees it, with a process group for every combination of its axes.

    Args:
      local, here: its number among the ranks of this machine, and how many these are.
    """
    torch.set_num_threads(max(1, cores() // here))
    where = torch.device(f"{device}:{local}" if device == "cuda" else "cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    options: dict[str, Any] = {"device_id": where} if device == "cuda" else {}
    with heartbeat.phase("rendezvous"):
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=Mesh(sizes).world,
            timeout=timeout,
            **options,
        )
        heartbeat.name_group(dist.group.WORLD.group_name, "all ranks", True)  # type: ignore[union-attr]
        if rendezvous == ENVIRONMENT:
            _check_same_mesh(sizes, rank)
        made = groups(sizes, timeout=timeout)
    yield Mesh(sizes, rank, where, made, timeout=timeout)
    # Not after an error: to leave a group of NCCL takes all ranks, and the others wait elsewhere for this one.
    heartbeat.closing()
    heartbeat.entered("barrier", dist.group.WORLD.group_name)  # type: ignore[union-attr]
    dist.barrier()
    heartbeat.left()
    dist.destroy_process_group()


def _check_same_mesh(sizes: dict[str, int], rank: int) -> None:
    """Check that this rank was started with the first one's mesh. Raises: MeshError."""
    store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    if rank == 0:
        store.set("funrl/mesh", meshes.text(sizes))
    elif (first := store.get("funrl/mesh").decode()) != meshes.text(sizes):
        raise MeshError(f"rank {rank} has the mesh {meshes.text(sizes)} and rank 0 {first}: start all with one --mesh")


def view(mesh: Mesh, sizes: Mapping[str, int]) -> Mesh:
    """The same processes as a mesh of other sizes, such as the one to generate on. Called by every process of the run.

    Raises:
      MeshError: the sizes make another number of devices.
    """
    sizes = dict(sizes)
    if Mesh(sizes).world != mesh.world:
        raise MeshError(
            f"{meshes.text(sizes)} has {Mesh(sizes).world} devices, {mesh} has {mesh.world}; they must be the same"
        )
    return mesh if sizes == mesh.sizes else submesh(mesh, sizes, mesh.ranks)


def submesh(mesh: Mesh, sizes: Mapping[str, int], ranks: Sequence[int]) -> Mesh:
    """A mesh over some of the processes of a run. Called by every process of the run, with the same arguments.

    A process outside of it gets it too, with `here` False: it knows its sizes and ranks, but no collective. A mesh over
    the processes of two others is their union.

    Args:
      mesh: any mesh of the run.
      sizes: size of each axis.
      ranks: the processes by their numbers in the run, ascending.

    Raises:
      MeshError: the ranks are not as many as the mesh has devices, not ascending, or not of this run.
    """
    sizes = dict(sizes)
    world, shape = Mesh(sizes).world, meshes.text(sizes)
    if len(ranks) != world or any(a >= b for a, b in itertools.pairwise(ranks)):
        raise MeshError(f"the mesh {shape} has {world} devices: {list(ranks)} must be as many ranks, ascending")
    ranks = meshes.ranks_of(ranks)
    run, process = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if ranks[0] < 0 or ranks[-1] >= run:
        raise MeshError(f"the mesh {shape} is to be over the ranks {list(ranks)}; this run has {run}")
    rank = ranks.index(process) if process in ranks else -1
    made = groups(sizes, ranks, mesh.timeout)
    return Mesh(sizes, rank, mesh.device, made, over=ranks, process=process, timeout=mesh.timeout)


def groups(
    sizes: Mapping[str, int], ranks: Ranks | None = None, timeout: timedelta | None = None
) -> dict[tuple[str, ...], str]:
    """Names of this process's process groups in a mesh, one for every combination of axes that are larger than 1.

    Called by every process of the run, in the same order. The groups of a mesh are made once.

    Args:
      sizes: of the axes.
      ranks: the processes of the mesh; None: all.
      timeout: of their collectives.
    """
    sizes = dict(sizes)
    if not meshes.combinations(sizes):
        return {}
    ranks = range(Mesh(sizes).world) if ranks is None else ranks
    everyone: Any = dist.group.WORLD
    made, key = _made.setdefault(everyone, {}), (tuple(sizes[axis] for axis in AXES), ranks)
    if key not in made:
        mine = made[key] = {}
        for axes in meshes.combinations(sizes):
            for positions in meshes.members(sizes, axes):
                over = [ranks[position] for position in positions]
                group: Any = everyone
                if len(over) < dist.get_world_size():
                    group = dist.new_group(over, timeout=timeout)
                if dist.get_rank() in over:
                    mine[axes] = group.group_name
                    heartbeat.name_group(group.group_name, "+".join(axes), len(over) == dist.get_world_size())
    return made[key]
