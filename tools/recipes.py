"""The verdicts of docs/recipes.md, from the dry run of every preset in recipes/.

    python tools/recipes.py

takes a minute or two of one core. `tests/docs/test_written_pages.py` makes the first one again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
PRESETS = {  # of recipes/, with the config.json of its model in recipes/models/
    "qwen2.5_0.5b_1gpu": "qwen2.5_0.5b",
    "qwen2.5_7b_8gpus": "qwen2.5_7b",
    "llama3_70b_8nodes": "llama3_70b",
    "llama3_70b_64nodes": "llama3_70b",
    "qwen2.5_vl_7b_8gpus": "qwen2.5_vl_7b",
}


def dry_run(preset: str) -> str:
    """Output of the dry run of a preset.

    Raises:
      CalledProcessError: it ends with an error, which it prints.
    """
    command = [sys.executable, "-m", "funrl.cli.main", *arguments(preset)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.rstrip() + "\n"


def arguments(preset: str) -> list[str]:
    """Flags of the dry run of a preset, which needs no model but its config.json."""
    return [f"--config=recipes/{preset}.yaml", f"--model=recipes/models/{PRESETS[preset]}.json", "--dry_run"]


def marks(preset: str) -> tuple[str, str]:
    """Lines between which the verdict on a preset stands."""
    return f"<!-- {preset}: written by tools/recipes.py -->\n", f"<!-- end of {preset} -->"


def shown(text: str, preset: str) -> str:
    """The part of a page that shows a preset."""
    begin, end = marks(preset)
    return text.split(begin)[1].split(end)[0]


def block(preset: str) -> str:
    """The command of a preset's dry run, and the lines of its output around the tables."""
    return f"\n```text\n$ funrl {' '.join(arguments(preset))}\n{summary(dry_run(preset))}```\n\n"


def summary(output: str) -> str:
    """The model, the step, its time and the verdict, of the output of a dry run."""
    lines = output.splitlines()
    begin = next(index for index, line in enumerate(lines) if " parameters, " in line)
    shown = lines[begin : begin + 2] + [line for line in lines if line.startswith(("a step takes ", "fits: "))]
    return "\n".join(shown) + "\n"


def page(text: str) -> str:
    """The page with its verdicts written anew."""
    for preset in PRESETS:
        begin, end = marks(preset)
        before, rest = text.split(begin)
        text = before + begin + block(preset) + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {PAGE.relative_to(ROOT)}")
