"""Report of a dry run: tables of memory, work and traffic, and a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from funrl.algos.core import Algorithm
from funrl.cost.dry_run import plain_job, tokens_of
from funrl.cost.placement.place_search import place_search
from funrl.cost.placement.pool_estimates import pool_estimate
from funrl.cost.placement.pool_settings import pool_settings
from funrl.cost.placement.transfers import pool_transfers
from funrl.cost.rates import communication, hidden, rates_of
from funrl.cost.remedies import Verdict, verdict_of, written_flags
from funrl.cost.reports.dry_json import as_object
from funrl.cost.reports.places_report import places_json, places_text
from funrl.cost.reports.pools_report import PlacedRun, pools_report
from funrl.cost.reports.schedule_report import (
    placed_schedules,
    schedules_object,
    schedules_of,
    schedules_text,
    wants_schedules,
)
from funrl.cost.reports.search_needs import needs_of
from funrl.cost.reports.search_report import search_json, search_text
from funrl.cost.schedules.splits import Workload, lengths_of
from funrl.cost.search.mesh_search import Traced, search
from funrl.cost.search.node_groups import with_groups
from funrl.cost.tables import duration_text, size, table
from funrl.cost.tracing.costs import MEMORY_KINDS
from funrl.cost.tracing.estimate import Estimate, stage_of
from funrl.cost.tracing.hardware import HARDWARE, Hardware
from funrl.cost.tracing.turns import EpisodeCost
from funrl.mesh import mesh as meshes
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.mesh.pools.placement import Placement
from funrl.processes.environment import ranks_of_node
from funrl.trainer.jobs.job import RLJob, compute_dtype
from funrl.trainer.settings.checks import check_settings
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import scorers_of
from funrl.trainer.settings.settings import Settings, with_flags

DEFAULT = "h100"
ONE_GENERATOR = "generate:1"  # in place of generators that join


def dry_run(settings: Settings, compose: Callable[[], Algorithm], line: Sequence[str] = ()) -> str:
    """Everything that --dry_run prints.

    Args:
      line: the command line, the program's name first; a search repeats it with the chosen flags.

    Raises:
      ValueError: a flag cannot work, with the same message as in a run.
    """
    settings = with_flags(settings, hardware=settings.estimate.hardware or DEFAULT)
    if settings.devices.joined:
        return joined_report(settings, compose)
    algorithm = compose()
    tokens = tokens_of(settings, algorithm)
    placed = settings.devices.placement
    apart = () if placed is None else tuple(placed.scoring)

    def costs(settings: Settings, hardware: Hardware, pool: str = "") -> Estimate:
        return pool_estimate(settings, algorithm, tokens, hardware, pool, apart)

    if settings.devices.place is not None and settings.devices.train.wanted is not None:
        check_settings(settings)
        result = place_search(settings, algorithm, HARDWARE[str(settings.estimate.hardware)])
        chosen = with_flags(settings, **result.candidates[0].flags)
        best = dry_run(chosen, lambda: algorithm)
        return places_json(result, best) if settings.estimate.json else places_text(result, line, best)
    if (placement := settings.devices.placement) is not None:
        check_settings(settings)
        hardware = HARDWARE[str(settings.estimate.hardware)]
        run = placed_run(settings, placement, algorithm, hardware, tokens)
        return pools_report(settings, run, costs, described_pool, hardware)
    if settings.devices.train.wanted is not None:
        return searched(settings, algorithm, costs, line)
    node = ranks_of_node() or RANKS_PER_NODE  # the dry run may be made on another machine
    settings, note = with_groups(settings, lambda: algorithm, HARDWARE[str(settings.estimate.hardware)], node)
    text = report(settings, costs, tokens)
    if wants_schedules(settings):
        schedules = schedules_of(settings, algorithm, HARDWARE[str(settings.estimate.hardware)], tokens)
        if settings.estimate.json:
            return json.dumps(json.loads(text) | {"schedules": schedules_object(schedules)}, indent=1)
        text += f"\n\n{schedules_text(schedules)}"
    return text if note is None or settings.estimate.json else f"{note}\n\n{text}"


def joined_report(settings: Settings, compose: Callable[[], Algorithm]) -> str:
    """Dry run of trainer ranks, and of one generator that joins them and writes all rows.

    Raises:
      ValueError: a flag cannot work.
    """
    check_settings(settings)
    if scorers := scorers_of(settings):
        raise SettingsError(
            f"--dry_run with --place={settings.devices.place}: models that reward on the trainer ranks are not "
            f"estimated beside generators that join; leave --{scorers[0]} out"
        )
    place = f"train:{meshes.text(settings.devices.train.chosen)} {ONE_GENERATOR}"
    text = dry_run(with_flags(settings, place=place, mesh="dp1"), compose)
    if settings.estimate.json:
        return json.dumps(json.loads(text) | {"place": settings.devices.place}, indent=1)
    note = f"--place={settings.devices.place}: with one generator on dp1, which pulls weights and writes all rows"
    return f"{note}; n of them take an n-th of its time\n\n{text}"


def placed_run(
    settings: Settings, placement: Placement, algorithm: Algorithm, hardware: Hardware, tokens: int
) -> PlacedRun:
    """Transfers between the pools of a run, and its schedules where they are asked for.

    Raises:
      ValueError: a flag cannot work.
    """
    job = plain_job(pool_settings(settings, placement.train, learns=True), algorithm, hardware.memory)
    assert isinstance(job, RLJob)
    transfers = pool_transfers(job, placement, tokens)
    if not wants_schedules(settings):
        return PlacedRun(placement, transfers)
    work = Workload(lengths_of(settings, job.sampling.max_new_tokens), tokens, hardware)
    seconds = transfers[0].seconds(hardware)
    return PlacedRun(placement, transfers, placed_schedules(settings, placement, algorithm, work, seconds))


def searched(
    settings: Settings, algorithm: Algorithm, costs: Callable[[Settings, Hardware], Estimate], line: Sequence[str]
) -> str:
    """The answer and tables of a search for --mesh=auto:N, or with --json one object.

    Args:
      line: as in `dry_run`.
    """
    hardware = HARDWARE[str(settings.estimate.hardware)]
    result = search(settings, algorithm, hardware)
    best = result.best[0]
    fits = verdict_of(best.estimate, best.settings, hardware, lambda settings: costs(settings, hardware))
    needed = needs_of(settings, algorithm, result, fits)
    if settings.estimate.json:
        return search_json(result, needed, fits)

    def describe(traced: Traced) -> str:
        parts = [title(traced.estimate, traced.settings), rate(traced.estimate, hardware), verdict(fits, hardware)]
        return "\n".join([*parts, f"not counted: {', '.join(traced.estimate.left_out)}"])

    return search_text(result, line, needed, describe)


def report(settings: Settings, costs: Callable[[Any, Hardware], Estimate], tokens: int) -> str:
    """Tables and verdict, or with --json one object.

    Args:
      settings: the flags.
      costs: estimates settings.
      tokens: of a prompt or text.
    """
    hardware = HARDWARE[str(settings.estimate.hardware or DEFAULT)]
    estimate = costs(settings, hardware)
    fits = verdict_of(estimate, settings, hardware, lambda settings: costs(settings, hardware))
    if settings.estimate.json:
        return json.dumps(as_object(estimate, fits, hardware), indent=1)
    parts = [
        title(estimate, settings),
        memory(estimate),
        work(estimate, hardware),
        *([turns(estimate.episodes)] if estimate.episodes else []),
        rate(estimate, hardware),
        traffic(estimate),
    ]
    return "\n\n".join([*parts, verdict(fits, hardware), f"not counted: {', '.join(estimate.left_out)}"])


def described_pool(estimate: Estimate, settings: Settings, fits: Verdict, hardware: Hardware) -> str:
    """Tables and verdict of the ranks of a pool."""
    tables = [memory(estimate), work(estimate, hardware), traffic(estimate), verdict(fits, hardware)]
    return "\n\n".join([title(estimate, settings), *tables, f"not counted: {', '.join(estimate.left_out)}"])


def title(estimate: Estimate, settings: Settings) -> str:
    """First lines of a report: the model, the meshes and the step."""
    job = estimate.job
    train = meshes.text(job.sizes) + (" fully sharded" if settings.sharding.fsdp else "")
    if settings.sharding.fsdp_models is not None:
        train += f" ({settings.sharding.fsdp_models})"
    generate = f", generate {meshes.text(job.generate_sizes)}" if "generate" in estimate.phases else ""
    world = meshes.Mesh(job.sizes).world
    rank = settings.adapters.lora_rank
    learns = estimate.trained < estimate.parameters
    trained = f", of which {estimate.trained / 1e6:,.1f} M are trained (rank {rank})" if learns else ""
    return (
        f"{job.model.config.source.family}, {estimate.parameters / 1e6:,.1f} M parameters{trained}, "
        f"{compute_dtype(settings)}, {world} device{'s' * (world > 1)} ({settings.estimate.hardware}): "
        f"train {train}{generate}\n"
        f"a step: {estimate.step}"
    )


def memory(estimate: Estimate) -> str:
    """Peak memory of each phase by kind, on the rank that holds most."""
    kinds = [k for k in MEMORY_KINDS if any(c.peak.get(k, 0) >= 1 for c in estimate.phases.values())]
    rows = [
        (name, size(c.total), *(size(c.peak.get(k, 0)) if c.peak.get(k, 0) >= 1 else "-" for k in kinds))
        for name, c in estimate.phases.items()
    ]
    return "\n".join(table(("peak memory of a rank", "total", *kinds), rows))


def work(estimate: Estimate, hardware: Hardware) -> str:
    """FLOPs and seconds of each phase."""
    rows = []
    whole = [0.0, 0.0, 0.0, 0.0]
    for name, costs in estimate.phases.items():
        sent = communication(estimate, costs, hardware)
        spent = (costs.flops, costs.seconds, sent, hidden(estimate, costs, hardware))
        whole = [a + b for a, b in zip(whole, spent, strict=True)]
        useful = f"{100 * estimate.useful[name]:.1f}%" if name in estimate.useful else "-"
        rows.append((name, *_spent(*spent), useful))
    of_peak, of_bandwidth = hardware.efficiency
    notes = [f"at {of_peak:.0%} of peak FLOPs and {of_bandwidth:.0%} of every bandwidth"]
    if estimate.useful:
        notes.append("useful: of the FLOPs of all ranks, where each waits for the slowest at every micro-batch")
    head = ("a step of a rank", "FLOPs", "kernels", "collectives", "hidden", "seconds", "useful")
    return "\n".join([*table(head, [*rows, ("all", *_spent(*whole), "")]), *notes])


def _spent(flops: float, kernels: float, collectives: float, behind: float) -> tuple[str, ...]:
    times = (kernels, collectives, behind, kernels + collectives - behind)
    return (f"{flops:.3g}", *(duration_text(seconds, 3) if seconds else "-" for seconds in times))


def turns(episodes: EpisodeCost) -> str:
    """Turns of the episodes of a rank of the engine, and what they wait for."""
    replies, context, seconds = episodes.turns
    lines = [
        f"an episode: {replies} replies, {context} tokens before each but the first, {episodes.tokens:,} tokens in all",
        f"an engine reads {episodes.read:,} tokens of later turns; of {episodes.open:,} unfinished episodes "
        f"{episodes.running:,} generate at a time; pages of those that wait: {size(episodes.cache)}",
    ]
    if seconds:
        waited = f"{duration_text(episodes.waited)} of a step are waited for"
        overlapped = f"{duration_text(episodes.overlapped)} overlap with generation"
        lines.append(f"environments take {duration_text(seconds)} before each later reply: {waited}, {overlapped}")
    if episodes.recomputed:
        lines.append(f"{episodes.recomputed:,} tokens are computed again, as not all pages stay")
    return "\n".join(lines)


def traffic(estimate: Estimate) -> str:
    """Bytes by mesh axes and collective, of one step and one rank."""
    stages: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name, costs in estimate.phases.items():
        for (op, group), (count, nbytes) in costs.traffic.items():
            axes = estimate.axes[group][0] if group in estimate.axes else group
            total = stages.setdefault((axes, op), {}).setdefault(stage_of(name), [0.0, 0.0])
            total[0] += count
            total[1] += nbytes
    columns = list(dict.fromkeys(map(stage_of, estimate.phases)))
    rows = []
    for (axes, op), of in sorted(stages.items()):
        cells = [f"{of[c][0]:,.0f} x {size(of[c][1] / of[c][0])}" if c in of else "-" for c in columns]
        rows.append((axes, op, *cells, size(sum(nbytes for _, nbytes in of.values()))))
    if not rows:
        return "nothing is sent"
    return "\n".join(table(("mesh axes", "collective", *columns, "bytes of a rank"), rows))


def rate(estimate: Estimate, hardware: Hardware) -> str:
    """Hours of the run and tokens a second."""
    rates = rates_of(estimate, hardware)
    devices = f", {rates.tokens_per_second_per_device:,.0f} of each device" if rates.devices > 1 else ""
    return (
        f"a step takes {duration_text(rates.seconds)}, --steps={rates.steps} take {duration_text(3600 * rates.hours)}: "
        f"{rates.tokens_per_second:,.0f} tokens a second{devices}"
    )


def verdict(outcome: Verdict, hardware: Hardware) -> str:
    """The verdict in words: the job fits, or which flags help, and what they cost."""
    ratio = f"{size(outcome.peak.nbytes)} of the {size(outcome.room)} that can be used of {size(hardware.memory)}"
    if outcome.fits:
        return f"fits: the most that a rank holds, in {outcome.peak.phase}, is {ratio}"
    lines = [f"does not fit: a rank needs {ratio}, in {outcome.peak.phase}; too large: {', '.join(outcome.too_large)}"]
    for flags, peak, seconds, fits in outcome.suggestions:
        more = seconds / outcome.seconds - 1 if outcome.seconds else 0.0
        compared = f", {abs(more):.0%} {'longer' if more > 0 else 'shorter'}" if abs(more) >= 0.005 else ""
        fitting = " (fits)" if fits else ""
        reached = f"{size(peak.nbytes)}, in {peak.phase}{fitting}; a step takes {duration_text(seconds)}{compared}"
        lines.append(f"  with {written_flags(flags)}: {reached}")
    return "\n".join(lines)
