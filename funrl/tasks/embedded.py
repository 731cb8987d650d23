"""The embedded tasks by name: the one place that knows which there are."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from funrl.tasks.task import EmbeddedTask

# The second is the first, for a decoder with experts, the third has pictures, and the last an environment.
TASK_NAMES = ("arithmetic", "arithmetic_moe", "shapes", "calculator")


@functools.cache
def embedded_task(name: str) -> EmbeddedTask:
    """The task of one of `TASK_NAMES`."""
    if name in ("arithmetic", "arithmetic_moe"):
        from funrl.tasks.arithmetic import arithmetic_task  # here, for flags are read without numpy

        return arithmetic_task(name)
    # Only that of the task, for those with environments import torch.
    return getattr(importlib.import_module(f"funrl.tasks.{name}"), f"{name}_task")()


def is_embedded_reward(reward: object) -> bool:
    """True if a function is the reward of an embedded task."""
    return any(reward is embedded_task(name).reward for name in TASK_NAMES)


def has_tokenizer_of(task: str, directory: str | Path) -> bool:
    """True if a model's directory has the tokenizer of an embedded task."""
    try:
        content = json.loads((Path(directory) / "tokenizer.json").read_text())
        tokens = {*content["model"]["vocab"], *(token["content"] for token in content["added_tokens"])}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return tokens == embedded_task(task).tokens
