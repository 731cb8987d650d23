"""The table of families of docs/models.md."""

import importlib.util
from pathlib import Path

from funrl.models.huggingface.families import FAMILIES

TOOL = Path(__file__).parents[2] / "tools" / "families.py"


def test_the_page_has_what_the_tests_compare():
    spec = importlib.util.spec_from_file_location("families_tool", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.NOTES.keys() == FAMILIES.keys()
    text = tool.PAGE.read_text()
    assert tool.drawn(text) == text, "python tools/families.py writes it anew"
