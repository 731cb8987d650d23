"""Report of a dry run: tables of memory, work and traffic, and a verdict; or one JSON object."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from funrl.algos.core import Algorithm
from funrl.cost.dry_run import (
    PoolTransfer,
    RankWork,
    plain_job,
    pool_estimate,
    pool_settings,
    pool_transfers,
    tokens_of,
)
from funrl.cost.rows import rows_of_step
from funrl.cost.schedules import (
    Workload,
    busy_cells,
    lengths_of,
    placed_schedules,
    schedules_object,
    schedules_of,
    schedules_text,
    wants_schedules,
)
from funrl.cost.search import (
    PlaceSearch,
    Search,
    place_search,
    reasons_text,
    search,
    spans_text,
    with_groups,
)
from funrl.cost.tracing.costs import MEMORY_KINDS, Costs
from funrl.cost.tracing.estimate import EpisodeCost, Estimate, stage_of
from funrl.cost.tracing.hardware import HARDWARE, USABLE, Hardware
from funrl.cost.verdict import (
    Peak,
    Verdict,
    communication,
    duration_text,
    hidden,
    peak_of,
    quoted_flags,
    rates_of,
    size,
    step_seconds,
    table,
    verdict_of,
    written_flags,
)
from funrl.mesh import mesh as meshes
from funrl.mesh.pools.placement import Placement
from funrl.processes.environment import ranks_of_node
from funrl.trainer.jobs.job import RLJob, compute_dtype
from funrl.trainer.settings.checks import check_settings
from funrl.trainer.settings.settings import Settings, settings_flags, with_flags


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


SHOWN_WAYS = 10  # rows of the table


def search_text(result: Search, line: Sequence[str], report: str) -> str:
    """The answer of a search, its table, and the report of the best split.

    Args:
      line: the command line, the program's name first; empty: unknown.
      report: dry run of the best split.
    """
    head = ("flags", "memory", "fits", "a step", "all steps", "tokens/s", "of a device", "largest in")
    rows = []
    for traced in result.tried[:SHOWN_WAYS]:
        rates = rates_of(traced.estimate, result.hardware)
        rows.append(
            (
                written_flags(traced.flags),
                size(traced.nbytes),
                "yes" if traced.fits else "no",
                duration_text(rates.seconds),
                duration_text(3600 * rates.hours),
                f"{rates.tokens_per_second:,.0f}",
                f"{rates.tokens_per_second_per_device:,.0f}",
                peak_of(traced.estimate).phase + ("" if traced.nodes == 1 else f", {spans_text(traced.nodes)}"),
            )
        )
    lines = table(head, rows)
    if rest := len(result.tried) - len(rows):
        lines.append(f"and {rest} more, which --json lists")
    lines += [f"not {flags}: {reason}" for flags, reason in result.refused.items()]
    lines += [f"no {axis}: {reason}" for axis, reason in result.unused.items()]
    return "\n\n".join([_answer(result, line), "\n".join(lines), report])


def _answer(result: Search, line: Sequence[str]) -> str:
    """The best way in two lines: its command, and what it costs."""
    best = result.tried[0]
    rates = rates_of(best.estimate, result.hardware)
    count = len(result.tried) + len(result.refused)
    if not best.fits:
        verdict = f"nothing fits {result.world} devices; of {count} ways tried this needs the least memory:"
    elif not best.sensible:
        verdict = f"nothing sensible fits {result.world} devices; of {count} ways tried this is the fastest:"
    else:
        verdict = f"the best of {count} ways tried to split the run over {result.world} devices:"
    held = f"{size(best.nbytes)} of a device's {size(result.hardware.memory * USABLE)}"
    time = f"{duration_text(rates.seconds)} a step, {duration_text(3600 * rates.hours)} for --steps={rates.steps}"
    cost = f"{held}, {time}, {rates.tokens_per_second_per_device:,.0f} tokens/s a device"
    lines = [verdict, f"  {command_text(line, best.flags)}", f"  {cost}"]
    if best.nodes > 1:
        lines.append(
            f"  not sensible: {spans_text(best.nodes)} of {result.hardware.node} sends sums over the network in every "
            "layer"
        )
    return "\n".join(lines)


def command_text(line: Sequence[str], flags: dict[str, Any]) -> str:
    """A command line with these flags instead of its own, without those of a dry run.

    Args:
      line: the program's name and its arguments; empty: only the flags are written.
    """
    if not line:
        return quoted_flags(flags)
    replaced = {*flags, "dry_run", *(name for name, flag in settings_flags().items() if flag.requires == "dry_run")}
    names = [argument.removeprefix("--").partition("=")[0].replace("-", "_") for argument in line]
    kept = [argument for name, argument in zip(names[1:], line[1:], strict=True) if name not in replaced]
    return " ".join([line[0], *map(shlex.quote, kept), quoted_flags(flags)])


def search_object(result: Search, verdict: Verdict) -> dict[str, object]:
    """The numbers of a search.

    Args:
      verdict: on the best.
    """
    traced = []
    for split in result.tried:
        rates = rates_of(split.estimate, result.hardware)
        traced.append(
            {
                "flags": split.flags,
                "peak": peak_object(peak_of(split.estimate)),
                "seconds": rates.seconds,
                "hours": rates.hours,
                "tokens_per_second_per_device": rates.tokens_per_second_per_device,
                "fits": split.fits,
                "sensible": split.sensible,
            }
        )
    best = as_object(result.tried[0].estimate, verdict, result.hardware)
    rest = {"traced": traced, "refused": result.refused, "unused_axes": result.unused}
    return {"devices": result.world, "best": best} | rest


def places_text(result: PlaceSearch, line: Sequence[str], report: str) -> str:
    """The answer of a search, its table, and the report of the best placement.

    Args:
      line: the command line, the program's name first; empty: unknown.
      report: dry run of the best placement.
    """
    best = result.candidates[0]
    count = len(result.candidates) + len(result.dropped)
    if best.fits(result.room):
        answer = f"the best of {count} ways to divide {result.world} devices:"
    else:
        answer = f"nothing fits {result.world} devices; of {count} ways to divide them this needs the least memory:"
    head = ("flags", "train holds", "generate holds", "fits", "a step", "trainer busy", "generators busy")
    rows = []
    for candidate in result.candidates:
        cells = (
            written_flags(candidate.flags),
            size(candidate.nbytes),
            size(candidate.peaks["generate"].nbytes) if candidate.peaks else "not traced",
            "yes" if candidate.fits(result.room) else "no",
        )
        rows.append((*cells, *busy_cells(candidate.result)))
    if result.shared is not None:
        rows.append(("all devices shared", "-", "-", "-", duration_text(result.shared), "-", "-"))
    lines = table(head, rows)
    lines += [f"no way to train on {count}: {reason}" for count, reason in result.dropped.items()]
    return "\n\n".join(
        [f"{answer}\n  {command_text(line, best.flags)}\n  {reasons_text(result)}", "\n".join(lines), report]
    )


def places_object(result: PlaceSearch, best: dict[str, object]) -> dict[str, object]:
    """The numbers of a search for a placement.

    Args:
      best: those of the best placement.
    """
    candidates = [
        {
            "flags": candidate.flags,
            "fits": candidate.fits(result.room),
            "train_bytes": candidate.nbytes,
            "peaks": {name: peak_object(peak) for name, peak in candidate.peaks.items()},
            "result": candidate.result._asdict(),
        }
        for candidate in result.candidates
    ]
    rest = {"places": candidates, "shared_seconds": result.shared, "dropped": result.dropped}
    return {"devices": result.world, "best": best} | rest


def placed_report(
    settings: Settings, algorithm: Algorithm, placement: Placement, tokens: int, hardware: Hardware
) -> tuple[str, dict[str, object]]:
    """Tables and a verdict for each pool, what goes between them, and a step; and the numbers.

    Args:
      tokens: of a prompt.

    Raises:
      ValueError: a flag cannot work.
    """
    check_settings(settings)
    parts = [f"place {placement}"]
    numbers: dict[str, object] = {"place": str(placement)}
    seconds = {}
    for name, pool in placement.pools.items():
        own = pool_settings(settings, pool, learns=placement.shards(name))
        work = RankWork(tokens, hardware, name, ("generate", *placement.scoring))
        report, numbers[name], seconds[name] = rank_report(own, algorithm, work)
        parts.append(f"{name}: {report}")
    job = plain_job(pool_settings(settings, placement.train, learns=True), algorithm, hardware.memory)
    assert isinstance(job, RLJob)
    transfers = pool_transfers(job, placement, tokens)
    moved = {transfer.content: transfer.seconds(hardware) for transfer in transfers}
    overlaps = settings.asynchrony.staleness > 0
    parts.append(transfers_text(transfers, hardware))
    if placement.scoring:
        parts.append(f"not counted: rows to the ranks of {', '.join(placement.scoring)}, and what comes back")
    total = placed_seconds(seconds, moved, overlaps)
    each = ", ".join(f"{name} {duration_text(x)}" for name, x in (seconds | moved).items())
    turns = "with both pools at work at the same time" if overlaps else "as the pools take turns"
    parts.append(f"a step takes {duration_text(total)}, {turns}: {each}")
    numbers["transfers"] = [transfer._asdict() for transfer in transfers]
    numbers["step"] = {"seconds": total, **seconds, **moved}
    if wants_schedules(settings):
        lengths = lengths_of(settings, job.sampling.max_new_tokens)
        work = Workload(lengths, tokens, hardware)
        schedules = placed_schedules(settings, placement, algorithm, work, transfers[0].seconds(hardware))
        numbers["schedules"] = schedules_object(schedules)
        parts.append(schedules_text(schedules))
    return "\n\n".join(parts), numbers


def transfers_text(transfers: Sequence[PoolTransfer], hardware: Hardware) -> str:
    """Table of what goes between the pools."""
    rows = [
        (x.content, size(x.sent), size(x.received), str(x.messages), duration_text(x.seconds(hardware), 3))
        for x in transfers
    ]
    head = ("between the pools", "a rank sends", "a rank receives", "messages", "seconds")
    return "\n".join([*table(head, rows), "sent, received, messages: of the rank with the most of each"])


def placed_seconds(pools: dict[str, float], moved: dict[str, float], overlaps: bool) -> float:
    """Seconds of a step, where all rows have full length.

    Args:
      pools: seconds of each pool's work.
      moved: seconds of what goes between them.
      overlaps: whether the pools work at the same time.
    """
    generating = pools["generate"]
    others = sum(pools.values()) - generating
    return (max(generating, others) if overlaps else generating + others) + sum(moved.values())


DEFAULT = "h100"


def dry_run(settings: Settings, compose: Callable[[], Algorithm], line: Sequence[str] = ()) -> str:
    """Everything that --dry_run prints.

    Args:
      line: the command line, the program's name first; a search repeats it with the chosen flags.

    Raises:
      ValueError: a flag cannot work, with the same message as in a run.
    """
    text, numbers = _reported(settings, compose, line)
    return json.dumps(numbers, indent=1) if settings.estimate.json else text


def _reported(
    settings: Settings, compose: Callable[[], Algorithm], line: Sequence[str]
) -> tuple[str, dict[str, object]]:
    """The report as text, and its numbers; the arguments are those of `dry_run`."""
    settings = with_flags(settings, hardware=settings.estimate.hardware or DEFAULT)
    hardware = HARDWARE[str(settings.estimate.hardware)]
    hardware = hardware._replace(node=ranks_of_node() or hardware.node)  # the dry run may be made on another machine
    if settings.devices.generators is not None:
        return _ray_report(settings, compose, meshes.text(settings.devices.generators.sizes))
    algorithm = compose()
    tokens = tokens_of(settings, algorithm)
    work = RankWork(tokens, hardware)
    wanted = settings.devices.train.wanted

    if settings.devices.place is not None and wanted is not None:
        check_settings(settings)
        result = place_search(settings, algorithm, hardware)
        best, numbers = _reported(with_flags(settings, **result.candidates[0].flags), lambda: algorithm, ())
        return places_text(result, line, best), places_object(result, numbers)
    if (placement := settings.devices.placement) is not None:
        return placed_report(settings, algorithm, placement, tokens, hardware)
    if wanted is not None:
        ways = search(settings, algorithm, hardware)
        split = ways.tried[0]
        outcome = verdict_of(split.estimate, split.settings, hardware, lambda x: pool_estimate(x, algorithm, work))
        text = search_text(ways, line, tables(split.estimate, split.settings, outcome, work))
        return text, search_object(ways, outcome)
    settings, note = with_groups(settings, lambda: algorithm, hardware, hardware.node)
    text, numbers, _ = rank_report(settings, algorithm, work)
    if wants_schedules(settings):
        schedules = schedules_of(settings, algorithm, hardware, tokens)
        numbers["schedules"] = schedules_object(schedules)
        text += f"\n\n{schedules_text(schedules)}"
    return text if note is None else f"{note}\n\n{text}", numbers


def _ray_report(settings: Settings, compose: Callable[[], Algorithm], generator: str) -> tuple[str, dict[str, object]]:
    """Dry run of trainer ranks, and of one generator on Ray that writes all rows.

    Args:
      generator: mesh of it.

    Raises:
      ValueError: a flag cannot work.
    """
    check_settings(settings)
    place = f"train:{meshes.text(settings.devices.train.chosen)} generate:{generator}"
    text, numbers = _reported(with_flags(settings, place=place, mesh="dp1"), compose, ())
    note = f"--place={settings.devices.place}: with one generator, which writes all rows"
    return f"{note}; n of them take an n-th of its time\n\n{text}", numbers | {"place": settings.devices.place}


def rank_report(settings: Settings, algorithm: Algorithm, work: RankWork) -> tuple[str, dict[str, object], float]:
    """Tables and verdict of a rank, its numbers, and the seconds of a step.

    Raises:
      ValueError: a flag cannot work.
    """
    hardware = work.hardware
    estimate = pool_estimate(settings, algorithm, work)
    outcome = verdict_of(estimate, settings, hardware, lambda changed: pool_estimate(changed, algorithm, work))
    text = tables(estimate, settings, outcome, work)
    return text, as_object(estimate, outcome, hardware), step_seconds(estimate, hardware)


def tables(estimate: Estimate, settings: Settings, outcome: Verdict, work: RankWork) -> str:
    """Tables of an estimate, and the verdict on it."""
    hardware = work.hardware
    parts = [title(estimate, settings), memory(estimate), seconds_table(estimate, hardware)]
    if estimate.episodes is not None:
        parts.append(turns(estimate.episodes))
    if not work.pool:
        parts.append(rate(estimate, hardware))
    parts += [traffic(estimate), verdict(outcome, hardware), f"not counted: {', '.join(estimate.left_out)}"]
    return "\n\n".join(parts)


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


def seconds_table(estimate: Estimate, hardware: Hardware) -> str:
    """FLOPs and seconds of each phase."""
    rows = []
    whole = [0.0, 0.0, 0.0, 0.0]
    for name, costs in estimate.phases.items():
        sent = communication(estimate, costs, hardware)
        spent = (costs.flops, costs.seconds, sent, hidden(estimate, costs, hardware))
        whole = [a + b for a, b in zip(whole, spent, strict=True)]
        useful = f"{100 * estimate.useful[name]:.1f}%" if name in estimate.useful else "-"
        rows.append((name, *_spent(*spent), useful))
    shares = hardware.efficiency
    notes = [
        f"products at {shares.product:.0%} of peak FLOPs, attention at {shares.attention:.0%} and "
        f"{shares.attention_backward:.0%}, grouped products at {shares.grouped:.0%} and {shares.grouped_backward:.0%}; "
        f"memory at {shares.memory:.0%} of its bandwidth, collectives at {shares.message:.0%}"
    ]
    if estimate.useful:
        notes.append("useful: of the FLOPs of all ranks, where each waits for the slowest at every micro-batch")
    head = ("a step of a rank", "FLOPs", "kernels", "collectives", "hidden", "seconds", "useful")
    return "\n".join([*table(head, [*rows, ("all", *_spent(*whole), "")]), *notes])


def _spent(flops: float, kernels: float, collectives: float, behind: float) -> tuple[str, ...]:
    times = (kernels, collectives, behind, kernels + collectives - behind)
    return (f"{flops:.3g}", *(duration_text(seconds, 3) if seconds else "-" for seconds in times))


def turns(episodes: EpisodeCost) -> str:
    """Turns of the episodes of a rank of the engine, and what they wait for."""
    replies, context, seconds, waits = episodes.turns
    lines = [
        f"an episode: {replies} replies, {context} tokens before each but the first, {episodes.tokens:,} tokens in all",
        f"an engine reads {episodes.read:,} tokens of later turns; of {episodes.open:,} unfinished episodes "
        f"{episodes.running:,} generate at a time; pages of those that wait: {size(episodes.cache)}",
    ]
    if seconds:
        waited = f"{duration_text(episodes.waited)} of a step are waited for"
        overlapped = f"{duration_text(episodes.overlapped)} overlap with generation"
        of_trace = f", and {duration_text(waits[-1])} in the longest of {len(waits):,} episodes" if waits else ""
        taken = f"environments take {duration_text(seconds)} before each later reply{of_trace}"
        lines.append(f"{taken}: {waited}, {overlapped}")
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
