"""The table of a run's newest evaluation: completions of held-out prompts, with what they got."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funrl.track.charts import number
from funrl.track.run_directory import read_lines

ROWS = 16  # on the page
LONGEST_CELL = 400  # characters of a prompt or completion; of a longer one its end is shown


def newest_table(path: Path) -> list[dict[str, Any]]:
    """The rows of the newest evaluation in eval_samples.jsonl, spread over its prompts; none where there is no file.

    Raises:
      RunDirectoryError: as `read_lines`.
    """
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for row in read_lines(path):
        if found and row.get("step") != found[-1].get("step"):
            found = []
        found.append(row)
    firsts = [row for row in found if not row.get("sample")]  # one of each prompt, as far as there are enough
    rows = firsts if len(firsts) >= min(ROWS, len(found)) else found
    stride = max(1, len(rows) // ROWS)
    return rows[::stride][:ROWS]


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as an HTML table; "" without any."""
    if not rows:
        return ""
    votes = any(row.get("answer") not in (None, "", str(row.get("completion", "")).strip()) for row in rows)
    columns = ["prompt", "completion", *(["answer"] if votes else []), "reward", "tokens"]
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(row, name)}</td>' for name in columns)}</tr>" for row in rows)
    return f'<table class="card evaluation"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if name == "reward" and isinstance(value, (int, float)):
        tone = "good" if row.get("correct") or value > 0.5 else "some" if value > 0 else "bad"
        return f'<span class="pill {tone}">{number(value)}</span>'
    if name == "tokens" and value is not None:
        return f"{value}" if row.get("finished", True) else f"{value}, cut off"
    text = "" if value is None else str(value)
    short = text if len(text) <= LONGEST_CELL else "..." + text[-LONGEST_CELL:]
    return f"<pre>{html.escape(short)}</pre>"
