"""Time of a step and of a run by an estimate, whether it fits, the flags that make it fit, and text of numbers."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from funrl.cost.rows import rows_of_step
from funrl.cost.tracing.costs import UPDATES, Costs, Traffic
from funrl.cost.tracing.estimate import MOVE, RESHARD, Estimate, stage_of
from funrl.cost.tracing.hardware import USABLE, Hardware, collective_seconds, message_seconds
from funrl.mesh import mesh as meshes
from funrl.trainer.jobs.sharding import is_sharded
from funrl.trainer.offload import PARTS
from funrl.trainer.settings.settings import Settings, scoring_budget, with_flags


def size(nbytes: float) -> str:
    """Bytes with three figures and a decimal unit: "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB" if nbytes < 999.5 else f"{nbytes:.0f} TB"


def duration_text(seconds: float, figures: int = 2) -> str:
    """Format seconds in the customary unit: "1.2 s", "28 min", "3.5 h".

    Args:
      seconds: to format.
      figures: significant digits; integers keep all of theirs.
    """
    units = ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"), (86400.0, "days"))
    most = {"us": 1000, "ms": 1000, "s": 100, "min": 100, "h": 72}  # largest value in a unit
    amount = seconds
    unit = "s"
    for length, unit in units:
        amount = seconds / length
        if unit == "days" or float(f"{amount:.{figures}g}") < most[unit]:
            break
    if not seconds:
        return "0 s"
    written = f"{amount:,.0f}" if amount >= 10 ** (figures - 1) else f"{amount:.{figures}g}"
    return f"{written} {unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


class Errors(NamedTuple):
    """Errors of estimates beside published figures, as shares of these.

    Attributes:
      count: of the rows.
      median: of the absolute errors.
      most: bound on the absolute errors of nine of ten rows.
    """

    count: int
    median: float
    most: float


# By benchmarks/published.py, on the rows that no constant is fitted on.
PUBLISHED_ERRORS = {"seconds": Errors(25, 0.050, 0.128), "gib": Errors(18, 0.015, 0.075)}


