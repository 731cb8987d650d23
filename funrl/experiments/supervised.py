"""The kinds of experiments that learn from given texts: what `run.main` is told of each."""

import functools
from typing import Any

from funrl.cost.dry_report import supervised_dry_run
from funrl.experiments.run import Kind
from funrl.trainer.supervise import HIDDEN, SupervisedSettings, prepare_course, teach


def _kind(**course: Any) -> Kind:
    """`course` are the arguments that `prepare_course` and `supervised_dry_run` share."""
    prepare = functools.partial(prepare_course, **course)
    return Kind(SupervisedSettings, HIDDEN, prepare, teach, functools.partial(supervised_dry_run, **course))


DEMONSTRATIONS = _kind(kind="demonstrations")
PREFERENCES = _kind(kind="preferences")
REWARDS = _kind(kind="preferences", reads="rewards")
