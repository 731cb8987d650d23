"""Report of a search over meshes: the answer, tables of what was traced and of what falls out; or one object."""

from __future__ import annotations

import collections
import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from funrl.cost.rates import duration_text
from funrl.cost.remedies import Verdict, written_flags
from funrl.cost.reports.dry_json import as_object, peak_object
from funrl.cost.search.mesh_search import Other, Search, Traced, spans_text
from funrl.cost.tracing.hardware import USABLE
from funrl.mesh.explain import size, table
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.trainer.settings.settings import settings_flags

SHOWN_WAYS = 10  # of the table


def search_text(found: Search, line: Sequence[str], needed: Sequence[str], describe: Callable[[Traced], str]) -> str:
    """The answer of a search, then its tables.

    Args:
      line: the command line, the program's name first; empty: it is not known.
      needed: what would be needed if nothing sensible fits.
      describe: tells of the best in words.
    """
    best = found.best[0]
    parts = [_answer(found, line)]
    if needed:
        parts.append("\n".join(["what would be needed instead:", *(f"  {one}" for one in needed)]))
    rough = [one for one in found.others if one.rough is not None]
    shown = rough[: max(0, SHOWN_WAYS - len(found.best))]
    head = ("flags", "memory", "fits", "a step", "all steps", "tokens/s", "of a device", "how it was found")
    rows = [*(_traced_row(one) for one in found.best), *(_rough_row(found, one) for one in shown)]
    rest = [one for one in found.others if all(one is not other for other in shown)]
    parts.append("\n".join([*table(head, rows), *_summary(rest)]))
    if found.unused:
        parts.append("\n".join(f"no {axis}: {reason}" for axis, reason in found.unused.items()))
    return "\n\n".join([*parts, describe(best)])


def _answer(found: Search, line: Sequence[str]) -> str:
    """The best way in two lines: its command, and what it costs."""
    best = found.best[0]
    rates = found.best[0].rates
    count = len(found.ranked.splits) + len(found.ranked.others)
    if not best.fits:
        verdict = f"nothing fits {found.world} devices; of {count} ways to split the run this needs least:"
    elif not best.sensible:
        verdict = f"nothing sensible fits {found.world} devices; of {count} ways to split the run this is the fastest:"
    else:
        verdict = f"the best of {count} ways to split the run over {found.world} devices:"
    held = f"{size(best.peak.nbytes)} of a device's {size(found.hardware.memory * USABLE)}"
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
        return written_flags(flags)
    replaced = {*flags, "dry_run", *(name for name, one in settings_flags().items() if one.requires == "dry_run")}
    names = [argument.removeprefix("--").partition("=")[0].replace("-", "_") for argument in line]
    kept = [argument for name, argument in zip(names[1:], line[1:], strict=True) if name not in replaced]
    return " ".join([line[0], *map(shlex.quote, kept), written_flags(flags)])


def search_json(found: Search, needed: Sequence[str], verdict: Verdict) -> str:
    """The same as one JSON object.

    Args:
      needed: as in `search_text`.
      verdict: on the best.
    """
    whole: dict[str, Any] = {
        "devices": found.world,
        "best": as_object(found.best[0].found, verdict, found.hardware),
        "traced": [
            {
                "flags": one.flags,
                "peak": peak_object(one.peak),
                "seconds": one.rates.seconds,
                "hours": one.rates.hours,
                "tokens_per_second_per_device": one.rates.tokens_per_second_per_device,
                "fits": one.fits,
                "sensible": one.sensible,
            }
            for one in found.best
        ],
        "not_traced": [
            {
                "flags": one.flags,
                "bytes": one.rough.nbytes if one.rough else None,
                "seconds": one.rough.seconds if one.rough else None,
                "reason": one.reason,
            }
            for one in found.others
        ],
        "needed": list(needed),
        "unused_axes": found.unused,
    }
    return json.dumps(whole, indent=1)


def _traced_row(one: Traced) -> tuple[str, ...]:
    rates = one.rates
    spans = "" if one.nodes == 1 else f", {spans_text(one.nodes)}"
    return (
        written_flags(one.flags),
        size(one.peak.nbytes),
        "yes" if one.fits else "no",
        duration_text(rates.seconds),
        duration_text(3600 * rates.hours),
        f"{rates.tokens_per_second:,.0f}",
        f"{rates.tokens_per_second_per_device:,.0f}",
        f"traced, largest in {one.peak.phase}{spans}",
    )


def _rough_row(found: Search, one: Other) -> tuple[str, ...]:
    assert one.rough is not None
    fits = "yes" if one.rough.nbytes <= found.hardware.memory * USABLE else "no"
    cost = (size(one.rough.nbytes), fits, duration_text(one.rough.seconds))
    return (written_flags(one.flags), *cost, "-", "-", "-", f"by formula: {one.reason}")


def _summary(rest: Sequence[Other]) -> list[str]:
    """Lines that count the ways which are not in the table."""
    if not rest:
        return []
    reasons = collections.Counter(one.reason for one in rest if one.rough is not None)
    parts = [f"{count} {reason}" for reason, count in reasons.most_common()]
    impossible = [one for one in rest if one.rough is None]
    if impossible:
        flags = written_flags(impossible[0].flags)
        parts.append(f"{len(impossible)} cannot be, such as {flags}: {impossible[0].reason}")
    return [f"and {len(rest)} more, which --json lists: {'; '.join(parts)}"]
