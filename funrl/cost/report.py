"""Report of a dry run: tables of memory, work and traffic, and a verdict; or one JSON object."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    Schedules,
    Workload,
    lengths_of,
    placed_schedules,
    schedules_object,
    schedules_of,
    schedules_text,
    wants_schedules,
)
from funrl.cost.search import (
    PlacedCandidate,
    PlaceSearch,
    Search,
    Traced,
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
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.mesh.pools.placement import Placement
from funrl.processes.environment import ranks_of_node
from funrl.trainer.jobs.job import RLJob, compute_dtype
from funrl.trainer.settings.checks import check_settings
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import scorers_of
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


def search_text(result: Search, line: Sequence[str], describe: Callable[[Traced], str]) -> str:
    """The answer of a search, then its tables.

    Args:
      line: the command line, the program's name first; empty: unknown.
      describe: describes the best split in words.
    """
    head = ("flags", "memory", "fits", "a step", "all steps", "tokens/s", "of a device", "largest in")
    rows = [_traced_row(traced) for traced in result.tried[:SHOWN_WAYS]]
    lines = table(head, rows)
    if rest := len(result.tried) - len(rows):
        lines.append(f"and {rest} more, which --json lists")
    lines += [f"not {flags}: {reason}" for flags, reason in result.refused.items()]
    lines += [f"no {axis}: {reason}" for axis, reason in result.unused.items()]
    return "\n\n".join([_answer(result, line), "\n".join(lines), describe(result.tried[0])])


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
            f"  not sensible: {spans_text(best.nodes)} of {RANKS_PER_NODE} sends sums over the network in every layer"
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


def search_json(result: Search, verdict: Verdict) -> str:
    """The same as one JSON object.

    Args:
      verdict: on the best.
    """
    whole: dict[str, Any] = {
        "devices": result.world,
        "best": as_object(result.tried[0].estimate, verdict, result.hardware),
        "traced": [
            {
                "flags": traced.flags,
                "peak": peak_object(peak_of(traced.estimate)),
                "seconds": traced.seconds,
                "hours": rates_of(traced.estimate, result.hardware).hours,
                "tokens_per_second_per_device": rates_of(traced.estimate, result.hardware).tokens_per_second_per_device,
                "fits": traced.fits,
                "sensible": traced.sensible,
            }
            for traced in result.tried
        ],
        "refused": result.refused,
        "unused_axes": result.unused,
    }
    return json.dumps(whole, indent=1)


def _traced_row(traced: Traced) -> tuple[str, ...]:
    rates = rates_of(traced.estimate, traced.hardware)
    spans = "" if traced.nodes == 1 else f", {spans_text(traced.nodes)}"
    return (
        written_flags(traced.flags),
        size(traced.nbytes),
        "yes" if traced.fits else "no",
        duration_text(rates.seconds),
        duration_text(3600 * rates.hours),
        f"{rates.tokens_per_second:,.0f}",
        f"{rates.tokens_per_second_per_device:,.0f}",
        f"{peak_of(traced.estimate).phase}{spans}",
    )


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
    rows = [_place_row(candidate, result.room) for candidate in result.candidates]
    if result.shared is not None:
        rows.append(("all devices shared", "-", "-", "-", duration_text(result.shared), "-", "-"))
    lines = table(head, rows)
    lines += [f"no way to train on {count}: {reason}" for count, reason in result.dropped.items()]
    return "\n\n".join(
        [f"{answer}\n  {command_text(line, best.flags)}\n  {reasons_text(result)}", "\n".join(lines), report]
    )


def _place_row(candidate: PlacedCandidate, room: float) -> tuple[str, ...]:
    return (
        written_flags(candidate.flags),
        size(candidate.nbytes),
        size(candidate.peaks["generate"].nbytes) if candidate.peaks else "not traced",
        "yes" if candidate.fits(room) else "no",
        duration_text(candidate.result.step),
        f"{candidate.result.trainer_busy:.0%}",
        f"{candidate.result.generators_busy:.0%}",
    )


def places_json(result: PlaceSearch, report: str) -> str:
    """The same as one JSON object.

    Args:
      report: as in `places_text`, an object.
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
    whole = {
        "devices": result.world,
        "best": json.loads(report),
        "places": candidates,
        "shared_seconds": result.shared,
        "dropped": result.dropped,
    }
    return json.dumps(whole, indent=1)


