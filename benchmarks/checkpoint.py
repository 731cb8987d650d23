"""Writing and reading checkpoints, against a plain copy of the same bytes; and what a save costs a step.

    python benchmarks/checkpoint.py                    # 1 GB on one rank
    python benchmarks/checkpoint.py --mesh=dp4,tp2     # the same 1 GB over eight ranks, fully sharded
    python benchmarks/checkpoint.py --gb=0.1 --folder=/dev/shm/bench

| line | what |
|---|---|
| copy | this rank's chunks to the shared memory: all that a step waits for |
| write, plain write | until the checkpoint is there; each rank's bytes in one file of its own. Both reach the disk |
| read, plain read | into new tensors in the layout of the mesh; those files into new tensors. From the page cache |
| step, step that saves | a loop of matrix products, alone and while a checkpoint is copied and written |

Bandwidths are of all ranks together. Methods take turns; printed are medians over the rounds but the first. Each begins
without the memory that the one before has freed, which would be a gift of pages to the next that reads. CPU-seconds
are those of all ranks and of the processes that write for them; the kernel's own, which bring pages to the disk, are
not among them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from absl import app, flags
from torch import Tensor

from funrl.mesh import rules
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import Mesh, parse
from funrl.mesh.rules import Layout
from funrl.processes import heartbeat
from funrl.trainer.checkpoints.checkpoint import CHECKPOINT_FORMAT, recorded
from funrl.trainer.storage.shard_server import Commit, Reserve, WriteShards
from funrl.trainer.storage.shards import Memory, OwnShards, ShardServer, copy_to_memory, own_shards, read_tensors

MESH = flags.DEFINE_string("mesh", "dp1", "devices by axis")
GB = flags.DEFINE_float("gb", 1.0, "size of the checkpoint, in 1e9 bytes", lower_bound=0.01)
ROUNDS = flags.DEFINE_integer("rounds", 4, "rounds; the first is not counted", lower_bound=2)
STEP = flags.DEFINE_float("step_s", 20.0, "seconds of a step on an idle machine", lower_bound=0.1)
FOLDER = flags.DEFINE_string("folder", None, "where to write; by default a temporary directory")

WIDTH = 2048  # of the matrices; the rest of the bytes is their number


def random_weights(mesh: Mesh, gb: float) -> tuple[dict[str, Tensor], dict[str, Layout]]:
    """This rank's part of float32 matrices of `gb` gigabytes, and their layouts."""
    count = max(1, round(gb * 1e9 / (4 * WIDTH * WIDTH)))
    table = rules.fully_sharded(rules.STORED)
    layout = rules.layout("w", (WIDTH, WIDTH), ("embed", "mlp"), table, mesh.sizes)
    generator = torch.Generator().manual_seed(mesh.rank)
    names = [f"w/{i}" for i in range(count)]
    weights = {name: torch.rand(layout.local_shape(mesh.rank), generator=generator) for name in names}
    return weights, dict.fromkeys(names, layout)


