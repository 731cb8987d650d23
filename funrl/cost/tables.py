"""Text of sizes, durations and tables."""

from __future__ import annotations

from collections.abc import Sequence


def size(nbytes: float) -> str:
    """Bytes with three figures and a decimal unit: "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB" if nbytes < 999.5 else f"{nbytes:.0f} TB"


def duration_text(seconds: float, figures: int = 2) -> str:
    """Format seconds in the customary unit: "1.2 s", "28 min", "3.5 h".

    Args:
      seconds: to format.
      figures: significant digits; integers keep all of theirs.
    """
    units = ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"), (86400.0, "days"))
    most = {"us": 1000, "ms": 1000, "s": 100, "min": 100, "h": 72}  # largest value in a unit
    amount = seconds
    unit = "s"
    for length, unit in units:
        amount = seconds / length
        if unit == "days" or float(f"{amount:.{figures}g}") < most[unit]:
            break
    if not seconds:
        return "0 s"
    written = f"{amount:,.0f}" if amount >= 10 ** (figures - 1) else f"{amount:.{figures}g}"
    return f"{written} {unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
