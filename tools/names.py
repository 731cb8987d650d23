"""The tables of TRL's and verl's names in docs/migration.md: the rows of `funrl.flags.foreign` that give flags.

    python tools/names.py

`tests/docs/test_written_pages.py` fails where the page is not what the code says.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "migration.md"
sys.path.insert(0, str(ROOT))

from funrl.flags.foreign.meaning import Library, NameCase  # noqa: E402
from funrl.flags.foreign.trl import TRL  # noqa: E402
from funrl.flags.foreign.verl import VERL  # noqa: E402


def table(library: Library) -> str:
    """A line for each case of a name that becomes other flags; names with the same case share one."""
    names: dict[NameCase, list[str]] = {}
    for name, rows in library.rows.items():
        for row in rows:
            if "=" in row.flags and not row.flags.startswith(("differs", f"{name}={{}}", "only ")):
                names.setdefault(row, []).append(f"`{name}`")
    lines = ["| there | if | here | what differs |", "|---|---|---|---|"]
    lines += [f"| {', '.join(theirs)} | {' | '.join(cells(row, library))} |" for row, theirs in names.items()]
    return "\n".join(lines)


def cells(row: NameCase, library: Library) -> tuple[str, str, str]:
    """Conditions, flags and reason of a row; `X` is the value, and computed values are dots."""
    conditions = " ".join(f"`{condition}`" for condition in row.conditions)
    flags = " ".join(f"`--{shown(flag, library)}`" for flag in row.flags.split())
    return conditions, flags, shown(row.reason, library).replace("*", "\\*")


def shown(text: str, library: Library) -> str:
    """A text with its placeholders as a reader writes them."""
    return re.sub(
        r"\{([\w.]*)\}", lambda match: match[1] if match[1] in library.defaults else "...", text.replace("{}", "X")
    )


def page(text: str) -> str:
    """The page with its tables written anew."""
    for library in (TRL, VERL):
        begin = f"<!-- {library.title}: written by tools/names.py -->\n"
        end = f"<!-- end of {library.title} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n" + table(library) + "\n\n" + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {PAGE.relative_to(ROOT)}")
