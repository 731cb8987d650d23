"""The kinds of experiments that learn from given texts: what `run.main` is told of each."""

import functools

from funrl.experiments.run import Kind
from funrl.runtime.supervise import HIDDEN, SupervisedSettings, prepare_course, teach

DEMONSTRATIONS = Kind(SupervisedSettings, HIDDEN, functools.partial(prepare_course, kind="demonstrations"), teach)
PREFERENCES = Kind(SupervisedSettings, HIDDEN, functools.partial(prepare_course, kind="preferences"), teach)
REWARDS = Kind(
    SupervisedSettings, HIDDEN, functools.partial(prepare_course, kind="preferences", reads="rewards"), teach
)
