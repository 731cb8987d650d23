"""Every number and name that a run takes from outside: one field is one flag, with its bounds where it is defined.

The fields are in a file for each group of flags. Whether a value is good, what a command line's text means, the help
and the table in docs/flags.md come from the declaration of the field. What depends on several flags is checked by the
functions of `checks.py`. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from funrl.mesh.text import MeshError, parse, wanted_devices
from funrl.tasks import arithmetic
from funrl.trainer.declaration import Flag, SettingsError, value_type
from funrl.trainer.device_settings import DeviceSettings
from funrl.trainer.job_settings import JobSettings
from funrl.trainer.output_settings import OutputSettings
from funrl.trainer.rollout_settings import RolloutSettings
from funrl.trainer.scorers import weights_by_name
from funrl.trainer.update_settings import UpdateSettings

GROUPS = {"job": "What to do", "devices": "Where", "rollout": "Generation", "update": "Training", "output": "Output"}
SCORE_BUDGETS = 4  # token budgets in one forward pass without a gradient, where no flag says
TOKEN_MULTIPLE = 8  # a rank's tokens of a micro-batch are a multiple of it
NEW_TOKENS = 64  # of a completion, where neither a flag nor the embedded task says
NEW_TOKENS_FROM_SCRATCH = 32  # the same without --model; the embedded task's decoder has 64 positions


@dataclass(frozen=True)
class Settings(OutputSettings, UpdateSettings, RolloutSettings, JobSettings, DeviceSettings):
    """The flags of every run, group by group. None means: the run chooses."""


@functools.cache
def settings_flags() -> Mapping[str, Flag]:
    """The flags of `Settings` by name, in their order."""
    hints, found = typing.get_type_hints(Settings), {}
    for field in dataclasses.fields(Settings):
        kind = value_type(hints[field.name])
        found[field.name] = Flag(field.name, field.default, kind.type, kind.optional, **field.metadata)
    return types.MappingProxyType(found)


def check_values(settings: Settings) -> None:
    """Check the value of each flag by itself.

    Raises:
      SettingsError: the first that cannot work.
    """
    for name, one in settings_flags().items():
        value = getattr(settings, name)
        if problem := one.problem(value):
            raise SettingsError(f"--{name}={value}: {problem}")
    for name in ("mesh", "generate_mesh"):
        mesh_sizes(settings, name)


def mesh_sizes(settings: Settings, name: str = "mesh") -> dict[str, int]:
    """Sizes of the mesh that a flag gives; of --generate_mesh, where it is not given, none. Those of auto:N, which is
    not chosen yet, are N over data.

    Raises:
      SettingsError: its text is not a mesh.
    """
    text = getattr(settings, name)
    try:
        wanted = wanted_devices(text) if text is not None and name == "mesh" else None
        return {} if text is None else parse(text if wanted is None else f"dp{wanted}", name)
    except MeshError as error:
        raise SettingsError(str(error)) from error


def scoring_budget(settings: Settings) -> int:
    """Tokens of a micro-batch where nothing is learned; a longer row raises it.

    A forward pass without a gradient holds the activations of one layer. By the dry run it takes 99 kB a token of a 70B
    on tp8, 111 of an 8B and 62 of a 1B; an update that saves only what enters each layer 1,580, 525 and 200.
    """
    return settings.score_token_budget or SCORE_BUDGETS * settings.token_budget


def for_kind(settings: Settings, kind: str) -> Settings:
    """The settings of a kind of run: flags without a meaning in it have the value that changes nothing."""
    idle = {name: one.without for name, one in settings_flags().items() if kind not in one.kinds}
    return dataclasses.replace(settings, **idle)


def resolved(settings: Settings, given: bool = False) -> Settings:
    """The settings with the number of new tokens, and the weights of rewards, that they imply.

    Args:
      given: whether prompts are given in another way than by a flag.

    Raises:
      LoadError: --reward is not one.
    """
    if settings.reward_weights is None:
        functions = int(settings.prompts is None and not given)  # of the embedded task
        settings = dataclasses.replace(settings, reward_weights=weights_by_name(settings, functions))
    if settings.prompts is None and settings.reward is None and not given:
        default = arithmetic.MAX_NEW_TOKENS
    else:
        default = NEW_TOKENS_FROM_SCRATCH if settings.model is None else NEW_TOKENS
    return dataclasses.replace(settings, max_new_tokens=settings.max_new_tokens or default)
