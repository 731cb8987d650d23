"""Limits of the waiting of a job's ranks: for each other, and for reward functions."""

from __future__ import annotations

import datetime

from funrl.processes.stall_monitor import duration
from funrl.processes.watch import WaitLimits
from funrl.trainer.jobs.datasets import has_workers
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.settings.settings import reward_timeout_of


def waiting_of(job: Job) -> WaitLimits:
    """Limits of the waiting of a job's ranks, by its flags."""
    flags = job.settings.waiting
    reward = ""
    if isinstance(job, RLJob) and job.task.rewards:
        reward = "; nothing ends a reward function that runs without workers (--reward_workers=0): give workers"
        if has_workers(job.settings, job.task.rewards):
            reward = f"; a reward function may take {duration(reward_timeout_of(job.settings))} (--reward_timeout)"
    timeout = datetime.timedelta(minutes=flags.timeout)
    return WaitLimits(timeout, flags.heartbeat, flags.stalled_after, reward)
