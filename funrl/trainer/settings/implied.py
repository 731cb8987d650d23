"""Values of flags that other flags imply. Nothing here imports torch."""

from __future__ import annotations

from funrl.tasks.embedded import embedded_task
from funrl.trainer.settings.scorers import weights_by_name
from funrl.trainer.settings.settings import Settings, with_flags

NEW_TOKENS = 64  # of a completion, unless a flag or the embedded task gives it
NEW_TOKENS_FROM_SCRATCH = 32  # the same without --model; the embedded task's decoder has 64 positions


def resolved(settings: Settings, given: bool = False) -> Settings:
    """The settings with implied values filled in: the number of new tokens and the weights of rewards.

    Args:
      given: whether the caller passes prompts itself, not by a flag.

    Raises:
      LoadError: --reward does not name reward functions.
    """
    if settings.rewards.reward_weights is None:
        functions = int(settings.examples.prompts is None and not given)  # of the embedded task
        settings = with_flags(settings, reward_weights=weights_by_name(settings, functions))
    return with_flags(settings, max_new_tokens=new_tokens_of(settings, given))


def new_tokens_of(settings: Settings, given: bool = False) -> int:
    """Tokens that a completion may have: those of a flag, or what they are by default.

    Args:
      given: whether the caller passes prompts itself, not by a flag.
    """
    if settings.sampling.max_new_tokens is not None:
        return settings.sampling.max_new_tokens
    own = settings.examples.prompts, settings.rewards.reward, settings.environments.env
    if all(value is None for value in own) and not given:
        return embedded_task(settings.examples.task).max_new_tokens
    return NEW_TOKENS_FROM_SCRATCH if settings.models.model is None else NEW_TOKENS
