"""Remedies if a search has no sensible mesh for a run: devices, dtype, offloading, another trainer."""

from __future__ import annotations

from funrl.algos.core import Algorithm
from funrl.cost.dry_run import estimate, plain_job, tokens_of
from funrl.cost.remedies import Verdict, peak_of, written_flags
from funrl.cost.search.mesh_search import Ranked, Search, ranked_splits, split_flags
from funrl.cost.search.split_variants import Candidate, engine_bytes_of_node, engine_fits_node
from funrl.cost.tables import size
from funrl.cost.tracing.hardware import HARDWARE, USABLE
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.trainer.jobs.job import RLJob, compute_dtype
from funrl.trainer.offload import PARTS
from funrl.trainer.settings.settings import Settings, with_flags

MORE = (2, 4, 8)  # multiples of the number of devices to try


def needs_of(settings: Settings, algorithm: Algorithm, result: Search, verdict: Verdict) -> tuple[str, ...]:
    """Lines on what would make a sensible mesh fit; empty if one fits already.

    Args:
      settings: the flags of the search.
      verdict: on the best mesh.
    """
    if result.best[0].sensible:
        return ()
    ranked = result.ranked
    lines = [_engine(ranked), _devices(settings, algorithm, result, ranked)]
    lines += [_dtype(settings, algorithm, result), _hardware(settings, algorithm, result)]
    lines += [*_other_flags(verdict), _pipeline(ranked)]
    if result.best[0].fits:  # otherwise the verdict has tried it
        lines.insert(-1, _offload(settings, algorithm, result))
    return tuple(line for line in lines if line)


def sensible_fit(ranked: Ranked, room: float) -> Candidate | None:
    """The fastest candidate by formula that fits, and whose tensor parallel groups stay inside a node."""
    fitting = [
        candidate
        for candidates in ranked.splits
        for candidate in candidates
        if candidate.nodes == 1 and candidate.rough.nbytes <= room
    ]
    return min(fitting, key=lambda candidate: candidate.rough.seconds, default=None)


def leanest(ranked: Ranked) -> Candidate | None:
    """The candidate with the least memory by formula whose tensor parallel groups stay inside a node."""
    inside = [candidate for candidates in ranked.splits for candidate in candidates if candidate.nodes == 1]
    return min(inside, key=lambda candidate: candidate.rough.nbytes, default=None)


def _engine(ranked: Ranked) -> str:
    space = ranked.space
    if not isinstance(space.base, RLJob) or engine_fits_node(space):
        return ""
    routers = space.base.models[space.base.main_role].abilities.routers
    split = "experts too are split over tp only there; " if routers else ""
    return (
        f"the engine's weights take {size(engine_bytes_of_node(space))} a device with tp{RANKS_PER_NODE}, more than "
        f"its {size(space.room)}: {split}more devices do not help"
    )


def _devices(settings: Settings, algorithm: Algorithm, result: Search, ranked: Ranked) -> str:
    if isinstance(ranked.space.base, RLJob) and not engine_fits_node(ranked.space):
        return ""
    room = ranked.space.room
    for world in (result.world * times for times in MORE):
        wider = ranked_splits(settings, algorithm, world, result.hardware)
        fit = sensible_fit(wider, room)
        if fit is not None:
            return f"more devices: {world:,} with {_candidate(fit, settings)}"
    least = leanest(wider)
    held = "" if least is None else f"; the best mesh needs {size(least.rough.nbytes)}"
    return f"more devices alone do not help: {result.world * MORE[-1]:,} are not enough{held}"


def _dtype(settings: Settings, algorithm: Algorithm, result: Search) -> str:
    if compute_dtype(settings) == "bfloat16":
        return ""
    changed = with_flags(settings, dtype="bfloat16")
    fit = sensible_fit(
        ranked_splits(changed, algorithm, result.world, result.hardware), result.hardware.memory * USABLE
    )
    return "" if fit is None else f"another dtype: --dtype=bfloat16 with {_candidate(fit, settings)}"


def _hardware(settings: Settings, algorithm: Algorithm, result: Search) -> str:
    same = [(device.memory, name) for name, device in HARDWARE.items() if device.tpu == result.hardware.tpu]
    larger = [(memory, name) for memory, name in same if memory > result.hardware.memory]
    for memory, name in sorted(larger):
        fit = sensible_fit(ranked_splits(settings, algorithm, result.world, HARDWARE[name]), memory * USABLE)
        if fit is not None:
            return f"larger devices: --hardware={name} ({size(memory)}) with {_candidate(fit, settings)}"
    return ""


def _other_flags(verdict: Verdict) -> list[str]:
    """Flags that the verdict has tried, each on top of the earlier ones."""
    lines = []
    for flags, peak, _, fits in verdict.suggestions:
        kind = "offloading" if "offload" in flags else "other flags"
        enough = "fits" if fits else "is not enough"
        lines.append(f"{kind}: {written_flags(flags)} with the mesh above needs {size(peak.nbytes)}, which {enough}")
    return [line for suggestion, line in zip(verdict.suggestions, lines, strict=True) if "mesh" not in suggestion.flags]


def _offload(settings: Settings, algorithm: Algorithm, result: Search) -> str:
    """Memory of the leanest mesh with --offload, traced."""
    ranked = result.ranked
    hardware = result.hardware
    least = leanest(ranked)
    if (
        least is None
        or not isinstance(ranked.space.base, RLJob)
        or not hardware.accelerator
        or settings.devices.offload is not None
    ):
        return ""
    if not engine_fits_node(ranked.space):
        return ""
    changed = with_flags(least.settings, offload=",".join(PARTS))
    try:
        job = plain_job(changed, algorithm, hardware.memory)
        peak = peak_of(estimate(job, tokens_of(changed, algorithm), hardware))
    except ValueError:
        return ""
    enough = "fits" if peak.nbytes <= ranked.space.room else "is not enough"
    flags = written_flags(split_flags(changed, settings) | {"offload": changed.devices.offload})
    return f"offloading: {flags} needs {size(peak.nbytes)}, in {peak.phase}, which {enough}"


def _pipeline(ranked: Ranked) -> str:
    model = ranked.space.base.model
    inside = f"tp inside a node and its {model.config.layers} layers over nodes"
    return f"pipeline parallelism ({inside}), which funrl does not have"


def _candidate(candidate: Candidate, given: Settings) -> str:
    flags = written_flags(split_flags(candidate.settings, given))
    return f"{flags} needs about {size(candidate.rough.nbytes)}, by formula"
