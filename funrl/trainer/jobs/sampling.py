"""Sampling of a run: of the completions to train on, and of those to evaluate, and the room that these need."""

from __future__ import annotations

from typing import Any

from funrl.mesh.mesh import Mesh
from funrl.models import Model, ModelConfig
from funrl.models.huggingface.generation_config import GENERATION, sampling_defaults
from funrl.models.weight_dtypes import TORCH_DTYPES
from funrl.rollout.native.backends import bytes_of_page
from funrl.rollout.native.cache_sizes import page_tokens
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.job import Task
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import new_tokens_of
from funrl.trainer.settings.settings import Settings, flag_value

EVAL_DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
IDLE_IF_GREEDY = ("top_k", "top_p", "min_p")


def new_tokens(settings: Settings, task: Task | None = None) -> int:
    """Tokens that a completion may have."""
    if task is None:
        return new_tokens_of(settings)
    return settings.sampling.max_new_tokens or task.max_new_tokens


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
    shared: dict[str, Any] = {"max_new_tokens": count, "stop": stop}
    train_values: dict[str, Any] = {name: flag_value(settings, name) for name in EVAL_DEFAULTS}
    train = Sampling(**train_values, **shared, samples=settings.sampling.samples_per_prompt)
    given: dict[str, Any] = {name: flag_value(settings, f"eval_{name}") for name in EVAL_DEFAULTS}
    values = EVAL_DEFAULTS | sampling_defaults(config) | {name: x for name, x in given.items() if x is not None}
    greedy = values["temperature"] == 0
    idle = [name for name in IDLE_IF_GREEDY if greedy and given[name] is not None]
    if idle:
        raise settings.refusal(f"{{eval_{idle[0]}}} does nothing: evaluation is greedy; give --eval_temperature too")
    if greedy and settings.evaluation.eval_samples > 1:
        raise settings.refusal(
            "{eval_samples}: evaluation is greedy, so all would be the same; give --eval_temperature too"
        )
    try:
        numbers: dict[str, Any] = values | {"temperature": values["temperature"] or 1.0} | shared
        return train, Sampling(**numbers, greedy=greedy, samples=settings.evaluation.eval_samples)
    except ValueError as error:
        raise SettingsError(f"{GENERATION} of the model: {error}") from error


def check_budget(settings: Settings, task: Task, new_tokens: int) -> None:
    """Raise SettingsError where no completion or episode could take more than one step.

    Args:
      new_tokens: of a completion.
    """
    tokens = settings.sampling.new_tokens_per_step
    most = row_new_tokens(settings, task, new_tokens)
    if tokens is not None and tokens >= most:
        row = "a completion has {most} tokens at most (--max_new_tokens)"
        if task.environment is not None:
            row = "a trajectory has {most} tokens at most (--max_new_tokens, --episode_turns, --episode_tokens)"
        raise settings.refusal(
            f"{{new_tokens_per_step}}: {row}, so none would continue in a later step; give fewer, or leave it out",
            most=most,
        )


def check_cache(settings: Settings, task: Task, new_tokens: int, model: Model, mesh: Mesh, memory: float) -> None:
    """Check that the cache holds the longest prompt with its completion, and the memory holds the cache.

    Args:
      mesh: the generate mesh.
      memory: bytes that one rank may use.

    Raises:
      SettingsError: --kv_cache_gb is less than the keys and values of that row, or more than the memory.
    """
    if settings.engines.kv_cache_gb is None:
        return
    if settings.engines.kv_cache_gb * 1e9 > memory:
        raise settings.refusal(f"{{kv_cache_gb}}: a rank of this machine has {memory / 1e9:.3g} GB in all; give less")
    longest = max(len(e.tokens) for e in (*task.prompts, *task.heldout))
    tokens = min(longest + row_new_tokens(settings, task, new_tokens), model.config.max_positions)
    dtype = TORCH_DTYPES[settings.models.dtype]
    pages = -(-tokens // page_tokens(mesh.device.type))
    page_bytes = bytes_of_page(model, mesh, dtype, packed=settings.models.compile != "on")
    needed = (pages * page_bytes + model.cell_bytes(mesh, dtype)) / 1e9
    if needed > settings.engines.kv_cache_gb:
        what = "completion" if task.environment is None else "episode"
        flag = "--max_new_tokens" if task.environment is None else "--episode_tokens"
        raise settings.refusal(
            f"{{kv_cache_gb}}: the longest prompt and {what} may have {tokens} tokens, whose keys and values take "
            f"{needed:.2g} GB on a rank; give it more, or a smaller {flag}"
        )
