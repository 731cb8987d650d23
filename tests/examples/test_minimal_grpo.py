"""The example that shows that the pieces are public: it learns, it is short, and it uses neither Settings nor flags."""

import ast
import runpy
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "minimal_grpo.py"
PLUMBING = {"absl", "argparse", "Settings", "settings", "job", "loop", "experiments", "flags"}


def test_it_is_short_and_uses_neither_settings_nor_flags():
    text = FILE.read_text()
    assert len(text.splitlines()) < 100
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {part for alias in node.names for part in alias.name.split(".")}
            imported |= set((getattr(node, "module", None) or "").split("."))
    assert "funrl" in imported and not imported & PLUMBING
    assert "sys.argv" not in text and "environ" not in text


@pytest.mark.slow
def test_the_reward_rises():
    means = runpy.run_path(str(FILE))["main"]()
    assert sum(means[-5:]) / 5 >= sum(means[:5]) / 5 + 0.2
