"""The warm start that is part of the package: that of the default flags and seed.

    python tools/warm_start.py

trains it anew in about two minutes of one core, and replaces the directory in funrl/tasks/warm_starts. A slow test of
tests/api/test_warm_start.py compares it with a fresh training.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from funrl.algos import recipe
from funrl.api import warm_start
from funrl.trainer.jobs.job import Job
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.settings import settings_of


def default_job() -> Job:
    """The job of `funrl ppo` without flags, on the CPU."""
    return prepare(settings_of(device="cpu"), recipe("ppo"))


def main() -> int:
    shipped = warm_start.SHIPPED
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        warm_start.SHIPPED = Path(cache)  # where there is none
        with warm_start.warm_started(default_job()) as job:
            shutil.rmtree(shipped, ignore_errors=True)
            shutil.copytree(str(job.start), shipped / Path(str(job.start)).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