PoolCosts = Callable[[Settings, Hardware, str], Estimate]
Describe = Callable[[Estimate, Settings, Verdict, Hardware], str]


class PlacedRun(NamedTuple):
    """A placement and what its pools exchange.

    Attributes:
      placement: of the ranks.
      transfers: between the pools in a step.
      schedules: simulated runs; None: none are asked for.
    """

    placement: Placement
    transfers: Sequence[PoolTransfer]
    schedules: Schedules | None = None


def pools_report(settings: Settings, run: PlacedRun, costs: PoolCosts, describe: Describe, hardware: Hardware) -> str:
    """Tables and a verdict for each pool, what goes between them, and a step; or with --json one object.

    Args:
      settings: the flags.
      run: how they place it.
      costs: (settings, hardware, name of a pool) -> the estimate of a rank that does only that.
      describe: (estimate, flags of the pool, whether it fits, hardware) -> its tables.
      hardware: of each rank.
    """
    placement = run.placement
    parts = [f"place {placement}"]
    objects: dict[str, object] = {"place": str(placement)}
    seconds = {}
    for name, pool in placement.pools.items():
        own = pool_settings(settings, pool, learns=placement.shards(name))
        estimate = costs(own, hardware, name)
        fits = verdict_of(estimate, own, hardware, lambda changed, name=name: costs(changed, hardware, name))
        objects[name] = as_object(estimate, fits, hardware)
        parts.append(f"{name}: {describe(estimate, own, fits, hardware)}")
        seconds[name] = step_seconds(estimate, hardware)
    moved = {transfer.content: transfer.seconds(hardware) for transfer in run.transfers}
    overlaps = settings.asynchrony.staleness > 0
    parts.append(transfers_text(run.transfers, hardware))
    if placement.scoring:
        parts.append(f"not counted: rows to the ranks of {', '.join(placement.scoring)}, and what comes back")
    parts.append(_step_text(seconds, moved, overlaps))
    if settings.estimate.json:
        objects["transfers"] = [transfer._asdict() for transfer in run.transfers]
        objects["step"] = {"seconds": placed_seconds(seconds, moved, overlaps), **seconds, **moved}
        if run.schedules is not None:
            objects["schedules"] = schedules_object(run.schedules)
        return json.dumps(objects, indent=1)
    if run.schedules is not None:
        parts.append(schedules_text(run.schedules))
    return "\n\n".join(parts)


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


def _step_text(pools: dict[str, float], moved: dict[str, float], overlaps: bool) -> str:
    total = duration_text(placed_seconds(pools, moved, overlaps))
    each = ", ".join(f"{name} {duration_text(x)}" for name, x in (pools | moved).items())
    if overlaps:
        return f"a step takes {total}, with both pools at work at the same time: {each}"
    return f"a step takes {total}, as the pools take turns: {each}"


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
        return pool_estimate(settings, algorithm, RankWork(tokens, hardware, pool, apart))

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
    best = result.tried[0]
    fits = verdict_of(best.estimate, best.settings, hardware, lambda settings: costs(settings, hardware))
    if settings.estimate.json:
        return search_json(result, fits)

    def describe(traced: Traced) -> str:
        parts = [title(traced.estimate, traced.settings), rate(traced.estimate, hardware), verdict(fits, hardware)]
        return "\n".join([*parts, f"not counted: {', '.join(traced.estimate.left_out)}"])

    return search_text(result, line, describe)


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
