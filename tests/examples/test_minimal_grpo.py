"""The example that shows that the pieces are public: it learns, it is short, and it uses neither Settings nor flags."""

import ast
import re
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


def test_it_prints_a_line_a_step_at_its_smallest_size(capsys):
    main = runpy.run_path(str(FILE))["main"]
    main.__globals__.update(WARMUP=1, STEPS=2, PROMPTS=2, SAMPLES=2)
    assert len(main()) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and re.fullmatch(r"step 2: reward \d\.\d+, loss -?\d\.\d+", lines[2]), lines


@pytest.mark.slow
def test_the_reward_rises():
    """With sums of single digits, which are learned in fewer steps."""
    main = runpy.run_path(str(FILE))["main"]
    main.__globals__.update(DIGITS=1, WARMUP=60, STEPS=14)
    means = main()
    assert sum(means[-5:]) / 5 >= sum(means[:5]) / 5 + 0.05
