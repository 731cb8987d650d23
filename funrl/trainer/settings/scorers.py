"""Flags of models that score completions, DIR or DIR@0.5 with a weight, and of environments that reward episodes.

With them the values that other flags imply: weights of rewards, and tokens of a completion.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from funrl.loading import parts_by_source
from funrl.rewards.named import parse_rewards
from funrl.role_kinds import ROLES, SCORING_ROLES
from funrl.tasks.embedded import embedded_task
from funrl.trainer.settings.declaration import SettingsError, refusing
from funrl.trainer.settings.settings import (
    Settings,
    check_needs,
    flag_value,
    given_flag,
    is_given,
    settings_flags,
    with_flags,
)

if TYPE_CHECKING:
    from funrl.models import Model

JUDGE = "judge"
SCORERS = (*SCORING_ROLES, JUDGE)  # in the order of their weights and columns
MODEL_FLAGS = tuple(dict.fromkeys(("model", *ROLES.by_flag(), *SCORERS)))  # each names a directory
SOURCED_FLAGS = tuple(name for name, kind in ROLES.by_flag().items() if not kind.scores_completions)  # DIR@math
EPISODE_FLAGS = tuple(name for name, flag in settings_flags().items() if "environment" in flag.needs)
WITHOUT_ENVIRONMENT = {  # flag: why it does not go with an environment
    "reward": "the environment rewards its episodes",
    "reward_model": "reward models read single completions",
    "process_reward_model": "reward models read single completions",
    "judge": "a judge reads single completions",
    "reward_weights": "the environment's reward is the only one",
    "on_reward_error": "an episode that fails is tried again, see --episode_retries",
}


class Given(NamedTuple):
    """Objects that a caller in Python gives, instead of flags that name them.

    Attributes:
      model: instead of --model; its weights begin at random.
      tokenizer: of that model; None: the embedded task's.
      records: instead of --prompts or --data: dicts such as their lines.
      rewards: instead of --reward.
      eval_records: instead of --eval_data.
      curriculum: instead of --curriculum.
      environment: instead of --env: an environment, or what `environment_from` makes one of.
    """

    model: Model | None = None
    tokenizer: object = None
    records: Sequence[Mapping[str, object]] | None = None
    rewards: tuple[Callable[..., float], ...] | None = None
    eval_records: Sequence[Mapping[str, object]] | None = None
    curriculum: Callable[..., object] | None = None
    environment: Any = None

    @property
    def environment_name(self) -> str:
        """Name of the environment; "": none is given."""
        name = getattr(self.environment, "__name__", type(self.environment).__name__)
        return "" if self.environment is None else name


NOTHING_GIVEN = Given()  # of a command line


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


def sourced_paths(settings: Settings, name: str) -> dict[str, str]:
    """Source of prompts -> directory, where a flag such as --teacher names DIR@math,DIR@chat; {}: it names one.

    Raises:
      SettingsError: a part has no source, or two have the same.
    """
    value = flag_value(settings, name)
    if name not in SOURCED_FLAGS or value is None or Path(value).exists():
        return {}
    with refusing():
        return parts_by_source(name, value, "DIR")


def model_paths(settings: Settings, name: str) -> dict[str, str]:
    """The directories that a flag names, by what follows each: "@0.5", a weight, "@math", a source, or ""."""
    if sourced := sourced_paths(settings, name):
        return {f"@{source}": path for source, path in sourced.items()}
    path = model_path(settings, name)
    return {} if path is None else {flag_value(settings, name).removeprefix(path): path}


def with_paths(settings: Settings, name: str, change: Callable[[str], str]) -> str:
    """The value of a flag of models, with each directory changed."""
    return ",".join(change(path) + rest for rest, path in model_paths(settings, name).items())


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


def own_environment(settings: Settings, given: Given = NOTHING_GIVEN) -> str | None:
    """Name of an environment of a flag or of Python; None: neither."""
    return given.environment_name or settings.environments.env


def has_environment(settings: Settings, given: Given = NOTHING_GIVEN) -> bool:
    """True if a run makes episodes: with an environment of a flag, of Python, or of the embedded task."""
    if own_environment(settings, given) is not None:
        return True
    examples = settings.examples
    embedded = examples.prompts is None and examples.data is None and given.records is None
    return embedded and embedded_task(examples.task).environment is not None


def environment_flag(settings: Settings, given: Given = NOTHING_GIVEN) -> str:
    """The flag that names the environment of a run that has one."""
    own = own_environment(settings, given)
    return f"--task={settings.examples.task}" if own is None else f"--env={own}"


def check_environment_flags(settings: Settings, given: Given = NOTHING_GIVEN) -> None:
    """Check the flags of environments. Raises: SettingsError, one that does nothing or does not go with them."""
    episodes = has_environment(settings, given)
    check_needs(settings, env=own_environment(settings, given), environment=episodes)
    flags = {name: given_flag(settings, name) for name in WITHOUT_ENVIRONMENT if is_given(settings, name)}
    flags |= {"reward": "a reward function"} if given.rewards else {}
    if episodes and flags:
        name, flag = next(iter(flags.items()))
        what = environment_flag(settings, given)
        raise SettingsError(f"{flag} with {what}: {WITHOUT_ENVIRONMENT[name]}; leave it out")


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
