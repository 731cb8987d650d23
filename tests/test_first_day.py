"""A new user's ten jobs work, from an empty folder, as `tests/first_day.sh` types them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "first_day.sh"


@pytest.mark.slow
@pytest.mark.gloo
def test_the_first_day(tmp_path):
    pytest.importorskip("pyarrow")
    done = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path)], env=os.environ | {"PYTHON": sys.executable}, capture_output=True,
        text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(*(line for line in done.stdout.splitlines() if line.startswith(("==", "skipped"))), sep="\n")
    jobs = [line for line in done.stdout.splitlines() if line.startswith("==")]
    assert len(jobs) == 11 and "all ten jobs are done" in done.stdout
