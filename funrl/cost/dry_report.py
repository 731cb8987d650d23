"""Report of a dry run: tables of memory, work and traffic, and a verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from funrl.algos.core import Algorithm
from funrl.cost.costs import MEMORY_KINDS, UPDATES, Costs
from funrl.cost.dry_run import estimate, plain_job, tokens_of
from funrl.cost.estimate import MOVE, RESHARD, Estimate, stage_of
from funrl.cost.hardware import HARDWARE, USABLE, Hardware, collective_seconds, message_seconds
from funrl.mesh import mesh as meshes
from funrl.mesh.explain import size, table
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.trainer.offload import PARTS
from funrl.trainer.settings import Settings, scoring_budget
from funrl.trainer.sharding import sharded_roles

DEFAULT = "h100"
ATTEMPTS = 3  # estimates of other flags where it does not fit


def dry_run(settings: Settings, compose: Callable[[], Algorithm]) -> str:
    """Everything that --dry_run prints.

    Raises:
      ValueError: a flag that cannot work, as a run would say it.
    """
    algorithm = compose()
    tokens = tokens_of(settings, algorithm)

    def costs(settings: Settings, hardware: Hardware) -> Estimate:
        return estimate(plain_job(settings, algorithm, hardware.memory), tokens, hardware)

    return report(settings, costs)


def report(settings: Settings, costs: Callable[[Any, Hardware], Estimate]) -> str:
    """Tables and verdict.

    Args:
      settings: the flags.
      costs: estimates such flags.
    """
    settings = dataclasses.replace(settings, hardware=settings.hardware or DEFAULT)
    hardware = HARDWARE[str(settings.hardware)]
    found = costs(settings, hardware)
    parts = [title(found, settings), memory(found), work(found, hardware), traffic(found)]
    parts.append(verdict(found, settings, hardware, lambda settings: costs(settings, hardware)))
    return "\n\n".join([*parts, f"not counted: {', '.join(found.left_out)}"])


def title(found: Estimate, settings: Settings) -> str:
    job = found.job
    train = meshes.text(job.sizes) + (" fully sharded" if settings.fsdp else "")
    if settings.fsdp_models is not None:
        train += f" ({settings.fsdp_models})"
    generate = f", generate {meshes.text(job.generate_sizes)}" if "generate" in found.phases else ""
    world = meshes.Mesh(job.sizes).world
    trained = "" if job.lora is None else f", of which {found.trained / 1e6:,.1f} M learn (rank {job.lora.rank})"
    return (
        f"{job.model.config.family}, {found.parameters / 1e6:,.1f} M parameters{trained}, {settings.dtype}, "
        f"{world} device{'s' * (world > 1)} ({settings.hardware}): train {train}{generate}\n"
        f"a step: {found.step}"
    )


def memory(found: Estimate) -> str:
    """The worst moment of each phase by kind, on the rank that holds most."""
    kinds = [k for k in MEMORY_KINDS if any(c.peak.get(k, 0) >= 1 for c in found.phases.values())]
    rows = [
        (name, size(c.total), *(size(c.peak.get(k, 0)) if c.peak.get(k, 0) >= 1 else "-" for k in kinds))
        for name, c in found.phases.items()
    ]
    return "\n".join(table(("peak memory of a rank", "total", *kinds), rows))


def work(found: Estimate, hardware: Hardware) -> str:
    """FLOPs and seconds of each phase."""
    rows, whole = [], [0.0, 0.0, 0.0]
    for name, costs in found.phases.items():
        spent = (costs.flops, costs.seconds, communication(found, costs, hardware))
        whole = [a + b for a, b in zip(whole, spent, strict=True)]
        useful = f"{100 * found.useful[name]:.1f}%" if name in found.useful else "-"
        rows.append((name, *_spent(*spent), useful))
    of_peak, of_bandwidth = hardware.efficiency
    notes = [f"at {of_peak:.0%} of peak FLOPs and {of_bandwidth:.0%} of every bandwidth, collectives not hidden"]
    if found.useful:
        notes.append("useful: of the FLOPs of all ranks, where each waits for the slowest at every micro-batch")
    head = ("a step of a rank", "FLOPs", "kernels", "collectives", "seconds", "useful")
    return "\n".join([*table(head, [*rows, ("all", *_spent(*whole), "")]), *notes])


def _spent(flops: float, kernels: float, collectives: float) -> tuple[str, ...]:
    return (f"{flops:.3g}", f"{kernels:.3g} s", f"{collectives:.3g} s", f"{kernels + collectives:.3g}")


def communication(found: Estimate, costs: Costs, hardware: Hardware) -> float:
    """Seconds of all collectives of a phase, one after the other."""
    seconds = 0.0
    for (op, group), (count, nbytes) in costs.traffic.items():
        if op == RESHARD:
            seconds += message_seconds(hardware, count, nbytes, near=False)
            continue
        _, axes, sizes = found.axes[group]
        ranks = meshes.members(sizes, axes)[0]
        near = len({rank // RANKS_PER_NODE for rank in ranks}) == 1
        if op == MOVE:
            seconds += message_seconds(hardware, count, nbytes, near)
        else:
            seconds += collective_seconds(hardware, op, count, nbytes, len(ranks), near)
    return seconds


def traffic(found: Estimate) -> str:
    """Bytes by mesh axes and collective, of one step and one rank."""
    stages: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name, costs in found.phases.items():
        for (op, group), (count, nbytes) in costs.traffic.items():
            axes = found.axes[group][0] if group in found.axes else group
            total = stages.setdefault((axes, op), {}).setdefault(stage_of(name), [0.0, 0.0])
            total[0] += count
            total[1] += nbytes
    columns = list(dict.fromkeys(map(stage_of, found.phases)))
    rows = []
    for (axes, op), of in sorted(stages.items()):
        cells = [f"{of[c][0]:,.0f} x {size(of[c][1] / of[c][0])}" if c in of else "-" for c in columns]
        rows.append((axes, op, *cells, size(sum(nbytes for _, nbytes in of.values()))))
    if not rows:
        return "nothing is sent"
    return "\n".join(table(("mesh axes", "collective", *columns, "bytes of a rank"), rows))


def verdict(found: Estimate, settings: Settings, hardware: Hardware, costs: Callable[[Settings], Estimate]) -> str:
    """The verdict: the job fits, or flags that reduce its memory, added one after the other until it does.

    Args:
      costs: estimates other settings.
    """
    room = hardware.memory * USABLE
    name, most = _worst(found)
    ratio = f"{size(most)} of the {size(room)} that can be used of {size(hardware.memory)}"
    if most <= room:
        return f"fits: the most that a rank holds, in {name}, is {ratio}"
    over = [n for n, c in found.phases.items() if c.total > room]
    lines = [f"does not fit: a rank needs {ratio}, in {name}; too large: {', '.join(over)}"]
    together: dict[str, Any] = {}
    for changes in remedies(found, settings, hardware, name)[:ATTEMPTS]:
        together |= changes
        try:
            name, most = _worst(costs(dataclasses.replace(settings, **together)))
        except ValueError:  # a mesh, say, that the model's heads do not divide over
            together = {k: v for k, v in together.items() if k not in changes}
            continue
        flags = " ".join(f"--{k}" if v is True else f"--{k}={v}" for k, v in together.items())
        lines.append(f"  with {flags}: {size(most)}, in {name}" + (" (fits)" if most <= room else ""))
        if most <= room:
            break
    return "\n".join(lines)


def remedies(found: Estimate, settings: Settings, hardware: Hardware, worst: str) -> list[dict[str, Any]]:
    """Changes of flags that may help the worst phase, most promising first."""
    peak, sizes, config = found.phases[worst].peak, found.job.sizes, found.job.model.config
    states = sum(peak.get(k, 0) for k in ("weights", "optimizer", "gradients", "staging"))
    passing = sum(peak.get(k, 0) for k in ("activations", "logits"))
    total, changes = sum(peak.values()), []
    if not settings.fsdp and sizes["data"] > 1 and states > 0.2 * total:
        changes.append({"fsdp": True})
    if settings.fsdp and not set(found.roles) <= set(sharded_roles(settings)) and states > 0.2 * total:
        changes.append({"fsdp_models": ",".join(found.roles)})
    if settings.remat == "none" and worst.startswith(UPDATES) and passing > 0.2 * total:
        changes.append({"remat": "full"})
    budgets = {"score_token_budget": scoring_budget(settings), "token_budget": settings.token_budget}
    flag = {"score": "score_token_budget", "update": "token_budget"}.get(stage_of(worst))
    if flag is not None and passing > 0.2 * total and budgets[flag] > found.tokens:
        changes.append({flag: max(found.tokens, budgets[flag] // 4)})
    if peak.get("cache", 0) > 0.2 * total and settings.samples_per_prompt > 2:
        changes.append({"samples_per_prompt": settings.samples_per_prompt // 2})
    generates = "generate" in found.phases
    if generates and hardware.accelerator and settings.offload is None and states > 0.2 * total:
        changes.append({"offload": ",".join(PARTS)})
    wider = sizes | {"tensor": 2 * sizes["tensor"], "data": sizes["data"] // 2}
    if sizes["data"] % 2 == 0 and config.heads % wider["tensor"] == 0 and wider["tensor"] <= RANKS_PER_NODE:
        changes.append(dict.fromkeys(["mesh", "generate_mesh"] if generates else ["mesh"], meshes.text(wider)))
    return changes


def _worst(found: Estimate) -> tuple[str, float]:
    name = max(found.phases, key=lambda n: found.phases[n].total)
    return name, math.ceil(found.phases[name].total)
