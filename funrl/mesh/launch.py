"""Run one program on every device of a mesh, and make meshes over some of its processes.

Under torchrun or srun (see `environment`) this process is one of the ranks. Otherwise the ranks are started here:
forked on CPU, because a fork after `import torch` is ready in a second where eight fresh interpreters take half a
minute; fresh interpreters on CUDA and ROCm, one per GPU. A mesh of one device starts nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import Mesh, MeshError, Ranks
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.processes import gloo, heartbeat, store
from funrl.processes.device_memory import expand_segments
from funrl.processes.environment import ranks_of_node, read_environment
from funrl.processes.heartbeat import Heartbeat, Link
from funrl.processes.store_link import Alone, LaunchAgreement, StoreLink
from funrl.processes.watch import WaitLimits, keeper
from funrl.processes.workers import RankProgram, WorkerError, can_fork, run_processes

__all__ = [
    "WaitLimits",
    "WorkerError",
    "check_devices",
    "communication_backends",
    "cores",
    "device_type",
    "groups",
    "launch",
    "local_ranks",
    "ranks_per_node",
    "submesh",
    "view",
    "with_expert_nodes",
]

Before = Callable[[int], contextlib.AbstractContextManager[Any]]


class _Program(NamedTuple):
    """The program and what `launch` was given for it."""

    run: Callable[..., Any]
    before: Before | None
    sizes: dict[str, int]
    device: str
    plain: tuple[type[Exception], ...]
    waiting: WaitLimits


class _Rank(NamedTuple):
    """A rank's number in the run, its number among the ranks of this machine, and how many these are."""

    number: int
    local: int
    here: int


# Names of the groups that have been made, by their ranks, as long as the group of all processes is the same.
_made: weakref.WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], ...], str | None]] = weakref.WeakKeyDictionary()


def device_type() -> str:
    """Device type: "cuda" where torch sees a GPU (ROCm included), else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_problem() -> str | None:
    """Reason why torch sees no GPU; None: it sees one."""
    if torch.cuda.is_available():
        return None
    build = torch.version.cuda or torch.version.hip
    if build is None:
        return f"torch {torch.__version__} is built for CPUs; the build for this machine's GPUs is on pytorch.org"
    name = "CUDA" if torch.version.cuda else "ROCm"
    return f"torch {torch.__version__}, built for {name} {build}, sees no GPU; the driver may be missing or older"


def communication_backends() -> tuple[str, ...]:
    """Backends of torch.distributed that ranks use and this build has."""
    there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    return tuple(name for name, available in there.items() if dist.is_available() and available())


def check_devices(sizes: Mapping[str, int], device: str) -> None:
    """Raise MeshError where the mesh does not fit the machine or the ranks that torchrun has started."""
    world = Mesh(dict(sizes)).world
    shape = meshes.text(dict(sizes))
    if read_environment() is not None:
        if int(os.environ["WORLD_SIZE"]) != world:
            raise MeshError(f"the mesh {shape} has {world} devices, {os.environ['WORLD_SIZE']} ranks were started")
    elif device == "cuda" and world > torch.cuda.device_count():
        raise MeshError(f"the mesh {shape} needs {world} GPUs, this machine has {torch.cuda.device_count()}")


def ranks_per_node() -> int:
    """Ranks that torchrun has started on this machine; without torchrun a usual number, for all are on it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", RANKS_PER_NODE))


def local_ranks(world: int) -> int:
    """Ranks on this machine, of `world` in the run: the ranks that torchrun has started, or all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(
    program: Callable[..., object],
    sizes: Mapping[str, int],
    device: str | None = None,
    plain: tuple[type[Exception], ...] = (),
    before: Before | None = None,
    waiting: WaitLimits = WaitLimits(),  # noqa: B008
) -> Any:
    """Run `program(mesh)` on every rank and return what rank 0 returned.

    Each rank computes with its share of the machine's cores. The program may be any callable, a lambda of a notebook
    too: forked ranks have it, and cloudpickle takes it to fresh interpreters.

    Args:
      program: (mesh) -> result, or (mesh, what `before` gives) -> result; the same on every rank.
      sizes: size of each mesh axis.
      device: "cpu" or "cuda"; the default is `device_type()`.
      plain: exceptions whose message is all that a user needs; no traceback is shown of them.
      before: (rank) -> a context that every rank enters while it has neither process groups nor a device, and leaves
        at the end; what it gives is the program's second argument. It is where a rank forks processes of its own.
      waiting: how long ranks wait for each other.

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
        rank = int(os.environ["RANK"])
        local = int(os.environ.get("LOCAL_RANK", 0))
        run = _Program(program, before, sizes, device=device, plain=plain, waiting=waiting)
        attempt = store.own_attempt()
        own = _Rank(rank, local, local_ranks(world))
        if rank or attempt is None:
            return _in_group(run, own, store.join_store(attempt, waiting.timeout))
        with keeper(attempt, world, waiting):
            store.gather_ranks(attempt, world, waiting.timeout)
            return _in_group(run, own, store.join_store(attempt, waiting.timeout))
    if world == 1:
        return _on_rank(program, before, 0, mesh_of=functools.partial(_single, device), link=Alone(waiting.heartbeat_s))
    run = functools.partial(_run, _Program(program, before, sizes, device=device, plain=plain, waiting=waiting))
    return run_processes(RankProgram(run, plain), world, fork=device == "cpu" and can_fork(), waiting=waiting)


