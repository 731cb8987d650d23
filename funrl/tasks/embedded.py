"""The embedded tasks by name: the one place that knows which there are."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from funrl.tasks.task import EmbeddedTask

# The second is the first, for a decoder with experts; from the third on they have environments.
TASK_NAMES = ("arithmetic", "arithmetic_moe", "calculator", "retry", "programs", "search", "guessing")


@functools.cache
def embedded_task(name: str) -> EmbeddedTask:
    """The task of one of `TASK_NAMES`."""
    from funrl.tasks import (  # here, for flags are read without numpy
        arithmetic,
        calculator,
        guessing,
        programs,
        retry,
        search,
    )

    with_environments = {
        "calculator": calculator.calculator_task,
        "retry": retry.retry_task,
        "programs": programs.programs_task,
        "search": search.search_task,
        "guessing": guessing.guessing_task,
    }
    return with_environments[name]() if name in with_environments else arithmetic.arithmetic_task(name)


def is_embedded_reward(reward: object) -> bool:
    """True if a function is the reward of an embedded task."""
    return any(reward is embedded_task(name).reward for name in TASK_NAMES)


def is_embedded_tokenizer(directory: str | Path) -> bool:
    """True if a model's directory has the tokenizer of an embedded task."""
    return any(embedded_task(name).is_its_tokenizer(directory) for name in TASK_NAMES)
