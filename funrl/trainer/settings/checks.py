"""Checks of several flags together, and of the files that they name. Nothing here imports torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from funrl.data.cached_datasets import has_cached_model
from funrl.data.columns import Fields, parse_fields
from funrl.data.json_lines import DataError
from funrl.data.mixture import WeightedFile, weighted_files
from funrl.data.records import FORMATS, source_problem
from funrl.loading import locate
from funrl.rewards.named import VERIFIERS, parse_rewards
from funrl.tasks.embedded import is_embedded_tokenizer
from funrl.trainer.settings.declaration import SettingsError, parts
from funrl.trainer.settings.refusals import ALWAYS, check_agents
from funrl.trainer.settings.scorers import (
    MODEL_FLAGS,
    NO_OBJECTS,
    SCORERS,
    GivenObjects,
    check_environment_flags,
    has_environment,
    model_path,
    own_environment,
    scorers_of,
    weights_by_name,
)
from funrl.trainer.settings.settings import Settings, check_values, flag_value, settings_flags

LARGEST = 3.4028234663852886e38  # largest float32, the trainer's dtype
DATA_FLAGS = {"prompts": "prompts", "data": "texts", "eval_data": "held-out data"}
REST_WEIGHT = 0.1  # weight of prompts outside --difficulty's pass rates, by default
OF_OWN_DATA = (
    "fields",
    "eval_data",
    "prompt_template",
    "system_prompt",
    "few_shot",
    "chat_template",
    "tools",
    "template_arguments",
)


def check_settings(
    settings: Settings, kind: str | None = None, rewarded: bool = True, given: GivenObjects = NO_OBJECTS
) -> None:
    """Check every flag by itself, then all together.

    Args:
      settings: the flags.
      kind: kind of the run, one of `declaration.RUN_KINDS`; None: not known yet, skip the checks that depend on it.
      rewarded: whether the algorithm uses rewards.
      given: in Python, instead of flags.

    Raises:
      SettingsError: the first flag that cannot work, with its value and a way out.
    """
    check_values(settings)
    check_together(settings, given)
    if kind == "rl" and not settings.estimate.dry_run:
        check_rewards(settings, rewarded, given)
    if kind == "supervised" and not settings.estimate.dry_run:
        check_data(settings)


def check_together(settings: Settings, given: GivenObjects = NO_OBJECTS) -> None:
    """Check combinations of flags that matter for every kind of run.

    Raises:
      SettingsError: as `check_settings`.
    """
    for check in ALWAYS:
        check(settings)
    if settings.examples.difficulty is not None:
        difficulty_of(settings.examples.difficulty)
    check_environment_flags(settings, given)
    if has_environment(settings, given):
        check_agents(settings)


def check_rewards(settings: Settings, rewarded: bool = True, given: GivenObjects = NO_OBJECTS) -> None:
    """Check that the flags of reinforcement learning name prompts and, where `rewarded`, rewards.

    Raises:
      SettingsError: they do not.
    """
    if settings.examples.prompts is None and own_environment(settings, given) is None:
        refuse_idle_data(settings)
        if settings.rewards.reward is not None:
            raise settings.refusal("{reward} needs --prompts=FILE.jsonl")
        if settings.models.model is not None and not _completes_embedded_task(settings.models.model):
            reward = " and --reward=FILE.py:function" if rewarded else ""
            raise settings.refusal("{model} needs --prompts=FILE.jsonl{reward}", reward=reward)
    elif (
        rewarded and settings.rewards.reward is None and not (scorers_of(settings) or has_environment(settings, given))
    ):
        raise settings.refusal("{prompts} needs --reward=FILE.py:function or --reward_model=DIR")
    # The embedded task has one.
    functions = 1 if settings.examples.prompts is None else len(parts(settings.rewards.reward))
    if settings.rewards.on_reward_error != "stop" and not functions:
        raise settings.refusal("{on_reward_error} does nothing without --reward")
    if not has_environment(settings, given):
        weights_of_rewards(settings, functions)
    if settings.formatting.step_separator is not None and settings.rewards.process_reward_model is None:
        raise settings.refusal("{step_separator} does nothing without --process_reward_model=DIR")


def _completes_embedded_task(model: str) -> bool:
    """True if a model, a run or a checkpoint has the tokenizer of the embedded task."""
    folder = Path(model)
    places = folder, folder / "model", folder / "checkpoints" / "model", folder.parent / "model"
    own = next((place for place in places if (place / "tokenizer.json").is_file()), folder)
    return is_embedded_tokenizer(own)


def check_data(settings: Settings) -> None:
    """Check that the flags of a supervised run name texts. Raises: SettingsError."""
    if (
        settings.models.model is not None
        and settings.examples.data is None
        and not _completes_embedded_task(settings.models.model)
    ):
        raise settings.refusal("{model} needs --data=FILE.jsonl")
    if settings.examples.data is None:
        refuse_idle_data(settings)


def check_files(settings: Settings) -> None:
    """Check that files and directories named by flags exist, without reading them; check --fields too.

    A model name with an owner, such as Qwen/Qwen3-0.6B, is checked when it is loaded.

    Raises:
      SettingsError, LoadError: one is missing.
    """
    names_of_fields(settings)
    for name in () if settings.estimate.dry_run else ("prompts", "data", "eval_data"):
        for path, _ in data_files(settings, name):
            if problem := source_problem(path):
                raise SettingsError(f"--{name}: {path}: {problem}; {DATA_FLAGS[name]} are {FORMATS}, see --help")
    for name in MODEL_FLAGS:
        path = model_path(settings, name)
        if path is None or settings.estimate.dry_run or Path(path).is_dir():
            continue
        named = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path)
        if not named or ("/" not in path and not has_cached_model(path)):
            nor = ", nor the name of a model in the local Hugging Face cache" if named else ""
            raise SettingsError(f"--{name}: {path} is not a directory{nor}")
    for part in () if settings.rewards.reward is None else parse_rewards(settings.rewards.reward):
        if part.source not in VERIFIERS:
            locate("reward", part.source)
    if settings.examples.curriculum is not None:
        locate("curriculum", settings.examples.curriculum)


def data_files(settings: Settings, flag: str) -> list[WeightedFile]:
    """The files that --prompts, --data or --eval_data names. Raises: SettingsError."""
    value = flag_value(settings, flag)
    try:
        return [] if value is None else weighted_files(value)
    except DataError as error:
        raise SettingsError(f"--{flag}: {error}") from error


def refuse_idle_data(settings: Settings) -> None:
    """Refuse flags for the user's prompts and texts if the run uses the embedded task. Raises: SettingsError."""
    for name in OF_OWN_DATA:
        value = flag_value(settings, name)
        if value != settings_flags()[name].default:
            raise SettingsError(f"--{name}={value} does nothing without --prompts or --data")


