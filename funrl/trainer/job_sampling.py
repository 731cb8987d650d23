"""Sampling of a run: of the completions to train on, and of those to evaluate."""

from __future__ import annotations

from typing import Any

from funrl.models import Config
from funrl.models.generation_config import GENERATION, sampling_defaults
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.declaration import SettingsError
from funrl.trainer.job_data import Task, Texts
from funrl.trainer.settings import Settings, resolved

EVAL_DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
IDLE_IF_GREEDY = ("top_k", "top_p", "min_p")


def new_tokens(settings: Settings, task: Task | Texts | None = None) -> int:
    """Tokens that a completion may have."""
    default = task.max_new_tokens if isinstance(task, Task) else resolved(settings).max_new_tokens
    return settings.max_new_tokens or default or 1


def samplings(settings: Settings, count: int, stop: tuple[int, ...], config: Config) -> tuple[Sampling, Sampling]:
    """Sampling of the completions to train on, and of those to evaluate.

    Args:
      count: tokens that a completion may have.
      stop: tokens that end a completion.
      config: of the model that the run begins with.

    Raises:
      SettingsError: the model's generation_config.json has a number out of its range, or a flag does nothing.
    """
    train = Sampling(
        settings.temperature, settings.top_k, settings.top_p, count, stop, settings.samples_per_prompt,
        min_p=settings.min_p, repetition_penalty=settings.repetition_penalty,
    )  # fmt: skip
    given: dict[str, Any] = {name: getattr(settings, f"eval_{name}") for name in EVAL_DEFAULTS}
    how = EVAL_DEFAULTS | sampling_defaults(config) | {name: x for name, x in given.items() if x is not None}
    greedy = how["temperature"] == 0
    idle = [name for name in IDLE_IF_GREEDY if greedy and given[name] is not None]
    if idle:
        raise SettingsError(
            f"--eval_{idle[0]}={given[idle[0]]} does nothing: evaluation is greedy; give --eval_temperature too"
        )
    if greedy and settings.eval_samples > 1:
        raise SettingsError(
            f"--eval_samples={settings.eval_samples}: evaluation is greedy, so all would be the same; give "
            "--eval_temperature too"
        )
    try:
        numbers: dict[str, Any] = how | {"temperature": how["temperature"] or 1.0}
        return train, Sampling(**numbers, max_new_tokens=count, stop=stop, greedy=greedy, samples=settings.eval_samples)
    except ValueError as error:
        raise SettingsError(f"{GENERATION} of the model: {error}") from error
