"""Record the collectives that each rank starts, and check that ranks start those of a communicator in one order.

NCCL matches the collectives of a communicator by their order alone, from whichever thread they come, and messages of
two ranks without tags. Gloo is patient with some other orders: a run of gloo's ranks may pass and hang on GPUs.
"""

import contextlib
import itertools
import pickle
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from funrl.mesh import collectives

RAGGED = "all_to_all_single"  # whose parts differ between ranks


class Collective(NamedTuple):
    """A collective, or a message, that a rank has started.

    Attributes:
      communicator: name of its process group.
      ranks: of the run, in the communicator.
      content: operator, dtypes and shapes, the same on all ranks.
      site: line of the program that starts it.
      thread: of the program.
      way: sending and receiving rank of a message; (): it is a collective.
    """

    communicator: str
    ranks: tuple[int, ...]
    content: str
    site: str
    thread: str
    way: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.content} on communicator {self.communicator} at {self.site}"


class Recorder:
    """Records everything that this process starts while `recording` lasts."""

    def __init__(self) -> None:
        self.started: list[Collective] = []
        self._lock = threading.Lock()

    def add(self, group, content: str, way: tuple[int, ...] = ()) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        thread = threading.current_thread().name
        with self._lock:
            self.started.append(Collective(group.group_name, ranks, content, _site(), thread, way))

    def __getattr__(self, name: str):
        """An operator of functional collectives that is recorded."""
        operator = getattr(_OPERATORS, name)
        if name == "wait_tensor":
            return operator

        def start(x, *arguments):
            group = dist.distributed_c10d._resolve_process_group(arguments[-1])
            extra = "" if name == RAGGED else f" {arguments[:-1]}"
            self.add(group, f"{name}{extra} of {_form(x, name == RAGGED)}")
            return operator(x, *arguments)

        return start

    @contextlib.contextmanager
    def recording(self):
        """Record what goes through `torch.distributed` from this program."""
        patches: dict[str, Any] = {name: self._recorded(getattr(dist, name), name) for name in _CALLS}
        patches |= {name: self._message(getattr(dist, name), name) for name in ("isend", "irecv")}
        with mock.patch.object(collectives, "_c10d", self), mock.patch.multiple(dist, **patches):
            yield self

    def _recorded(self, call, name: str):
        def start(*arguments, **named):
            if not named.get("use_local_synchronization"):
                ranks = f" of {list(arguments[0])}" if name == "new_group" and arguments else ""
                group = None if name == "new_group" else named.get("group")
                self.add(group or dist.group.WORLD, name + ranks)
            return call(*arguments, **named)

        return start

    def _message(self, call, name: str):
        def start(x: Tensor, peer: int, group=None, tag: int = 0):
            own = dist.get_rank()
            way = (own, peer) if name == "isend" else (peer, own)
            self.add(group or dist.group.WORLD, f"message of {x.numel() * x.element_size()} bytes", way)
            return call(x, peer, group=group, tag=tag)

        return start


_OPERATORS = collectives._c10d
_CALLS = ("all_gather_object", "broadcast_object_list", "barrier", "new_group")
_INNER = (collectives.__file__, __file__, contextlib.__file__, "autograd.py", "autograd/function.py", "_ops.py")


def _site() -> str:
    """File and line that started a collective, outside of the functions that all use."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_INNER):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _form(x, ragged: bool) -> str:
    tensors = x if isinstance(x, list) else [x]
    return ", ".join(f"{t.dtype} {'of any size' if ragged else list(t.shape)}" for t in tensors)


def run_recorded(program, folder: Path, mesh):
    """Run `program(mesh)` on a rank, and leave what it starts in a file of the folder."""
    with Recorder().recording() as recorder:
        result = program(mesh)
    (folder / f"rank-{mesh.process}").write_bytes(pickle.dumps(recorder.started))
    return result


def read_records(folder: Path) -> dict[int, list[Collective]]:
    """What each rank has started, by rank."""
    files = {int(path.name.removeprefix("rank-")): path for path in Path(folder).glob("rank-*")}
    return {rank: pickle.loads(files[rank].read_bytes()) for rank in sorted(files)}


def check_order(records: dict[int, list[Collective]]) -> None:
    """Raise AssertionError where two ranks start other collectives, or in another order.

    - Collectives of a communicator: the same ones in one order, from one thread of each rank.
    - Collectives of all communicators that two ranks share: in one order, for a device may run one at a time.
    - Messages from a rank to another, by thread: received as they are sent.
    """
    calls = {rank: [x for x in started if not x.way] for rank, started in records.items()}
    for communicator, ranks in sorted({(x.communicator, x.ranks) for started in calls.values() for x in started}):
        of_ranks = {rank: [x for x in calls[rank] if x.communicator == communicator] for rank in ranks}
        for rank, started in of_ranks.items():
            threads = sorted({x.thread for x in started})
            assert len(threads) < 2, f"communicator {communicator}: rank {rank} uses it from threads {threads}"
        for rank in ranks[1:]:
            _compare(f"communicator {communicator} of ranks {ranks}", of_ranks, ranks[0], rank)
    for pair in itertools.combinations(sorted(calls), 2):
        shared = {rank: [x for x in calls[rank] if set(pair) <= set(x.ranks)] for rank in pair}
        _compare(f"communicators that ranks {pair} share", shared, *pair)
    messages = {rank: defaultdict(list) for rank in records}
    for rank, started in records.items():
        for x in started:
            messages[rank][x.way, x.thread].append(x)
    for way, thread in sorted({key for ends in messages.values() for key in ends if key[0]}):
        ends = {rank: messages[rank][way, thread] for rank in way}
        _compare(f"messages of {thread} from rank {way[0]} to rank {way[1]}", ends, *way)


def _compare(where: str, started: dict[int, list[Collective]], one: int, other: int) -> None:
    for number, (a, b) in enumerate(itertools.zip_longest(started[one], started[other])):
        same = a is not None and b is not None and (a.communicator, a.content) == (b.communicator, b.content)
        assert same, f"{where}, number {number}: rank {one} starts {a or 'nothing'}, rank {other} {b or 'nothing'}"
