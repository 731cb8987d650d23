"""Runs with generators in processes of their own, forked from one that has imported everything."""

import dataclasses
import functools
import multiprocessing
import os
import traceback
from pathlib import Path

import torch
from small_runs import GRPO, Quiet, small_job

from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.trainer.placement.joined import join_run
from funrl.trainer.placement.ranks import run_rank

FORK = multiprocessing.get_context("fork")


def generator_job(job):
    """The job of a run as one generator on a rank of its own has it."""
    devices = dataclasses.replace(job.settings.devices, place=None, mesh="dp1")
    settings = dataclasses.replace(job.settings, devices=devices)
    sizes = dict.fromkeys(job.sizes, 1)
    return dataclasses.replace(job, settings=settings, sizes=sizes, generate_sizes=sizes)


def generate(job, run_dir, log):
    """The program of a generator's process; its exit status is 0 where it has joined and the run has ended."""
    torch.set_num_threads(1)
    with open(log, "a", buffering=1) as file:
        try:
            how, counts = join_run(generator_job(job), run_dir, single(), lambda text: print(text, file=file))
            print(how, *counts, file=file)
        except BaseException:
            traceback.print_exc(file=file)
            os._exit(1)
    os._exit(0)


def started_generator(job, run_dir, name):
    """A process that generates for the run in a directory; it ends with this one."""
    process = FORK.Process(target=generate, args=(job, str(run_dir), str(Path(run_dir) / f"{name}.log")), daemon=True)
    process.start()
    return process


def rank_of(job, run_dir, mesh):
    observer = Quiet(str(Path(run_dir) / "checkpoints"))
    outcome = run_rank(job, mesh, observer)
    weights = getattr(observer, "params", None)
    observer.params = None
    return outcome, observer, weights


def trained(compose=GRPO, run_dir=None, **settings):
    """Outcome, observer and weights of a run."""
    job = small_job(compose, run_dir=str(run_dir), **settings)
    return launch(functools.partial(rank_of, job, run_dir), job.launched, "cpu")
