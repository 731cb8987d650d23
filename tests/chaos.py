"""Kill a run at random moments and resume it, over and over; at the end it must be the run that nobody killed.

    python tests/chaos.py                              # 50 kills over dp2 and dp2,tp2
    python tests/chaos.py --kills=4 --meshes=dp2

Killed with SIGKILL are, in turn: one rank, the launcher, all processes, and all of them inside a save. After each kill
every line of metrics that was there before must still be there, and every checkpoint, or a newer one in its place. At
the end the lines (but for times and memory) and the weights are compared bit by bit.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from absl import app, flags
from forked_python import start_python

KILLS = flags.DEFINE_integer("kills", 50, "kills over all meshes", lower_bound=1)
MESHES = flags.DEFINE_string("meshes", "dp2;dp2,tp2", "meshes, with ; between")
SEED = flags.DEFINE_integer("chaos_seed", 0, "of the moments")
KINDS = ("rank", "launcher", "all", "save")
MEASURED = ("time_s/", "memory/", "perf/tokens_per_s")


class Lost(AssertionError):
    """Something that was finished is gone."""


def command(folder: Path, mesh: str, steps: int) -> list[str]:
    """Words of a small run that saves every step, and continues where it was."""
    small = ("--batch_prompts=4", "--samples_per_prompt=2", "--max_new_tokens=4", "--warmstart_steps=0")
    rest = ("--eval_prompts=4", "--device=cpu", "--compile=off", "--queue=fixed", "--save_every=1", "--resume")
    program = ["-m", "funrl.experiments.grpo", f"--mesh={mesh}", f"--steps={steps}"]
    return [*program, f"--run_dir={folder}", *small, *rest]


def started(folder: Path, mesh: str, steps: int) -> subprocess.Popen[str]:
    """The run, in a process group of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return start_python(command(folder, mesh, steps), environment, stdout=subprocess.DEVNULL)


def finished_lines(folder: Path) -> list[dict[str, float]]:
    """The whole lines of metrics, without times and memory."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
    return [{name: x for name, x in row.items() if not name.startswith(MEASURED)} for row in rows]


def checkpoints(folder: Path) -> set[int]:
    """The steps of the checkpoints that are whole."""
    return {int(path.parent.name[5:]) for path in folder.glob("checkpoints/step-*/complete.json")}


def kill_once(folder: Path, mesh: str, steps: int, kind: str, draw: random.Random) -> bool:
    """Start the run, kill it at a random moment, and look for what is lost; False where it ended before.

    Raises:
      Lost: a checkpoint or a line is gone.
    """
    run, at = started(folder, mesh, steps), draw.randint(1, 3)
    begin = max((*checkpoints(folder), *(int(row["step"]) for row in finished_lines(folder))), default=0)
    deadline, seen = time.monotonic() + 300, 0
    while run.poll() is None and seen < begin + at and time.monotonic() < deadline:
        seen = max((int(row["step"]) for row in finished_lines(folder)), default=0)
        time.sleep(0.005)
    while kind == "save" and run.poll() is None and not list(folder.glob("checkpoints/.step-*")):
        time.sleep(0.001)
    time.sleep(draw.random() * 0.05)
    before, lines = checkpoints(folder), finished_lines(folder)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    ranks = [int(pid) for pid in children.read_text().split()] if run.poll() is None else []
    if run.poll() is not None:
        _, error = run.communicate()
        if run.returncode:
            raise Lost(f"the run ended by itself with status {run.returncode}: {error}")
        return False
    if kind == "rank" and ranks:
        os.kill(draw.choice(ranks), signal.SIGKILL)
    elif kind in ("rank", "launcher"):
        run.kill()
    else:
        os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    after = checkpoints(folder)
    if before and not (after and max(after) >= max(before)):
        raise Lost(f"checkpoints {sorted(before)} before the kill, {sorted(after)} after it")
    if finished_lines(folder)[: len(lines)] != lines:
        raise Lost(f"{len(lines)} lines before the kill of {kind}, others after it")
    return True


def survive(folder: Path, mesh: str, kills: int, seed: int) -> int:
    """Kill a run so many times, let it end, and compare it with the run that nobody killed.

    Returns: the kills that came before its end.

    Raises:
      Lost: the two differ, or something was lost on the way.
    """
    draw, steps, killed = random.Random(seed), 4 * kills + 2, 0
    for number in range(kills):
        killed += kill_once(folder / "run", mesh, steps, KINDS[number % len(KINDS)], draw)
    for name in ("run", "whole"):
        run = started(folder / name, mesh, steps)
        _, error = run.communicate(timeout=600)
        if run.returncode:
            raise Lost(f"{name} ended with status {run.returncode}: {error}")
    first, other = finished_lines(folder / "run"), finished_lines(folder / "whole")
    if first != other:
        raise Lost(f"the lines differ: steps {[row['step'] for row in first]} and {[row['step'] for row in other]}")
    files = [(folder / name / "model" / "model.safetensors").read_bytes() for name in ("run", "whole")]
    if files[0] != files[1]:
        raise Lost("the weights at the end differ")
    return killed


def main(_: list[str]) -> None:
    """Kill runs on every mesh, and say how it went."""
    meshes = MESHES.value.split(";")
    for number, mesh in enumerate(meshes):
        folder = Path(tempfile.mkdtemp(prefix="funrl-chaos-"))
        kills = KILLS.value // len(meshes) + (number < KILLS.value % len(meshes))
        killed = survive(folder, mesh, kills, SEED.value + number)
        print(f"{mesh}: {killed} kills; nothing was lost, and the end is that of the run that nobody killed")
        shutil.rmtree(folder)


if __name__ == "__main__":
    app.run(main)
