"""Kills of generators lose nothing and do nothing twice; `python tests/join_chaos.py` kills fifty of them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "trainer"))
import join_chaos

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def test_kills_of_generators_lose_nothing(tmp_path):
    plan = join_chaos.Plan(steps=4, kills=2, outages=1, stops=False, seed=0, staleness=2)
    assert join_chaos.survive(tmp_path, plan).startswith("staleness 2, 4 steps, 2 kills")
