"""Sampling of a run: of the completions to train on, and of those to evaluate."""

from __future__ import annotations

from typing import Any

from funrl.models import ModelConfig
from funrl.models.huggingface.generation_config import GENERATION, sampling_defaults
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.job import Task
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.implied import resolved
from funrl.trainer.settings.settings import Settings, flag_value

EVAL_DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
IDLE_IF_GREEDY = ("top_k", "top_p", "min_p")


def new_tokens(settings: Settings, task: Task | None = None) -> int:
    """Tokens that a completion may have."""
    default = resolved(settings).sampling.max_new_tokens if task is None else task.max_new_tokens
    return settings.sampling.max_new_tokens or default or 1


def row_new_tokens(settings: Settings, task: Task, new_tokens: int) -> int:
    """Tokens that the policy may sample for a row: a completion, or all turns of a trajectory.

    Args:
      new_tokens: of a completion.
    """
    if task.environment is None:
        return new_tokens
    most = settings.environments.episode_turns * new_tokens
    return min(most, settings.environments.episode_tokens or most)


def samplings(settings: Settings, count: int, stop: tuple[int, ...], config: ModelConfig) -> tuple[Sampling, Sampling]:
    """Sampling of the completions to train on, and of those to evaluate.

    Args:
      count: tokens that a completion may have.
      stop: tokens that end a completion.
      config: of the model that the run begins with.

    Raises:
      SettingsError: the model's generation_config.json has a number out of its range, or a flag does nothing.
    """
    flags = settings.sampling
    train = Sampling(
        flags.temperature,
        flags.top_k,
        flags.top_p,
        count,
        stop,
        flags.samples_per_prompt,
        min_p=flags.min_p,
        repetition_penalty=flags.repetition_penalty,
    )
    given: dict[str, Any] = {name: flag_value(settings, f"eval_{name}") for name in EVAL_DEFAULTS}
    values = EVAL_DEFAULTS | sampling_defaults(config) | {name: x for name, x in given.items() if x is not None}
    greedy = values["temperature"] == 0
    idle = [name for name in IDLE_IF_GREEDY if greedy and given[name] is not None]
    if idle:
        raise SettingsError(
            f"--eval_{idle[0]}={given[idle[0]]} does nothing: evaluation is greedy; give --eval_temperature too"
        )
    if greedy and settings.evaluation.eval_samples > 1:
        raise SettingsError(
            f"--eval_samples={settings.evaluation.eval_samples}: evaluation is greedy, so all would be the same; give "
            "--eval_temperature too"
        )
    try:
        numbers: dict[str, Any] = values | {"temperature": values["temperature"] or 1.0}
        return train, Sampling(
            **numbers, max_new_tokens=count, stop=stop, greedy=greedy, samples=settings.evaluation.eval_samples
        )
    except ValueError as error:
        raise SettingsError(f"{GENERATION} of the model: {error}") from error