def _run(program: _Program, rank: int, client: object, folder: str) -> Any:
    """Run the program on one of the ranks that are started here."""
    own = _Rank(rank, local=rank, here=Mesh(program.sizes).world)
    return _in_group(program, own, client, LaunchAgreement(f"{folder}-saved", program.plain))


def _in_group(program: _Program, own: _Rank, client: object, launched: LaunchAgreement | None = None) -> Any:
    """Run the program on one of several ranks, which have a client of their store."""
    if launched is None:  # the process may have had a run before
        gc.collect()
    gc.freeze()  # modules stay to the end, and searches for garbage would read all of them each time
    timeout = program.waiting.timeout
    group = functools.partial(_process_group, program.sizes, own, program.device, client, timeout)
    link = StoreLink(client, own.number, Mesh(program.sizes).world, program.waiting, launched=launched)
    return _on_rank(program.run, program.before, own.number, mesh_of=group, link=link)


def _on_rank(
    program: Callable[..., object],
    before: Before | None,
    rank: int,
    mesh_of: Callable[[], contextlib.AbstractContextManager[Mesh]],
    link: Link,
) -> Any:
    """Run the program on this rank: enter `before` while there is no thread, then start the heartbeat and the mesh."""
    heart = Heartbeat(link)
    with contextlib.nullcontext() if before is None else before(rank) as opened:
        try:
            with heartbeat.alive(heart), mesh_of() as mesh:
                return program(mesh) if before is None else program(mesh, opened)
        except Exception as error:
            if text := link.timed_out():
                raise WorkerError(text) from error
            raise
        finally:
            link.close(heart)


@contextlib.contextmanager
def _single(device: str) -> Iterator[Mesh]:
    """The mesh of this process alone."""
    if device == "cuda":
        expand_segments()
        torch.cuda.set_device(0)
    yield meshes.single(f"{device}:0" if device == "cuda" else "cpu")


@contextlib.contextmanager
def join_mesh(sizes: Mapping[str, int], rank: int, device: str, client: Any, timeout: timedelta) -> Iterator[Mesh]:
    """The mesh of processes of this machine that have clients of one store; one that fails leaves it at once."""
    own = _Rank(rank, rank, Mesh(dict(sizes)).world)
    try:
        with _process_group(dict(sizes), own, device, client, timeout) as mesh:
            yield mesh
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