class Bench:
    """The same bytes, written and read in two ways."""

    def __init__(self, mesh: Mesh, folder: str, gb: float) -> None:
        self.mesh = mesh
        self.folder = Path(folder)
        self.tensors, self.layouts = random_weights(mesh, gb)
        self.own: OwnShards = own_shards(self.tensors, self.layouts, mesh)
        self.memory = Memory(self.own.nbytes)
        self.number = 0
        self.server = ShardServer()
        self.reader = ShardServer()  # a run reads before it writes, at full priority
        self.server.send(Reserve(self.memory.path, self.own.nbytes))
        self.finish()

    def copy(self) -> None:
        copy_to_memory(self.own, self.tensors, self.layouts, mesh=self.mesh, memory=self.memory)

    def begin_write(self) -> None:
        """Have the copy written to a new checkpoint, which takes the place of the one before."""
        self.number += 1
        draft = str(self.folder / f".step-{self.number}")
        names = {part.name for part in self.own.parts} | self.own.created
        arrays = {name: self.own.arrays[name] for name in names}
        self.server.send(
            WriteShards(
                draft,
                process=self.mesh.rank,
                memory=self.memory.path,
                arrays=arrays,
                parts=self.own.parts,
                created=self.own.created,
                numbers={},
            )
        )
        if self.mesh.rank == 0:
            self.server.send(
                Commit(
                    draft,
                    path=str(self.folder / f"step-{self.number}"),
                    processes=self.mesh.world,
                    arrays=self.own.arrays,
                    facts={"format": CHECKPOINT_FORMAT, "step": self.number},
                    removed=(str(self.folder / f"step-{self.number - 1}"),),
                    synced=(),
                    timeout_s=600.0,
                )
            )

    def finish(self) -> None:
        problems = self.server.answers(wait=True)
        assert not problems, problems

    def write(self) -> None:
        self.begin_write()
        self.finish()

    def read(self) -> None:
        database = recorded(self.folder / f"step-{self.number}").database(self.reader)
        dtypes = {name: x.dtype for name, x in self.tensors.items()}
        for name, x in read_tensors(database, dtypes, self.layouts, mesh=self.mesh):
            assert x.shape == self.tensors[name].shape

    def plain_write(self) -> None:
        with open(self.folder / f"plain-{self.mesh.rank}", "wb") as file:
            for x in self.tensors.values():
                file.write(x.numpy().data)
            file.flush()
            os.fsync(file.fileno())

    def plain_read(self) -> None:
        tensors = [torch.empty_like(x) for x in self.tensors.values()]
        with open(self.folder / f"plain-{self.mesh.rank}", "rb") as file:
            for x in tensors:
                file.readinto(x.numpy().data)

    def timed(self, run: Callable[[], None]) -> tuple[float, float]:
        """Seconds until all ranks are done, and CPU-seconds of all until what they have begun is done too."""
        heartbeat.beat()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        gather_objects(None, self.mesh)
        start = time.perf_counter()
        before = self.cpu_s()
        run()
        gather_objects(None, self.mesh)
        seconds = time.perf_counter() - start
        self.finish()
        return seconds, sum(gather_objects(self.cpu_s() - before, self.mesh))

    def cpu_s(self) -> float:
        """CPU-seconds of this rank and its servers so far."""
        return sum(map(process_s, (os.getpid(), *(s.process.pid for s in (self.server, self.reader) if s.process))))


def process_s(pid: int) -> float:
    """CPU-seconds of a process so far; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def products(seconds: float) -> Callable[[], None]:
    """A step of about `seconds` on an idle core."""
    x = torch.rand(512, 512)
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < min(1.0, seconds):
        x @ x
        count += 1
    total = round(count * seconds / min(1.0, seconds))

    def step() -> None:
        for _ in range(total):
            x @ x

    return step


def program(folder: str, gb: float, rounds: int, step_s: float, mesh: Mesh) -> dict[str, list[tuple[float, float]]]:
    """Seconds and CPU-seconds of every method in every round."""
    bench = Bench(mesh, folder, gb)
    step = products(step_s)

    def saves() -> None:
        bench.copy()
        bench.begin_write()
        step()

    methods: dict[str, Callable[[], None]] = {
        "copy": bench.copy,
        "write": bench.write,
        "plain write": bench.plain_write,
        "read": bench.read,
        "plain read": bench.plain_read,
        "step": step,
        "step that saves": saves,
    }
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, run in methods.items():
            measured[name].append(bench.timed(run))
    bench.server.close()
    bench.reader.close()
    return measured


def main(_: list[str]) -> None:
    """Print the table."""
    folder = FOLDER.value or tempfile.mkdtemp(prefix="funrl-checkpoint-")
    os.makedirs(folder, exist_ok=True)
    run = functools.partial(program, folder, GB.value, ROUNDS.value, STEP.value)
    try:
        measured = launch(run, parse(MESH.value), "cpu")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    median = {name: statistics.median(s for s, _ in values[1:]) for name, values in measured.items()}
    cpu = {name: statistics.median(s for _, s in values[1:]) for name, values in measured.items()}
    print(f"{GB.value:g} GB, {MESH.value}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name in ("copy", "write", "plain write", "read", "plain read"):
        print(f"{name:16} {median[name]:8.2f} s {GB.value / median[name]:8.2f} GB/s {cpu[name]:8.2f} CPU-s")
    for name in ("step", "step that saves"):
        print(f"{name:16} {median[name]:8.2f} s {'':13} {cpu[name]:8.2f} CPU-s")
    for name in ("write", "read"):
        print(f"{name} / plain {name}: {median[f'plain {name}'] / median[name]:.2f}")
    print(f"a step that saves takes {100 * (median['step that saves'] / median['step'] - 1):.1f}% longer")


if __name__ == "__main__":
    app.run(main)
