"""A new user's ten jobs work, from an empty folder, as `tests/first_day.sh` types them."""

import os
from pathlib import Path

import pytest
from forked_python import run_with_python

SCRIPT = Path(__file__).parent / "first_day.sh"


@pytest.mark.slow
@pytest.mark.gloo
def test_the_first_day(tmp_path):
    pytest.importorskip("pyarrow")
    done = run_with_python(["bash", str(SCRIPT), str(tmp_path)], os.environ, timeout_s=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(*(line for line in done.stdout.splitlines() if line.startswith(("==", "skipped"))), sep="\n")
    jobs = [line for line in done.stdout.splitlines() if line.startswith("==")]
    assert len(jobs) == 11 and "all ten jobs are done" in done.stdout
