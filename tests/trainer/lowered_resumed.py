"""A program: runs on a mesh of JAX's CPU devices whose checkpoints torch continues on one device, and the reverse.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python lowered_resumed.py MESH FOLDER

It prints the largest difference of a metric from those of a run in torch that never stopped, and the metric's name.
"""

import shutil
import sys

from lowered_runs import gap_of, job_of
from small_runs import MEASURED, Quiet
from test_lowered_runs import Stopping

from funrl.mesh.mesh import single
from funrl.trainer.loop import train_loop


def learned(steps):
    """The metrics of steps that do not depend on the machine."""
    uncounted = ("memory/", "time_s/")
    return [
        {name: x for name, x in numbers.items() if not name.startswith(uncounted) and not name.endswith(MEASURED)}
        for _, numbers in steps
    ]


def main(mesh, folder):
    jobs = {"torch": ("sft:", {}), "xla": (f"sft:{mesh}", {"backend": "xla"})}

    def run(backend, observer, **settings):
        text, options = jobs[backend]
        train_loop(job_of(text, "float64", steps=4, **options, **settings), single(), observer)

    whole = Quiet(f"{folder}/whole")
    run("torch", whole)
    for before, after in (("torch", "xla"), ("xla", "torch")):
        place = f"{folder}/{before}"
        try:
            run(before, Stopping(place), save_every="1")
        except FloatingPointError:
            shutil.rmtree(f"{place}/step-3", ignore_errors=True)  # which the run saves when it fails
        again = Quiet(place)
        run(after, again, resume=True, run_dir="x")
        assert [step for step, _ in again.steps] == [3, 4], again.notes
        print(before, after, *gap_of(learned(again.steps), learned(whole.steps[2:])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
