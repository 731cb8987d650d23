"""Report of a search over meshes: tables of what was traced and of what falls out, or one object."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from funrl.cost.dry_json import as_object, peak_object
from funrl.cost.hardware import USABLE
from funrl.cost.mesh_search import Other, Search, Traced
from funrl.cost.remedies import Verdict, written_flags
from funrl.mesh.explain import size, table


def search_text(found: Search, describe: Callable[[Traced], str]) -> str:
    """Tables of a search.

    Args:
      describe: tells of the best in words.
    """
    best = found.best[0]
    count = len(found.best) + len(found.others)
    head = f"{found.world} devices can be split in {count} ways; the best {len(found.best)} by formula, traced:"
    traced = table(
        ("flags", "memory", "fits", "a step", "hours", "tokens/s", "of a device", "largest in"),
        [_traced_row(one) for one in found.best],
    )
    parts = ["\n".join([head, *traced])]
    if found.others:
        rest = table(("not traced", "memory", "a step", "why"), [_other_row(found, one) for one in found.others])
        parts.append("\n".join(rest))
    if found.unused:
        parts.append("\n".join(f"no {axis}: {reason}" for axis, reason in found.unused.items()))
    return "\n\n".join([*parts, f"the best: {written_flags(best.flags)}\n{describe(best)}"])


def search_json(found: Search, verdict: Verdict) -> str:
    """The same as one JSON object.

    Args:
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
        "unused_axes": found.unused,
    }
    return json.dumps(whole, indent=1)


def _traced_row(one: Traced) -> tuple[str, ...]:
    rates = one.rates
    return (
        written_flags(one.flags), size(one.peak.nbytes), "yes" if one.fits else "no", f"{rates.seconds:.3g} s",
        f"{rates.hours:.3g}", f"{rates.tokens_per_second:,.0f}", f"{rates.tokens_per_second_per_device:,.0f}",
        one.peak.phase,
    )  # fmt: skip


def _other_row(found: Search, one: Other) -> tuple[str, ...]:
    flags = written_flags(one.flags)
    if one.rough is None:
        return (flags, "-", "-", one.reason)
    room = found.hardware.memory * USABLE
    why = f"needs {size(one.rough.nbytes)} of {size(room)}" if one.rough.nbytes > room else one.reason
    return (flags, size(one.rough.nbytes), f"{one.rough.seconds:.3g} s", why)
