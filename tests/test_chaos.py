"""A run that is killed a few times is the run that nobody killed; `python tests/chaos.py` kills it fifty times."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import chaos

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc"),
]


def test_kills_lose_nothing(tmp_path):
    assert chaos.survive(tmp_path, "dp2", 2, 2) >= 1  # a kill that comes late finds the run at its end