@contextlib.contextmanager
def _process_group(sizes: dict[str, int], own: _Rank, device: str, client: Any, timeout: timedelta) -> Iterator[Mesh]:
    """The mesh of all ranks as one of them sees it, with a process group for every combination of its axes.

    The groups wait in a client of the store of their own, beside the one that is given.
    """
    rank = own.number
    torch.set_num_threads(max(1, cores() // own.here))
    where = torch.device(f"{device}:{own.local}" if device == "cuda" else "cpu")
    if device == "cuda":
        expand_segments()
        torch.cuda.set_device(where)
    options: dict[str, Any] = {"device_id": where} if device == "cuda" else {}
    with heartbeat.phase("rendezvous"):
        groups_client = client.clone()
        groups_client.set_timeout(timeout)
        _check_same_mesh(groups_client, sizes, rank)
        dist.init_process_group(
            "nccl" if device == "cuda" else gloo.register_gloo(),
            store=groups_client,
            rank=rank,
            world_size=Mesh(sizes).world,
            timeout=timeout,
            **options,
        )
        heartbeat.name_group(dist.group.WORLD.group_name, "all ranks", True)  # type: ignore[union-attr]
        mesh = Mesh(sizes, rank, where, groups=groups(sizes, timeout=timeout), timeout=timeout)
        mesh = with_expert_nodes(mesh, ranks_of_node())
    yield mesh
    # Not after an error: to leave a group of NCCL takes all ranks, and the others wait elsewhere for this one.
    heartbeat.entered("barrier", dist.group.WORLD.group_name)  # type: ignore[union-attr]
    dist.barrier()
    heartbeat.left()
    dist.destroy_process_group()


def _check_same_mesh(client: Any, sizes: dict[str, int], rank: int) -> None:
    """Check that this rank was started with the first one's mesh. Raises: MeshError."""
    if rank == 0:
        client.set(store.MESH, meshes.text(sizes))
    elif (first := client.get(store.MESH).decode()) != meshes.text(sizes):
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
    world = Mesh(sizes).world
    shape = meshes.text(sizes)
    if len(ranks) != world or any(a >= b for a, b in itertools.pairwise(ranks)):
        raise MeshError(f"the mesh {shape} has {world} devices: {list(ranks)} must be as many ranks, ascending")
    ranks = meshes.ranks_of(ranks)
    run, process = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if ranks[0] < 0 or ranks[-1] >= run:
        raise MeshError(f"the mesh {shape} is to be over the ranks {list(ranks)}; this run has {run}")
    rank = ranks.index(process) if process in ranks else -1
    names = groups(sizes, ranks, mesh.timeout)
    part = Mesh(sizes, rank, mesh.device, groups=names, over=ranks, process=process, timeout=mesh.timeout)
    return with_expert_nodes(part, ranks_of_node())


def groups(
    sizes: Mapping[str, int], ranks: Ranks | None = None, timeout: timedelta | None = None
) -> dict[tuple[str, ...], str]:
    """Names of this process's process groups in a mesh, one for every combination of axes that are larger than 1.

    Called by every process of the run, in the same order. The groups of a mesh are made once. On a GPU only groups of
    which a collective is called have a communicator, and its memory.

    Args:
      sizes: of the axes.
      ranks: the processes of the mesh; None: all.
      timeout: of their collectives.
    """
    sizes = dict(sizes)
    ranks = range(Mesh(sizes).world) if ranks is None else ranks
    names: dict[tuple[str, ...], str] = {}
    for axes in meshes.combinations(sizes):
        name = _group_name(
            tuple(tuple(ranks[position] for position in over) for over in meshes.members(sizes, axes)),
            "+".join(axes),
            timeout=timeout,
        )
        if name is not None:
            names[axes] = name
    return names


def with_expert_nodes(mesh: Mesh, node: int | None) -> Mesh:
    """The mesh with the ranks of `expert` by nodes of `node` ranks; None: all are on one. See `Mesh.nodes`.

    Called by every process of the run, in the same order.
    """
    ranks = mesh.ranks

    def group_of(sizes: dict[str, int]) -> str | None:
        parts = meshes.members(sizes, ("expert",))
        return _group_name(tuple(tuple(ranks[i] for i in part) for part in parts), "expert by nodes", mesh.timeout)

    return meshes.with_nodes(mesh, node, group_of)


def _group_name(parts: tuple[tuple[int, ...], ...], axes: str, timeout: timedelta | None) -> str | None:
    """Name of this process's group among disjoint ones, which are made unless they are there; None outside of all."""
    everyone: Any = dist.group.WORLD
    rank = dist.get_rank()
    if len(parts[0]) == dist.get_world_size():
        heartbeat.name_group(everyone.group_name, axes, True)
        return everyone.group_name
    names = _made.setdefault(everyone, {})
    if parts not in names:
        group: Any = None
        with unbound(everyone):
            for part in parts:
                joined = dist.new_group(list(part), timeout=timeout)
                group = joined if rank in part else group
        names[parts] = None if group is None else group.group_name
        if group is not None:
            heartbeat.name_group(group.group_name, axes, False)
    return names[parts]


@contextlib.contextmanager
def unbound(everyone: Any) -> Iterator[None]:
    """Inside, NCCL's groups are made without a communicator: each gets one with its first collective, or never.

    Where the group of all processes is bound to a device, torch splits off a communicator for every new group at once,
    and waits until all ranks of the run take part.
    """
    device = everyone.bound_device_id
    everyone.bound_device_id = None
    try:
        yield
    finally:
        everyone.bound_device_id = device
