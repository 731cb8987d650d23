"""docs/placement.md: its numbers are those of the simulation, its snippets run (in test_snippets.py)."""

import re
import shlex
from pathlib import Path

import pytest

from funrl.algos.recipes import recipe
from funrl.cost import schedules as schedule_report
from funrl.cost.dry_run import read_model
from funrl.cost.schedules import AsyncRun, LengthLaw, engine_times, schedules_of, schedules_text, simulate_run
from funrl.cost.search import with_groups
from funrl.cost.tracing.hardware import HARDWARE
from funrl.flags.parser import read
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.rollout.ledger import LedgerRule
from funrl.trainer.settings.settings import settings_flags, settings_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/placement.md"


def command():
    (line,) = re.findall(r"^```bash\n(funrl rollout_is --dry_run --model=.*)\n```", PAGE.read_text(), re.M)
    return shlex.split(line)


def output():
    """The splits that the page's command prints, and the rules of its own staleness."""
    line = [word.replace("config.json", "recipes/models/qwen2.5_7b.json") for word in command()[2:]]
    settings = settings_of(**read(settings_flags().values(), ["funrl", *line]).values)
    hardware = HARDWARE["h100"]
    settings, _ = with_groups(settings, recipe("rollout_is"), hardware, RANKS_PER_NODE)
    return schedules_text(schedules_of(settings, recipe("rollout_is")(), hardware, 512))


class Taken:
    def seconds(self, lengths):
        return 113.0


def step(staleness, window):
    engine = engine_times(read_model(str(ROOT / "recipes/models/qwen2.5_7b.json")), HARDWARE["h100"])
    rule = LedgerRule(512, staleness, window)
    run = AsyncRun(rule, 16, LengthLaw(2100, 0.6, 28672), 200, engine, replicas=16, slots=256, update=Taken())
    return simulate_run(run, steps=30)


WINDOWS = {"W = 1, in order": 1, "W = 0.3 P": 154, "W = P": 512, "as groups are complete": 10**9}


@pytest.mark.slow
def test_the_table_of_order_is_simulated():
    text = PAGE.read_text()
    rows = re.findall(r"^\| (W = [^|]*|as groups [^|]*) \| (\d.*) \|$", text.partition("<!-- order -->")[2], re.M)
    assert [name for name, _ in rows] == list(WINDOWS)
    assert all(cells.count("|") == 2 for _, cells in rows)
    for (name, cells), column in zip(rows[::2], (0, 2), strict=True):  # one of every other row is simulated again
        seconds, age = map(int, re.findall(r"\d+", cells.split("|")[column]))
        result = step((1, 2, 4)[column], WINDOWS[name])
        assert (seconds, age) == (pytest.approx(result.step, abs=2), result.age_max), name
    assert f"At S = 0 a step takes {step(0, 1).step:.0f} s" in text


@pytest.mark.slow
def test_the_output_is_that_of_the_command(monkeypatch):
    monkeypatch.setattr(schedule_report, "STALENESS", ())
    lines = {tuple(line.split()) for line in PAGE.read_text().splitlines() if line.startswith("    ")}
    missing = [line for line in output().splitlines() if tuple(line.split()) not in lines]
    assert not any(line.strip("- ") for line in missing), missing  # a rule is as wide as the cells of all rows
