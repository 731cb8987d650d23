"""The functions that prepare, run and estimate a command: those of reinforcement learning, or of given texts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from funrl.cost.dry_report import dry_run, supervised_dry_run
from funrl.experiments.command import Command
from funrl.trainer.job import prepare
from funrl.trainer.loop import train
from funrl.trainer.supervise import prepare_course, teach


class Entries(NamedTuple):
    """(settings, compose) -> job; (job, mesh, run_dir) -> outcome; (settings, compose) -> text."""

    prepare: Callable[..., Any]
    train: Callable[..., Any]
    dry_run: Callable[..., str]


def entries(command: Command) -> Entries:
    """The functions for a command."""
    if command.kind == "rl":
        return Entries(prepare, train, dry_run)
    course = {"kind": "demonstrations" if command.experiment == "sft" else "preferences"}
    if command.experiment == "reward_model":
        course["reads"] = "rewards"
    return Entries(functools.partial(prepare_course, **course), teach, functools.partial(supervised_dry_run, **course))
