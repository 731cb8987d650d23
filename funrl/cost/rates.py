"""Time of a step and of a run by an estimate: seconds, hours, tokens a second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from funrl.cost.row_plan import rows_of_step
from funrl.cost.tracing.costs import Costs, Traffic
from funrl.cost.tracing.estimate import MOVE, RESHARD, Estimate
from funrl.cost.tracing.hardware import Hardware, collective_seconds, message_seconds
from funrl.mesh import mesh as meshes
from funrl.mesh.plan import RANKS_PER_NODE


class Rates(NamedTuple):
    """Times and throughput of a run, by an estimate.

    Attributes:
      seconds: seconds of a step.
      steps: steps of the run.
      tokens: tokens of a step's rows, prompts included.
      devices: number of devices.
    """

    seconds: float
    steps: int
    tokens: int
    devices: int

    @property
    def hours(self) -> float:
        """Hours of all steps."""
        return self.steps * self.seconds / 3600

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all devices together, as the metric perf/tokens_per_s."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens a second of one device."""
        return self.tokens_per_second / self.devices


def rates_of(estimate: Estimate, hardware: Hardware) -> Rates:
    """Rates of an estimated run."""
    job = estimate.job
    return Rates(
        seconds=step_seconds(estimate, hardware),
        steps=job.settings.run.steps,
        tokens=rows_of_step(job) * estimate.tokens,
        devices=meshes.Mesh(job.sizes).world,
    )


def step_seconds(estimate: Estimate, hardware: Hardware) -> float:
    """Seconds of all phases of a step, one after the other."""
    return sum(phase_seconds(estimate, costs, hardware) for costs in estimate.phases.values())


def phase_seconds(estimate: Estimate, costs: Costs, hardware: Hardware) -> float:
    """Seconds of a phase: its kernels, and the collectives that do not overlap with them."""
    return costs.seconds + communication(estimate, costs, hardware) - hidden(estimate, costs, hardware)


def communication(estimate: Estimate, costs: Costs, hardware: Hardware) -> float:
    """Seconds of all collectives of a phase, one after the other."""
    return _sent(estimate, costs.traffic, hardware)


def hidden(estimate: Estimate, costs: Costs, hardware: Hardware) -> float:
    """Seconds of a phase in which collectives and kernels overlap.

    Only collectives that start before their result is needed overlap with kernels. On a CPU both use the same cores, so
    none overlap.
    """
    if not hardware.accelerator:
        return 0.0
    return min(_sent(estimate, costs.early, hardware), costs.cover)


def _sent(estimate: Estimate, traffic: Mapping[tuple[str, str], Traffic], hardware: Hardware) -> float:
    seconds = 0.0
    for (op, group), (count, nbytes) in traffic.items():
        if op == RESHARD:
            seconds += message_seconds(hardware, count, nbytes, near=False)
            continue
        _, axes, sizes = estimate.axes[group]
        ranks = meshes.peers(sizes, axes, 0)
        near = len({rank // RANKS_PER_NODE for rank in ranks}) == 1
        if op == MOVE:
            seconds += message_seconds(hardware, count, nbytes, near)
        else:
            seconds += collective_seconds(hardware, op, count, nbytes, len(ranks), near)
    return seconds
