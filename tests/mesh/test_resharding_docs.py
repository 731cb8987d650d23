"""The snippets of docs/resharding.md."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/resharding.md"


@pytest.mark.slow
@pytest.mark.gloo
def test_the_snippets_run():
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 3
    exec(compile("\n".join(snippets), "docs/resharding.md", "exec"), {"__name__": "snippets"})
