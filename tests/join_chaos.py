"""Kill generators of a run at random moments while others join; at the end it must be the run that had none.

    PYTHONPATH=.:tests:tests/trainer python tests/join_chaos.py                     # 60 steps, 50 kills
    PYTHONPATH=.:tests:tests/trainer python tests/join_chaos.py --steps=6 --kills=4 --staleness=2

Episodes of two turns, the second one sampled twice, with one rank that trains and three generators in processes of
their own. Each one killed with SIGKILL is replaced by a new one, five times only after the run has been without any.
One is stopped with SIGSTOP: the run has to say so within 30 seconds, and takes it back when it goes on. Each request
has to arrive once, and samples, metrics and weights have to be those, bit by bit, of a run whose rank generates itself;
with --staleness of a run with one generator that nobody disturbs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import joined_runs
import torch
from absl import app, flags
from joined_runs import FORK, PLACE, generate, rank_of
from small_runs import GRPO, MEASURED, Quiet
from test_episode_runs import Branching, episode_job

from funrl import trees
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.mesh.mesh import single
from funrl.rollout.joined.lease_server import LeaseServer

LIMIT_S = 30.0  # to name a generator that is stopped
RUN_S = 3600.0  # of the whole run
IN_SERVICE = 3
OWN = ("memory/", "sync/bytes")
TASK: dict[str, Any] = {"minibatches": 1, "max_new_tokens": 8, "batch_prompts": 8, "samples_per_prompt": 4}


class Plan(NamedTuple):
    """A run, and its disturbances.

    Attributes:
      steps, staleness: of the run.
      kills: generators that are killed.
      outages: kills after which there is none for a moment.
      stops: whether one is stopped for a while.
      seed: of the moments.
    """

    steps: int
    kills: int
    outages: int
    stops: bool
    seed: int
    staleness: int = 0

    def job(self, folder: Path, place: str | None) -> Any:
        """The job of the run in a directory."""
        settings = {"steps": self.steps, "eval_every": 2, "staleness": self.staleness} | TASK
        compose = rollout_is if self.staleness else GRPO
        return episode_job(compose, Branching(), place=place, run_dir=str(folder), **settings)


class Lost(AssertionError):
    """Something has been lost or done twice, or is said too late."""


class Written(Quiet):
    """An observer whose notes and steps stand in a file at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder / "checkpoints"))
        self.file = folder / "events.jsonl"

    def write(self, kind: str, value: Any) -> None:
        with open(self.file, "a") as stream:
            stream.write(json.dumps([time.time(), kind, value]) + "\n")

    def note(self, text: str) -> None:
        super().note(text)
        self.write("note", text)

    def step(self, step: int, metrics: Any, seconds: Any) -> None:
        super().step(step, metrics, seconds)
        self.write("step", step)


def train(folder: Path, job: Any) -> None:
    """The program of the rank that trains; what it ends with is in a file."""
    torch.set_num_threads(1)
    opened: list[Any] = []
    arrived: list[int] = []
    open_units = LeaseServer.open
    collect = LeaseServer.collect

    def opening(self: LeaseServer, units: Any) -> None:
        units = list(units)
        opened.extend((request.number, request.seed) for unit in units for request in unit)
        open_units(self, units)

    def collecting(self: LeaseServer, timeout_s: float, program: int = 0) -> Any:
        news = collect(self, timeout_s, program)
        arrived.extend(done.number for done in news.completions)
        return news

    LeaseServer.open = opening
    LeaseServer.collect = collecting
    observers: list[Written] = []

    def observer(_: str) -> Written:
        observers.append(Written(folder))
        return observers[0]

    joined_runs.Quiet = observer
    outcome, seen, weights = rank_of(job, str(folder), single())
    torch.save(
        {
            "error": outcome.error,
            "shown": seen.shown,
            "table": [tuple(row) for row in seen.table],
            "steps": seen.steps,
            "weights": trees.leaves(weights),
            "opened": opened,
            "arrived": arrived,
        },
        folder / "end.pt",
    )


def events(folder: Path) -> list[tuple[float, str, Any]]:
    """Notes and steps so far, with their times."""
    file = folder / "events.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def newest_step(folder: Path) -> int:
    return max((value for _, kind, value in events(folder) if kind == "step"), default=0)


class Generators:
    """The processes that generate."""

    def __init__(self, folder: Path, job: Any) -> None:
        self.folder = folder
        self.job = job
        self.alive: list[Any] = []
        self.count = 0

    def join(self) -> None:
        name = f"g{self.count}"
        self.count += 1
        process = FORK.Process(target=generate, args=(self.job, self.folder, name, None, None), name=name, daemon=True)
        process.start()
        self.alive.append(process)

    def in_service(self) -> list[Any]:
        """Those that have joined the run."""
        logs = {process: self.folder / f"{process.name}.log" for process in self.alive}
        return [process for process, log in logs.items() if log.exists() and "has joined" in log.read_text()]

    def kill(self, process: Any) -> None:
        process.kill()
        process.join()
        self.alive.remove(process)

    def close(self) -> None:
        for process in list(self.alive):
            self.kill(process)


