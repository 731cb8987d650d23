"""Runs with generators in processes of their own, forked from one that has imported everything."""

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
import time
import traceback
from pathlib import Path

import torch
from small_runs import GRPO, Quiet, small_job

from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.rollout.native.engine import NativeEngine
from funrl.trainer.placement.joined import join_run
from funrl.trainer.placement.ranks import run_rank

FORK = multiprocessing.get_context("fork")
WAIT_S = 120.0
PLACE = "train:dp1@0 generate:join"


def generator_job(job):
    """The job of a run as one generator on a rank of its own has it."""
    devices = dataclasses.replace(job.settings.devices, place=None, mesh="dp1")
    settings = dataclasses.replace(job.settings, devices=devices)
    sizes = dict.fromkeys(job.sizes, 1)
    return dataclasses.replace(job, settings=settings, sizes=sizes, generate_sizes=sizes)


def signals_itself(ends, mark):
    """Make this process send itself a signal in the middle of its work: a signal, and the iteration of its engine."""
    sign, iterations = ends
    step = NativeEngine.step
    count = 0

    def counting(self):
        nonlocal count
        count += 1
        if count == iterations:
            Path(mark).touch()
            os.kill(os.getpid(), sign)
        return step(self)

    NativeEngine.step = counting


def generate(job, run_dir, name, ends, after):
    """The program of a generator's process; its exit status is 0 where it has joined and the run has ended."""
    torch.set_num_threads(1)
    with open(Path(run_dir) / f"{name}.log", "a", buffering=1) as file:
        try:
            if ends is not None:
                signals_itself(ends, Path(run_dir) / f"{name}.signal")
            deadline = time.monotonic() + WAIT_S
            while after is not None and not (Path(run_dir) / f"{after}.signal").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            how, counts = join_run(
                generator_job(job), str(run_dir), single(), lambda text: print(text, file=file), WAIT_S
            )
            print(how, *counts, file=file)
        except BaseException:
            traceback.print_exc(file=file)
            os._exit(1)
    os._exit(0)


@contextlib.contextmanager
def generators(job, run_dir, wanted):
    """Processes that generate for the run in a directory, by name.

    Args:
      wanted: of each name, a signal that it sends itself with the iteration of its engine, and the name of the one
        whose signal it waits for; each may be None.
    """
    started = {}
    for name, (ends, after) in wanted.items():
        started[name] = FORK.Process(target=generate, args=(job, run_dir, name, ends, after), daemon=True)
        started[name].start()
    try:
        yield started
        for process in started.values():
            if process.exitcode is None and not stopped(process.pid):
                process.join(WAIT_S)
    finally:
        for process in started.values():
            process.kill()
            process.join()


def stopped(pid):
    """True if a process is stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def rank_of(job, run_dir, mesh):
    observer = Quiet(str(Path(run_dir) / "checkpoints"))
    outcome = run_rank(job, mesh, observer)
    weights = getattr(observer, "params", None)
    observer.params = None
    return outcome, observer, weights


def trained(job, run_dir):
    """Outcome, observer and weights of a run."""
    return launch(functools.partial(rank_of, job, run_dir), job.launched, "cpu")


def joined(run_dir, wanted, compose=GRPO, **settings):
    """`trained` of a run with generators, and the exit status of each."""
    return joined_job(run_dir, wanted, small_job(compose, **{"place": PLACE, "run_dir": str(run_dir)} | settings))


def joined_job(run_dir, wanted, job):
    """`joined` of a job whose settings have the place and the directory."""
    with generators(job, run_dir, wanted) as started:
        ended = trained(job, run_dir)
    return ended, {name: process.exitcode for name, process in started.items()}


KILLED = -signal.SIGKILL
