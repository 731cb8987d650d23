"""The table of docs/comparison.md: what verl and TRL do otherwise, from the heads of the recipes.

    python tools/comparison.py

`tests/docs/test_written_pages.py` fails where the page is not what the code says.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "comparison.md"
BEGIN, END = "<!-- recipes: written by tools/comparison.py -->\n", "<!-- end of recipes -->"
sys.path.insert(0, str(ROOT))

from funrl.algos import NAMES, recipe  # noqa: E402


def said(name: str) -> tuple[str, str]:
    """Differences of verl and of TRL, from the head of a recipe's file.

    Raises:
      ValueError: it says nothing of one of them.
    """
    text = importlib.import_module(recipe(name).__module__).__doc__ or ""
    if together := re.search(r"^verl and TRL: (.*?)(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE):
        return cell(together[1]), cell(together[1])
    verl = re.search(r"^verl: (.*?)(?=\sTRL(?: [\d.]+)?(?::| has none)|\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    trl = re.search(r"\sTRL(?: [\d.]+)?(?:: | has )(.*?)(?=\n\n|\Z)", text[verl.end() :] if verl else "", re.DOTALL)
    if verl is None or trl is None:
        raise ValueError(f"{name}: its file says nothing of verl or of TRL: {text}")
    return cell(verl[1]), cell(trl[1])


def cell(text: str) -> str:
    """First sentence of a text, for a cell of a table; "" for a library without the recipe."""
    first = re.split(r"\. (?=[A-Z]|[\w-]+: )", re.sub(r"\s+", " ", text.strip()))[0]
    absent = re.match(r"none\b|trains none", first)
    return "" if absent else first.replace("|", "\\|").replace("*", "\\*").rstrip(".;")


def page(text: str) -> str:
    """The page with its table written anew."""
    lines = ["| recipe | verl | TRL |", "|---|---|---|"]
    texts = {name: said(name) for name in NAMES}
    shown = {name: both for name, both in texts.items() if any(both) and both[0] != "not there as such"}
    lines += [f"| `{name}` | " + " | ".join(both) + " |" for name, both in shown.items()]
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {PAGE.relative_to(ROOT)}")
