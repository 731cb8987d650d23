"""The embedded tasks by name: the one place that knows which there are."""

from funrl.tasks import arithmetic
from funrl.tasks.task import EmbeddedTask

TASKS: dict[str, EmbeddedTask] = {model: arithmetic.embedded_task(model) for model in arithmetic.MODELS}


def is_embedded_reward(reward: object) -> bool:
    """True if a function is the reward of an embedded task."""
    return any(reward is task.reward for task in TASKS.values())