def survive(folder: Path, plan: Plan) -> str:
    """Run, kill and compare; returns what happened.

    Raises:
      Lost: the runs differ, or a request has not arrived once.
    """
    steps, kills, outages, stops, seed, _ = plan
    draw = random.Random(seed)
    moments = sorted((draw.randint(0, steps - 2), draw.random() * 0.3) for _ in range(kills))
    without = set(draw.sample(range(kills), min(outages, kills)))
    stop_at = draw.randint(1, steps - 2) if stops else steps + 1
    (folder / "run").mkdir()
    job = plan.job(folder / "run", PLACE)
    generators = Generators(folder / "run", job)
    trainer = FORK.Process(target=train, args=(folder / "run", job))
    trainer.start()
    named_s = 0.0
    killed = 0
    deadline = time.monotonic() + RUN_S
    try:
        for _ in range(IN_SERVICE):
            generators.join()
        while trainer.exitcode is None:
            if time.monotonic() > deadline:
                raise Lost(f"the run stands at step {newest_step(folder / 'run')} after {RUN_S:.0f} s")
            step = newest_step(folder / "run")
            if step >= stop_at and generators.in_service():
                named_s = stop_one(generators, folder / "run")
                stop_at = steps + 1
            if killed < kills and step >= moments[killed][0] and (joined := generators.in_service()):
                time.sleep(moments[killed][1])
                victims = list(generators.alive) if killed in without else [draw.choice(joined)]
                for victim in victims:
                    generators.kill(victim)
                if killed in without:
                    time.sleep(0.5)
                for _ in victims:
                    generators.join()
                killed += 1
            trainer.join(0.02)
    finally:
        generators.close()
        trainer.kill()
        trainer.join()
    if trainer.exitcode:
        raise Lost(f"the run ended with status {trainer.exitcode}")
    undisturbed(folder / "whole", plan)
    requests = compare(folder)
    notes = [value for _, kind, value in events(folder / "run") if kind == "note"]
    counts = {
        word: sum(word in note for note in notes) for word in ("has joined", "is lost", "is back", "go to others")
    }
    stopped = f"; a stopped generator was named after {named_s:.1f} s" if stops else ""
    return (
        f"staleness {plan.staleness}, {steps} steps, {killed} kills, {len(without)} times without one{stopped}. "
        f"{requests} requests arrived once each; samples, metrics and weights are those of the undisturbed run. "
        f"Notes: {counts}"
    )


def undisturbed(folder: Path, plan: Plan) -> None:
    """The run that nobody disturbs: without generators, and with --staleness with one."""
    folder.mkdir()
    job = plan.job(folder, PLACE if plan.staleness else None)
    generators = Generators(folder, job)
    trainer = FORK.Process(target=train, args=(folder, job))
    trainer.start()
    try:
        if plan.staleness:
            generators.join()
        trainer.join(RUN_S)
    finally:
        generators.close()
        trainer.kill()
        trainer.join()


def stop_one(generators: Generators, folder: Path) -> float:
    """Stop a generator until the run has named it, and let it go on; returns the seconds until then.

    Meanwhile it is the only one, so that the run does not end without it.
    """
    process = generators.in_service()[0]
    others = [other for other in generators.alive if other is not process]
    os.kill(process.pid, signal.SIGSTOP)
    begin = time.time()
    for other in others:
        generators.kill(other)
    while time.time() < begin + LIMIT_S + 10:
        for when, kind, value in events(folder):
            if kind == "note" and when > begin and f":{process.pid}-" in value and "has been silent" in value:
                os.kill(process.pid, signal.SIGCONT)
                if when - begin > LIMIT_S:
                    raise Lost(f"the stopped generator was named after {when - begin:.0f} s")
                for _ in others:
                    generators.join()
                return when - begin
        time.sleep(0.05)
    raise Lost("the stopped generator was not named")


def compare(folder: Path) -> int:
    """Compare the run with the undisturbed one; returns the number of requests."""
    ends = [torch.load(folder / name / "end.pt", weights_only=False) for name in ("run", "whole")]
    run, whole = ends
    if run["error"] or whole["error"]:
        raise Lost(f"errors: {run['error']}, {whole['error']}")
    if sorted(run["arrived"]) != sorted(number for number, _ in run["opened"]):
        raise Lost(f"{len(run['opened'])} requests were opened and {len(run['arrived'])} have arrived")
    for name in ("shown", "table"):
        if run[name] != whole[name]:
            raise Lost(f"{name} differ")
    for (step, a), (_, b) in zip(run["steps"], whole["steps"], strict=True):
        names = [n for n in a if not n.startswith(OWN) and not n.endswith(MEASURED)]
        if wrong := [n for n in names if a[n] != b[n]]:
            raise Lost(f"step {step}: {wrong[0]} is {a[wrong[0]]} and {b[wrong[0]]}")
    if not all(metrics["actor/grad_norm"] for _, metrics in run["steps"]):
        raise Lost("a step has not changed the weights")
    if not all(torch.equal(a, b) for a, b in zip(run["weights"], whole["weights"], strict=True)):
        raise Lost("the weights at the end differ")
    return len(run["arrived"])


def define_flags() -> None:
    """Define those of the program; a test that imports this file beside others has none of them."""
    flags.DEFINE_integer("steps", 60, "steps of the run", lower_bound=2)
    flags.DEFINE_integer("kills", 50, "generators that are killed", lower_bound=0)
    flags.DEFINE_integer("outages", 5, "kills after which the run has no generator for a moment", lower_bound=0)
    flags.DEFINE_boolean("stops", True, "stop a generator once")
    flags.DEFINE_integer("staleness", 0, "of the run", lower_bound=0)
    flags.DEFINE_integer("chaos_seed", 0, "of the moments")


def main(_: list[str]) -> None:
    """Kill generators, and say how it went."""
    given = flags.FLAGS
    folder = Path(tempfile.mkdtemp(prefix="funrl-join-"))
    plan = Plan(given.steps, given.kills, given.outages, given.stops, given.chaos_seed, given.staleness)
    print(survive(folder, plan))
    shutil.rmtree(folder)


if __name__ == "__main__":
    define_flags()
    app.run(main)
