"""A dry run as one JSON object, whose fields docs/dry_run.md lists."""

from __future__ import annotations

from typing import Any

from funrl.cost.rates import communication, hidden, rates_of
from funrl.cost.remedies import Peak, Verdict
from funrl.cost.row_plan import rows_of_step
from funrl.cost.tracing.costs import Costs
from funrl.cost.tracing.estimate import Estimate
from funrl.cost.tracing.hardware import Hardware
from funrl.cost.tracing.turns import EpisodeCost
from funrl.mesh import mesh as meshes
from funrl.trainer.jobs.job import compute_dtype


def as_object(estimate: Estimate, verdict: Verdict, hardware: Hardware) -> dict[str, Any]:
    """The numbers of a dry run; bytes, FLOPs and seconds are of one rank."""
    job = estimate.job
    settings = estimate.job.settings
    rates = rates_of(estimate, hardware)
    return {
        "model": {
            "family": job.model.config.source.family,
            "parameters": estimate.parameters,
            "trained_parameters": estimate.trained,
            "dtype": compute_dtype(settings),
        },
        "hardware": {"name": settings.estimate.hardware, "memory_bytes": hardware.memory, "usable_bytes": verdict.room},
        "devices": rates.devices,
        "mesh": meshes.text(job.sizes),
        "generate_mesh": meshes.text(job.generate_sizes) if "generate" in estimate.phases else None,
        "fsdp": settings.sharding.fsdp,
        "step": {
            "rows": rows_of_step(job),
            "tokens_per_row": estimate.tokens,
            "tokens": rates.tokens,
            "seconds": rates.seconds,
        },
        "run": {
            "steps": rates.steps,
            "hours": rates.hours,
            "tokens_per_second": rates.tokens_per_second,
            "tokens_per_second_per_device": rates.tokens_per_second_per_device,
        },
        "episodes": None if estimate.episodes is None else _episodes(estimate.episodes),
        "phases": {name: _phase(estimate, name, costs, hardware) for name, costs in estimate.phases.items()},
        "fits": verdict.fits,
        "peak": peak_object(verdict.peak),
        "suggestions": [
            {"flags": flags, "peak": peak_object(peak), "seconds": seconds, "fits": fits}
            for flags, peak, seconds, fits in verdict.suggestions
        ],
        "not_counted": list(estimate.left_out),
    }


def _episodes(episodes: EpisodeCost) -> dict[str, Any]:
    """The turns of episodes."""
    return {
        "turns": episodes.turns.replies,
        "turn_tokens": episodes.turns.context,
        "tool_seconds": episodes.turns.seconds,
        "running": episodes.running,
        "unfinished": episodes.open,
        "read_tokens": episodes.read,
        "recomputed_tokens": episodes.recomputed,
        "waited_seconds": episodes.waited,
        "overlapped_seconds": episodes.overlapped,
        "waiting_cache_bytes": episodes.cache,
    }


def peak_object(peak: Peak) -> dict[str, Any]:
    """The peak memory of a rank."""
    return {"phase": peak.phase, "bytes": peak.nbytes}


def _phase(estimate: Estimate, name: str, costs: Costs, hardware: Hardware) -> dict[str, Any]:
    traffic = [
        {
            "axes": estimate.axes[group][0] if group in estimate.axes else group,
            "collective": op,
            "count": count,
            "bytes": nbytes,
        }
        for (op, group), (count, nbytes) in costs.traffic.items()
    ]
    return {
        "peak_bytes": {"total": costs.total} | {kind: nbytes for kind, nbytes in costs.peak.items() if nbytes >= 1},
        "flops": costs.flops,
        "kernel_seconds": costs.seconds,
        "collective_seconds": communication(estimate, costs, hardware),
        "hidden_seconds": hidden(estimate, costs, hardware),
        "useful": estimate.useful.get(name),
        "traffic": traffic,
    }
