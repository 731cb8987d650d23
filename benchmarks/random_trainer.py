"""The trainer's own functions on random weights and rows of full length, for benchmarks; and memory of a process."""

from __future__ import annotations

from pathlib import Path

import torch

from funrl import trees
from funrl.cost.full_rows import full_rows
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import Layout, shard
from funrl.trainer import loop
from funrl.trainer.jobs.build import Parts, first_state, first_weights, frozen_weights, sync
from funrl.trainer.jobs.job import Job
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.state import State
from funrl.trainer.steps.step_rows import Rows, mapped


def device_rows(job: Job, parts: Parts, tokens: int, local: int) -> Rows:
    """Rows of the greatest length on this rank's device.

    Args:
      job: of the run.
      parts: of the run.
      tokens: of a prompt.
      local: rows of each rank.
    """
    return mapped(full_rows(job, parts, tokens, local), lambda x: x.to(parts.mesh.device))


def random_trainer(job: Job, parts: Parts, rows: Rows, clock: Clock) -> tuple[loop.Trainer, State]:
    """A trainer whose source gives the same rows at each step, and its first state; the engine has the weights."""
    mesh = parts.mesh
    generator = torch.Generator(mesh.device).manual_seed(0)
    begin = trees.map(lambda x, layout: _piece(x, layout, mesh, generator), job.model.shapes, parts.begin.stored)
    weights = first_weights(job, parts, begin)
    frozen = frozen_weights(parts, weights)
    state = sync(parts, first_state(job, parts, weights, ()), frozen=frozen)
    source = Source(dict, lambda state, step: (rows, state, {}), lambda roles, step: {})
    return loop.Trainer(job, parts, source, frozen, clock), state


def _piece(x: torch.Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator) -> torch.Tensor:
    return shard(torch.randn(x.shape, generator=generator, device=mesh.device) * 0.02, layout, mesh)


def clear_peak() -> None:
    """Set the high-water mark of this process to what is resident."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].removesuffix("kB")) * 1024