def errors_text() -> str:
    """The errors of estimates beside published figures, in words."""
    time = PUBLISHED_ERRORS["seconds"]
    memory = PUBLISHED_ERRORS["gib"]
    return (
        f"seconds are off by {time.median:.0%} in the median of {time.count} published training steps that no constant "
        f"is fitted on,\nand nine of ten are within {time.most:.0%}; memory by {memory.median:.0%} of {memory.count}, "
        f"within {memory.most:.0%}; prices are not among them"
    )


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
        nodes = len({rank // hardware.node for rank in ranks})
        if op == MOVE:
            seconds += message_seconds(hardware, count, nbytes, near=nodes == 1)
        else:
            seconds += collective_seconds(hardware, op, count, nbytes, len(ranks), len(ranks) // nodes)
    return seconds


ATTEMPTS = 3  # estimates with other flags if it does not fit


class Peak(NamedTuple):
    """The peak memory of a rank.

    Attributes:
      phase: phase of the peak.
      nbytes: bytes held at the peak.
    """

    phase: str
    nbytes: float


class Suggestion(NamedTuple):
    """Flags that reduce memory, and what they cost.

    Attributes:
      flags: name -> value.
      peak: peak memory with them.
      seconds: seconds of a step with them.
      fits: whether the job then fits.
    """

    flags: dict[str, Any]
    peak: Peak
    seconds: float
    fits: bool


class Verdict(NamedTuple):
    """Verdict on whether a job fits.

    Attributes:
      fits: whether it fits.
      room: usable bytes of a device.
      peak: the peak memory of a rank.
      too_large: phases that exceed the room.
      seconds: of a step.
      suggestions: flags, each on top of the earlier ones that helped, until it fits.
    """

    fits: bool
    room: float
    peak: Peak
    too_large: tuple[str, ...]
    seconds: float
    suggestions: tuple[Suggestion, ...]


def verdict_of(
    estimate: Estimate, settings: Settings, hardware: Hardware, costs: Callable[[Settings], Estimate]
) -> Verdict:
    """Compare an estimate with the memory of a device; if it does not fit, try flags one after the other.

    Args:
      costs: estimates other settings.
    """
    room = hardware.memory * USABLE
    peak = peak_of(estimate)
    over = tuple(name for name, phase in estimate.phases.items() if phase.total > room)
    known = Verdict(peak.nbytes <= room, room, peak, over, step_seconds(estimate, hardware), ())
    if known.fits:
        return known
    together: dict[str, Any] = {}
    suggestions: list[Suggestion] = []
    for changes in remedies(estimate, settings, hardware, peak.phase)[:ATTEMPTS]:
        together |= changes
        try:
            other = costs(with_flags(settings, **together))
        except ValueError:  # such as a mesh that does not divide the model's heads
            together = {k: v for k, v in together.items() if k not in changes}
            continue
        peak = peak_of(other)
        suggestions.append(Suggestion(dict(together), peak, step_seconds(other, hardware), peak.nbytes <= room))
        if suggestions[-1].fits:
            break
    return known._replace(suggestions=tuple(suggestions))


def remedies(estimate: Estimate, settings: Settings, hardware: Hardware, worst: str) -> list[dict[str, Any]]:
    """Changes of flags that may reduce the worst phase, most promising first."""
    peak = estimate.phases[worst].peak
    sizes = estimate.job.sizes
    heads = estimate.job.model.abilities.heads
    states = sum(peak.get(k, 0) for k in ("weights", "optimizer", "gradients", "staging"))
    passing = sum(peak.get(k, 0) for k in ("activations", "logits"))
    total = sum(peak.values())
    changes = []
    if not settings.sharding.fsdp and sizes["data"] > 1 and states > 0.2 * total:
        changes.append({"fsdp": True})
    whole = [role for role in estimate.roles if not is_sharded(settings, role)]
    if settings.sharding.fsdp and whole and states > 0.2 * total:
        changes.append({"fsdp_models": ",".join(estimate.roles)})
    if settings.devices.remat == "none" and worst.startswith(UPDATES) and passing > 0.2 * total:
        changes.append({"remat": "full"})
    budgets = {"score_token_budget": scoring_budget(settings), "token_budget": settings.updates.token_budget}
    flag = {"score": "score_token_budget", "update": "token_budget"}.get(stage_of(worst))
    if flag is not None and passing > 0.2 * total and budgets[flag] > estimate.tokens:
        changes.append({flag: max(estimate.tokens, budgets[flag] // 4)})
    if peak.get("cache", 0) > 0.2 * total and settings.sampling.samples_per_prompt > 2:
        changes.append({"samples_per_prompt": settings.sampling.samples_per_prompt // 2})
    generates = "generate" in estimate.phases
    if generates and hardware.accelerator and settings.devices.offload is None and states > 0.2 * total:
        changes.append({"offload": ",".join(PARTS)})
    wider = sizes | {"tensor": 2 * sizes["tensor"], "data": sizes["data"] // 2}
    if sizes["data"] % 2 == 0 and heads % wider["tensor"] == 0 and wider["tensor"] <= hardware.node:
        changes.append(dict.fromkeys(["mesh", "generate_mesh"] if generates else ["mesh"], meshes.text(wider)))
    return changes


def peak_of(estimate: Estimate) -> Peak:
    """The peak memory of a rank, and its phase."""
    name = max(estimate.phases, key=lambda n: estimate.phases[n].total)
    return Peak(name, math.ceil(estimate.phases[name].total))


def written_flags(changes: dict[str, Any]) -> str:
    """Flags as a command line writes them."""
    return " ".join(f"--{k}" if v is True else f"--{k}={v}" for k, v in changes.items())


def quoted_flags(changes: Mapping[str, Any]) -> str:
    """Flags as a shell takes them."""
    return " ".join(shlex.quote(written_flags({name: value})) for name, value in changes.items())
