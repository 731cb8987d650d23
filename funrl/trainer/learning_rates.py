"""Peak learning rates: those that flags give, and defaults that fit the size of the model.

A larger model wants smaller steps. The default of a model that is given falls with the square root of its number of
parameters N,

    lr(N) = 0.2 / sqrt(N), at least 5e-7 and at most 1e-3,

| N | 1e5 | 2.6e5 | 1e8 | 5e8 | 7e9 | 7e10 | 1e11 |
|---|---|---|---|---|---|---|---|
| lr | 6.3e-4 | 3.9e-4 | 2e-5 | 8.9e-6 | 2.4e-6 | 7.6e-7 | 6.3e-7 |

and adapters take ten times as much. Its ends are known: on a model of 2.6e5 parameters 4e-4 to 1e-3 learn well, and
published runs of 7e9 to 7e10 take 5e-7 to 3e-6. A model that begins from nothing is that of an embedded task, which
has a rate of its own.

References: Schulman and Thinking Machines Lab, 2025, "LoRA Without Regret" (the factor of adapters).
"""

from __future__ import annotations

import math

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.models.model import Model
from funrl.trainer.settings import Settings

RATE_OF_ONE, LOWEST, HIGHEST = 0.2, 5e-7, 1e-3
ADAPTERS = 10.0
FROM_NOTHING, ADAPTERS_FROM_NOTHING = 1e-3, 3e-3


def rate_of_size(parameters: int, adapters: bool = False) -> float:
    """The default learning rate of a model, to two digits.

    Args:
      parameters: of the whole model, 1 or more.
      adapters: whether adapters learn instead of it.

    >>> rate_of_size(7_000_000_000)
    2.4e-06
    """
    rate = min(max(RATE_OF_ONE / math.sqrt(parameters), LOWEST), HIGHEST)
    return float(f"{rate * (ADAPTERS if adapters else 1.0):.1e}")


def learning_rates(settings: Settings, algorithm: Algorithm, model: Model) -> dict[str, float]:
    """Peak learning rates of the roles that learn.

    Args:
      model: that the run begins with, without adapters.
    """
    adapters = settings.lora_rank is not None
    if settings.lr is not None:
        lr = settings.lr
    elif settings.model is None:
        lr = ADAPTERS_FROM_NOTHING if adapters else FROM_NOTHING
    else:
        lr = rate_of_size(trees.count(model.shapes), adapters)
    critic = 2 * lr if settings.critic_lr is None else settings.critic_lr
    implicit = lr if settings.implicit_reward_lr is None else settings.implicit_reward_lr
    own = {"critic": critic, "implicit_reward": implicit}
    return {name: own.get(name, lr) for name in algorithm.losses}
