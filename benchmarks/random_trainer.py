"""The trainer's own functions on random weights and rows of full length, for benchmarks; and memory of a process."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from funrl import trees
from funrl.cost.rows import full_rows
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import Layout, shard
from funrl.processes.workers import can_fork
from funrl.trainer import phases
from funrl.trainer.jobs.build import first_state, first_weights, frozen_weights
from funrl.trainer.jobs.job import Job
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.roles import State
from funrl.trainer.steps.step_rows import Rows, mapped
from funrl.trainer.steps.sync import sync

T = TypeVar("T")
FORK = multiprocessing.get_context("fork")
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's parameters M_MMAP_THRESHOLD and M_TRIM_THRESHOLD


def device_rows(job: Job, parts: Parts, tokens: int, local: int) -> Rows:
    """Rows of the greatest length on this rank's device.

    Args:
      job: of the run.
      parts: of the run.
      tokens: of a prompt.
      local: rows of each rank.
    """
    return mapped(full_rows(job, parts, tokens, local), lambda x: x.to(parts.mesh.device))


def random_trainer(job: Job, parts: Parts, rows: Rows, clock: Clock) -> tuple[phases.Trainer, State]:
    """A trainer whose source gives the same rows at each step, and its first state; the engine has the weights."""
    mesh = parts.mesh
    generator = torch.Generator(mesh.device).manual_seed(0)
    begin = trees.map(lambda x, layout: _piece(x, layout, mesh, generator), job.model.shapes, parts.begin.stored)
    weights = first_weights(job, parts, begin)
    frozen = frozen_weights(parts, weights)
    state = sync(parts, first_state(job, parts, weights, ()), frozen=frozen)
    source = Source(dict, lambda state, step: (rows, state, {}), lambda roles, step: {}, has_digests=False)
    return phases.Trainer(job, parts, source, frozen, clock), state


def _piece(x: torch.Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator) -> torch.Tensor:
    return shard(torch.randn(x.shape, generator=generator, device=mesh.device) * 0.02, layout, mesh)


def alone(run: Callable[[], T], limit_s: float | None = None) -> T | None:
    """Result of a call in a fork of this process, whose memory is its own; None if it takes longer than `limit_s`.

    What the fork frees goes back to the system at once, so that its resident bytes are the bytes in use.

    Raises:
      SystemExit: the call fails; its process has printed why.
    """
    assert can_fork(), "this process has threads that a fork would wait for"
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_send, args=(run, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(limit_s) else None
    except EOFError:
        process.join()
        raise SystemExit(process.exitcode or 1) from None
    finally:
        process.kill()
        process.join()


def _send(run: Callable[[], object], sender: Connection) -> None:
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(TRIM_THRESHOLD, 0)
    libc.malloc_trim(0)
    sender.send(run())


def clear_peak() -> None:
    """Set the high-water mark of this process to what is resident."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].removesuffix("kB")) * 1024
