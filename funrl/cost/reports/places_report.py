"""Report of a search over placements: the answer and why, a table of all of them, and the dry run of the best."""

from __future__ import annotations

import json
from collections.abc import Sequence

from funrl.cost.placement.place_search import PlacedCandidate, PlaceSearch, reasons_text
from funrl.cost.remedies import written_flags
from funrl.cost.reports.dry_json import peak_object
from funrl.cost.reports.search_report import command_text
from funrl.cost.tables import duration_text, size, table


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
    roles = any(candidate.placement.scoring for candidate in result.candidates)
    held = ("train holds", "generate holds", *["roles hold"] * roles)
    head = ("flags", *held, "fits", "a step", "trainer busy", "generators busy", "memory")
    parts = [f"{answer}\n  {command_text(line, best.flags)}\n  {reasons_text(result)}"]
    rows = [_row(candidate, result.room, len(held)) for candidate in result.candidates]
    if result.shared is not None:
        nothing = ["-"] * len(held)
        rows.append(("all devices shared", *nothing, "-", duration_text(result.shared), "-", "-", "-"))
    lines = table(head, rows)
    lines += [f"no way to train on {count}: {reason}" for count, reason in result.dropped.items()]
    return "\n\n".join([*parts, "\n".join(lines), report])


def _row(candidate: PlacedCandidate, room: float, columns: int) -> tuple[str, ...]:
    """Cells of a candidate, of which `columns` are what a rank holds: to train, to generate, and for roles."""
    result = candidate.result
    held = [candidate.peaks[name].nbytes for name in ("train", "generate") if candidate.peaks]
    held += (
        [max(candidate.peaks[name].nbytes for name in candidate.placement.scoring)] if len(candidate.peaks) > 2 else []
    )
    cells = [size(nbytes) for nbytes in held or [candidate.nbytes]]
    return (
        written_flags(candidate.flags),
        *cells,
        *["-"] * (columns - len(cells)),
        "yes" if candidate.fits(room) else "no",
        duration_text(result.step),
        f"{result.trainer_busy:.0%}",
        f"{result.generators_busy:.0%}",
        "traced" if candidate.peaks else "by formula",
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
