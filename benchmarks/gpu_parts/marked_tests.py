"""The tests that are marked `gpu`, as a row."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from gpu_parts.rows import Bench, Row, Rows

ROOT = Path(__file__).parents[2]
NOTHING_SELECTED = 5  # pytest's exit status


def marked_test_rows(bench: Bench) -> Rows:
    """Run them in a process of its own: only files that have such tests are read, for others import more packages.

    With --small only the first such file is read.
    """
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    files = files[:1] if bench.small else files
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *files]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    failed = done.returncode not in (0, NOTHING_SELECTED)
    if failed:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    lines = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()
    passed = re.search(r"(\d+) passed", lines[-1])
    yield Row(
        f"tests marked gpu, in {len(files)} files",
        float(passed[1] if passed else 0),
        "passed",
        note=lines[-1],
        failed=failed,
    )
