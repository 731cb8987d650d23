"""Flags of models that score completions: DIR, or DIR@0.5 with a weight. Nothing here imports torch."""

from __future__ import annotations

import math

from funrl.rewards.named import parse_rewards
from funrl.role_kinds import ROLES, SCORING_ROLES
from funrl.trainer.settings.settings import Settings, flag_value

SCORERS = (*SCORING_ROLES, "judge")  # in the order of their weights and columns
MODEL_FLAGS = tuple(dict.fromkeys(("model", *ROLES.by_flag(), *SCORERS)))  # each names a directory


def scorers_of(settings: Settings) -> tuple[str, ...]:
    """The given flags of models that score completions."""
    return tuple(name for name in SCORERS if flag_value(settings, name) is not None)


def model_path(settings: Settings, name: str) -> str | None:
    """The directory that a flag names, without the weight of a scoring model."""
    value = flag_value(settings, name)
    return weighted_path(value)[0] if value is not None and name in SCORERS else value


def weighted_path(value: str) -> tuple[str, float | None]:
    """Directory and weight in DIR@0.5; if it does not end with a number, all of it is the directory.

    >>> weighted_path("runs/a@0.5"), weighted_path("runs/me@home")
    (('runs/a', 0.5), ('runs/me@home', None))
    """
    path, _, text = value.rpartition("@")
    try:
        weight = float(text)
    except ValueError:
        return value, None
    return (path, weight) if path and math.isfinite(weight) else (value, None)


def weights_by_name(settings: Settings, functions: int) -> str | None:
    """The weights that --reward and the flags of models give, in the form of --reward_weights; None if none does.

    Args:
      functions: number of reward functions if --reward names none.

    Raises:
      LoadError: --reward does not name reward functions.
    """
    reward = settings.rewards.reward
    own = [None] * functions if reward is None else [part.weight for part in parse_rewards(reward)]
    weights = [*own, *(weighted_path(flag_value(settings, name))[1] for name in scorers_of(settings))]
    if all(weight is None for weight in weights):
        return None
    return ",".join(str(1.0 if weight is None else weight).removesuffix(".0") for weight in weights)
