"""Report of a search over meshes: the answer, tables of traced and of dropped splits; or one JSON object."""

from __future__ import annotations

import collections
import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from funrl.cost.remedies import Verdict, quoted_flags, written_flags
from funrl.cost.reports.dry_json import as_object, peak_object
from funrl.cost.search.mesh_search import Other, Search, Traced, spans_text
from funrl.cost.tables import duration_text, size, table
from funrl.cost.tracing.hardware import USABLE
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.trainer.settings.settings import settings_flags

SHOWN_WAYS = 10  # rows of the table


def search_text(result: Search, line: Sequence[str], needed: Sequence[str], describe: Callable[[Traced], str]) -> str:
    """The answer of a search, then its tables.

    Args:
      line: the command line, the program's name first; empty: unknown.
      needed: lines of `needs_of`.
      describe: describes the best split in words.
    """
    best = result.best[0]
    parts = [_answer(result, line)]
    if needed:
        parts.append("\n".join(["what would make it fit:", *(f"  {need}" for need in needed)]))
    rough = [other for other in result.others if other.rough is not None]
    shown = rough[: max(0, SHOWN_WAYS - len(result.best))]
    head = ("flags", "memory", "fits", "a step", "all steps", "tokens/s", "of a device", "how it was found")
    rows = [*(_traced_row(traced) for traced in result.best), *(_rough_row(result, other) for other in shown)]
    rest = [other for other in result.others if all(other is not row for row in shown)]
    parts.append("\n".join([*table(head, rows), *_summary(rest)]))
    if result.unused:
        parts.append("\n".join(f"no {axis}: {reason}" for axis, reason in result.unused.items()))
    return "\n\n".join([*parts, describe(best)])


def _answer(result: Search, line: Sequence[str]) -> str:
    """The best way in two lines: its command, and what it costs."""
    best = result.best[0]
    rates = result.best[0].rates
    count = len(result.ranked.splits) + len(result.ranked.others)
    if not best.fits:
        verdict = f"nothing fits {result.world} devices; of {count} ways to split the run this needs the least memory:"
    elif not best.sensible:
        verdict = f"nothing sensible fits {result.world} devices; of {count} ways to split the run this is the fastest:"
    else:
        verdict = f"the best of {count} ways to split the run over {result.world} devices:"
    held = f"{size(best.peak.nbytes)} of a device's {size(result.hardware.memory * USABLE)}"
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


def search_json(result: Search, needed: Sequence[str], verdict: Verdict) -> str:
    """The same as one JSON object.

    Args:
      needed: as in `search_text`.
      verdict: on the best.
    """
    whole: dict[str, Any] = {
        "devices": result.world,
        "best": as_object(result.best[0].estimate, verdict, result.hardware),
        "traced": [
            {
                "flags": traced.flags,
                "peak": peak_object(traced.peak),
                "seconds": traced.rates.seconds,
                "hours": traced.rates.hours,
                "tokens_per_second_per_device": traced.rates.tokens_per_second_per_device,
                "fits": traced.fits,
                "sensible": traced.sensible,
            }
            for traced in result.best
        ],
        "not_traced": [
            {
                "flags": other.flags,
                "bytes": other.rough.nbytes if other.rough else None,
                "seconds": other.rough.seconds if other.rough else None,
                "reason": other.reason,
            }
            for other in result.others
        ],
        "needed": list(needed),
        "unused_axes": result.unused,
    }
    return json.dumps(whole, indent=1)


def _traced_row(traced: Traced) -> tuple[str, ...]:
    rates = traced.rates
    spans = "" if traced.nodes == 1 else f", {spans_text(traced.nodes)}"
    return (
        written_flags(traced.flags),
        size(traced.peak.nbytes),
        "yes" if traced.fits else "no",
        duration_text(rates.seconds),
        duration_text(3600 * rates.hours),
        f"{rates.tokens_per_second:,.0f}",
        f"{rates.tokens_per_second_per_device:,.0f}",
        f"traced, largest in {traced.peak.phase}{spans}",
    )


def _rough_row(result: Search, other: Other) -> tuple[str, ...]:
    assert other.rough is not None
    fits = "yes" if other.rough.nbytes <= result.hardware.memory * USABLE else "no"
    cost = (size(other.rough.nbytes), fits, duration_text(other.rough.seconds))
    return (written_flags(other.flags), *cost, "-", "-", "-", f"by formula: {other.reason}")


def _summary(rest: Sequence[Other]) -> list[str]:
    """Lines that count the splits that are not in the table."""
    if not rest:
        return []
    reasons = collections.Counter(other.reason for other in rest if other.rough is not None)
    parts = [f"{count} {reason}" for reason, count in reasons.most_common()]
    impossible = [other for other in rest if other.rough is None]
    if impossible:
        flags = written_flags(impossible[0].flags)
        parts.append(f"{len(impossible)} cannot be, such as {flags}: {impossible[0].reason}")
    return [f"and {len(rest)} more, which --json lists: {'; '.join(parts)}"]