def names_of_fields(settings: Settings) -> Fields:
    """The columns that --fields names. Raises: SettingsError."""
    try:
        return parse_fields(settings.examples.fields)
    except DataError as error:
        raise SettingsError(str(error)) from error


class Difficulty(NamedTuple):
    """Pass rates of the prompts to train on, and the weight of the others, at least 0 and below 1."""

    low: float
    high: float
    rest: float


def difficulty_of(text: str) -> Difficulty:
    """The pass rates in "0.1,0.9" or "0.1,0.9,0.05".

    Raises:
      SettingsError: the text is not of this form.
    """
    try:
        low, high, *rest = (float(part) for part in parts(text))
        difficulty = Difficulty(low, high, *(rest or [REST_WEIGHT]))
    except (ValueError, TypeError):
        difficulty = Difficulty(1.0, 0.0, 0.0)
    if not (0 <= difficulty.low < difficulty.high <= 1 and 0 <= difficulty.rest < 1):
        raise SettingsError(
            f"--difficulty={text}: write LOW,HIGH or LOW,HIGH,WEIGHT, pass rates from 0 to 1 and a weight below 1, as "
            "in 0.1,0.9"
        )
    return difficulty


def weights_of_rewards(settings: Settings, functions: int) -> tuple[float, ...]:
    """The weight of each reward in a completion's score: reward functions first, then models that score.

    Weights come from --reward_weights, or from --reward and DIR@0.5, or are 1.

    Args:
      settings: the flags.
      functions: number of reward functions.

    Raises:
      SettingsError: the number of weights is wrong, all are 0, or two flags give weights.
    """
    named = weights_by_name(settings, functions)
    rewards = functions + len(scorers_of(settings))
    given = settings.rewards.reward_weights or named
    if given is None:
        return (1.0,) * rewards
    flag = "--reward_weights" if named is None else "--reward with weights"
    if named not in (None, given):
        flags = {name: str(flag_value(settings, name)) for name in ("reward", *SCORERS)}
        where = " and ".join(f"--{name}={value}" for name, value in flags.items() if "@" in value)
        raise SettingsError(f"--reward_weights={given}: {where} gives weights too; give them in one place")
    try:
        weights = tuple(float(part) for part in parts(given))
    except ValueError:
        weights = ()
    if len(weights) != rewards or not all(abs(weight) <= LARGEST for weight in weights):
        raise SettingsError(f"{flag}={given}: give one number for each of the rewards ({rewards}), separated by commas")
    if not any(weights):  # one negative weight is a penalty, which a policy can learn from
        raise SettingsError(f"{flag}={given}: every score would be 0; give one that is not")
    return weights
