"""The snippets and the picture of docs/resharding.md."""

import json
import re
from pathlib import Path

import pytest
from test_resharding import SMALL

from funrl.cost.resharding import ReshardingRequest, resharding_report

DOCS = Path(__file__).parents[2] / "docs"
PICTURED = SMALL | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "vocab_size": 8192,
}


@pytest.mark.slow
@pytest.mark.gloo
def test_the_snippets_run():
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / "resharding.md").read_text(), re.DOTALL)
    assert len(snippets) == 3
    exec(compile("\n".join(snippets), "docs/resharding.md", "exec"), {"__name__": "snippets"})


def test_the_table_and_the_picture_are_what_the_command_makes(tmp_path):
    model, picture = tmp_path / "config.json", tmp_path / "resharding.svg"
    model.write_text(json.dumps(PICTURED))
    printed = resharding_report(ReshardingRequest(str(model), "dp4,tp2", "dp2,tp4", fsdp=True, picture=str(picture)))
    assert picture.read_text() == (DOCS / "resharding.svg").read_text()
    page = (DOCS / "resharding.md").read_text()
    shown = page[page.index("    llama, 16.8 M") : page.index("and draws this")].splitlines()
    for line in (line.strip() for line in shown if line.strip() and line.strip() != "..."):
        assert line in printed, line
